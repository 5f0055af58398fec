"""Tokens of a masked dataset that are not learned are read as any others, and are no targets."""

import json
import math

import numpy as np
import pytest

from data import report
from data.loader import IGNORE, Loader
from data.manifest import MANIFEST
from data.storage import Storage, token_dtype
from data.writer import TokenizedDocument, unigram_entropy, write_dataset

VOCAB = 50
EOD = 0


def documents_of(seed: int = 0) -> list[TokenizedDocument]:
    """60 documents, with and without a closing EOD, of which about a third is learned."""
    draw = np.random.default_rng(seed)
    documents = []
    for number, length in enumerate(draw.integers(2, 40, 60)):
        tokens = draw.integers(1, VOCAB, length)
        if number % 2:
            tokens[-1] = EOD
        documents.append(TokenizedDocument(tokens, learned=draw.random(length) < 0.3))
    return documents


def complete(document: TokenizedDocument) -> tuple[list[int], list[bool]]:
    """Its ids and marks as they should come back."""
    ids, learned = document.tokens.tolist(), document.learned.tolist()
    if ids[-1] == EOD:
        return ids, learned
    return [*ids, EOD], [*learned, learned[-1]]


def write(folder, documents=None, **settings):
    given = dict(vocab_size=VOCAB, eod_id=EOD, val_fraction=0.2, shard_tokens=300, masked=True)
    return write_dataset(documents or documents_of(), folder, **(given | settings))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write(tmp_path_factory.mktemp("masks") / "d")


def test_ids_and_marks_come_back(dataset):
    expected = [complete(document) for document in documents_of()]
    assert len(dataset.manifest.shards) > 3
    for split in dataset.splits.values():
        for number, document in enumerate(split._documents):
            ids, learned = expected[document]
            assert split.read(number, 0, 10**9).tolist() == ids
            assert split.learned(number, 0, 10**9).tolist() == learned
            assert split.learned(number, 1, 3).tolist() == learned[1:4]
    dataset.verify()


@pytest.mark.parametrize("masked", [False, True])
def test_bits_per_byte_are_unknown_if_some_tokens_have_no_loss(tmp_path, masked):
    document = TokenizedDocument(np.arange(1, 9), source_bytes=32)
    split = write(tmp_path / "d", [document], val_fraction=0, masked=masked).split("train")
    assert math.isnan(split.bits_per_byte(1.0)) == masked


@pytest.mark.parametrize("split", ["train", "val"])
def test_labels_are_the_next_tokens_that_are_learned(dataset, split):
    loader = Loader(dataset, 16, 1, split=split)
    for position in range(loader.rows_per_epoch):
        labels = loader.rows([position]).labels[0].tolist()
        expected = []
        for document, start, length in loader.plan.row(loader.row_index(position)):
            ids = loader.split.read(document, start + 1, length).tolist()
            learned = loader.split.learned(document, start + 1, length).tolist()
            targets = [one if mark else IGNORE for one, mark in zip(ids, learned, strict=True)]
            expected += [*targets, IGNORE][:length]
        assert labels[: len(expected)] == expected
        assert set(labels[len(expected) :]) <= {IGNORE}


def test_the_unigram_entropy_is_that_of_the_targets(dataset):
    for split in dataset.splits.values():
        targets = []
        for number, length in enumerate(split.lengths):
            ids = split.read(number, 0, length)
            targets += ids[split.learned(number, 0, length)].tolist()
        assert split.unigram_entropy == unigram_entropy(np.bincount(targets, minlength=VOCAB))
        assert split.num_tokens == split.lengths.sum() > len(targets) > 0


@pytest.mark.parametrize("vocabulary, dtype", [(1 << 15, "uint16"), ((1 << 15) + 1, "uint32")])
def test_one_bit_is_not_for_ids(tmp_path, vocabulary, dtype):
    tokens = np.array([vocabulary - 1, 5])
    made = write(
        tmp_path / "d",
        [TokenizedDocument(tokens, learned=np.array([False, True]))],
        vocab_size=vocabulary,
        val_fraction=0,
    )
    assert made.dtype == dtype == token_dtype(vocabulary, masked=True)
    assert made.split("train").read(0, 0, 2).tolist() == tokens.tolist()
    assert made.manifest.shards[0].max_id == vocabulary - 1
    with pytest.raises(ValueError, match=r"allowed are 1 to 2\^31"):
        token_dtype((1 << 31) + 1, masked=True)


def test_a_dataset_without_marks_says_nothing_of_them(tmp_path):
    made = write_dataset([np.array([1, 2])], tmp_path / "d", vocab_size=9, eod_id=0)
    assert "masked" not in json.loads((tmp_path / "d" / MANIFEST).read_text())
    assert not made.masked and made.split("train").learned(0, 1, 5).tolist() == [True, True]


def test_an_id_beyond_the_vocabulary_is_found_under_a_mark():
    storage = Storage.of(VOCAB, masked=True)
    stored = storage.stored(np.array([3, VOCAB]), np.array([True, False]))
    assert stored[1] > 1 << 15
    assert storage.ids(stored).tolist() == [3, VOCAB]


@pytest.mark.parametrize(
    "marks, settings, words",
    [
        (np.ones(2, bool), {"masked": False}, "masked=True"),
        (np.ones(3, bool), {}, "2 tokens"),
        (np.ones(2), {}, "2 tokens"),
        (np.zeros(2, bool), {}, "learned"),
    ],
)
def test_marks_that_mean_nothing_are_refused(tmp_path, marks, settings, words):
    with pytest.raises(ValueError, match=words):
        write(tmp_path / "d", [TokenizedDocument(np.array([1, 2]), learned=marks)], **settings)
    assert not (tmp_path / "d").exists()


def test_the_report_is_of_ids_not_of_marks(tmp_path):
    """A document and its copy with other marks are copies of each other."""
    documents = documents_of()
    again = [one._replace(learned=~one.learned) for one in documents]
    made = write(tmp_path / "d", documents + again, val_fraction=0)
    assert report.copies(made) == ["  of train, 60 documents are copies"]
