"""Context gain: of planted scorers whose gain is known, and of a model's single windows."""

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from longhaul import kernels
from longhaul.evals import gain
from longhaul.evals.gain import Window
from longhaul.evals.score import Item, ModelScorer, Scores
from model import IGNORE, ModelConfig

WINDOW = Window(short=32, stride=8, ngram=4)
V = 50


class Documents:
    """Documents in memory, with what the sample asks of a split."""

    def __init__(self, documents: Sequence, masked: int = 0):
        self.ids = [np.asarray(ids) for ids in documents]
        self.masked = masked  # every so many tokens one is read and not learned
        self.lengths = np.array([len(ids) for ids in self.ids])
        self.num_documents = len(self.ids)

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        return self.ids[document][start : start + length]

    def learned(self, document: int, start: int, length: int) -> np.ndarray:
        places = np.arange(self.lengths[document])[start : start + length]
        return places % self.masked != 0 if self.masked else np.full(len(places), True)


def random_documents(*lengths: int, vocabulary: int = V) -> Documents:
    make = np.random.default_rng(0)
    return Documents([make.integers(0, vocabulary, length) for length in lengths])


def copying_documents() -> Documents:
    """Random tokens, then the same again: 100 tokens later than any short context sees."""
    halves = random_documents(100, 100, 100, vocabulary=10_000).ids
    return Documents([np.concatenate([half, half]) for half in halves])


class Planted:
    """Nats for each label from what the row shows up to it."""

    def __init__(self):
        self.items = []

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        self.items.append(item)
        nll = torch.zeros(item.labels_BT.shape, dtype=torch.float64)
        for row, (ids, labels) in enumerate(zip(item.tokens_BT, item.labels_BT, strict=True)):
            for t in (labels != IGNORE).nonzero()[:, 0].tolist():
                nll[row, t] = self.nats(ids[: t + 1].tolist(), int(labels[t]))
        return Scores(nll, None)


class Uniform(Planted):
    def nats(self, seen: list[int], label: int) -> float:
        return math.log(V)


class CopyHead(Planted):
    """Predicts what followed the last earlier occurrence of the 4 tokens, within what it sees."""

    def nats(self, seen: list[int], label: int) -> float:
        tail = seen[-4:]
        for end in range(len(seen) - 1, 3, -1):
            if seen[end - 4 : end] == tail:
                return 0.01 if seen[end] == label else 12.0
        return 9.0


class Count(Planted):
    """The number of tokens seen, so that the losses say what was read."""

    def nats(self, seen: list[int], label: int) -> float:
        return float(len(seen))


# --------------------------------------------------------------------------- what is compared


CUTS = [
    (T, short, stride)
    for short, stride in [(32, 8), (32, 7), (32, 32), (20, 1)]
    for T in [short + stride, short + stride + 1, 47, 48, 100]
    if T >= short + stride
]


@pytest.mark.parametrize("T, short, stride", CUTS)
def test_each_position_from_the_short_context_on_is_counted_once(T, short, stride):
    chosen = gain.sample(random_documents(T + 1), 100, Window(short, stride, 4), rows=1)
    found = gain.measure(Count(), chosen)

    assert found.all.tokens == T - short
    # with the full context position t sees t + 1 tokens, with the short one those of its window
    assert found.all.full_D[0] == sum(t + 1 for t in range(short, T))
    seen = [short - stride + 1 + (t - short) % stride for t in range(short, T)]
    assert max(seen) <= short
    assert found.all.short_D[0] == sum(seen)


def test_windows_of_all_documents_share_batches_no_larger_than_a_row():
    scorer = Uniform()
    gain.measure(scorer, gain.sample(random_documents(101, 97, 85), 100, WINDOW, rows=3))
    sizes = [item.tokens_BT.numel() for item in scorer.items]
    assert max(sizes) == 100
    assert all(item.tokens_BT.shape == (3, 32) for item in scorer.items[3:-1])


def test_the_sample_is_the_beginnings_of_the_longest_documents_then_what_follows_them():
    split = random_documents(90, 40, 260, 41, 120, 5)
    chosen = gain.sample(split, 100, WINDOW, rows=10)
    assert [piece.place for piece in chosen.pieces] == [
        (2, 0),
        (4, 0),
        (0, 0),
        (3, 0),
        (2, 100),
        (2, 200),
    ]
    assert [piece.positions for piece in chosen.pieces] == [100, 100, 89, 40, 100, 59]
    assert (chosen.documents, chosen.too_short) == (6, 2)

    fewer = gain.sample(split, 100, WINDOW, rows=5)
    assert [p.place for p in fewer.pieces] == [p.place for p in chosen.pieces[:5]]


