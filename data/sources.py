"""Text from files: plain, JSONL, and gzip of both; a folder is walked in sorted order.

Imports nothing of ours. Every byte counts: no newline translation, no BOM removal, no
normalisation. What is not valid text is named as file:offset or file:line and refused, or handed to
`report` and left out.
"""

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import BinaryIO, NamedTuple

JSONL_SUFFIXES = (".jsonl", ".ndjson")
Report = Callable[[str], None]


class Document(NamedTuple):
    """One document: where it comes from, and its text."""

    name: str
    text: str


def refuse(message: str) -> None:
    """The default answer to a damaged document: raise ValueError."""
    raise ValueError(f"{message}: repair it, or leave such documents out with --on_error skip")


def list_files(inputs: Iterable[Path | str]) -> list[Path]:
    """The regular files of `inputs`, in order; folders recursively, sorted, without hidden entries,
    __pycache__ or linked folders.

    Raises ValueError for a path that is not there, or when no file is found.
    """
    inputs = [Path(path) for path in inputs]
    files = [file for path in inputs for file in _expand(path)]
    if not files:
        raise ValueError(
            f"no files in {', '.join(map(str, inputs))}: give --input files or folders that hold text"
        )
    return files


def read_documents(
    inputs: Iterable[Path | str], text_field: str = "text", report: Report = refuse
) -> Iterator[Document]:
    """The documents of all `inputs` in order: one per text file, one per line of a .jsonl file.

    Raises ValueError (or calls `report` and goes on) for text that is not UTF-8, a lone surrogate,
    a bad line or damaged gzip.
    """
    for path in list_files(inputs):
        if PurePath(path.name.removesuffix(".gz")).suffix in JSONL_SUFFIXES:
            yield from _read_jsonl(path, text_field, report)
        else:
            yield from _read_text(path, report)


def decode(content: bytes, path: Path | str, report: Report = refuse) -> str | None:
    """The text of UTF-8 bytes; None after a report that names file:offset."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        report(f"{path}:{error.start}: byte 0x{content[error.start]:02x} is not UTF-8")
        return None


def by_directory(documents: Iterable[Document]) -> Iterator[Document]:
    """Join the documents of one directory, which must follow each other, into one; a comment line
    names each.

    Short files packed into a long row are not long context: a directory is a text whose parts refer
    to each other.
    """
    directory, parts = None, []
    for document in documents:
        parent = str(PurePath(document.name).parent)
        if parent != directory and parts:
            yield Document(directory, "".join(parts))
            parts = []
        directory = parent
        newline = "" if document.text.endswith("\n") else "\n"
        parts.append(f"# {_in_one_line(document.name)}\n{document.text}{newline}")
    if parts:
        yield Document(directory, "".join(parts))


def _in_one_line(name: str) -> str:
    """A file name as text: names may hold newlines, and bytes that are not UTF-8."""
    return name.replace("\n", "\\n").encode("utf-8", "backslashreplace").decode("utf-8")


def _expand(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(
                name for name in folders if not name.startswith(".") and name != "__pycache__"
            )
            found = (Path(folder, name) for name in sorted(names) if not name.startswith("."))
            yield from (file for file in found if file.is_file())
    else:
        raise ValueError(f"input {path} is not a file or folder: check the path given with --input")


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


@contextmanager
def _readable(path: Path, report: Report) -> Iterator[None]:
    """What goes wrong with a file as a whole is reported by its name."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        report(f"{path} is damaged gzip ({error})")
    except PermissionError:
        report(f"{path} may not be read (permissions)")


def _read_text(path: Path, report: Report) -> Iterator[Document]:
    with _readable(path, report):
        with _open(path) as file:
            content = file.read()
        if (text := decode(content, path, report)) is not None:
            yield Document(str(path), text)


def _read_jsonl(path: Path, text_field: str, report: Report) -> Iterator[Document]:
    with _readable(path, report), _open(path) as file:
        for number, line in enumerate(file, start=1):
            text = (
                _parse_line(line, f"{path}:{number}", text_field, report) if line.strip() else None
            )
            if text is not None:
                yield Document(f"{path}:{number}", text)


def _parse_line(line: bytes, place: str, text_field: str, report: Report) -> str | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return report(f"{place}: this line is not JSON ({error})")
    if not isinstance(record, dict) or not isinstance(text := record.get(text_field), str):
        fields = (
            ", ".join(map(str, list(record)[:8]))
            if isinstance(record, dict)
            else type(record).__name__
        )
        return report(
            f"{place}: there is no string field {text_field!r} (found: {fields}); set --text_field"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return report(
            f"{place}: character {error.start} of {text_field!r} is a lone surrogate, which is no text"
        )
    return text
