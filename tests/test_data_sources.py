"""Parquet, compression, patterns, URLs, encodings and fields of records: the same text whatever it
comes in, in memory that does not grow with the files.
"""

import bz2
import gzip
import json
import lzma
import random
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet as pq

from data import inputs
from data.fields import FieldError, TextField
from data.prepare import main
from data.sources import TextFiles
from data.tokenizer import train
from tests.kit import read_texts
from tests.readers import damaged

ROOT = Path(__file__).parent.parent
TEXTS = ["one\n", "", "caf\u00e9 \u65e5\u672c \U0001f600\n", "x" * 5000, "a\r\nb\x00c"]
JSONL = "".join(json.dumps(dict(text=text)) + "\n" for text in TEXTS).encode()
COMPRESS = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: zstandard.ZstdCompressor().compress(content),
}


def write_parquet(path: Path, columns: dict, **settings) -> Path:
    pq.write_table(pyarrow.table(columns), path, **settings)
    return path


HELD = """
import sys
import pyarrow
from data.prepare import main
from data.sources import TextFiles
from tests.events import python_bytes

def read(path):
    global characters
    characters = sum(len(document.text) for document in TextFiles([path]).documents())

def prepare(path):
    global characters
    characters = 0
    main(["--input", path, "--output", path + ".d", "--tokenizer", tokenizer, "--workers", "2"])

tokenizer, small, *others = sys.argv[1:]
work = prepare if tokenizer else read
read(small)  # makes all imports
for path in others:
    held = python_bytes(lambda: work(path))
    print("HELD", characters, held + pyarrow.default_memory_pool().max_memory())
"""


def held(tmp_path: Path, files: list[Path], tokenizer: Path | str = "") -> list[tuple[int, int]]:
    """(characters, most bytes that Python and Arrow held at one time) of each file, which are read
    one after the other in a process of their own; with a tokenizer they are prepared.
    """
    small = write_parquet(tmp_path / "small.parquet", dict(text=TEXTS))
    command = [sys.executable, "-c", HELD, str(tokenizer), *map(str, [small, *files])]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line.split() for line in result.stdout.splitlines()]
    return [(int(line[1]), int(line[2])) for line in lines if line[:1] == ["HELD"]]


# ---- compression


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_give_the_text_of_plain_ones(tmp_path, suffix):
    compress = COMPRESS[suffix]
    (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(JSONL))
    (tmp_path / f"b.txt{suffix}").write_bytes(compress(b"first ") + compress(b"second"))
    assert read_texts(tmp_path) == [*TEXTS, "first second"]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_that_is_cut_off_is_named(tmp_path, suffix, name):
    whole = COMPRESS[suffix](JSONL * 500)
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(ValueError, match=f"{name}{suffix} .*--on_error skip"):
        read_texts(path)
    reports = []
    files = TextFiles([path], report=reports.append)
    list(files.documents())
    assert len(reports) == 1
    assert files.describe()[0]["bytes"] == path.stat().st_size


