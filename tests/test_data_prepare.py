"""Files become a dataset that gives every byte back; bad input is one line, exit code 2, and
nothing written.
"""

import gzip
import hashlib
import json
import os

import numpy as np
import pytest

from data import pipeline
from data.dataset import Dataset, open_dataset
from data.inputs import look_into
from data.pipeline import build_dataset, encode, scan
from data.prepare import main
from data.sources import Document, TextFiles, by_directory, refuse
from data.tokenizer import Tokenizer
from tests.kit import written_texts

WORDS = (
    "the quick brown fox jumps over the lazy dog "
    "while seven wizards box and sing about long context\n"
)
TRICKY = [
    "crlf\r\nline\r\n",
    "\ufeffbom first",
    "nul \x00 inside",
    "space mark \u2581\u2581 here",
    "<|endoftext|> is text",
    "tab\tand  spaces   ",
    "\n\n\n",
    "\u00e9\u65e5\U0001f600",
    "\U0001f525\u200d\ufffd\U0010ffff",
    "<s> </s> <unk> <0x00> <0xE2>",
    "a\u2028b\u2029c\x0bd\x0ce\x85f",
]


def text_of(seed: int, words: int = 400) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS.split(), words)) + "\n"


@pytest.fixture
def folder(tmp_path):
    """A folder of text files, the tricky ones among them."""
    root = tmp_path / "input"
    (root / "b" / "deep").mkdir(parents=True)
    for n in range(6):
        (root / f"{n}.txt").write_text(text_of(n))
        (root / "b" / f"{n}.txt").write_text(text_of(10 + n))
    for n, text in enumerate(TRICKY):
        (root / "b" / "deep" / f"{n:02}.txt").write_bytes(text.encode())
    return root


# --- reading


def test_folders_are_walked_in_sorted_order_without_hidden_entries(folder):
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / ".hidden").write_text("hidden")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.pyc").write_bytes(bytes([0xA7, 0x0D]))
    names = [str(path.relative_to(folder)) for path in look_into(folder).files]
    assert names == [f"{n}.txt" for n in range(6)] + [f"b/{n}.txt" for n in range(6)] + [
        f"b/deep/{n:02}.txt" for n in range(len(TRICKY))
    ]


def test_a_link_to_a_folder_is_not_followed_and_is_named(folder, tmp_path):
    (folder / "loop").symlink_to(folder)
    assert len(look_into(folder).files) == 12 + len(TRICKY)
    [note] = TextFiles([folder]).notes()
    assert str(folder / "loop") in note

    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "link").symlink_to(folder)
    with pytest.raises(ValueError, match="only/link"):
        look_into(tmp_path / "only")


def test_jsonl_gives_a_document_per_line_also_from_gzip(tmp_path):
    lines = "".join(json.dumps({"id": n, "body": text}) + "\n\n" for n, text in enumerate(TRICKY))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    documents = list(TextFiles([tmp_path], text_field="body").documents())
    assert [d.text for d in documents] == TRICKY * 2
    assert documents[1].name == f"{tmp_path}/a.jsonl:3"


BAD_FILES = {
    "utf8.txt:2": b"ab\xe9cd",
    "cut.txt:3": b"abc\xf0\x9f\x98",
    "broken.jsonl:2": b'{"text": "a"}\n{"text": \n',
    "deep.jsonl:1": b"[" * 100_000 + b"\n",
    "array.jsonl:1": b"[1]\n",
    "field.jsonl:1": b'{"body": "a"}\n',
    "number.jsonl:1": b'{"text": 3}\n',
    "lone.jsonl:1": b'{"text": "ab\\ud800"}\n',
}


@pytest.mark.parametrize("place", BAD_FILES)
def test_damaged_text_is_refused_by_place_or_left_out_on_request(tmp_path, place):
    (tmp_path / place.split(":")[0]).write_bytes(BAD_FILES[place])
    (tmp_path / "zz.txt").write_text("fine")
    with pytest.raises(ValueError, match=place) as error:
        list(TextFiles([tmp_path], report=refuse).documents())
    assert "--on_error skip" in str(error.value) and "\n" not in str(error.value)
    reports = []
    assert "fine" in [d.text for d in TextFiles([tmp_path], report=reports.append).documents()]
    assert len(reports) == 1


