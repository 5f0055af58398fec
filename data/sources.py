"""Documents from the user's files: text, JSONL and parquet, compressed or not (data/inputs.py).

Every byte counts: no newline translation, no BOM removal, no normalisation. What is not valid text
is named as file:offset, file:line or file:row, and refused, left out, or replaced, as asked.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import BinaryIO, NamedTuple

from data import contents, parquet
from data.fields import FieldError, TextField
from data.inputs import (
    Input,
    compression_of,
    kind_of,
    look_into,
    opened,
    require_package,
    some,
    suffix_of,
)

DOCUMENT_BYTES = 64 << 20  # the longest document: 16M tokens or so

Report = Callable[[str], object]


class Document(NamedTuple):
    """A text, and where it is from; of a question with its answer, both."""

    name: str
    text: str
    answer: str | None = None

    @property
    def num_chars(self) -> int:
        """The characters of the text and the answer."""
        return len(self.text) + len(self.answer or "")


def refuse(message: str) -> None:
    """The default answer to a damaged document: raise ValueError."""
    raise ValueError(f"{message}: repair it, or leave such documents out with --on_error skip")


# ---- formats that are not read


TABLES = (".json", ".csv", ".tsv")
PLAIN = ".txt"  # the suffix of what is text, whatever is in it


def require_readable(file: Path) -> None:
    """Raise ValueError if the name says that the file is not text, or has fields that would not be
    read.
    """
    if suffix_of(file) == ".zip":
        raise ValueError(f"{file} is a zip archive, which is not read: run `unzip {file}`")
    kind = kind_of(file)
    if kind in TABLES:
        raise ValueError(
            f"{file}: {kind[1:]} is not read, only text, JSONL and parquet are: write one JSON "
            f"record a line, as {file.name.split('.')[0]}.jsonl"
        )


def require_fields(file: Path, flag: str) -> None:
    """Raise ValueError if the name says that the file has no records with fields."""
    if kind_of(file) not in READERS:
        raise ValueError(
            f"{file} is read as text, which has no field for {flag}: give JSONL or parquet only "
            f"(files that end in {', '.join(READERS)}), or drop {flag}"
        )


def require_text(file: Path) -> None:
    """Raise ValueError if a file that would be read as text begins as something else."""
    head = b""
    with opened(file, lambda damage: None) as stream:  # the reading will name the damage
        head = stream.read(contents.HEAD)
    found = contents.no_text(head)
    if found is None and kind_of(file) != PLAIN:
        found = contents.records(head)
    if found:
        form, remedy = found
        raise ValueError(f"{_begins(file, form)}: {remedy}")


def _begins(file: Path, form: str) -> str:
    suffix = f"the suffix {kind_of(file)}" if kind_of(file) else "no suffix"
    return f"{file} begins as {form}, and with {suffix} it would be read as text"


def require_extras(file: Path) -> None:
    """Raise ValueError naming the package that this file needs and that is not installed."""
    if kind_of(file) == ".parquet":
        require_package("pyarrow", f"{file} is parquet, which")
    if compression_of(file) == "zstd":
        require_package("pyarrow", f"{file} is zstd, which")


# ---- documents


class TextFiles:
    """The user's files and folders: their documents, and a record of where these are from.

    A text file is one document, and so is each line of a .jsonl file and each row of a .parquet
    file.
    """

    def __init__(
        self,
        inputs: Sequence[Path | str],
        text_field: str | None = None,
        report: Report = refuse,
        replace: bool = False,
        document_bytes: int = DOCUMENT_BYTES,
        answer_field: str | None = None,
    ):
        """text_field: which text of a record is the document (data/fields.py), "text" if None.
        answer_field: which one is its answer, if documents have answers; neither may be empty then.
        report: told of each document that is left out. replace: bytes that are not UTF-8 become
        U+FFFD. document_bytes: a longer text is cut at the end of a line, a longer record is bad.

        Raises ValueError if one of the inputs does not exist, holds no file, is of a format that
        is not read, has no field for a text or an answer that is asked for, or needs a package that
        is not installed.
        """
        if document_bytes < 1:
            raise ValueError(
                f"--max_document_mib allows documents of {document_bytes >> 20} MiB: give 1 or more"
            )
        self._inputs = [look_into(path) for path in inputs]
        self._fields = [TextField(text_field or "text")]
        if answer_field is not None:
            self._fields.append(TextField(answer_field, "--answer_field"))
        asked = self._fields if text_field else self._fields[1:]
        self._report = report
        self._replace = replace
        self._limit = document_bytes
        self._replaced: dict[str, int] = {}  # place of the first one of a document -> U+FFFD
        self._markup: dict[Path, None] = {}  # text files in folders that hold records

        self._files = [file for one in self._inputs for file in one.files]
        for one in self._inputs:
            for file in one.files:
                # in a folder of sources, .json and .csv are text like any other
                if asked or one.names(file):
                    require_readable(file)
                for field in asked:
                    require_fields(file, field.flag)
                require_extras(file)
                if one.names(file) and kind_of(file) not in READERS:
                    require_text(file)

    def notes(self) -> list[str]:
        """What was left out, or may not be what the user thinks, in lines."""
        lines = []
        linked = [link for one in self._inputs for link in one.linked]
        if linked:
            lines.append(
                f"left out: {some(linked)}, because links to folders are not followed: give the "
                "folder itself with --input"
            )
        if self._markup:
            lines.append(
                f"read as plain text, with all markup: {some(list(self._markup))}: write JSONL to "
                "read a field of their records"
            )
        if self._replaced:
            first = next(iter(self._replaced))
            count = sum(self._replaced.values())
            lines.append(
                f"replaced bytes that are not UTF-8 by {count:,} U+FFFD in "
                f"{len(self._replaced):,} documents, the first at {first}"
            )
        return lines

    def documents(self) -> Iterator[Document]:
        """The documents of all inputs, in order.

        Raises ValueError, or calls `report` and goes on, for text that is not UTF-8, a lone
        surrogate, a record without the text field, and damaged files.
        """
        for file in self._files:
            read = READERS.get(kind_of(file), TextFiles._texts)
            yield from read(self, file)

    def describe(self) -> list[dict]:
        """Each input's files and bytes, and a SHA-256 over its "name hash" lines."""
        return [self._describe_input(one) for one in self._inputs]

    def stamp(self) -> list:
        """What changes if a file or the way to read it does: a list for JSON."""
        text, *answer = [field.spelled for field in self._fields]
        settings = [text, "utf-8", self._replace, self._limit, *answer]
        return [settings, [_stamp(file) for file in self._files]]

    def _describe_input(self, one: Input) -> dict:
        digest = hashlib.sha256()
        for file in one.files:
            with open(file, "rb", buffering=0) as stored:
                sha256 = hashlib.file_digest(stored, "sha256").hexdigest()
            line = f"{one.name_inside(file)} {sha256}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return {
            "name": one.named,
            "files": len(one.files),
            "bytes": sum(file.stat().st_size for file in one.files),
            "sha256": digest.hexdigest(),
        }

    # ---- one file

    def _texts(self, file: Path) -> Iterator[Document]:
        """The text of a file: one document, several if it is longer than the limit."""
        with self._opened(file) as stream:
            for offset, content in _blocks(stream, self._limit):
                if content is None:
                    self._report(self._too_long(f"{file}:{offset}: a line"))
                    return
                if not offset and not self._is_text(file, content[: contents.HEAD]):
                    return
                text = self._decode(content, str(file), offset)
                if text is None:
                    return
                yield Document(f"{file}:{offset}" if offset else str(file), text)

    def _is_text(self, file: Path, head: bytes) -> bool:
        """Whether a file in a folder is text, which may have markup; else a report says what it is.

        Sources may be records, and no source lacks a suffix and begins as JSON: part-00000 does.
        """
        kind = kind_of(file)
        found = contents.no_text(head)
        form, remedy = found or contents.records(head) or ("", "")
        if found or (form == contents.JSON and not kind):
            self._report(f"{_begins(file, form)} ({remedy})")
            return False
        if kind in TABLES or (form and kind != PLAIN):
            self._markup[file] = None
        return True

    def _lines(self, file: Path) -> Iterator[Document]:
        """A document for each line of JSON."""
        with self._opened(file) as stream:
            number = 0
            while line := stream.readline(self._limit + 1):
                number += 1
                place = f"{file}:{number}"
                if len(line) > self._limit:
                    self._report(self._too_long(f"{place}: a line"))
                    _skip_line(stream, line)
                    continue
                document = self._parsed(line, place) if line.strip() else None
                if document is not None:
                    yield document

    def _rows(self, file: Path) -> Iterator[Document]:
        """A document for each row of a table."""
        try:
            for number, record in enumerate(parquet.records(file, self._fields), 1):
                document = self._document(record, f"{file}:{number}")
                if document is not None:
                    yield document
        except FieldError as error:
            raise ValueError(f"{file}: {error}: give a column") from None
        except parquet.BadParquet as error:
            self._report(f"{file} is damaged parquet ({error})")

    def _opened(self, file: Path):
        return opened(file, self._report)

    def _too_long(self, what: str) -> str:
        return f"{what} has more than {self._limit:,} bytes (raise --max_document_mib)"

    # ---- one text

    def _decode(self, content: bytes, name: str, offset: int = 0) -> str | None:
        """The text of bytes; None after a report that names file:offset."""
        bad: list[str] = []
        text = decode(content, name, bad.append if self._replace else self._report, offset)
        if not bad:
            return text
        text = content.decode(errors="replace")
        place = bad[0].split(": ")[0]
        self._replaced[place] = text.count("\ufffd") - content.count("\ufffd".encode())
        return text

    def _parsed(self, line: bytes, place: str) -> Document | None:
        """The document of a JSONL line; None after a report that names file:line."""
        decoded = self._decode(line, place)
        if decoded is None:
            return None
        try:
            record = json.loads(decoded)
        except (ValueError, RecursionError) as error:
            self._report(f"{place}: this line is not JSON ({error})")
            return None
        return self._document(record, place)

    def _document(self, record: object, place: str) -> Document | None:
        """The document of a record; None after a report that names its place, also if it has an
        answer and one of the two is empty.
        """
        try:
            return Document(place, *(self._text(record, field) for field in self._fields))
        except FieldError as error:
            self._report(f"{place}: {error}")
            return None

    def _text(self, record: object, field: TextField) -> str:
        """One text of a record, or of what is wrong with it."""
        if isinstance(record, FieldError):
            raise record
        text = field.text_of(record)
        if len(text) > self._limit:
            raise FieldError(self._too_long("a text"))
        if not text and len(self._fields) > 1:
            name = "prompt" if field is self._fields[0] else "answer"
            raise FieldError(f"the {name} ({field.flag} {field.spelled!r}) is empty")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FieldError(
                f"character {error.start} of {field.spelled!r} is a lone surrogate, which is not "
                "text"
            ) from None
        return text


