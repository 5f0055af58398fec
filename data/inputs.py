"""Which files the user means, and their bytes: paths, folders and patterns; gzip, xz, bzip2 and
zstd. Nothing is ever read whole, so memory does not depend on the size of a file.
"""

import bz2
import glob
import gzip
import hashlib
import importlib.util
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

CHUNK = 1 << 20
CHUNKS = (64, 1 << 14)  # compressed bytes at a time, fewer if they expand to more than CHUNK
COMPRESSED = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstd"}
# besides OSError without a number, which gzip raises
DAMAGE = (EOFError, zlib.error)
PACKAGES = {"zstandard": "zstd", "pyarrow": "parquet"}


class Damaged(EOFError):
    """Compressed bytes that cannot be expanded."""


def require_package(name: str, what: str) -> None:
    """Raise ValueError naming the extra if a package is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ValueError(
            f"{what} needs the package {name}: run pip install -e '.[{PACKAGES[name]}]', or "
            f"pip install {name}"
        )


# ---- which files


class Input(NamedTuple):
    """What the user named, the files in it, and the linked folders in it, which are left out."""

    named: str
    files: list[Path]
    linked: list[Path]

    def name_inside(self, file: Path) -> str:
        """The file's name within what the user named."""
        if file.is_relative_to(self.named):
            return str(file.relative_to(self.named))
        return str(file).removeprefix(self.named).lstrip("/")


def list_files(path: Path | str) -> list[Path]:
    """The files of `look_into`."""
    return look_into(path).files


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
    """The files that a pattern such as books/**/*.txt matches, and those of matching folders."""
    found = Input(pattern, [], [])
    for name in sorted(glob.glob(pattern, recursive=True)):
        # with **, a folder matches as well as the files in it
        if Path(name).is_file():
            found.files.append(Path(name))
    if not found.files:
        raise ValueError(f"input {pattern} matches no file: check the pattern given with --input")
    return found


def some(files: Sequence[Path]) -> str:
    """The first file, and how many more there are."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0]}{more}"


def kind_of(file: Path) -> str:
    """The suffix of a name, that of a compression aside."""
    return Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix


def compression_of(file: Path) -> str | None:
    """The name of the compression that the suffix of a file tells."""
    return COMPRESSED.get(file.suffix)


# ---- their bytes


class Hashed(NamedTuple):
    """The size and SHA-256 of a file."""

    size: int
    sha256: str


def open_raw(file: Path) -> BinaryIO:
    """The bytes of a file as they are stored."""
    return open(file, "rb", buffering=0)


@contextmanager
def opened(
    file: Path, on_damage: Callable[[str], object], on_hash: Callable[[Hashed], object]
) -> Iterator[BinaryIO]:
    """The bytes of a file, expanded if it is compressed; damage ends them and is told.

    The file is read to its end, and hashed on the way, in all cases.
    """
    with open_raw(file) as stored:
        raw = _HashingReader(stored)
        plain = io.BufferedReader(raw, CHUNK)
        try:
            yield _expanded(plain, compression_of(file))
        except (OSError, *DAMAGE) as error:
            is_of_the_disk = isinstance(error, OSError) and error.errno is not None
            if is_of_the_disk:
                raise
            on_damage(f"{file} is damaged {compression_of(file)} ({error})")

        # what follows the damage belongs to the hash as well
        while plain.read(CHUNK):
            pass
        on_hash(raw.result())


def hash_file(file: Path) -> Hashed:
    """The size and SHA-256 of a file."""
    with open_raw(file) as stored:
        raw = _HashingReader(stored)
        buffer = bytearray(CHUNK)
        while raw.readinto(buffer):
            pass
        return raw.result()


def _expanded(file: BinaryIO, compression: str | None) -> BinaryIO:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=file, mode="rb")
    if compression == "xz":
        start = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ)
        streams = _Streams(file, start, lzma.LZMAError, padding=b"\0")
    elif compression == "bzip2":
        streams = _Streams(file, bz2.BZ2Decompressor, OSError)
    elif compression == "zstd":
        import zstandard

        start = zstandard.ZstdDecompressor().decompressobj
        streams = _Streams(file, start, zstandard.ZstdError)
    else:
        return file
    return io.BufferedReader(streams, CHUNK)


class _HashingReader(io.RawIOBase):
    """Reads a file from its beginning to its end and hashes it on the way."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._size = 0
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        """As in io.RawIOBase."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """As in io.RawIOBase."""
        count = self._file.readinto(buffer)
        self._size += count
        self._digest.update(memoryview(buffer)[:count])
        return count

    def result(self) -> Hashed:
        """The size and SHA-256 of what was read."""
        return Hashed(self._size, self._digest.hexdigest())


class _Streams(io.RawIOBase):
    """The contents of compressed streams that follow each other. Raises Damaged if the last one is
    cut off or a later one is damaged, which the libraries' own readers take for the end.

    start: makes the object that expands a stream, which raises `error`; padding: what may be
    between two of them.
    """

    def __init__(
        self,
        file: BinaryIO,
        start: Callable,
        error: type[Exception],
        padding: bytes = b"",
    ):
        self._file = file
        self._start = start
        self._error = error
        self._padding = padding
        self._stream = start()
        self._compressed = b""
        self._plain = b""
        self._chunk = 256

    def readable(self) -> bool:
        """As in io.RawIOBase."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """As in io.RawIOBase."""
        while not self._plain and self._fill():
            pass
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _fill(self) -> bool:
        """Expand some more bytes; False at the end of the file."""
        content = self._compressed or self._file.read(self._chunk)
        self._compressed = b""
        if not content:
            if self._stream is not None:
                raise Damaged("it ends within a stream")
            return False

        if self._stream is None:
            content = content.lstrip(self._padding)
            if not content:
                return True
            self._stream = self._start()
        try:
            self._plain = memoryview(self._stream.decompress(content))
        except self._error as error:
            raise Damaged(str(error)) from None
        self._adapt(len(self._plain))
        if self._stream.eof:
            self._compressed = self._stream.unused_data
            self._stream = None
        return True

    def _adapt(self, expanded: int) -> None:
        """Read fewer bytes at a time if they expand to many, because all of these are in memory."""
        least, most = CHUNKS
        if expanded > CHUNK:
            self._chunk = max(least, self._chunk // 4)
        elif expanded < CHUNK // 4:
            self._chunk = min(most, self._chunk * 2)
