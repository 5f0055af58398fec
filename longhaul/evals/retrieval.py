"""Does the model find what is far away? Scores of retrieval tasks by length and depth.

The score of a task is the share of its answers that are right: all tokens of an answer are the most
likely ones. The mean at a length is over tasks, each counting the same. *Effective context* is the
longest length up to which the mean is at least 85% of what the model itself reaches at the shortest
one. Letters: I items of a task at one length, E parts of the row (depths), L lengths, M tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longhaul import dist
from longhaul.evals import heatmap
from longhaul.evals.intervals import Interval, mean_of_shares, wilson_of_items
from longhaul.evals.score import Item, MustStop, Scorer, Scores, score_all
from longhaul.evals.tasks import DEPTHS, TASKS, Sizes, TaskItem, TaskItems, Vocabulary
from model import IGNORE

KEPT = 0.85  # of its own score at the shortest length, as in NoLiMa (arXiv 2502.05167)
LABEL = 19  # characters of the names in the table on screen
COLUMN = 10  # characters of a score with its interval
COLUMNS = 8  # scores in a line, so that it has at most 100 characters


# --------------------------------------------------------------------------- the measure


@dataclass(frozen=True, eq=False)
class Questions:
    """What is asked: `count` items of each task at each length. ValueError for a task, length or
    vocabulary of which no item can be made; making an item may still refuse (TaskItems).
    """

    vocabulary: Vocabulary
    lengths: Sequence[int]
    tasks: Sequence[str] = tuple(TASKS)
    count: int = 64
    sizes: Sizes = field(default_factory=Sizes)
    seed: int = 0

    def __post_init__(self):
        if not self.lengths or not self.tasks or self.count < 1:
            raise ValueError("nothing is asked: pass at least one length, one task and one item")
        for length in self.lengths:
            self.at(length)

    def at(self, length: int) -> list[TaskItems]:
        """The items of each task at a length."""
        return [
            TaskItems(task, length, self.count, self.vocabulary, self.sizes, self.seed)
            for task in dict.fromkeys(self.tasks)
        ]


def measure(
    scorer: Scorer,
    questions: Questions,
    *,
    world: dist.World | None = None,
    ranks_per_row: int = 1,
    must_stop: MustStop | None = None,
) -> "Retrieval | None":
    """The scores of all tasks at all lengths, on all ranks; None if `must_stop()` gave it up."""
    found = []
    for length in sorted(set(questions.lengths)):
        of_tasks = questions.at(length)
        scores = score_all(
            OnlyAnswers(scorer),
            Rows(of_tasks),
            hits=True,
            world=world,
            ranks_per_row=ranks_per_row,
            must_stop=must_stop,
        )
        if scores is None:
            return None
        for items in of_tasks:
            found.append(counted(items, scores[: questions.count]))
            scores = scores[questions.count :]
    return Retrieval(tuple(found))


class Rows(Sequence[Item]):
    """The rows of several tasks, one task after another, made when they are asked for."""

    def __init__(self, of_tasks: Sequence[TaskItems]):
        self.of_tasks = of_tasks
        self.count = len(of_tasks[0])

    def __len__(self) -> int:
        return len(self.of_tasks) * self.count

    def __getitem__(self, index: int) -> Item:
        """The row of an item."""
        task, place = divmod(index, self.count)
        return self.of_tasks[task][place].item


class OnlyAnswers:
    """A scorer that keeps the figures of the labels only: a row at 131,072 tokens has 1.1 MiB."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer

    def score(self, item: Item, *, hits: bool = True) -> Scores:
        """The scores of the labels in their order."""
        scores = self.scorer.score(item, hits=hits)
        asked_BT = item.labels_BT != IGNORE
        return Scores(scores.nll_BT[asked_BT], scores.hit_BT[asked_BT])


def counted(items: TaskItems, scores: Sequence[Scores]) -> "Score":
    """The right answers of a task at one length."""
    hits_IE = np.zeros((len(items), DEPTHS), dtype=np.int64)
    asked_IE = np.zeros_like(hits_IE)
    for index, of_item in enumerate(scores):
        for depth, right in right_answers(items[index], of_item):
            part = min(int(depth * DEPTHS), DEPTHS - 1)
            hits_IE[index, part] += right
            asked_IE[index, part] += 1
    return Score(
        task=items.task,
        length=items.length,
        hits_IE=hits_IE,
        asked_IE=asked_IE,
        chance=items.chance,
        chance_by_form=items.chance_by_form,
    )