@pytest.mark.parametrize("suffix", COMPRESS)
def test_damage_in_a_later_stream_is_never_taken_for_the_end(tmp_path, suffix):
    noise = random.Random(0).randbytes(300_000).hex().encode()  # more than a library reads ahead
    texts = (b"one" * 99, b"two" * 99, noise)
    first, second, third = [COMPRESS[suffix](text) for text in texts]
    path = tmp_path / f"a.txt{suffix}"
    for place in (0, 1, 2, len(second) // 2):
        bad = bytearray(second)
        bad[place] ^= 0xFF
        path.write_bytes(first + bad + third)
        with pytest.raises(ValueError, match=f"a.txt{suffix} "):
            read_texts(path)
    path.write_bytes(first + second + third)
    assert read_texts(path) == [b"".join(texts).decode()]


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_a_file_that_is_left_early_is_told_once(tmp_path, suffix):
    content = b"\xff" + random.Random(0).randbytes(300_000).hex().encode()
    (tmp_path / f"a.txt{suffix}").write_bytes(COMPRESS.get(suffix, bytes)(content))
    reports = []
    assert read_texts(tmp_path, report=reports.append, document_bytes=1000) == []
    assert len(reports) == 1


def test_an_error_of_the_disk_is_not_taken_for_damage(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(OSError, match="the disk"), inputs.opened(tmp_path / "a.txt", print):
        raise OSError(5, "the disk")


# ---- parquet


def test_a_column_of_parquet_gives_a_document_for_each_row(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", dict(id=range(5), text=TEXTS), row_group_size=2)
    documents = list(TextFiles([path]).documents())
    assert [document.text for document in documents] == TEXTS
    assert documents[2].name == f"{path}:3"
    assert TextFiles([path]).stamp() == TextFiles([path]).stamp()


@pytest.mark.parametrize(
    "kind",
    [pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), "string")],
)
def test_every_type_of_text_column_is_read_and_null_is_empty(tmp_path, kind):
    column = pyarrow.array(["a", None, "\u00e9"]).cast(kind)
    assert read_texts(write_parquet(tmp_path / "a.parquet", dict(text=column))) == [
        "a",
        "",
        "\u00e9",
    ]


def test_nested_columns_are_read(tmp_path):
    columns = dict(title=["T", "U"], meta=[dict(body="b", n=1), dict(body="c", n=2)], other=[0, 0])
    path = write_parquet(tmp_path / "a.parquet", columns)
    assert read_texts(path, text_field="meta.body") == ["b", "c"]


def test_parquet_without_the_column_is_refused_and_names_those_it_has(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", dict(id=[1], body=["x"]))
    for report in (print, None):
        settings = dict(report=report) if report else {}
        with pytest.raises(ValueError, match=r"'text' \(found: id, body\); set --text_field"):
            read_texts(path, **settings)
    with pytest.raises(ValueError, match="a.parquet:1: .*'id'"):
        read_texts(path, text_field="id")


def test_bytes_of_parquet_that_are_not_text_are_named_by_row(tmp_path):
    bad = pyarrow.array([b"fine", b"ab\xff"]).view(pyarrow.string())
    path = write_parquet(tmp_path / "a.parquet", dict(text=bad))
    with pytest.raises(ValueError, match="a.parquet:2: "):
        read_texts(path)
    nested = pyarrow.StructArray.from_arrays([bad], ["b"])
    path = write_parquet(tmp_path / "b.parquet", dict(text=nested))
    with pytest.raises(ValueError, match="b.parquet:2: "):
        read_texts(path, text_field="text.b")


def test_damaged_bytes_of_parquet_are_always_named_or_read(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", dict(text=TEXTS), write_page_checksum=True)
    good = path.read_bytes()
    refused = 0
    for seed in range(150):
        path.write_bytes(damaged(random.Random(seed), good))
        try:
            read_texts(path)
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 75


def repeated() -> list[str]:
    """6,000 rows of four texts of 16 kB: a file of some kB with a dictionary, 96 MB of text."""
    texts = [digit * 16_000 for digit in "0123"]
    return texts * 1500


def growing() -> list[str]:
    """Many short rows, then 400 of 200 kB."""
    return ["short"] * 300_000 + [str(row) * 66_666 for row in range(100, 500)]


def expanding(path: Path) -> int:
    """Write 128 MiB of text into a file of some KiB; its characters."""
    text = "long " * 2000
    line = json.dumps(dict(text=text)).encode() + b"\n"
    with open(path, "wb") as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
        for _ in range(2**27 // len(line)):
            writer.write(line)
    return 2**27 // len(line) * len(text)


@pytest.mark.slow
def test_memory_does_not_depend_on_how_much_a_file_expands(tmp_path):
    files = [tmp_path / name for name in ("a.jsonl.zst", "b.parquet", "c.parquet")]
    characters = [expanding(files[0])]
    for path, rows in zip(files[1:], (repeated(), growing())):
        write_parquet(path, dict(text=rows), write_batch_size=8)
        characters.append(sum(map(len, rows)))

    found = held(tmp_path, files)
    assert [count for count, _ in found] == characters
    assert found[0][1] < 32 * 2**20
    assert max(most for _, most in found) < 48 * 2**20


# ---- which files


def test_patterns_name_files(tmp_path):
    for name in ("b/x.txt", "a/y.txt", "a/z.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_texts(f"{tmp_path}/**/*.txt") == ["a/y.txt", "b/x.txt"]


@pytest.mark.parametrize("name", ["a.parquet", "a.txt.zst"])
def test_a_package_that_is_missing_is_named_with_what_installs_it(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match="pip install pyarrow"):
        TextFiles([tmp_path / name])


# ---- fields


RECORD = dict(text="t", meta=dict(body="b", list=["x", "y"]), n=3, none=None, **{"a.b": "dotted"})


@pytest.mark.parametrize(
    "field, text",
    [
        ("text", "t"),
        ("meta.body", "b"),
        ("meta.list.1", "y"),
        ("a.b", "dotted"),
        ("none", ""),
    ],
)
def test_a_field_and_a_path_give_the_text(field, text):
    assert TextField(field).text_of(RECORD) == text


@pytest.mark.parametrize("field", ["body", "meta", "meta.list.2", "meta.list.x", "n", "text.x"])
def test_a_record_without_the_text_is_named(field):
    with pytest.raises(FieldError, match="found: text, meta, n"):
        TextField(field).text_of(RECORD)


# ---- bad bytes


def test_bad_bytes_are_replaced_and_counted_on_request(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufffd\u00e9".encode() + b"\xff\xfe\n\xe9")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xe9"}\n')
    files = TextFiles([tmp_path], replace=True)
    for _ in range(2):
        texts = [document.text for document in files.documents()]
        assert texts == ["\ufffd\u00e9\ufffd\ufffd\n\ufffd", "x", "\ufffd"]
        [note] = files.notes()
        assert "4 U+FFFD in 2 documents" in note and f"{tmp_path}/a.txt:5" in note


# ---- long documents


@pytest.mark.parametrize("limit", [4, 5, 7, 100])
def test_a_text_longer_than_the_limit_is_cut_at_lines_and_loses_nothing(tmp_path, limit):
    content = b"ab\ncdef\n\n\ng\nhi"
    (tmp_path / "a.txt").write_bytes(content)
    reports = []
    files = TextFiles([tmp_path / "a.txt"], document_bytes=limit, report=reports.append)
    documents = list(files.documents())
    if limit < 5:
        assert "--max_document_mib" in reports[0]
        return
    assert not reports
    assert "".join(document.text for document in documents).encode() == content
    assert all(0 < len(document.text) <= limit for document in documents)
    for document in documents[1:]:
        offset = int(document.name.rpartition(":")[2])
        assert content[offset:].decode().startswith(document.text)


def test_a_record_longer_than_the_limit_is_named_and_the_rest_is_read(tmp_path):
    lines = [json.dumps(dict(text=text)) for text in ("a", "b" * 3_000_000, "c")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    write_parquet(tmp_path / "b.parquet", dict(text=["a", "b" * 3_000_000, "c"]))
    reports = []
    assert read_texts(tmp_path, document_bytes=100, report=reports.append) == ["a", "c"] * 2
    assert [report.split("/")[-1].split(" has")[0] for report in reports] == [
        "a.jsonl:2: a line",
        "b.parquet:2: a text",
    ]


# ---- the command line


def test_the_command_line_counts_what_is_empty_and_replaced(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"some words and a line\n" * 2000 + b"\xff")
    (tmp_path / "in" / "empty.txt").write_bytes(b"")
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "d")]
    assert main([*arguments, "--vocab_size", "280", "--on_error", "replace"]) == 0
    said = capsys.readouterr()
    assert "1 documents without text" in said.out and "1 U+FFFD" in said.err


@pytest.mark.slow
def test_memory_does_not_grow_with_a_parquet_file(tmp_path):
    """4 MiB and 16 MiB."""
    draw = random.Random(0)
    letters = str.maketrans("0123456789", "etaoinshrd")
    words = [str(draw.randrange(10**6)).translate(letters) for _ in range(200_000)]
    model = train([" ".join(words[:5000])], 300, tmp_path / "t.model").path
    files = []
    for mebibytes in (4, 16):
        places = draw.sample(range(len(words) - 1200), mebibytes * 128)
        rows = [" ".join(words[place : place + 1200]) for place in places]
        # with pages of 1 MiB: those of 8 MiB, which the default makes, are not reached by 4 MiB
        settings = dict(compression="none", write_batch_size=64)
        path = write_parquet(tmp_path / f"{mebibytes}.parquet", dict(text=rows), **settings)
        assert path.stat().st_size > mebibytes * 2**20
        files.append(path)
    (_, first), (_, second) = held(tmp_path, files, model)
    assert first > 0
    assert second < first + 6 * 2**20  # 2 MiB; a table that is read whole takes 14
