"""What the first bytes of a file say that its name does not: records, or something that is no text.

Text has no signature. A file is taken for text unless its beginning is that of a format below.
"""

import csv
import re

JSON = "JSON"
HEAD = 1 << 16  # bytes of a file that are looked at

RENAME = "give the file a name that ends in"
# The first bytes of formats that are never text, with what to do.
SIGNATURES = {
    b"PAR1": ("parquet", f"{RENAME} .parquet"),
    b"\x1f\x8b": ("gzip", f"{RENAME} .gz, after the suffix of what is in it"),
    b"\x28\xb5\x2f\xfd": ("zstd", f"{RENAME} .zst, after the suffix of what is in it"),
    b"\xfd7zXZ\0": ("xz", f"{RENAME} .xz, after the suffix of what is in it"),
    b"BZh9": ("bzip2", f"{RENAME} .bz2, after the suffix of what is in it"),
    b"PK\3\4": ("a zip archive", "run `unzip` on it and give what is in it"),
    b"ARROW1": ("an Arrow file", "write it as parquet"),
    b"\xff\xff\xff\xff": ("an Arrow stream", "write it as parquet"),
    b"%PDF-": ("a PDF", "give its text as a .txt file"),
    b"\xff\xfe": ("UTF-16", "run `iconv -f utf-16 -t utf-8` on it"),
    b"\xfe\xff": ("UTF-16", "run `iconv -f utf-16 -t utf-8` on it"),
}
PICKLE = re.compile(rb"\x80[\x02-\x05]|\([dl]p\d+\n")
TAR = slice(257, 262)  # where the archive says ustar
OBJECT = re.compile(rb'(\xef\xbb\xbf)?\s*(\[\s*)?\{\s*"(?:[^"\\\n]|\\.)*"\s*:')
CELL = re.compile(r"[\w.-]+")


def no_text(head: bytes) -> tuple[str, str] | None:
    """(the format, the remedy) of a file whose first bytes are no text; None if they may be."""
    for signature, answer in SIGNATURES.items():
        if head.startswith(signature):
            return answer
    if head[TAR] == b"ustar":
        return "a tar archive", "run `tar -xf` on it and give what is in it"
    if PICKLE.match(head):
        return "a pickle", "write its text as JSONL"
    # of UTF-16 without a mark every second byte of most texts is 0
    zeros = [half.count(0) for half in (head[::2], head[1::2])]
    if max(zeros) > max(8, len(head) / 4):
        return "UTF-16, UTF-32 or binary data", "convert it to UTF-8 with `iconv -t utf-8`"
    return None


def records(head: bytes) -> tuple[str, str] | None:
    """(the format, the remedy) of a file whose first bytes are those of records; None if not."""
    remedy = f"{RENAME} .jsonl, with one JSON record a line, or in .txt, to train on it as it is"
    if OBJECT.match(head):
        return JSON, remedy
    lines = head.decode(errors="replace").splitlines()
    if _is_table(lines[:3]):
        return "CSV", remedy
    return None


def _is_table(lines: list[str]) -> bool:
    """Whether the first line is names of columns, and the next one has as many cells."""
    for delimiter in ",;\t":
        first, second, *_ = [*csv.reader(lines, delimiter=delimiter), [], []]
        is_even = len(first) == len(second) > 1
        if is_even and all(map(CELL.fullmatch, first)):
            return True
    return False
