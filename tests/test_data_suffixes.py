"""A suffix says the same in capitals, and what no suffix names is not taken for text in silence."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data.inputs import look_into
from data.load_tokenizer import load_tokenizer
from data.prepare import main
from data.sources import TextFiles
from data.tokenizer import train
from tests import qwen_tokenizer
from tests.kit import read_texts

RECORDS = b"".join(json.dumps(dict(text=f"document {n}")).encode() + b"\n" for n in range(3))
TEXT = b"Shall I compare thee, to a day\nThou art more, lovely\n"
TABLE = b'id,text\n1,"hello, csv"\n'


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


def table_bytes() -> bytes:
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table(dict(text=["document 0", "1", "2"])), stream)
    return stream.getvalue()


def tar_bytes() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return stream.getvalue()


CAPITALS = {
    "a.JSONL": RECORDS,
    "a.NdJson": RECORDS,
    "a.JSONL.GZ": gzip.compress(RECORDS),
    "a.jsonl.Bz2": bz2.compress(RECORDS),
    "a.Jsonl.XZ": lzma.compress(RECORDS),
    "a.jsonl.Zst": zstd(RECORDS),
    "a.Parquet": table_bytes(),
}


@pytest.mark.parametrize("name", CAPITALS)
def test_a_suffix_in_capitals_names_the_same_format(tmp_path, name):
    (tmp_path / name).write_bytes(CAPITALS[name])
    for path in (tmp_path, tmp_path / name, f"{tmp_path}/*{name[1:].lower()}"):
        found = read_texts(path, text_field="text")
        assert len(found) == 3 and found[0] == "document 0"


@pytest.mark.parametrize("name", ["T.CSV", "t.Tsv", "t.JSON", "t.csv.GZ", "t.ZIP"])
def test_what_is_refused_is_refused_in_capitals_and_by_pattern_too(tmp_path, name):
    content = gzip.compress(TABLE) if name.endswith("GZ") else TABLE
    for copy in (name, f"2{name}"):
        (tmp_path / copy).write_bytes(content)
    for path in (tmp_path / name, f"{tmp_path}/*{name[1:]}"):
        with pytest.raises(ValueError, match=name[1:]):
            TextFiles([path])
    with pytest.raises(ValueError, match=name[1:]):
        TextFiles([tmp_path], text_field="text")


def test_a_text_in_capitals_is_text_and_a_pattern_finds_it(tmp_path):
    (tmp_path / "A.TXT").write_bytes(TEXT)
    (tmp_path / "b.Txt.gz").write_bytes(gzip.compress(TEXT))
    assert read_texts(tmp_path) == [TEXT.decode()] * 2
    assert [path.name for path in look_into(f"{tmp_path}/*.txt").files] == ["A.TXT"]


@pytest.mark.parametrize("flag", ["--text_field", "--answer_field"])
@pytest.mark.parametrize("name", ["a.txt", "README", "a.py"])
def test_a_field_of_a_file_that_is_read_as_text_is_refused(tmp_path, capsys, flag, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(TEXT)
    (tmp_path / "in" / "b.jsonl").write_bytes(RECORDS)
    for path in (tmp_path / "in", tmp_path / "in" / name):
        arguments = ["--input", str(path), flag, "text", "--output", str(tmp_path / "d")]
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert name in error and flag in error and error.count("\n") == 1
    assert not (tmp_path / "d").exists()


NO_TEXT = {
    "part-00000": RECORDS,
    "part-00001.gz": gzip.compress(RECORDS),
    "a.jl": RECORDS,
    "a.ipynb": b'{\n "cells": []\n}\n',
    "a.dat": TABLE,
    "a.tab": TABLE.replace(b",", b"\t"),
    "a.pq": table_bytes(),
    "a.jsonl.gzip": gzip.compress(RECORDS),
    "a.jsonl.zstd": zstd(RECORDS),
    "a.bz": bz2.compress(RECORDS),
    "a.lzma2": lzma.compress(RECORDS),
    "a.tar": tar_bytes(),
    "a.tar.gz": gzip.compress(tar_bytes()),
    "a.docx": b"PK\3\4\0\0",
    "a.arrow": b"ARROW1\0\0",
    "a.bin": pickle.dumps(dict(a=1)),
    "old.bin": pickle.dumps(dict(a=1), protocol=0),
    "utf16.txt": TEXT.decode().encode("utf-16"),
    "unmarked.txt": TEXT.decode().encode("utf-16-le"),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_a_named_file_that_begins_as_something_else_than_text_is_refused(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(NO_TEXT[name])
    for path in (tmp_path / name, f"{tmp_path}/{name[:-1]}*"):
        assert main(["--input", str(path), "--output", str(tmp_path / "d")]) == 2
        error = capsys.readouterr().err
        kind = Path(name.removesuffix(".gz")).suffix
        assert str(tmp_path / name) in error and (kind or "no suffix") in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["a.txt", "a.TXT", "a.txt.gz"])
def test_records_that_the_user_calls_text_are_text(tmp_path, name):
    for content in (RECORDS, TABLE):
        stored = gzip.compress(content) if name.endswith("gz") else content
        (tmp_path / name).write_bytes(stored)
        assert read_texts(tmp_path / name) == [content.decode()]


@pytest.mark.parametrize("text", [TEXT, b"", b"\0", b"[1] a note\n", b'{"', b"{{ name }}: x\n"])
@pytest.mark.parametrize("name", ["README", "a.md", "a.py", "a.tex"])
def test_text_without_a_suffix_that_is_known_stays_text(tmp_path, name, text):
    (tmp_path / name).write_bytes(text)
    assert read_texts(tmp_path / name) == read_texts(tmp_path) == [text.decode()]


def test_sources_in_a_folder_stay_text_and_records_among_them_are_said(tmp_path):
    for name in ("a.py", "b.json", "c.map"):
        (tmp_path / name).write_bytes(RECORDS)
    (tmp_path / "d.csv").write_bytes(TABLE)
    files = TextFiles([tmp_path])
    found = [document.text for document in files.documents()]
    assert found == [RECORDS.decode()] * 3 + [TABLE.decode()]
    assert f"{tmp_path}/a.py and 3 more" in files.notes()[0]


@pytest.mark.parametrize("name", ["part-00000", "a.tar", "unmarked.txt"])
def test_in_a_folder_what_is_no_text_is_refused_or_left_out_on_request(tmp_path, name):
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / name).write_bytes(NO_TEXT[name])
    with pytest.raises(ValueError, match=name):
        read_texts(tmp_path)
    reports = []
    assert read_texts(tmp_path, report=reports.append) == [TEXT.decode()]
    assert len(reports) == 1


def test_a_tokenizer_file_in_capitals_is_the_same(tmp_path):
    folder = qwen_tokenizer.make(tmp_path / "t", ["abc\n" * 9], 260, 260, 640)
    capitals = folder / "TOKENIZER.JSON"
    (folder / "tokenizer.json").rename(capitals)
    assert load_tokenizer(capitals).padded_vocab_size() == 640
    model = train([TEXT.decode() * 9], 280, tmp_path / "t.MODEL").path
    assert load_tokenizer(model).vocab_size == 280
