"""Retrieval: items that a planted scorer with perfect recall always solves and a uniform one never
better than by chance, and the figures and pictures that follow from scores.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import data.recall
from data.dataset import open_dataset
from data.writer import write_dataset
from footprint.answers import svg
from longhaul import dist
from longhaul.evals import heatmap
from longhaul.evals.intervals import Interval, wilson
from longhaul.evals.retrieval import (
    Questions,
    Retrieval,
    Score,
    Share,
    effective_context,
    measure,
    share_of,
)
from longhaul.evals.score import Item, Scores
from longhaul.evals.tasks import (
    ALL_TASKS,
    DEPTHS,
    HARDER_TASKS,
    TASKS,
    Sizes,
    TaskItems,
    Vocabulary,
    occurrences,
)
from model import IGNORE

SIZES = Sizes()


def text(ids: int = 512, tokens: int = 4096, **changes) -> Vocabulary:
    noise = np.random.default_rng(5).integers(0, ids, tokens)
    return replace(Vocabulary.of_text(noise, ids), **changes)


def recall(query: int | None = None) -> Vocabulary:
    return Vocabulary.of_recall(400, [0, 128], [128, 256], [256, 384], query)


VOCABULARIES = {"text": text(), "recall": recall(), "recall with a mark": recall(query=390)}


class PerfectRecall:
    """Reads a row and answers by looking keys up; nothing but the tokens before an answer and the
    places of the answers is known to it.
    """

    def __init__(self, vocabulary: Vocabulary):
        self.width = vocabulary.key_width
        self.keys = set(vocabulary.keys.tolist())

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        row = item.tokens_BT[0].tolist()
        labels = item.labels_BT[0]
        asked = (labels != IGNORE).nonzero()[:, 0].tolist()
        hit_T = torch.zeros(len(row), dtype=torch.bool)
        for place in asked:
            hit_T[place] = self.answer(row[: place + 1], asked) == int(labels[place])
        return Scores(torch.zeros(1, len(row)).double(), hit_T[None])

    def answer(self, row: list[int], asked: list[int]) -> int:
        if row[-1] not in self.keys:
            return self.copied(row)
        key = row[-self.width :]
        places = [place for place in self.places(row, key) if place + self.width <= asked[0]]
        if len(places) > 1:  # several values: each was asked in its turn
            ends = [row[: place + 1][-self.width :] for place in asked if place < len(row)]
            return row[places[ends.count(key) - 1] + self.width]

        place = places[0]
        while True:
            then = row[place + self.width : place + 2 * self.width]
            earlier = [other for other in self.places(row, then) if other < place]
            if not earlier or not self.keys.issuperset(then):
                return row[place + self.width]
            place = earlier[0]

    def copied(self, row: list[int]) -> int:
        """What followed the longest end of the row that it holds twice."""
        places = self.places(row[:-1], row[-1:])
        for size in range(2, len(row)):
            longer = [end for end in places if end >= size - 1]
            longer = [end for end in longer if row[end - size + 1] == row[-size]]
            if not longer:
                break
            places = longer
        return row[places[0] + 1]

    def places(self, row: list[int], wanted: list[int]) -> list[int]:
        size = len(wanted)
        return [p for p in range(len(row) - size + 1) if row[p : p + size] == wanted]


class Uniform:
    """Pseudo-random hits with probability 1/V."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        seed = checksum(item.tokens_BT)
        draws = np.random.default_rng(seed).random(item.tokens_BT.shape)
        nll = torch.full(item.tokens_BT.shape, math.log(self.vocab_size)).double()
        return Scores(nll, torch.from_numpy(draws < 1 / self.vocab_size))


def checksum(tokens: torch.Tensor) -> int:
    return int((tokens.double() * torch.arange(1, tokens.numel() + 1)).sum())


