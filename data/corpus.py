"""The embedded corpus, no download: the Python standard library and the installed torch and numpy,
as source text.

Imports data.sources, data.pipeline, files.folders. About 87 MB of .py, 25M tokens at a vocabulary
of 8,192. Each file of torch and numpy must have the SHA-256 of its package's RECORD; the standard
library has no RECORD, so the hash of what was read goes into the manifest. torch is located through
its metadata and never imported.
"""

import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import sentencepiece

from data.dataset import Dataset, open_dataset
from data.manifest import MANIFEST, VERSION, IntegrityError
from data.pipeline import build_dataset
from data.sources import Document, Report, by_directory, decode
from files.durable import locked

PACKAGES = ("numpy", "torch")
CORPUS_VERSION = 1  # raise it when the same files and settings give another dataset
GROUPINGS = ("directory", "file")
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")


class SourceFile(NamedTuple):
    """A file of the corpus; sha256 (base64, as in RECORD) is None for the standard library."""

    package: str
    name: str
    path: Path
    size: int
    sha256: str | None


def default_cache() -> Path:
    """$LONGHAUL_CACHE, else ~/.cache/longhaul."""
    return Path(os.environ.get("LONGHAUL_CACHE") or Path.home() / ".cache" / "longhaul")


def prepare_embedded(
    cache_dir: Path | str | None = None,
    vocab_size: int = 8192,
    documents: str = "directory",
    max_bytes: int | None = None,
    workers: int = 2,
    val_fraction: float = 0.02,
    report: Report = print,
) -> Dataset:
    """The embedded corpus as a dataset under `cache_dir`, prepared on the first call and opened on
    later ones.

    documents: "directory" joins the files of a directory into one document (about 40 of at least
    131,072 tokens: real
    long context), "file" keeps them apart. max_bytes: a sample of whole directories of about this
    size.
    Raises ValueError for a bad setting, IntegrityError when an installed file is not what its
    package's RECORD says.
    """
    if documents not in GROUPINGS:
        raise ValueError(f"documents is {documents!r}: allowed are {', '.join(GROUPINGS)}")
    cache = Path(cache_dir) if cache_dir is not None else default_cache()
    files = embedded_files(max_bytes, report)
    output = cache / f"embedded-{_key(files, (vocab_size, documents, val_fraction))}"
    if not (output / MANIFEST).exists():
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache):  # the second of two processes waits here, and finds the work done
            if not (output / MANIFEST).exists():
                _clear_leftovers(cache)
                build_embedded(
                    files,
                    output,
                    documents,
                    report,
                    vocab_size=vocab_size,
                    workers=workers,
                    val_fraction=val_fraction,
                )
    try:
        return open_dataset(output)
    except IntegrityError as error:
        raise IntegrityError(f"{error}; delete {output} and it is prepared anew") from None


def build_embedded(
    files: list[SourceFile],
    output: Path | str,
    documents: str = "directory",
    report: Report = print,
    val_fraction: float = 0.02,
    **settings,
) -> Dataset:
    """Write the dataset of these files to a new folder; `settings` as for `pipeline.build_dataset`."""
    join = by_directory if documents == "directory" else iter
    usable, sources = check_files(files, report)
    return build_dataset(
        lambda: join(read_files(usable)),
        output,
        sources=sources,
        val_fraction=val_fraction,
        **settings,
    )


def check_files(
    files: list[SourceFile], report: Report = print
) -> tuple[list[SourceFile], list[dict]]:
    """(the files that are UTF-8; per package its name, version, files, bytes and SHA-256 over "name
    hash" lines).
    """
    usable: dict[str, list[SourceFile]] = {}
    digests = {}
    skipped: list[str] = []
    for file in files:
        content = read_verified(file)
        if decode(content, file.name, skipped.append) is not None:
            usable.setdefault(file.package, []).append(file)
            line = f"{file.name} {hashlib.sha256(content).hexdigest()}\n"
            digests.setdefault(file.package, hashlib.sha256()).update(line.encode())
    if skipped:
        report(
            f"embedded corpus: {len(skipped)} files left out that are not UTF-8 ({'; '.join(skipped)})"
        )
    sources = [
        {
            "name": package,
            "version": _version(package),
            "files": len(group),
            "bytes": sum(file.size for file in group),
            "sha256": digests[package].hexdigest(),
        }
        for package, group in usable.items()
    ]
    return [file for group in usable.values() for file in group], sources