def test_the_seed_decides_between_equal_lengths_only():
    split = random_documents(*[120] * 20, 200)
    chosen = [
        [p.document for p in gain.sample(split, 100, WINDOW, 8, seed).pieces] for seed in (0, 0, 1)
    ]
    assert chosen[0] == chosen[1] != chosen[2]
    longest = gain.sample(random_documents(*[60] * 9, 70), 100, WINDOW, 1, seed=3)
    assert longest.pieces[0].document == 9


def test_tokens_that_are_not_learned_are_neither_asked_nor_counted():
    split = Documents(copying_documents().ids, masked=3)
    scorer = CopyHead()
    found = gain.measure(scorer, gain.sample(split, 199, WINDOW, 1))

    places = np.arange(33, 200)[np.arange(33, 200) % 3 != 0]  # of the tokens that are predicted
    assert found.all.tokens == len(places)
    assert found.far_copies.tokens == (places >= 104).sum()
    assert found.far_copies.share == pytest.approx((places >= 104).sum() / len(places))
    assert found.far_copies.gain == pytest.approx(9 - 0.01, abs=1e-12)
    whole = scorer.items[0].labels_BT[0]
    assert ((whole != IGNORE).nonzero()[:, 0] + 1).tolist() == places.tolist()


# --------------------------------------------------------------------------- known gains


def test_a_uniform_scorer_gains_nothing():
    found = gain.measure(Uniform(), gain.sample(copying_documents(), 199, WINDOW, 3))
    assert found.all.gain == found.far_copies.gain == 0
    assert found.all.interval == (0, 0)
    assert found.far_copies.tokens == 3 * 96


def test_a_copy_head_gains_on_far_copies_and_only_there():
    found = gain.measure(CopyHead(), gain.sample(copying_documents(), 199, WINDOW, 3))
    assert found.far_copies.gain == pytest.approx(9 - 0.01, abs=1e-12)
    assert found.far_copies.interval.low > 8
    assert found.all.gain * found.all.tokens == pytest.approx((9 - 0.01) * 3 * 96)
    assert found.far_copies.share == pytest.approx(96 / (199 - 32))


def test_the_key_tokens_of_longppl_are_those_that_the_full_context_makes_easy():
    chosen = gain.sample(copying_documents(), 199, WINDOW, 3)
    assert gain.measure(CopyHead(), chosen).key_tokens is None

    found = gain.measure(CopyHead(), chosen, key_tokens=True)
    assert found.key_tokens.tokens == 3 * 96
    assert found.key_tokens.gain == found.far_copies.gain
    assert found.longppl == pytest.approx(math.exp(0.01))
    assert found.record()["key_tokens"]["chosen_by"] == "the measured model"

    none = gain.measure(Uniform(), chosen, key_tokens=True)
    assert none.key_tokens.tokens == 0 and math.isnan(none.longppl)
    assert none.line().endswith("(0.0% of tokens) none")


@pytest.mark.parametrize(
    "full, short, is_key",
    [(1.9, 4.0, True), (1.9, 3.8, False), (2.1, 9.0, False), (0.5, 2.5, False), (2.0, 5.0, False)],
)
def test_longppl_asks_for_more_than_two_nats_of_gain_and_a_loss_below_two(full, short, is_key):
    class Fixed(Planted):
        def nats(self, seen, label):
            return full if len(seen) > 32 else short

    found = gain.measure(
        Fixed(), gain.sample(random_documents(50), 100, WINDOW, 1), key_tokens=True
    )
    assert found.key_tokens.tokens == (17 if is_key else 0)


def test_known_losses_of_the_validation_pass_are_not_scored_again():
    split = random_documents(260, 120, 90)
    chosen = gain.sample(split, 100, WINDOW, rows=9)
    expected = gain.measure(Count(), chosen)

    # a validation pass over packed rows: one holds a whole piece, one the ends of two documents
    rows = [[(0, 0, 100)], [(0, 200, 60), (1, 100, 20)], [(2, 0, 50)]]
    scores = []
    for pieces in rows:
        nll = [torch.arange(1, length + 1) for _, _, length in pieces]
        scores.append(Scores(torch.cat(nll)[None].double(), None))
    scorer = Count()
    found = gain.measure(scorer, chosen, known=gain.known_losses(rows, scores))

    assert np.array_equal(found.all.full_D, expected.all.full_D)
    whole = [item for item in scorer.items if item.tokens_BT.shape[1] != 32]
    # (2, 0) is known too, but not to its end
    assert [len(item.tokens_BT[0]) for item in whole] == [100, 89, 100]


# --------------------------------------------------------------------------- what is reported