class Reading:
    """Perfect recall of the last `window` tokens only: nothing that is further back is found."""

    def __init__(self, vocabulary: Vocabulary, window: int):
        self.perfect = PerfectRecall(vocabulary)
        self.window = window

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        tokens = item.tokens_BT.clone()
        tokens[:, : -self.window] = -1
        try:
            return self.perfect.score(Item(tokens, item.labels_BT), hits=hits)
        except IndexError:  # the key is not in the window
            nothing = torch.zeros(tokens.shape)
            return Scores(nothing.double(), nothing.bool())


# --------------------------------------------------------------------------- planted scorers


@pytest.mark.parametrize("name", VOCABULARIES)
def test_perfect_recall_is_right_on_every_task(name):
    vocabulary = VOCABULARIES[name]
    found = measure(PerfectRecall(vocabulary), Questions(vocabulary, [256, 128], count=16))
    assert found.lengths == (128, 256)
    assert found.tasks == tuple(TASKS)
    assert all(score.share.score == 1 for score in found.scores)
    assert [mean.score for mean in found.means] == [1, 1]
    assert found.effective_context == 256


class Newest(PerfectRecall):
    """Answers with the value that was written last."""

    def answer(self, row: list[int], asked: list[int]) -> int:
        places = self.places(row, row[-self.width :])
        before = [place for place in places if place + self.width <= asked[0]]
        return row[before[-1] + self.width]


class Oldest(Newest):
    """Answers with the value that was written first."""

    def places(self, row: list[int], wanted: list[int]) -> list[int]:
        return super().places(row, wanted)[:1]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_perfect_recall_is_right_in_every_noise(name):
    vocabulary = VOCABULARIES[name]
    harder = Questions(vocabulary, [256, 512], tasks=list(HARDER_TASKS), count=16)
    found = measure(Newest(vocabulary), harder)
    assert all(score.share.score == 1 for score in found.scores)

    oldest = measure(Oldest(vocabulary), harder)
    for task in HARDER_TASKS:
        assert oldest.of_task(task)[0].share.score == (0 if task == "newest" else 1)


NOISES = {
    "multikey-values": set(range(128, 256)),
    "multikey-keys": set(range(128)),
    "multikey-all": set(range(384)),
}


@pytest.mark.parametrize("task", NOISES)
def test_the_noise_has_the_ids_of_its_kind_and_none_of_the_keys(task):
    for row, noise in noises(task, 8192, 4):
        keys = {int(key) for key in row.unique() if key < 128} - noise
        assert len(keys) == 16 and noise == NOISES[task] - keys


def test_constant_noise_has_one_id_that_differs_from_row_to_row():
    found = [noise for _, noise in noises("multikey-constant", 512, 12)]
    assert all(len(noise) == 1 for noise in found) and len(set.union(*found)) > 8


def noises(task: str, length: int, count: int) -> Iterator[tuple[torch.Tensor, set[int]]]:
    """Rows, and the ids that stand in them more often than keys and values of pairs."""
    for one in TaskItems(task, length, count, recall(), SIZES):
        row = one.item.tokens_BT[0]
        ids, times = row.unique(return_counts=True)
        yield row, set(ids[times > 3].tolist())


def test_a_uniform_model_has_the_analytic_chance_within_its_interval():
    vocabulary = text(ids=20)
    tasks = [task for task in TASKS if task != "copy"]
    found = measure(Uniform(20), Questions(vocabulary, [160], tasks=tasks, count=200))
    assert found.chance == pytest.approx(1 / 20)
    for score in found.scores:
        low, high = score.share.interval
        assert low <= 1 / 20 <= high
        assert 0 < score.share.score
    assert found.means[0].interval.low <= 1 / 20 <= found.means[0].interval.high
    assert found.effective_context is None
    assert "none" in found.line()


