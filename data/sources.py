"""Text from files: plain, JSONL, and gzip of both; folders are walked in sorted order.

Every byte counts: no newline translation, no BOM removal, no normalisation. What is not valid text
is named as file:offset or file:line and refused, or handed to `report` and left out.
"""

import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import BinaryIO, NamedTuple

JSONL_SUFFIXES = (".jsonl", ".ndjson")
CHUNK = 1 << 20

Report = Callable[[str], None]


class Document(NamedTuple):
    """A text, and where it is from."""

    name: str
    text: str


def refuse(message: str) -> None:
    """The default answer to a damaged document: raise ValueError."""
    raise ValueError(f"{message}: repair it, or leave such documents out with --on_error skip")


# ---- which files


class Input(NamedTuple):
    """What the user named, the files in it, and the linked folders in it, which are left out."""

    path: Path
    files: list[Path]
    linked: list[Path]


def list_files(path: Path | str) -> list[Path]:
    """The files of `look_into`."""
    return look_into(path).files


def look_into(path: Path | str) -> Input:
    """A file, or the files of a folder and its subfolders, sorted.

    Hidden entries, __pycache__ and linked folders are left out. Raises ValueError if the path does
    not exist or no file is found.
    """
    path = Path(path)
    if path.is_file():
        return Input(path, [path], [])
    if not path.is_dir():
        raise ValueError(f"input {path} is not a file or folder: check the path given with --input")

    files = []
    linked = []
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(
            name for name in subfolders if not name.startswith(".") and name != "__pycache__"
        )
        linked += [Path(folder, name) for name in subfolders if Path(folder, name).is_symlink()]
        visible = sorted(name for name in names if not name.startswith("."))
        files += [Path(folder, name) for name in visible if Path(folder, name).is_file()]
    if files:
        return Input(path, files, linked)

    links = f", only {_some(linked)}, and links to folders are not followed" if linked else ""
    raise ValueError(f"no files in {path}{links}: give --input files or folders that hold text")


