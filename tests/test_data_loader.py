"""A batch is a pure function of its step; labels, positions and documents are what a reader would
write by hand.
"""

import json

import numpy as np
import pytest

from data.loader import IGNORE, Loader
from data.writer import write_dataset
from tests.events import calls

VOCAB, EOD = 1000, 0


def make(folder, lengths, **settings):
    """Documents of the given lengths (the closing end-of-document id included), each id naming its
    document.
    """
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, VOCAB, length - 1) for length in lengths]
    return write_dataset(
        documents, folder, vocab_size=VOCAB, eod_id=EOD, **{"val_fraction": 0, **settings}
    )


@pytest.fixture
def dataset(tmp_path):
    return make(
        tmp_path / "d",
        np.random.default_rng(1).integers(2, 200, 300),
        val_fraction=0.05,
        shard_tokens=5000,
    )


def all_rows(loader):
    return loader.rows(range(loader.rows_per_epoch))


def test_rows_are_what_the_plan_says_by_the_obvious_loop(dataset):
    loader = Loader(dataset, 64, 4)
    batch = all_rows(loader)
    for r, position in enumerate(range(loader.rows_per_epoch)):
        tokens = []
        labels = []
        positions = []
        doc_ids = []
        for n, (document, start, length) in enumerate(loader.plan.row(loader.row_index(position))):
            text = loader.split.read(document, 0, 10**9).tolist()
            for t in range(start, start + length):
                tokens.append(text[t])
                labels.append(text[t + 1] if t + 1 < len(text) else IGNORE)
                positions.append(t - start)
                doc_ids.append(n)
        padding = 64 - len(tokens)
        assert batch.tokens[r].tolist() == tokens + [EOD] * padding
        assert batch.labels[r].tolist() == labels + [IGNORE] * padding
        assert batch.positions[r].tolist() == positions + list(range(padding))
        assert batch.doc_ids[r].tolist() == doc_ids + [doc_ids[-1] + 1] * padding


def test_shapes_and_types_are_the_models(dataset):
    batch = Loader(dataset, 64, 4).batch(0)
    assert all(part.shape == (4, 64) for part in batch)
    assert [part.dtype for part in batch] == [np.int64, np.int64, np.int64, np.int32]
    assert (batch.labels != IGNORE).sum() > 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_read_the_global_batch_whatever_their_number(dataset, world_size):
    loader = Loader(dataset, 32, 6, seed=5)
    for step in (0, 1, 100):
        whole = loader.batch(step)
        shares = [loader.batch(step, rank, world_size) for rank in range(world_size)]
        for part in range(4):
            np.testing.assert_array_equal(
                np.concatenate([share[part] for share in shares]), whole[part]
            )


def test_a_world_size_that_does_not_divide_the_batch_lists_those_that_do(dataset):
    with pytest.raises(ValueError, match="1, 2, 3, 6 ranks"):
        Loader(dataset, 32, 6).batch(0, 0, 4)


def test_each_epoch_reads_every_row_once_in_another_order(dataset):
    loader = Loader(dataset, 32, 4)
    n = loader.rows_per_epoch
    epochs = [[loader.row_index(p) for p in range(e * n, (e + 1) * n)] for e in range(3)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_step_may_cross_the_end_of_an_epoch(dataset):
    loader = Loader(dataset, 32, 7)
    n = loader.rows_per_epoch
    step = n // 7
    assert n % 7, "choose a batch that does not divide the epoch"
    epochs = {position // n for position in loader.positions(step)}
    assert epochs == {0, 1} and len(loader.batch(step).tokens) == 7


def test_batches_do_not_depend_on_what_was_read_before(dataset):
    loader = Loader(dataset, 32, 4, seed=9)
    once = [loader.batch(step).tokens for step in range(10)]
    for step in (7, 2, 9, 0):
        np.testing.assert_array_equal(Loader(dataset, 32, 4, seed=9).batch(step).tokens, once[step])


def test_the_state_is_three_numbers_that_say_where_the_step_begins(dataset):
    loader = Loader(dataset, 32, 4, seed=2**31)
    for step in (0, 1, loader.rows_per_epoch, 10**6):
        state = json.loads(json.dumps(loader.state(step)))
        assert (
            set(state) == {"seed", "epoch", "position"}
            and state["position"] < loader.rows_per_epoch
        )
        first = state["epoch"] * loader.rows_per_epoch + state["position"]
        assert state["seed"] == 2**31 and first == step * 4 == loader.positions(step)[0]
    assert len(json.dumps(loader.state(10**6))) <= 64


def test_too_little_data_for_a_batch_names_settings_that_work(tmp_path):
    dataset = make(tmp_path / "d", [100] * 4)
    with pytest.raises(ValueError, match="at most 1 rows, or --context_length 128"):
        Loader(dataset, 512, 3)
    assert Loader(dataset, 512, 1).rows_per_epoch == 1
    assert Loader(dataset, 128, 3).rows_per_epoch >= 3
    with pytest.raises(ValueError, match="more text"):
        Loader(dataset, 512, 10**6)


@pytest.mark.parametrize("context, rows", [(0, 1), (-1, 1), (8, 0)])
def test_numbers_that_are_not_positive_are_refused(dataset, context, rows):
    with pytest.raises(ValueError, match="give a positive number"):
        Loader(dataset, context, rows)


def test_the_work_for_a_row_grows_with_its_documents_and_not_with_its_tokens(tmp_path):
    def calls_of_row(name: str, length: int, context: int) -> int:
        dataset = make(tmp_path / name, [length] * (2 * context // length))
        loader = Loader(dataset, context, 1)
        loader.batch(0)
        return calls(lambda: loader.batch(1))

    few = calls_of_row("few", 512, 8192)
    assert calls_of_row("longer", 8192, 131_072) <= few
    assert calls_of_row("more", 512, 131_072) < 16 * few