# What reads the files whose records have fields, by the suffix of their names; others are text.
READERS = {
    ".parquet": TextFiles._rows,
    ".jsonl": TextFiles._lines,
    ".ndjson": TextFiles._lines,
}


def _stamp(file: Path) -> list:
    """The name, the size and the time of the last change."""
    status = file.stat()
    return [str(file), status.st_size, status.st_mtime_ns]


def _blocks(stream: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """(offset, bytes) of a file in blocks of at most `limit` bytes that end with a line; None
    instead of a line that is longer. An empty file is one empty block.
    """
    offset = 0
    rest = b""
    while True:
        content = rest + stream.read(limit + 1 - len(rest))
        if len(content) <= limit:
            if content or not offset:
                yield offset, content
            return
        cut = content.rfind(b"\n", 0, limit) + 1
        yield offset, content[:cut] if cut else None
        if not cut:
            return
        offset += cut
        rest = content[cut:]


def _skip_line(stream: BinaryIO, read: bytes) -> None:
    """Go to the end of a line of which a part was read."""
    while read and not read.endswith(b"\n"):
        read = stream.readline(1 << 20)


def decode(
    content: bytes,
    name: Path | str,
    report: Report = refuse,
    offset: int = 0,
) -> str | None:
    """The text of bytes; None after a report that names file:offset."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        bad = content[error.start]
        report(f"{name}:{offset + error.start}: byte 0x{bad:02x} is not UTF-8")
        return None


# ---- joining


def by_directory(documents: Iterable[Document], limit: int = DOCUMENT_BYTES) -> Iterator[Document]:
    """Join the documents of each directory, which follow each other, into one document; a document
    that would get more than `limit` characters is several.

    Short files that are packed into a long row are not long context, but a directory is a text
    whose parts refer to each other. A comment line names each part.
    """
    directory = None
    parts: list[str] = []
    size = 0
    for document in documents:
        parent = str(PurePath(document.name).parent)
        is_full = size + len(document.text) > limit
        if parts and (parent != directory or is_full):
            yield Document(directory, "".join(parts))
            parts = []
            size = 0
        directory = parent
        newline = "" if document.text.endswith("\n") else "\n"
        parts.append(f"# {_on_one_line(document.name)}\n{document.text}{newline}")
        size += len(document.text)
    if parts:
        yield Document(directory, "".join(parts))


# What becomes a document: the files of a directory, which follow each other, or each file.
JOINS = {"directory": by_directory, "file": iter}


def _on_one_line(name: str) -> str:
    """A file name as text: names may hold newlines, and bytes that are not UTF-8."""
    return name.replace("\n", "\\n").encode("utf-8", "backslashreplace").decode("utf-8")