def right_answers(item: TaskItem, scores: Scores) -> list[tuple[float, bool]]:
    """The depth of each answer, and whether all its tokens are the most likely ones."""
    of_answers = scores.hit_BT.split([answer.tokens for answer in item.answers])
    found = []
    for answer, hits in zip(item.answers, of_answers, strict=True):
        found.append((answer.depth, bool(hits.all())))
    return found


# --------------------------------------------------------------------------- what it found


class Share(NamedTuple):
    """A share of right answers with its 95% interval; score is NaN if nothing was asked."""

    score: float
    interval: Interval
    answers: int
    items: int

    def record(self) -> dict:
        """For JSON, which has no NaN."""
        return {
            "score": None if self.answers == 0 else self.score,
            "interval": list(self.interval),
            "answers": self.answers,
            "items": self.items,
        }

    def short(self) -> str:
        """The score and the distance to the farther end of its interval, such as 0.98+-.05."""
        low, high = self.interval
        distance = max(self.score - low, high - self.score)
        return f"{self.score:.2f}+-{distance:.2f}".replace("+-0", "+-")

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.score:.2f} [{low:.2f}, {high:.2f}]"


def share_of(hits_I: NDArray, asked_I: NDArray) -> Share:
    """The share of right answers, of which several may be of one item."""
    answers = int(asked_I.sum())
    return Share(
        score=float(hits_I.sum()) / answers if answers else float("nan"),
        interval=wilson_of_items(hits_I, asked_I),
        answers=answers,
        items=int((asked_I > 0).sum()),
    )


@dataclass(frozen=True, eq=False)
class Score:
    """The right answers of one task at one length, for each item and depth.

    chance: the score of a model for which all its tokens are equally likely; chance_by_form: of one
    that guesses without a lookup, as TaskItems says.
    """

    task: str
    length: int
    hits_IE: NDArray
    asked_IE: NDArray
    chance: float
    chance_by_form: float

    @cached_property
    def share(self) -> Share:
        """Over all depths."""
        return share_of(self.hits_IE.sum(1), self.asked_IE.sum(1))

    @cached_property
    def by_depth(self) -> tuple[Share, ...]:
        """In each part of the row, its beginning first."""
        return tuple(map(share_of, self.hits_IE.T, self.asked_IE.T))

    @property
    def of_items(self) -> NDArray:
        """The share of right answers of each item, to compare two models pair by pair."""
        return self.hits_IE.sum(1) / self.asked_IE.sum(1)

    def record(self) -> dict:
        """For JSON."""
        return {
            "task": self.task,
            "length": self.length,
            **self.share.record(),
            "chance": self.chance,
            "chance_by_form": self.chance_by_form,
            "by_depth": [share.record() for share in self.by_depth],
        }