def embedded_files(max_bytes: int | None = None, report: Report = print) -> list[SourceFile]:
    """The files of the corpus, those of a directory together; a package without a RECORD is
    reported and left out.
    """
    files = list(_standard_library())
    for package in PACKAGES:
        files += _installed(package, report)
    return files if max_bytes is None else _sample_directories(files, max_bytes)


def read_files(files: Iterable[SourceFile]) -> Iterator[Document]:
    """The text of each file, checked against its RECORD."""
    for file in files:
        yield Document(file.name, decode(read_verified(file), file.path))


def read_verified(file: SourceFile) -> bytes:
    """The bytes of a file. Raises IntegrityError when RECORD has another hash."""
    content = file.path.read_bytes() if file.path.is_file() else b"missing"
    if file.sha256 is not None and _base64(hashlib.sha256(content)) != file.sha256:
        raise IntegrityError(
            f"{file.path} is not the file that {file.package} was installed with (its SHA-256 is not "
            f"the RECORD's): reinstall {file.package}, or prepare your own text with --input"
        )
    return content


def _clear_leftovers(cache: Path) -> None:
    """Remove what killed preparations left; the caller holds the lock on the cache."""
    for folder in cache.glob(".tmp-embedded-*"):
        shutil.rmtree(folder)


def _standard_library() -> Iterator[SourceFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            name = PurePosixPath("stdlib", path.relative_to(root).as_posix())
            yield SourceFile("stdlib", str(name), path, path.stat().st_size, None)


def _installed(package: str, report: Report) -> list[SourceFile]:
    """The .py files that RECORD lists for a package, sorted by directory."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        report(f"embedded corpus: {package} is not installed and left out")
        return []
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    files = [
        SourceFile(
            package,
            row[0],
            Path(distribution.locate_file(row[0])),
            int(row[2]),
            row[1].removeprefix("sha256="),
        )
        for row in rows
        if row[0].endswith(".py") and not row[0].startswith("..") and row[1].startswith("sha256=")
    ]
    if not files:
        report(f"embedded corpus: {package} has no RECORD to verify its files by and is left out")
    return sorted(files, key=lambda file: (str(PurePosixPath(file.name).parent), file.name))


def _sample_directories(files: list[SourceFile], max_bytes: int) -> list[SourceFile]:
    """Whole directories in hashed order until `max_bytes` is reached; the files keep their order."""
    sizes: dict[PurePosixPath, int] = {}
    for file in files:
        folder = PurePosixPath(file.name).parent
        sizes[folder] = sizes.get(folder, 0) + file.size
    chosen, total = set(), 0
    for folder in sorted(sizes, key=lambda folder: hashlib.sha256(str(folder).encode()).digest()):
        if not chosen or total + sizes[folder] <= max_bytes:
            chosen.add(folder)
            total += sizes[folder]
    return [file for file in files if PurePosixPath(file.name).parent in chosen]


def _version(package: str) -> str:
    return platform.python_version() if package == "stdlib" else importlib.metadata.version(package)


def _key(files: list[SourceFile], settings: tuple) -> str:
    """16 hexadecimal digits that change with any input file, setting or tokenizer-trainer version."""
    inputs = [
        CORPUS_VERSION,
        VERSION,
        settings,
        sentencepiece.__version__,
        platform.python_version(),
        [(file.name, file.size, file.sha256) for file in files],
    ]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


def _base64(digest) -> str:
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