class GuessingValues:
    """Answers with any of the values that stand in the row before the first answer."""

    def score(self, item: Item, *, hits: bool = False) -> Scores:
        labels = item.labels_BT[0]
        asked = (labels != IGNORE).nonzero()[:, 0]
        row = item.tokens_BT[0, : asked[0] + 1].unique()
        values = row[(row >= 128) & (row < 256)]
        guess = np.random.default_rng(checksum(item.tokens_BT)).choice(values, len(labels))
        return Scores(torch.zeros(1, len(labels)), torch.from_numpy(guess)[None] == labels)


def test_a_guess_among_the_values_of_a_row_has_its_analytic_chance():
    expected = dict(multikey=1 / 16, multivalue=1 / 8, tracking2=1 / 2, tracking4=1 / 2)
    found = measure(GuessingValues(), Questions(recall(), [160], tasks=list(expected), count=200))
    for score in found.scores:
        assert score.chance_by_form == expected[score.task]
        low, high = score.share.interval
        assert low <= score.chance_by_form <= high
    assert found.effective_context is None

    by_form = {task: TaskItems(task, 160, 1, recall(), SIZES).chance_by_form for task in TASKS}
    assert by_form == expected | dict(single=1 / 128, copy=128**-8)


def test_all_tokens_of_an_answer_must_be_right():
    vocabulary = text(ids=20)
    sizes = Sizes(copied=2)
    questions = Questions(vocabulary, [64], tasks=["copy"], count=600, sizes=sizes)
    found = measure(Uniform(3), questions)
    low, high = found.scores[0].share.interval
    assert low <= 1 / 9 <= high < 1 / 3
    assert found.chance == pytest.approx(1 / 400)


def test_what_is_outside_the_window_of_a_model_is_not_found():
    vocabulary = recall()
    questions = Questions(vocabulary, [64, 128, 512], tasks=["single"], count=32)
    found = measure(Reading(vocabulary, window=128), questions)
    short, fits, long = (score.share.score for score in found.scores)
    assert short == fits == 1
    assert long == 0.25  # the last two of eight parts of the row
    assert found.effective_context == 128
    assert found.grid()[:6, 2].tolist() == [0] * 6
    assert found.grid()[6:, 2].tolist() == [1] * 2


@pytest.mark.parametrize("form", ["64:16", "200:20", "300:64"])
def test_the_recall_data_asks_in_the_same_form(form):
    """What solves the items of a task solves the documents that a model learns it from."""
    scorer = PerfectRecall(recall())
    for seed in range(4):
        document = data.recall.recall(data.recall.parse_form(form), np.random.default_rng(seed))
        tokens = torch.from_numpy(document.tokens)
        learned = torch.from_numpy(document.learned)
        labels = torch.where(learned, tokens, IGNORE)[1:]
        item = Item(tokens[None, :-1], labels[None])
        assert torch.equal(scorer.score(item).hit_BT[0], labels != IGNORE)


def test_a_vocabulary_of_a_dataset_is_that_of_its_task_or_of_its_text(tmp_path):
    made = ["--output", str(tmp_path / "recall"), "--lengths", "64:8", "--tokens", "6400"]
    assert data.recall.main(made) == 0
    found = Vocabulary.of_dataset(open_dataset(tmp_path / "recall"), size=400)
    expected = recall()
    assert found.size == 400
    assert found.key_width == 1
    assert found.query is None
    for name in ("keys", "values", "passage", "noise"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))

    documents = np.random.default_rng(0).integers(1, 50, (20, 30))
    dataset = write_dataset(documents, tmp_path / "text", vocab_size=60, eod_id=0, val_fraction=0.3)
    found = Vocabulary.of_dataset(dataset, size=64)
    assert found.key_width == 4
    assert len(found.noise) == dataset.split("val").num_tokens - dataset.split("val").num_documents
    assert 0 not in found.noise


# --------------------------------------------------------------------------- items


