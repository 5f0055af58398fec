"""Validation loss and losses by position: against plain loops, on scores that are planted."""

import json
import math
import tracemalloc

import numpy as np
import pytest
import torch

from data.loader import Loader
from longhaul.evals import position
from longhaul.evals.score import Item, Scores, score_all
from model import IGNORE
from tests.test_data_loader import make

CONTEXT = 200  # no power of two
LENGTHS = np.random.default_rng(3).integers(2, 450, 400)


class Planted:
    """The loss of each token is drawn by its id, its position and its document in the row."""

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        mixed = item.tokens_BT * 31 + item.positions * 17 + item.doc_ids * 7
        nll = (mixed % 1009).double() / 100 + item.positions.double().log1p()
        return Scores(nll.masked_fill(item.labels_BT == IGNORE, 0), None)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make(tmp_path_factory.mktemp("data") / "set", LENGTHS, val_fraction=0.2)


@pytest.fixture(scope="module")
def rows(dataset):
    return position.Rows(dataset, CONTEXT, 30, seed=1)


@pytest.fixture(scope="module")
def losses(rows):
    return position.measure(Planted(), rows)


def tokens_of(rows) -> list[tuple[int, int, float]]:
    """(document, position, loss) of every token that has a label, by plain loops."""
    found = []
    for index in range(len(rows)):
        item = rows[index]
        nll_T = Planted().score(item).nll_BT[0]
        t = 0
        for document, _, length in rows.loader.plan.row(rows.loader.row_index(index)):
            for place in range(length):
                if item.labels_BT[0, t] != IGNORE:
                    found.append((document, place, float(nll_T[t])))
                t += 1
    return found


def test_rows_are_those_of_the_loader(dataset, rows):
    batch = Loader(dataset, CONTEXT, 1, seed=1, split="val").rows(range(30))
    assert len(rows) == 30
    for index, item in enumerate(rows):
        for part, whole in zip(item, batch, strict=True):
            assert torch.equal(part, torch.from_numpy(whole[index : index + 1]))
    with pytest.raises(IndexError):
        rows[30]
    few = position.Rows(dataset, CONTEXT, 10**6)
    assert len(few) == few.loader.rows_per_epoch


def test_losses_are_those_of_plain_loops(rows, losses):
    tokens = tokens_of(rows)
    assert losses.tokens == len(tokens)
    assert losses.loss == pytest.approx(np.mean([nll for *_, nll in tokens]), rel=1e-12)

    for bucket in losses.buckets:
        inside = [one for one in tokens if bucket.first <= one[1] < bucket.last]
        assert bucket.tokens == len(inside)
        assert bucket.documents == len({document for document, *_ in inside})
        assert bucket.loss == pytest.approx(np.mean([nll for *_, nll in inside]), rel=1e-12)

    found = losses.per_document()
    assert found["document"] == sorted({document for document, *_ in tokens})
    for document, count, loss in zip(*found.values(), strict=True):
        own = [nll for number, _, nll in tokens if number == document]
        assert count == len(own) and loss == pytest.approx(np.mean(own), rel=1e-12)


def test_many_losses_are_summed_in_the_memory_of_a_row(tmp_path):
    documents = np.full(100, 3000)
    rows = position.Rows(make(tmp_path / "set", documents, val_fraction=0.8), 1024, 10**6)
    scores = score_all(Planted(), rows)
    position.summed(rows, scores)  # what is made once
    tracemalloc.start()
    losses = position.summed(rows, scores)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2 * losses.tokens


def test_buckets_are_powers_of_two_above_the_floor(losses):
    edges = [(bucket.first, bucket.last) for bucket in losses.buckets]
    assert edges == [(0, 16), (16, 32), (32, 64), (64, 128), (128, 256)]
    assert [bucket.name for bucket in losses.buckets][-1] == "128-256"
    assert position.bucket_edges(16).tolist() == [0]
    assert position.bucket_edges(17).tolist() == [0, 16]
    assert position.bucket_edges(131072)[-1] == 65536


def test_a_long_context_has_eight_buckets_on_screen_and_all_in_the_record():
    edges = position.bucket_edges(131072)
    sums = np.arange(1.0, len(edges) + 1)[None].repeat(2, axis=0)
    long = position.Losses(
        first_E=edges,
        documents_D=np.arange(2),
        sums_DE=sums,
        counts_DE=np.ones_like(sums, dtype=int),
        of_pieces={},
        bits_per_nat=math.nan,
        unigram_entropy=6.0,
    )
    line = long.position_line()
    names = ["0-1k", "1k-2k", "2k-4k", "4k-8k", "8k-16k", "16k-32k", "32k-64k", "64k-128k"]
    assert [word.split()[0] for word in line.removeprefix("by position").split("|")] == names
    assert "0-1k 4.000 |" in line  # the mean of 1 .. 7
    assert len(long.record()["by_position"]) == 14
    assert "bits per byte" not in long.line()


def test_intervals_hold_the_figures_and_are_the_same_every_time(rows, losses):
    assert losses.interval.low < losses.loss < losses.interval.high
    for bucket in losses.buckets:
        assert bucket.interval.low < bucket.loss < bucket.interval.high
    assert position.measure(Planted(), rows).interval == losses.interval


def test_one_document_has_no_interval(tmp_path):
    dataset = make(tmp_path / "one", [40] * 4, val_fraction=0.25)
    losses = position.measure(Planted(), position.Rows(dataset, 64, 1))
    assert len(losses.documents_D) == 1
    assert losses.record()["interval"] is None
    assert "nats/token (1 document), perplexity" in losses.line()


def test_the_record_is_json_and_the_lines_have_its_figures(losses):
    record = json.loads(json.dumps(losses.record(), allow_nan=False))
    assert record["loss"] == losses.loss and record["tokens"] == losses.tokens
    assert record["documents"] == len(losses.documents_D)
    assert record["interval"] == list(losses.interval)
    assert record["by_position"][1]["loss"] == losses.buckets[1].loss

    half = (losses.interval.high - losses.interval.low) / 2
    assert f"{losses.loss:.4f} +- {half:.4f} nats/token" in losses.line()
    assert f"perplexity {math.exp(losses.loss):.2f}" in losses.line()
    assert losses.scalars()["position/16-32"] == losses.buckets[1].loss
    assert f"16-32 {losses.buckets[1].loss:.3f} | 32-64" in losses.position_line()


@pytest.mark.parametrize("seed", range(8))
def test_rows_without_a_label_are_not_read(tmp_path, seed):
    # the last token of a document, which nothing follows, is alone in a row
    dataset = make(tmp_path / "long", [65] * 2, val_fraction=0.5)
    rows = position.Rows(dataset, 64, 10, seed)
    losses = position.measure(Planted(), rows)
    assert rows.loader.rows_per_epoch == 2 and len(rows) == 1
    assert losses.tokens == 64 and math.isfinite(losses.loss)