@dataclass(frozen=True, eq=False)
class Retrieval:
    """The scores of all tasks at all lengths, shortest first, and what follows from them."""

    scores: tuple[Score, ...]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Shortest first."""
        return tuple(dict.fromkeys(score.length for score in self.scores))

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """As they were asked."""
        return tuple(dict.fromkeys(score.task for score in self.scores))

    def of_task(self, task: str) -> tuple[Score, ...]:
        """The scores of a task, one for each length."""
        return tuple(score for score in self.scores if score.task == task)

    def at(self, length: int) -> tuple[Score, ...]:
        """The scores at a length, one for each task."""
        return tuple(score for score in self.scores if score.length == length)

    @cached_property
    def means(self) -> tuple[Share, ...]:
        """The mean over tasks at each length."""
        return tuple(mean_of([score.share for score in self.at(n)]) for n in self.lengths)

    @property
    def chance(self) -> float:
        """The mean of a uniform model."""
        return float(np.mean([score.chance for score in self.scores]))

    @property
    def chance_by_form(self) -> float:
        """The mean of a model that guesses without a lookup."""
        return float(np.mean([score.chance_by_form for score in self.scores]))

    @cached_property
    def effective_context(self) -> int | None:
        """Of the mean over tasks."""
        return effective_context(self.lengths, self.means, self.chance_by_form)

    def effective_context_of(self, task: str) -> int | None:
        """Of one task."""
        scores = self.of_task(task)
        shares = [score.share for score in scores]
        return effective_context(self.lengths, shares, scores[0].chance_by_form)

    def grid(self, task: str | None = None) -> NDArray:
        """Scores by depth and length [E, lengths]: of a task, or the mean over all that asked
        something there; NaN where nothing was asked.
        """
        grids = []
        for name in self.tasks if task is None else (task,):
            columns = [[share.score for share in one.by_depth] for one in self.of_task(name)]
            grids.append(np.array(columns).T)

        scores_MEL = np.stack(grids)
        asked_EL = (~np.isnan(scores_MEL)).sum(0)
        sums_EL = np.nansum(scores_MEL, axis=0)
        return np.where(asked_EL > 0, sums_EL / np.maximum(asked_EL, 1), np.nan)

    # ---- reports

    @property
    def tables(self) -> dict[str, NDArray]:
        """Scores by depth and length [E, lengths]: the mean over tasks, then each task."""
        tables = {task: self.grid(task) for task in self.tasks}
        return {"mean": self.grid(), **tables} if len(tables) > 1 else tables

    def picture(self) -> str:
        """The tables as SVG."""
        return heatmap.picture(self.tables, self.lengths)

    def images(self) -> dict[str, NDArray[np.uint8]]:
        """The colours of the tables as RGB [H, W, 3], by their names in TensorBoard."""
        named = self.tables.items()
        return {f"retrieval/scores/{name}": heatmap.pixels(scores) for name, scores in named}

    def record(self) -> dict:
        """Everything for JSON."""
        means = zip(self.lengths, self.means, strict=True)
        return {
            "scores": [score.record() for score in self.scores],
            "mean": [{"length": length, **mean.record()} for length, mean in means],
            "chance": self.chance,
            "chance_by_form": self.chance_by_form,
            "effective_context": self.effective_context,
            "effective_context_by_task": {
                task: self.effective_context_of(task) for task in self.tasks
            },
        }

    def line(self) -> str:
        """The table of scores by task and length, and the effective context."""
        rows = {f"  {task}": [one.share for one in self.of_task(task)] for task in self.tasks}
        if len(self.tasks) > 1:
            rows["  mean"] = self.means

        lines = []
        for first in range(0, len(self.lengths), COLUMNS):
            shown = slice(first, first + COLUMNS)
            lines.append(_table_row("retrieval", [f"{n:,}" for n in self.lengths[shown]]))
            for name, shares in rows.items():
                lines.append(_table_row(name, [share.short() for share in shares[shown]]))

        items = self.means[0].items // len(self.tasks)
        chance = f"chance {self.chance:.2g}, {self.chance_by_form:.2g} for a guess among values"
        lines.append(f"{'':<{LABEL}}(n = {items} items each; {chance})")
        lines.append(f"{'effective context':<{LABEL}}{self.effective_words()}")
        return "\n".join(lines)

    def effective_words(self) -> str:
        """The effective context of the mean, or why there is none."""
        shortest = self.lengths[0]
        if self.effective_context is None:
            return f"none: {self.means[0]} at {shortest:,} tokens is not above chance"
        rule = f"at least {KEPT:.0%} of its own score at {shortest:,}"
        if self.effective_context == self.lengths[-1]:
            rule += "; the longest measured"
        return f"{self.effective_context:,} tokens ({rule})"

    def scalars(self) -> dict[str, float]:
        """The score of each task and the mean at each length; the effective context, or 0."""
        found = {
            f"retrieval/{score.task}_{score.length}": score.share.score for score in self.scores
        }
        for length, mean in zip(self.lengths, self.means, strict=True):
            found[f"retrieval/mean_{length}"] = mean.score
        found["retrieval/effective_context"] = float(self.effective_context or 0)
        return found


def mean_of(shares: Sequence[Share]) -> Share:
    """The mean of tasks, each counting the same; their items are independent."""
    scores = [share.score for share in shares]
    return Share(
        score=float(np.mean(scores)),
        interval=mean_of_shares(scores, [share.interval for share in shares]),
        answers=sum(share.answers for share in shares),
        items=sum(share.items for share in shares),
    )


def effective_context(lengths: Sequence[int], shares: Sequence[Share], chance: float) -> int | None:
    """The longest length that, like all shorter ones, keeps 85% of the score at the shortest.

    None if the score at the shortest is not above chance: the lower end of its interval is not. A
    length behind one that failed does not count, even if chance brings its score back.
    """
    if shares[0].interval.low <= chance:
        return None
    longest = lengths[0]
    for length, share in zip(lengths, shares, strict=True):
        if share.score < KEPT * shares[0].score:
            break
        longest = length
    return longest


def _table_row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<{LABEL}}" + "".join(f"{cell:>{COLUMN}}" for cell in cells)