@pytest.mark.parametrize("task", ALL_TASKS)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_an_item_has_its_length_and_asks_only_for_its_answers(task, name):
    for length in (199, 200):
        items = TaskItems(task, length, 9, VOCABULARIES[name], SIZES)
        for one in items:
            tokens_BT, labels_BT, positions, doc_ids = one.item
            assert tokens_BT.shape == labels_BT.shape == (1, length)
            assert positions is None and doc_ids is None

            asked = (labels_BT[0] != IGNORE).nonzero()[:, 0].tolist()
            spans = [range(a.first, a.first + a.tokens) for a in one.answers]
            assert asked == [place for span in spans for place in span]
            for place in asked[:-1]:
                assert labels_BT[0, place] == tokens_BT[0, place + 1]
            assert asked[-1] == length - 1
            assert all(0 <= answer.depth <= 1 for answer in one.answers)


def test_items_are_the_same_in_every_run_and_for_every_count():
    few = TaskItems("multikey", 256, 3, text(), SIZES)
    many = TaskItems("multikey", 256, 30, text(), SIZES)
    for index in (2, 0, 1):
        assert torch.equal(few[index].item.tokens_BT, many[index].item.tokens_BT)
        assert few[index].answers == many[index].answers

    others = [many[3], TaskItems("multikey", 256, 3, text(), SIZES, seed=1)[0]]
    assert not any(torch.equal(few[0].item.tokens_BT, one.item.tokens_BT) for one in others)


def test_these_are_the_items():
    """A changed item makes old and new scores incomparable."""
    row = TaskItems("tracking2", 64, 1, recall(), SIZES)[0]
    assert checksum(row.item.tokens_BT) == 548997


def test_needles_are_spread_evenly_over_the_row():
    items = TaskItems("single", 512, 2 * DEPTHS, text(), SIZES)
    depths = [one.answers[0].depth for one in items]
    parts = [int(depth * DEPTHS) for depth in depths]
    assert sorted(parts) == sorted(2 * list(range(DEPTHS)))

    for one, depth in zip(items, depths, strict=True):
        tokens = one.item.tokens_BT[0].tolist()
        key = tokens[-4:]
        place = next(p for p in range(512) if tokens[p : p + 4] == key)
        assert place / (512 - 8) == pytest.approx(depth, abs=0.01)


def test_keys_and_values_of_a_row_are_distinct():
    items = TaskItems("multikey", 600, 8, recall(), Sizes(keys=128, asked=128))
    for one in items:
        tokens = one.item.tokens_BT[0]
        assert len(one.answers) == 128
        keys = tokens[tokens < 128]
        values = torch.cat([tokens[(tokens >= 128) & (tokens < 256)], one.item.labels_BT[0, -1:]])
        for written in (keys, values):
            assert sorted(written.tolist()) == sorted(2 * written.unique().tolist())
            assert len(written.unique()) == 128


def test_no_key_stands_in_the_noise_by_accident():
    """Of 900 keys of two ids, a row of 256 tokens holds a given one by accident with p = 0.25."""
    vocabulary = text(ids=30, key_width=2)
    items = TaskItems("single", 256, 64, vocabulary, SIZES)
    for one in items:
        tokens = one.item.tokens_BT[0].numpy()
        assert occurrences(tokens, tuple(tokens[-2:])) == 2

    hopeless = TaskItems("single", 256, 1, text(ids=4, key_width=2), SIZES)
    with pytest.raises(ValueError, match="single at 256"):
        hopeless[0]


def test_special_tokens_are_neither_noise_nor_key():
    vocabulary = Vocabulary.of_text([1, 2, 0, 3, 2, 0], size=5, excluded=[0])
    assert vocabulary.noise.tolist() == [1, 2, 3, 2]
    assert vocabulary.keys.tolist() == vocabulary.values.tolist() == [1, 2, 3]


# --------------------------------------------------------------------------- figures


def score(hits: int, length: int = 64, task: str = "single", items: int = 80) -> Score:
    """`items` items with one answer, evenly over the depths, the first `hits` of them right."""
    asked_IE = np.eye(DEPTHS, dtype=int)[np.arange(items) % DEPTHS]
    right_I = (np.arange(items) < hits)[:, None]
    return Score(task, length, asked_IE * right_I, asked_IE, chance=0.001, chance_by_form=0.01)