def _some(paths: Sequence[Path]) -> str:
    """The first path, and how many more there are."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{paths[0]}{more}"


# ---- formats that are not read


# Python that writes the records of a file as JSONL.
WRITE_LINES = "open({jsonl!r}, 'w').writelines(json.dumps(r) + '\\n' for r in {records})"
RECORDS = {
    ".json": "import json; " + WRITE_LINES.replace("{records}", "json.load(open({path!r}))"),
    ".csv": "import csv, json; csv.field_size_limit(10**9); "
    + WRITE_LINES.replace("{records}", "csv.DictReader(open({path!r}, newline=''))"),
    ".tsv": "import csv, json; csv.field_size_limit(10**9); "
    + WRITE_LINES.replace(
        "{records}", "csv.DictReader(open({path!r}, newline=''), dialect='excel-tab')"
    ),
    ".parquet": "import pandas; "
    "pandas.read_parquet({path!r}).to_json({jsonl!r}, orient='records', lines=True)",
}
UNPACK = {".zst": "zstd -d", ".xz": "xz -dk", ".bz2": "bunzip2 -k", ".zip": "unzip"}


def require_readable(path: Path) -> None:
    """Raise ValueError with the command that helps if the name says that the file is not text, or
    has fields that would not be read.
    """
    if path.suffix in UNPACK:
        raise ValueError(
            f"{path} is compressed, and only gzip is read: unpack it with "
            f"`{UNPACK[path.suffix]} {path}`"
        )
    kind = _kind(path)
    if kind not in RECORDS:
        return
    if path.suffix == ".gz":
        raise ValueError(f"{path}: {kind[1:]} is not read: unpack it with `gunzip -k {path}` first")

    jsonl = path.with_suffix(".jsonl")
    code = RECORDS[kind].format(path=str(path), jsonl=str(jsonl))
    otherwise = ""
    if kind == ".json":
        otherwise = f"rename it to {jsonl} if each line is a record, else "
    raise ValueError(
        f"{path}: {kind[1:]} is not read, only text and JSONL are: {otherwise}run "
        f'`python -c "{code}"`'
    )


def _kind(path: Path) -> str:
    """The suffix of a name, that of gzip aside."""
    return PurePath(path.name.removesuffix(".gz")).suffix


# ---- documents


class TextFiles:
    """The user's files and folders: their documents, and a record of where these are from.

    A text file is one document, and so is each line of a .jsonl file. The files are hashed while
    they are read, so that the record does not take another reading.
    """

    def __init__(
        self, inputs: Sequence[Path | str], text_field: str | None = None, report: Report = refuse
    ):
        """`text_field`: the field of a JSONL line that holds the text, "text" if it is None.

        Raises ValueError if one of the inputs does not exist, holds no file, or is of a format that
        is not read.
        """
        self._inputs = [look_into(path) for path in inputs]
        self._text_field = text_field or "text"
        self._report = report
        self._hashed: dict[Path, _Hashed] = {}

        for path, files, _ in self._inputs:
            for file in files:
                # in a folder of sources, .json and .csv are text like any other
                if file == path or text_field or file.suffix == ".parquet":
                    require_readable(file)

    def notes(self) -> list[str]:
        """What was left out, or may not be what the user thinks, in lines."""
        lines = []
        files = [file for one in self._inputs for file in one.files]
        linked = [link for one in self._inputs for link in one.linked]
        tables = [file for file in files if _kind(file) in RECORDS]
        if linked:
            lines.append(
                f"left out: {_some(linked)}, because links to folders are not followed: give the "
                "folder itself with --input"
            )
        if tables:
            lines.append(
                f"read as plain text, with all markup: {_some(tables)}: give such a file by its "
                "own name to see how to read a field of its records"
            )
        return lines

    def documents(self) -> Iterator[Document]:
        """The documents of all inputs, in order.

        Raises ValueError, or calls `report` and goes on, for text that is not UTF-8, a lone
        surrogate, a line that is not JSON with the text field, and damaged gzip.
        """
        for one in self._inputs:
            for path in one.files:
                if _kind(path) in JSONL_SUFFIXES:
                    yield from self._jsonl_documents(path)
                else:
                    yield from self._text_documents(path)

    def describe(self) -> list[dict]:
        """Each input's files and bytes, and a SHA-256 over its "name hash" lines.

        The files must have been read to the end by `documents`.
        """
        return [self._describe_input(one) for one in self._inputs]

    def _describe_input(self, one: Input) -> dict:
        digest = hashlib.sha256()
        for file in one.files:
            line = f"{file.relative_to(one.path)} {self._hashed[file].sha256}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return {
            "name": str(one.path),
            "files": len(one.files),
            "bytes": sum(self._hashed[file].size for file in one.files),
            "sha256": digest.hexdigest(),
        }

    def _text_documents(self, path: Path) -> Iterator[Document]:
        with self._opened(path) as file:
            text = decode(file.read(), path, self._report)
            if text is not None:
                yield Document(str(path), text)

    def _jsonl_documents(self, path: Path) -> Iterator[Document]:
        with self._opened(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                text = _parse_line(line, f"{path}:{number}", self._text_field, self._report)
                if text is not None:
                    yield Document(f"{path}:{number}", text)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[BinaryIO]:
        """The bytes of a file, decompressed if it is gzip; damaged gzip is reported."""
        with _HashingFile(path) as raw, io.BufferedReader(raw, CHUNK) as file:
            try:
                if path.suffix == ".gz":
                    yield gzip.GzipFile(fileobj=file, mode="rb")
                else:
                    yield file
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                self._report(f"{path} is damaged gzip ({error})")

            # what follows the damage belongs to the hash as well
            while file.read(CHUNK):
                pass
            self._hashed[path] = raw.result()


class _Hashed(NamedTuple):
    """The size and SHA-256 of a file."""

    size: int
    sha256: str


class _HashingFile(io.FileIO):
    """A file that is read from its beginning to its end and hashed on the way."""

    def __init__(self, path: Path):
        super().__init__(path, "rb")
        self._size = 0
        self._digest = hashlib.sha256()

    def readinto(self, buffer: memoryview) -> int:
        """As in io.RawIOBase."""
        count = super().readinto(buffer)
        self._add(memoryview(buffer)[:count])
        return count

    def readall(self) -> bytes:
        """As in io.RawIOBase."""
        content = super().readall()
        self._add(content)
        return content

    def _add(self, content: bytes | memoryview) -> None:
        self._size += len(content)
        self._digest.update(content)

    def result(self) -> _Hashed:
        """The size and SHA-256 of what was read."""
        return _Hashed(self._size, self._digest.hexdigest())


def decode(content: bytes, path: Path | str, report: Report = refuse) -> str | None:
    """The text of UTF-8 bytes; None after a report that names file:offset."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        report(f"{path}:{error.start}: byte 0x{content[error.start]:02x} is not UTF-8")
        return None


def _parse_line(line: bytes, place: str, text_field: str, report: Report) -> str | None:
    """The text of a JSONL line; None after a report that names file:line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        report(f"{place}: this line is not JSON ({error})")
        return None

    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        found = _describe_record(record)
        report(
            f"{place}: there is no string field {text_field!r} (found: {found}); set --text_field"
        )
        return None

    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        report(
            f"{place}: character {error.start} of {text_field!r} is a lone surrogate, "
            "which is not text"
        )
        return None
    return text


def _describe_record(record: object) -> str:
    """The first fields of a JSON object, or the type of another value."""
    if not isinstance(record, dict):
        return type(record).__name__
    return ", ".join(list(record)[:8])


# ---- joining


def by_directory(documents: Iterable[Document]) -> Iterator[Document]:
    """Join the documents of each directory, which follow each other, into one document.

    Short files that are packed into a long row are not long context, but a directory is a text
    whose parts refer to each other. A comment line names each part.
    """
    directory = None
    parts: list[str] = []
    for document in documents:
        parent = str(PurePath(document.name).parent)
        if parent != directory and parts:
            yield Document(directory, "".join(parts))
            parts = []
        directory = parent
        newline = "" if document.text.endswith("\n") else "\n"
        parts.append(f"# {_on_one_line(document.name)}\n{document.text}{newline}")
    if parts:
        yield Document(directory, "".join(parts))


def _on_one_line(name: str) -> str:
    """A file name as text: names may hold newlines, and bytes that are not UTF-8."""
    return name.replace("\n", "\\n").encode("utf-8", "backslashreplace").decode("utf-8")
