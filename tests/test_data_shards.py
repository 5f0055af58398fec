"""A dataset folder gives back what was written, and every kind of damage is found and named."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.dataset import Dataset, check_vocab, open_dataset
from data.manifest import MANIFEST, IntegrityError, token_dtype
from data.writer import (
    TokenizedDocument,
    choose_validation,
    unigram_entropy,
    write_dataset,
)
from tests.kit import contents

VOCAB, EOD = 100, 0


def documents_of(seed=0, n=50, vocab=VOCAB):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab, rng.integers(1, 60)) for _ in range(n)]


@pytest.fixture
def dataset(tmp_path):
    return write_dataset(
        documents_of(),
        tmp_path / "data",
        vocab_size=VOCAB,
        eod_id=EOD,
        shard_tokens=300,
        val_fraction=0.1,
    )


def all_documents(dataset: Dataset) -> dict[int, list[int]]:
    return {
        int(index): split.read(d, 0, 10**9).tolist()
        for split in dataset.splits.values()
        for d, index in enumerate(split._documents)
    }


def rewrite_manifest(folder: Path, change) -> None:
    """Change the manifest and give it a fitting checksum, as someone malicious would."""
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    content.pop("checksum", None)
    content["checksum"] = hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(content))


def test_every_document_comes_back_with_its_closing_end_of_document(dataset):
    assert len(dataset.manifest.shards) > 3
    assert all_documents(dataset) == {
        i: [*document.tolist(), EOD] for i, document in enumerate(documents_of())
    }
    dataset.verify()


def test_splits_share_no_document_and_lose_none(dataset):
    train, val = dataset.split("train"), dataset.split("val")
    assert train.num_documents + val.num_documents == 50
    assert train.num_tokens + val.num_tokens == sum(len(d) + 1 for d in documents_of())
    assert val.lengths.sum() == val.num_tokens <= 0.1 * (train.num_tokens + val.num_tokens)
    assert not set(train._documents) & set(val._documents)


def test_a_read_stops_at_the_end_of_its_document(dataset):
    split = dataset.split("train")
    assert len(split.read(0, 1, 10**6)) == split.lengths[0] - 1
    assert split.read(0, int(split.lengths[0]) - 1, 5).tolist() == [EOD]


def test_an_end_of_document_that_is_there_is_not_doubled_and_empty_documents_are_left_out(tmp_path):
    dataset = write_dataset(
        [np.array([5, EOD]), np.array([], int), np.array([6])],
        tmp_path / "d",
        vocab_size=10,
        eod_id=EOD,
        val_fraction=0,
    )
    assert all_documents(dataset) == {0: [5, EOD], 1: [6, EOD]}


@pytest.mark.parametrize(
    "vocab, dtype", [(2, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (151_936, "uint32")]
)
def test_the_width_of_an_id_follows_the_vocabulary(tmp_path, vocab, dtype):
    tokens = np.array([1, vocab - 1, vocab // 2])
    dataset = write_dataset([tokens], tmp_path / "d", vocab_size=vocab, eod_id=0)
    assert dataset.dtype == np.dtype(dtype) == token_dtype(vocab)
    assert dataset.split("train").read(0, 0, 3).tolist() == tokens.tolist()
    assert dataset.manifest.shards[0].max_id == vocab - 1


def test_unigram_entropy_is_that_of_the_tokens_of_the_split(dataset):
    for name, split in dataset.splits.items():
        ids = np.concatenate([split.read(d, 0, 10**9) for d in range(split.num_documents)])
        p = np.unique(ids, return_counts=True)[1] / len(ids)
        assert split.unigram_entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-12), name
    assert unigram_entropy(np.array([5, 5, 5, 5, 0])) == pytest.approx(np.log(4))


def test_source_bytes_give_bits_per_byte(tmp_path):
    documents = [TokenizedDocument(np.array([1, 2, 3]), 8), TokenizedDocument(np.array([4]), 4)]
    split = write_dataset(documents, tmp_path / "d", vocab_size=9, eod_id=0, val_fraction=0).split(
        "train"
    )
    assert (split.source_bytes, split.num_tokens) == (12, 6)
    assert split.bits_per_byte(np.log(2)) == pytest.approx(0.5)


def test_validation_documents_are_whole_within_the_budget_and_of_both_lengths():
    lengths = np.random.default_rng(0).lognormal(5, 1.5, 5000).astype(int) + 1
    chosen = choose_validation(lengths, 0.02)
    assert (chosen == choose_validation(lengths, 0.02)).all() and (np.diff(chosen) > 0).all()
    assert 0.015 < lengths[chosen].sum() / lengths.sum() <= 0.02
    half = np.sort(lengths)[np.cumsum(np.sort(lengths)).searchsorted(lengths.sum() / 2)]
    assert 0.3 < lengths[chosen][lengths[chosen] >= half].sum() / lengths[chosen].sum() < 0.7


@pytest.mark.parametrize(
    "lengths, fraction, expected", [([5], 0.5, []), ([5, 3, 9], 0.0, []), ([5, 3, 9], 0.01, [1])]
)
def test_validation_has_a_document_whenever_there_are_two(lengths, fraction, expected):
    assert choose_validation(np.array(lengths), fraction).tolist() == expected


REFUSED = [
    ([[1, 2], [1, 100]], {}, "document 1 .* id 100 at token 1"),
    ([[1], [-1]], {}, "document 1 .* id -1 at token 0"),
    ([[1], [1.5]], {}, "document 1 "),
    ([[1], [[1, 2]]], {}, "document 1 "),
    ([[]], {}, "--input"),
    ([[1]], dict(vocab_size=0), "eod_id"),
    ([[1]], dict(vocab_size=9, eod_id=9), "eod_id"),
    ([[1]], dict(val_fraction=1.0), "val_fraction"),
]


@pytest.mark.parametrize("documents, changes, words", REFUSED)
def test_what_is_no_dataset_is_refused_and_leaves_nothing(tmp_path, documents, changes, words):
    settings = dict(vocab_size=VOCAB, eod_id=EOD) | changes
    with pytest.raises(ValueError, match=words):
        write_dataset(map(np.array, documents), tmp_path / "d", **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_split_and_a_larger_vocabulary_than_the_models_are_named(tmp_path):
    dataset = write_dataset([np.array([1])], tmp_path / "d", vocab_size=9, eod_id=0)
    with pytest.raises(ValueError, match="'val' .*--val_fraction"):
        dataset.split("val")
    check_vocab(dataset, 9)
    with pytest.raises(ValueError, match="--vocab_size 9"):
        check_vocab(dataset, 8)


def test_a_truncated_or_grown_or_missing_file_is_found_at_open(dataset):
    for path in sorted(dataset.path.iterdir()):
        if path.name == MANIFEST:
            continue
        content = path.read_bytes()
        for damaged in (content[:-2], content + b"\0\0"):
            path.write_bytes(damaged)
            with pytest.raises(IntegrityError, match=f"{path.name} .* {len(content)} bytes"):
                Dataset(dataset.path)
        path.unlink()
        with pytest.raises(IntegrityError, match=path.name):
            Dataset(dataset.path)
        path.write_bytes(content)
    Dataset(dataset.path)


def test_every_flipped_bit_is_found_by_verify(dataset):
    rng = np.random.default_rng(0)
    files = sorted(dataset.path.iterdir())
    for _ in range(150):
        path = files[rng.integers(len(files))]
        content = bytearray(path.read_bytes())
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        original = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(ValueError):
            open_dataset(dataset.path, verify=True)
        path.write_bytes(original)
    open_dataset(dataset.path, verify=True)


@pytest.mark.parametrize("name", ["shard-00000.idx", "val.idx"])
def test_damaged_ends_and_validation_documents_are_found_at_open(dataset, name):
    path = dataset.path / name
    numbers = np.fromfile(path, dtype="<u8")
    numbers[0] = 2**63
    numbers.tofile(path)
    with pytest.raises(IntegrityError, match=name):
        Dataset(dataset.path)


def test_a_missing_manifest_names_the_command_that_makes_one(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="python -m data.prepare"):
            Dataset(folder)


GARBLED = [
    "{",
    "[]",
    "{}",
    "[" * 100_000,
    '{"magic": "longhaul-dataset", "version": 99}',
    '{"magic": "longhaul-dataset", "version": 1}',
]


@pytest.mark.parametrize("content", GARBLED, ids=range(len(GARBLED)))
def test_a_garbled_or_future_manifest_is_refused_in_one_line(dataset, content):
    (dataset.path / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=MANIFEST) as error:
        Dataset(dataset.path)
    assert "\n" not in str(error.value)


def test_sixteen_bits_for_a_large_vocabulary_are_refused(dataset):
    def widen(content):
        content["vocab_size"] = 151_936

    rewrite_manifest(dataset.path, widen)
    with pytest.raises(IntegrityError, match="shard-00000.bin"):
        Dataset(dataset.path)


OUTSIDE = ["..", "../secret.bin", "/etc/passwd", "", "sub/shard.bin", "\x00", "a" * 5000]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_cannot_name_a_file_outside_the_dataset(dataset, name):
    good = (dataset.path / MANIFEST).read_bytes()
    changes = [
        lambda content: content["shards"][0].update(bin=name),
        lambda content: content["shards"][0].update(idx=name),
        lambda content: content["validation"].update(file=name),
    ]
    for change in changes:
        (dataset.path / MANIFEST).write_bytes(good)
        rewrite_manifest(dataset.path, change)
        with pytest.raises(ValueError, match="not a plain file"):
            Dataset(dataset.path)


def test_a_symbolic_link_in_a_dataset_is_refused(dataset, tmp_path):
    path = dataset.path / "shard-00000.bin"
    shutil.move(path, tmp_path / "elsewhere.bin")
    path.symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(ValueError, match="not a plain file"):
        Dataset(dataset.path)


def test_the_tokenizer_travels_with_the_dataset_and_is_hashed(tmp_path):
    (tmp_path / "t.model").write_bytes(b"model bytes")
    dataset = write_dataset(
        [np.array([1])], tmp_path / "d", vocab_size=9, eod_id=0, tokenizer=tmp_path / "t.model"
    )
    assert dataset.tokenizer_path.read_bytes() == b"model bytes"
    assert dataset.tokenizer_sha256 == hashlib.sha256(b"model bytes").hexdigest()
    dataset.tokenizer_path.write_bytes(b"other bytes")
    with pytest.raises(IntegrityError, match="tokenizer.model"):
        open_dataset(dataset.path, verify=True)


def test_an_output_that_holds_something_is_refused_and_left_alone(dataset, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = contents(dataset.path)
    for output in (dataset.path, tmp_path / "other", tmp_path / "file", tmp_path / "file" / "in"):
        with pytest.raises(ValueError, match="--output"):
            write_dataset([np.array([1])], output, vocab_size=9, eod_id=0)
    assert contents(dataset.path) == before
    (tmp_path / "empty").mkdir()
    write_dataset([np.array([1])], tmp_path / "empty", vocab_size=9, eod_id=0)


def test_a_folder_that_appears_while_a_dataset_is_written_is_not_replaced(tmp_path):
    def documents():
        yield np.array([1])
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "thesis.txt").write_text("mine")

    with pytest.raises(ValueError, match="--output"):
        write_dataset(documents(), tmp_path / "d", vocab_size=9, eod_id=0)
    assert [path.name for path in tmp_path.rglob("*")] == ["d", "thesis.txt"]


def test_what_a_killed_writer_left_is_not_in_the_dataset(tmp_path):
    stale = tmp_path / ".tmp-d"
    (stale / "folder").mkdir(parents=True)
    (stale / "shard-00007.bin").write_bytes(b"stale")
    dataset = write_dataset([np.array([1])], tmp_path / "d", vocab_size=9, eod_id=0)
    assert sorted(contents(dataset.path)) == [
        "manifest.json",
        "shard-00000.bin",
        "shard-00000.idx",
        "val.idx",
    ]