def test_a_score_has_the_interval_of_wilson_and_that_of_each_depth():
    one = score(hits=60)
    assert one.share == Share(0.75, pytest.approx(wilson(60, 80)), answers=80, items=80)
    assert one.by_depth[0] == Share(0.8, pytest.approx(wilson(8, 10)), answers=10, items=10)
    assert sum(share.answers for share in one.by_depth) == 80
    assert one.of_items.mean() == 0.75
    assert math.isnan(share_of(np.zeros(0), np.zeros(0)).score)


@pytest.mark.parametrize(
    "scores, expected",
    [
        ([1.0, 0.85, 0.84], 20),
        ([0.6, 0.51, 0.52], 30),
        ([1.0, 0.5, 1.0], 10),  # chance may bring a score back
        ([0.04, 0.9, 0.9], None),
    ],
)
def test_effective_context_is_relative_to_the_score_at_the_shortest_length(scores, expected):
    shares = [Share(one, Interval(one - 0.04, one), 1, 1) for one in scores]
    assert effective_context([10, 20, 30], shares, chance=0.01) == expected


def test_the_mean_counts_each_task_the_same():
    found = Retrieval(
        (score(80), score(40, task="multikey"), score(20, 128), score(0, 128, "multikey"))
    )
    assert [mean.score for mean in found.means] == [0.75, 0.125]
    assert found.means[0].interval.low == pytest.approx(
        0.75 - math.hypot(1 - wilson(80, 80).low, 0.5 - wilson(40, 80).low) / 2
    )
    assert found.effective_context == 64
    assert found.effective_context_of("single") == 64
    assert found.grid().shape == (DEPTHS, 2)
    assert found.grid("single")[:, 0].tolist() == [1.0] * DEPTHS
    assert found.grid()[:, 0].mean() == pytest.approx(0.75)


def test_the_grid_says_where_nothing_was_asked():
    few = score(3, items=3)
    grid = Retrieval((few,)).grid()
    assert grid[:3, 0].tolist() == [1, 1, 1]
    assert np.isnan(grid[3:]).all()


FOUND = Retrieval((score(80), score(40, task="copy"), score(20, 128), score(0, 128, "copy")))


def test_reports():
    lines = FOUND.line().splitlines()
    assert lines[3].split() == ["mean", "0.75+-.06", "0.12+-.06"]
    assert lines[5].split()[2:4] == ["64", "tokens"]
    record = FOUND.record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["effective_context"] == 64
    assert record["effective_context_by_task"] == {"single": 64, "copy": 64}
    assert record["scores"][0]["items"] == 80
    assert record["mean"][1]["score"] == 0.125
    shares = dict(single_64=1, copy_64=0.5, single_128=0.25, copy_128=0, mean_64=0.75)
    shares |= dict(mean_128=0.125, effective_context=64)
    assert FOUND.scalars() == {f"retrieval/{name}": value for name, value in shares.items()}


# --------------------------------------------------------------------------- the picture


def test_the_picture_has_a_cell_with_its_score_for_each_depth_and_length():
    cells = cells_of(FOUND.picture())
    assert len(cells) == sum(scores_EL.size for scores_EL in FOUND.tables.values()) > 0
    for name, scores_EL in FOUND.tables.items():
        depths = scores_EL.shape[0]
        for (row, column), value in np.ndenumerate(scores_EL):
            depth = f"{100 * (row + 0.5) / depths:.0f}%"
            box, words = cells[f"{name}, {FOUND.lengths[column]} tokens, depth {depth}"]
            assert words.text == heatmap.percent(value)
            fill = "var(--band)" if np.isnan(value) else f"rgb{svg.colour(value)}"
            assert box.get("fill") == fill

            first, _ = cells[f"{name}, {FOUND.lengths[0]} tokens, depth 6%"]
            assert float(box.get("x")) - float(first.get("x")) == heatmap.CELL * column
            assert float(box.get("y")) - float(first.get("y")) == heatmap.LINE * row


