"""Which files the user means, and their bytes: paths, folders and patterns; gzip, xz, bzip2 and
zstd. Nothing is ever read whole, so memory does not depend on the size of a file.
"""

import bz2
import glob
import gzip
import importlib.util
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

COMPRESSED = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstd"}
SUFFIXES = re.compile(r"(\.\w+)+$")  # at the end of a pattern
# besides OSError without a number, which all but xz raise
DAMAGE = (EOFError, zlib.error, lzma.LZMAError)


def require_package(name: str, what: str) -> None:
    """Raise ValueError naming a package that is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"{what} needs the package {name}: run pip install {name}")


# ---- which files


class Input(NamedTuple):
    """What the user named, the files in it, and the linked folders in it, which are left out."""

    named: str
    files: list[Path]
    linked: list[Path]

    def names(self, file: Path) -> bool:
        """Whether the user named a file, and no folder or a pattern such as **/* that holds it."""
        named = Path(self.named)
        is_group = named.is_dir() or not named.name.strip("*?.")
        return not is_group or self.files == [file]

    def name_inside(self, file: Path) -> str:
        """The file's name within what the user named."""
        if file.is_relative_to(self.named):
            return str(file.relative_to(self.named))
        return str(file).removeprefix(self.named).lstrip("/")


def look_into(named: Path | str) -> Input:
    """A file, the files of a folder and its subfolders, or those of a pattern; sorted.

    Hidden entries, __pycache__ and linked folders are left out. Raises ValueError if nothing of
    the kind exists.
    """
    if "://" in str(named):
        raise ValueError(f"input {named} is a URL: give --input the downloaded file")
    path = Path(named)
    if not path.exists() and glob.has_magic(str(named)):
        return _matching(str(named))
    if path.is_file():
        return Input(str(path), [path], [])
    if path.is_dir():
        return _in_folder(path)
    raise ValueError(f"input {path} is not a file or folder: check the path given with --input")


def _in_folder(path: Path) -> Input:
    files: list[Path] = []
    linked = []
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(
            name for name in subfolders if not name.startswith(".") and name != "__pycache__"
        )
        linked += [Path(folder, name) for name in subfolders if Path(folder, name).is_symlink()]
        visible = sorted(name for name in names if not name.startswith("."))
        files += [Path(folder, name) for name in visible if Path(folder, name).is_file()]
    if files:
        return Input(str(path), files, linked)

    links = f", only {some(linked)}, and links to folders are not followed" if linked else ""
    raise ValueError(f"no files in {path}{links}: give --input files or folders that hold text")


def _matching(pattern: str) -> Input:
    """The files that a pattern such as books/**/*.txt matches, in whatever case their suffixes are
    written, and those of matching folders.
    """
    found = Input(pattern, [], [])
    wanted = SUFFIXES.sub(_in_any_case, pattern)
    for name in sorted(glob.glob(wanted, recursive=True)):
        # with **, a folder matches as well as the files in it
        if Path(name).is_file():
            found.files.append(Path(name))
    if not found.files:
        raise ValueError(f"input {pattern} matches no file: check the pattern given with --input")
    return found


def _in_any_case(suffixes: re.Match) -> str:
    """.gz becomes .[gG][zZ]"""
    return re.sub(
        "[a-z]", lambda one: f"[{one[0].lower()}{one[0].upper()}]", suffixes[0], flags=re.I
    )


def some(files: Sequence[Path]) -> str:
    """The first file, and how many more there are."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0]}{more}"


def suffix_of(file: Path) -> str:
    """The suffix of a name in lower case: .JSONL is .jsonl."""
    return file.suffix.lower()


def kind_of(file: Path) -> str:
    """The suffix of a name, that of a compression aside."""
    return suffix_of(Path(file.stem)) if compression_of(file) else suffix_of(file)


def compression_of(file: Path) -> str | None:
    """The name of the compression that the suffix of a file tells."""
    return COMPRESSED.get(suffix_of(file))


# ---- their bytes


@contextmanager
def opened(file: Path, on_damage: Callable[[str], object]) -> Iterator[BinaryIO]:
    """The bytes of a file, expanded if it is compressed; damage ends them and is told."""
    with open(file, "rb", buffering=0) as stored:
        try:
            stream = _expanded(stored, compression_of(file))
            yield stream
            # the libraries take a later stream that is damaged for the end
            if not stream.read(1) and stored.read(1):
                raise EOFError("its streams end before the file does")
        except (OSError, *DAMAGE) as error:
            is_of_the_disk = isinstance(error, OSError) and error.errno is not None
            if is_of_the_disk:
                raise
            on_damage(f"{file} is damaged {compression_of(file)} ({error})")


def _expanded(file: BinaryIO, compression: str | None) -> BinaryIO:
    if compression == "zstd":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
    if compression is None:
        return io.BufferedReader(file)
    libraries = {"gzip": gzip, "xz": lzma, "bzip2": bz2}
    return libraries[compression].open(file)
