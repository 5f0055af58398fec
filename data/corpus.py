"""The embedded corpus, without a download: the sources of Python, torch and numpy as installed.

About 88 MB of .py files, 26M tokens at a vocabulary of 8,192. The hash of what was read goes into
the manifest. torch is located through its metadata and never imported.
"""

import csv
import hashlib
import importlib.metadata
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import sentencepiece

from base.durable import locked
from data.dataset import Dataset, open_dataset
from data.manifest import MANIFEST, VERSION, IntegrityError
from data.pipeline import build_dataset
from data.sources import JOINS, Document, Report, decode

PACKAGES = ("numpy", "torch")
CORPUS_VERSION = 2  # raise it when the same files and settings give another dataset
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")


class SourceFile(NamedTuple):
    """A file of the corpus."""

    package: str
    name: str
    path: Path
    size: int

    @property
    def directory(self) -> str:
        return str(PurePosixPath(self.name).parent)


# ---- the dataset


def prepare_embedded(
    cache_dir: Path | str | None = None,
    vocab_size: int = 8192,
    documents: str = "directory",
    max_bytes: int | None = None,
    workers: int = 2,
    val_fraction: float = 0.02,
    report: Report = print,
) -> Dataset:
    """The embedded corpus as a dataset under `cache_dir`: prepared by the first call, then opened.

    documents: "directory" joins the files of a directory into one document (about 40 of these have
    at least 131,072 tokens: real long context), "file" keeps the files apart.
    max_bytes: take a sample of whole directories of about this size.
    """
    cache = default_cache() if cache_dir is None else Path(cache_dir)
    files = embedded_files(max_bytes, report)
    output = cache / f"embedded-{_key(files, (vocab_size, documents, val_fraction))}"

    if not (output / MANIFEST).exists():
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache):
            # a second process waits for the lock, and finds the work done
            if not (output / MANIFEST).exists():
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
        raise IntegrityError(
            f"{error}; delete {output}, and the next run prepares it again"
        ) from None


def build_embedded(
    files: list[SourceFile],
    output: Path | str,
    documents: str = "directory",
    report: Report = print,
    val_fraction: float = 0.02,
    **settings,
) -> Dataset:
    """Write the dataset of these files to a new folder; `settings` as in `build_dataset`."""
    texts, sources = read_corpus(files, report)
    return build_dataset(
        lambda: JOINS[documents](texts),
        output,
        sources=lambda: sources,
        key=_key(files, (documents,)),
        val_fraction=val_fraction,
        **settings,
    )


def default_cache() -> Path:
    """$LONGHAUL_CACHE, or ~/.cache/longhaul."""
    folder = os.environ.get("LONGHAUL_CACHE")
    return Path(folder) if folder else Path.home() / ".cache" / "longhaul"


def _key(files: list[SourceFile], settings: tuple) -> str:
    """16 hexadecimal digits that change with any input file, setting or version of the trainer."""
    inputs = [
        CORPUS_VERSION,
        VERSION,
        settings,
        sentencepiece.__version__,
        platform.python_version(),
        [(file.name, file.size) for file in files],
    ]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


# ---- reading


def read_corpus(
    files: Iterable[SourceFile], report: Report = print
) -> tuple[list[Document], list[dict]]:
    """The text of the files that are UTF-8, and a record of each package.

    All of it is kept in memory, which is bounded by what is installed. The record has the SHA-256
    over the "name hash" lines of the package's files.
    """
    documents = []
    records: dict[str, dict] = {}
    skipped: list[str] = []
    for file in files:
        content = file.path.read_bytes()
        text = decode(content, file.name, skipped.append)
        if text is None:
            continue
        documents.append(Document(file.name, text))
        if file.package not in records:
            new = {"name": file.package, "version": _version(file.package)}
            records[file.package] = new | {"files": 0, "bytes": 0, "sha256": hashlib.sha256()}
        record = records[file.package]
        record["files"] += 1
        record["bytes"] += file.size
        record["sha256"].update(f"{file.name} {hashlib.sha256(content).hexdigest()}\n".encode())

    if skipped:
        report(
            f"embedded corpus: {len(skipped)} files that are not UTF-8 were left out "
            f"({'; '.join(skipped)})"
        )
    sources = [record | {"sha256": record["sha256"].hexdigest()} for record in records.values()]
    return documents, sources


def _version(package: str) -> str:
    if package == "stdlib":
        return platform.python_version()
    return importlib.metadata.version(package)


# ---- which files


def embedded_files(max_bytes: int | None = None, report: Report = print) -> list[SourceFile]:
    """The files of the corpus, directory by directory.

    A package that is not installed, or has no RECORD, is reported and left out.
    """
    files = list(_standard_library())
    for package in PACKAGES:
        files += _installed(package, report)
    return files if max_bytes is None else _sample_directories(files, max_bytes)


def _standard_library() -> Iterator[SourceFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                full_name = PurePosixPath("stdlib", path.relative_to(root).as_posix())
                yield SourceFile("stdlib", str(full_name), path, path.stat().st_size)


def _installed(package: str, report: Report) -> list[SourceFile]:
    """The .py files that RECORD lists for a package, sorted by directory."""
    try:
        installed = importlib.metadata.distribution(package)
        record = installed.read_text("RECORD") or ""
    except importlib.metadata.PackageNotFoundError:
        record = ""

    # not importlib.metadata.files, which asks for each of torch's 14,000 files whether it is there
    files = []
    for name, _, size in csv.reader(record.splitlines()):
        if name.endswith(".py") and not name.startswith(".."):
            path = Path(installed.locate_file(name))
            files.append(SourceFile(package, name, path, int(size)))

    if not files:
        report(
            f"embedded corpus: {package} is not installed with a RECORD of its files, and left out"
        )
    return sorted(files, key=lambda file: (file.directory, file.name))


def _sample_directories(files: list[SourceFile], max_bytes: int) -> list[SourceFile]:
    """Whole directories in hashed order, up to `max_bytes`; the files keep their order."""
    sizes: dict[str, int] = {}
    for file in files:
        sizes[file.directory] = sizes.get(file.directory, 0) + file.size

    chosen = set()
    total = 0
    for directory in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if not chosen or total + sizes[directory] <= max_bytes:
            chosen.add(directory)
            total += sizes[directory]
    return [file for file in files if file.directory in chosen]