def cells_of(drawn: str) -> dict[str, list[ElementTree.Element]]:
    """Box and words of each cell, by its tooltip."""
    groups = ElementTree.fromstring(drawn).findall("{*}g")
    return {tooltip.text: shapes for tooltip, *shapes in groups}


def test_a_higher_score_is_a_lighter_colour():
    shares = np.linspace(0, 1, 101)
    luma = [np.dot(svg.colour(share), (0.299, 0.587, 0.114)) for share in shares]
    assert (np.diff(luma) > 0).all()
    assert svg.colour(0) == (68, 1, 84) and svg.colour(1) == (253, 231, 37)


def test_colours_without_words_have_a_square_for_each_depth_and_length():
    scores_EL = np.array([[0.0, 1.0, 0.5], [0.25, np.nan, 0.75]])
    image = heatmap.pixels(scores_EL)
    assert image.dtype == np.uint8
    assert image.shape == (2 * heatmap.PIXELS, 3 * heatmap.PIXELS, 3)
    for (row, column), value in np.ndenumerate(scores_EL):
        square = image[row * heatmap.PIXELS :, column * heatmap.PIXELS :][: heatmap.PIXELS]
        colours = set(map(tuple, square[:, : heatmap.PIXELS].reshape(-1, 3).tolist()))
        assert colours == {(heatmap.NOTHING,) * 3 if np.isnan(value) else svg.colour(value)}


def test_a_percentage_says_all_or_none_only_if_it_is_so():
    words = [heatmap.percent(score) for score in (0.0, 0.001, 0.984, 0.999, 1.0, math.nan)]
    assert words == ["0", "1", "98", "99", "100", "-"]


@pytest.mark.parametrize("length", [100, 101])
def test_ranks_that_share_rows_pad_them_and_find_the_same(length):
    questions = Questions(recall(), [length], count=3)
    alone = measure(PerfectRecall(recall()), questions)
    padded = measure(
        PerfectRecall(recall()), questions, world=dist.World(rank=0, size=2), ranks_per_row=2
    )
    assert padded.record() == alone.record()
    assert padded.means[0].score == 1


# --------------------------------------------------------------------------- bad input


def asks(*words: str, vocabulary: Vocabulary | None = None, **changes) -> None:
    arguments = dict(lengths=[256], sizes=SIZES) | changes
    with pytest.raises(ValueError, match=".*".join(words)):
        Questions(vocabulary or recall(), **arguments)


def test_questions_that_cannot_be_asked_are_refused():
    asks("multikey$", tasks=["mutlikey"])
    asks("newest$", tasks=["zzz"])
    asks("copy", "30", lengths=[64, 30], tasks=["copy"])  # longer than the context
    Questions(recall(), [31], tasks=["copy"])
    asks("129", "1 ids", sizes=Sizes(keys=129), lengths=[512])
    asks("16", "10 ids", vocabulary=text(ids=10), tasks=["multikey"])
    asks("4,991", "4,096", vocabulary=text(), lengths=[5000], tasks=["single"])
    asks("4,194,304", lengths=[5_000_000], tasks=["single"])
    for nothing in (dict(lengths=[]), dict(tasks=[]), dict(count=0)):
        asks("at least one", **nothing)


@pytest.mark.parametrize("sizes", [dict(keys=4, asked=5), dict(cue=0)])
def test_sizes_that_cannot_be_are_refused(sizes):
    with pytest.raises(ValueError, match="ask for fewer|at least 1"):
        Sizes(**sizes)


def test_a_text_without_a_token_hides_nothing():
    with pytest.raises(ValueError, match="pass tokens"):
        Vocabulary.of_text([0, 0], 5, excluded=[0])