def test_files_are_hashed_whole_even_behind_damage(tmp_path):
    folder = tmp_path / "input"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text_of(n)}) + "\n" for n in range(200)).encode()
    (folder / "a.txt").write_bytes(text_of(0, 30_000).encode())
    (folder / "b.jsonl").write_bytes(lines + b"{broken\n" + lines)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "d.txt.gz").write_bytes(gzip.compress(lines)[:1000] + bytes(5_000_000))
    (folder / "e.txt").write_bytes(b"\xff")
    (folder / "f.txt").write_bytes(b"")
    reports = []
    files = TextFiles([folder, folder / "a.txt"], report=reports.append)
    for _ in range(2):
        assert len(list(files.documents())) == 1 + 400 + 200 + 1 + 1
        paths = sorted(folder.iterdir())
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
        record = "".join(f"{path.name} {digest}\n" for path, digest in zip(paths, digests))
        assert files.describe() == [
            {
                "name": str(folder),
                "files": 6,
                "bytes": sum(path.stat().st_size for path in paths),
                "sha256": hashlib.sha256(record.encode()).hexdigest(),
            },
            {
                "name": str(folder / "a.txt"),
                "files": 1,
                "bytes": (folder / "a.txt").stat().st_size,
                "sha256": hashlib.sha256(f". {digests[0]}\n".encode()).hexdigest(),
            },
        ]
    assert len(reports) == 2 * 3


def test_the_files_of_a_directory_become_one_document_with_their_names():
    documents = [Document("a/x.py", "1\n"), Document("a/y.py", "2"), Document("b/z.py", "3\n")]
    assert list(by_directory(documents)) == [
        Document("a", "# a/x.py\n1\n# a/y.py\n2\n"),
        Document("b", "# b/z.py\n3\n"),
    ]
    assert list(by_directory([])) == []

    documents = [Document(f"a/{n}", "x" * 40) for n in range(5)]
    joined = list(by_directory(documents, limit=100))
    assert len(joined) == 3  # cut between its files
    assert sum(document.text.count("x") for document in joined) == 200


# --- encoding


def test_the_sample_for_the_tokenizer_is_bounded_and_spread_over_the_documents(monkeypatch):
    monkeypatch.setattr(pipeline, "SAMPLE_CHARS", 50_000)
    monkeypatch.setattr(pipeline, "SAMPLE_CHUNK", 1000)
    documents = [Document(str(n), chr(97 + n) * 40_000) for n in range(20)]
    sample, num_chars, *counts = scan([*documents, Document("empty", ""), Document("tiny", "x")])
    assert num_chars == 800_001 and sum(map(len, sample)) == 50_000
    assert counts == [21, 1]
    assert len({chunk[0] for chunk in sample}) > 12
    assert sample == scan(documents).sample


def test_short_and_long_documents_have_the_ids_of_the_whole_whoever_encodes_them(
    folder, tmp_path, monkeypatch
):
    dataset = build_dataset(TextFiles([folder]).documents, tmp_path / "d", vocab_size=350)
    monkeypatch.setattr(pipeline, "BATCH_CHARS", 20_000)
    texts = ["".join(text_of(n) for n in range(60)), "no newline \u00e9 " * 9000, "", "short"]
    texts += [text_of(n, 50 * n) for n in range(40)]
    whole = Tokenizer(dataset.tokenizer_path)
    assert len(list(pipeline._parts([Document("long", texts[0])], whole))) > 4
    documents = [Document(str(n), text) for n, text in enumerate(texts)]
    for encoded, text in zip(encode(documents, dataset.tokenizer_path, 3), texts, strict=True):
        assert encoded.tokens.tolist() == whole.encode(text)
        assert encoded.source_bytes == len(text.encode())