def test_the_record_has_items_and_intervals_and_is_json():
    found = gain.measure(CopyHead(), gain.sample(copying_documents(), 199, WINDOW, 3))
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    assert record["short"] == 32 and record["context"] == 199 and record["ngram"] == 4
    assert record["all"].keys() == record["far_copies"].keys()
    far = record["far_copies"]
    assert far["tokens"] == 288 and far["documents"] == 3
    assert far["interval"][0] <= far["gain"] <= far["interval"][1]
    assert far["gain"] == pytest.approx(far["loss_short"] - far["loss_full"])

    documents = json.loads(json.dumps(found.per_document()))["far_copies"]
    assert sorted(documents["document"]) == [0, 1, 2] and documents["tokens"] == [96] * 3
    assert found.scalars() == {"gain/all": found.all.gain, "gain/far_copies": found.far_copies.gain}


SHORT = random_documents(1, 40, 12)
UNLEARNED = Documents([np.arange(200)] * 3, masked=1)
COPYING = Documents([*copying_documents().ids, np.arange(40)])


@pytest.mark.parametrize(
    "scorer, split, rows, said",
    [
        (CopyHead(), COPYING, 9, "5.1679 +- 0.0000 nats/token (3 documents, 1 other "),
        (CopyHead(), COPYING, 9, "(57.5% of tokens) 8.9900 +- 0.0000; it reads more than 32 "),
        (CopyHead(), COPYING, 1, "5.1679 nats/token (1 document, "),
        (Uniform(), COPYING, 9, "not shown"),
        (Uniform(), random_documents(90), 3, "far copies (0.0% of tokens) none"),
        (Uniform(), SHORT, 3, "not measured: "),
        (Uniform(), UNLEARNED, 3, "not measured: "),
    ],
)
def test_the_line_says_what_was_compared_or_why_nothing_was(scorer, split, rows, said):
    found = gain.measure(scorer, gain.sample(split, 199, WINDOW, rows))
    assert said in found.line()
    json.dumps(found.record(), allow_nan=False)
    assert ("gain/all" in found.scalars()) == ("not measured" not in said)
    assert ("gain/far_copies" in found.scalars()) == (split is COPYING)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_model_that_has_diverged_still_has_a_record(broken):
    class Broken(Planted):
        def nats(self, seen, label):
            return broken

    found = gain.measure(Broken(), gain.sample(copying_documents(), 199, WINDOW, 3))
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    assert record["all"]["gain"] is None and record["all"]["interval"] is None
    json.dumps(found.per_document(), allow_nan=False)
    assert " nan " in found.line()


def test_the_measure_stops_when_it_is_asked_to():
    chosen = gain.sample(copying_documents(), 199, WINDOW, 3)
    scorer = Uniform()
    for scored in (0, 2, 5):  # before all, among whole rows, among windows
        scorer.items.clear()
        stop = lambda scored=scored: len(scorer.items) == scored  # noqa: E731
        assert gain.measure(scorer, chosen, must_stop=stop) is None
        assert len(scorer.items) == scored


# --------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("window", [(32, 33, 8), (32, 0, 8), (0, 1, 8), (32, 8, 0)])
def test_a_window_that_cannot_be_is_refused(window):
    with pytest.raises(ValueError, match="give"):
        Window(*window)


def test_a_sample_that_cannot_be_is_refused():
    for context, rows in ((39, 1), (100, 0)):
        with pytest.raises(ValueError, match="give"):
            gain.sample(random_documents(200), context, WINDOW, rows)


def test_the_default_window_follows_the_context():
    assert Window.within(131_072) == Window(65_536, 16_384, 8)
    assert Window.within(1024) == Window(512, 128, 8)
    assert Window.within(8) == Window(4, 1, 8)
    with pytest.raises(ValueError, match="7 .* 8"):
        Window.within(7)


# --------------------------------------------------------------------------- a real model


def test_the_losses_of_both_sides_are_those_of_single_windows():
    sizes = dict(vocab_size=V, num_layers=2, hidden_size=64, ffn_size=96)
    decoder = kernels.decoder(ModelConfig.preset("tiny", **sizes))
    scorer = ModelScorer(decoder, "cpu")
    chosen = gain.sample(random_documents(62, 50), 96, WINDOW, rows=2)
    found = gain.measure(scorer, chosen)

    for place, piece in enumerate(chosen.pieces):
        ids = torch.from_numpy(piece.ids)
        full, short = 0.0, 0.0
        for t in range(32, piece.positions):
            start = t - 24 - (t - 32) % 8
            full += nats(decoder, ids[: t + 1], ids[t + 1])
            short += nats(decoder, ids[start : t + 1], ids[t + 1])
        assert found.all.full_D[place] == pytest.approx(full, rel=1e-6)
        assert found.all.short_D[place] == pytest.approx(short, rel=1e-6)


@torch.no_grad()
def nats(decoder, seen: torch.Tensor, label: torch.Tensor) -> float:
    return -float(decoder(seen[None])[0, -1].double().log_softmax(-1)[label])