# --- the command line


def test_a_folder_becomes_a_dataset_that_gives_every_byte_back(folder, tmp_path):
    """Also one that is written into it, which does not read itself."""
    expected = [path.read_bytes().decode() for path in look_into(folder).files]
    sizes = ["--vocab-size", "350", "--val-fraction", "0.2"]
    assert main(["--input", str(folder), "--output", str(folder / "out"), *sizes]) == 0
    dataset = open_dataset(folder / "out", verify=True)
    assert sorted(written_texts(dataset)) == sorted(expected)
    assert dataset.vocab_size == 350 and set(dataset.splits) == {"train", "val"}
    read_bytes = sum(split.source_bytes for split in dataset.splits.values())
    assert read_bytes == sum(len(text.encode()) for text in expected)
    assert dataset.manifest.sources[0]["files"] == len(expected)
    assert {path.name for path in tmp_path.iterdir()} == {"input"}


def test_the_end_of_an_only_document_is_the_validation_split(tmp_path, capsys):
    text = "".join(text_of(n) for n in range(40))
    (tmp_path / "input.txt").write_text(text)
    arguments = ["--input", str(tmp_path / "input.txt"), "--vocab_size", "350", "--output"]
    assert main([*arguments, str(tmp_path / "d"), "--val_fraction", "0.1"]) == 0
    head, tail = written_texts(open_dataset(tmp_path / "d", verify=True))
    assert head + tail == text
    assert 0.05 * len(text) < len(tail) < 0.15 * len(text)
    assert head.endswith("\n")
    assert f"{len(tail):,}" in capsys.readouterr().out

    assert main([*arguments, str(tmp_path / "whole"), "--val_fraction", "0"]) == 0
    assert written_texts(open_dataset(tmp_path / "whole")) == [text]


@pytest.mark.parametrize("text", ["x", "one line without an end", "\n" * 50])
def test_an_only_document_is_cut_without_losing_a_character(text):
    documents = [Document("empty", ""), Document("a", text)]
    head, *tail = pipeline._end_apart(documents, 0.01, lambda message: None)
    assert head.text + "".join(part.text for part in tail) == text
    assert head.text


def test_skipped_documents_are_named_on_screen_also_if_nothing_is_left(folder, tmp_path, capsys):
    bad = folder / "bad.txt"
    bad.write_bytes(b"ab\xff")
    flags = ["--output", str(tmp_path / "d"), "--vocab_size", "350", "--input"]
    assert main([*flags, str(folder)]) == 2 and not (tmp_path / "d").exists()
    assert main([*flags, str(folder), "--on_error", "skip"]) == 0
    # refused once, left out once
    assert capsys.readouterr().err.count("bad.txt:2: ") == 2
    assert len(written_texts(Dataset(tmp_path / "d"))) == 12 + len(TRICKY)

    only_bad = ["--output", str(tmp_path / "none"), "--input", str(bad)]
    assert main([*only_bad, "--on_error", "skip"]) == 2
    left_out, _ = capsys.readouterr().err.splitlines()
    assert "bad.txt:2: " in left_out


def test_names_that_look_like_paths_flags_or_lines_are_names(tmp_path):
    source = tmp_path / "names"
    source.mkdir()
    strange = [b"-rf", b"new\nline.txt", b"caf\xe9.txt", b"$(touch x)", b"%00", b"\xe2\x96\x81.txt"]
    for number, name in enumerate(strange):
        (source / os.fsdecode(name)).write_text(text_of(number))
    words = ["--input", source, "--output", tmp_path / "d", "--documents", "directory"]
    assert main([*map(str, words), "--vocab_size", "400", "--workers", "1"]) == 0
    text = "".join(written_texts(open_dataset(tmp_path / "d", verify=True)))
    assert all(text_of(number) in text for number in range(len(strange)))
    assert {path.name for path in tmp_path.iterdir()} == {"names", "d"}
