"""Retrieval tasks as token ids: needles hidden in noise, and questions at the end of the row.

Base models are asked by log-likelihood, so nothing is explained in words: a needle is a key with
its value, a question is the key again, and the answer is the value. The tasks have the form of
RULER (Hsieh et al. 2024, arXiv 2404.06654) without its text, so they need no tokenizer:

    single        one key, asked at the end
    multikey      many keys, of which several are asked
    multivalue    a key with several values, asked for all of them in the order of the row
    copy          a passage, of which the first tokens are repeated: how does it go on?
    tracking2     a key with a value, a key with that key as its value, and a key with the second
                  one: the last key is asked, and the answer is the value of the first
    tracking4     the same with four links
    multikey-values, multikey-keys, multikey-all, multikey-constant
                  multikey in harder noise: random values, keys that are not in the row, both and
                  what the noise has otherwise, or one of these ids all the time
    newest        multikey in which each key is written again later with another value, which counts

Where a lookup does not say what is wanted (multivalue, tracking), a second key or chain with its
answer shows it before the question. An item depends on its seed, task, length and index only.
"""

import difflib
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from data.dataset import Dataset
from longhaul.evals.score import Item
from model import IGNORE

DEPTHS = 8  # parts of a row over which the needles of successive items are spread evenly
DRAWS = 20  # of an item, until no key stands in the noise by accident
NOISE = 1 << 22  # tokens of a corpus that are read for noise

Ids = tuple[int, ...]


# --------------------------------------------------------------------------- what items are made of


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What keys, values and noise are made of; ids are int64 arrays.

    A key is `key_width` ids of `keys`, a value is one id of `values`, the passage of `copy` is made
    of ids of `passage`, and the noise of a row is a window of `noise`. `query` stands before a key
    that is asked, unless it is None. `size` is the number of ids that the model knows.
    """

    size: int
    keys: NDArray
    values: NDArray
    passage: NDArray
    noise: NDArray
    key_width: int = 4
    query: int | None = None

    @classmethod
    def of_text(cls, noise: ArrayLike, size: int, excluded: Sequence[int] = ()) -> "Vocabulary":
        """Of an ordinary corpus: the noise is its text, and all else consists of ids in it, but
        without those `excluded`, such as the end of a document. ValueError without any text.
        """
        noise = np.asarray(noise, dtype=np.int64)
        noise = noise[~np.isin(noise, excluded)]
        if not len(noise):
            raise ValueError("there is no text to hide needles in: pass tokens of a corpus")
        ids = np.unique(noise)
        return cls(size=size, keys=ids, values=ids, passage=ids, noise=noise)

    @classmethod
    def of_dataset(cls, dataset: Dataset, size: int) -> "Vocabulary":
        """Of the validation documents of a dataset, up to about four million tokens, or of what its
        manifest says of a synthetic task. ValueError if it has neither.
        """
        if dataset.manifest.task is not None:
            return cls.of_recall(size, **dataset.manifest.task)
        split = dataset.split("val")
        read = []
        tokens = 0
        for document, length in enumerate(split.lengths):
            if tokens >= NOISE:
                break
            part = min(int(length), NOISE - tokens)
            read.append(split.read(document, 0, part))
            tokens += part
        return cls.of_text(np.concatenate(read), size, excluded=[dataset.eod_id])

    @classmethod
    def of_recall(
        cls,
        size: int,
        keys: Sequence[int],
        values: Sequence[int],
        noise: Sequence[int],
        query: int | None = None,
    ) -> "Vocabulary":
        """Of synthetic recall data: `keys`, `values` and `noise` are ranges [first, stop) of ids.

        The noise is random and the same in every run.
        """
        random = np.random.default_rng(0)
        return cls(
            size=size,
            keys=np.arange(*keys),
            values=np.arange(*values),
            passage=np.arange(*noise),
            noise=random.integers(*noise, size=NOISE),
            key_width=1,
            query=query,
        )


@dataclass(frozen=True)
class Sizes:
    """How much the items of a task hold. ValueError for sizes that no item can have."""

    keys: int = 16  # multikey: in a row
    asked: int = 4  # multikey: of them
    values: int = 4  # multivalue: of the key
    cue: int = 8  # copy: tokens of the passage that are repeated
    copied: int = 8  # copy: tokens that must follow

    def __post_init__(self):
        if min(self.keys, self.asked, self.values, self.cue, self.copied) < 1:
            raise ValueError(f"{self}: pass at least 1 for each")
        if self.asked > self.keys:
            raise ValueError(f"{self.asked} of {self.keys} keys cannot be asked: ask for fewer")


# --------------------------------------------------------------------------- items


class Answer(NamedTuple):
    """What is asked: the labels at positions first .. first + tokens - 1 of the row. depth: how
    much of the noise stands before the needle, 0..1.
    """

    first: int
    tokens: int
    depth: float


class TaskItem(NamedTuple):
    """A row of exactly `length` tokens with labels at its answers, which come in their order."""

    item: Item
    task: str
    length: int
    answers: tuple[Answer, ...]


class TaskItems(Sequence[TaskItem]):
    """`count` items of one task at one length, each made when it is asked for.

    The first items of a larger count are the same. ValueError for an unknown task, a row in which
    the needles and questions do not fit, and a vocabulary with too few ids or too little noise.
    """

    def __init__(
        self,
        task: str,
        length: int,
        count: int,
        vocabulary: Vocabulary,
        sizes: Sizes,
        seed: int = 0,
    ):
        check_task(task)
        self.task = task
        self.length = length
        self.count = count
        self.vocabulary = vocabulary
        self.sizes = sizes
        self.seed = seed
        self._check()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> TaskItem:
        """ValueError if a key stands in the noise by accident however often it is drawn."""
        if not 0 <= index < self.count:
            raise IndexError(f"item {index} of {self.count}")

        draw = self._draw(index)
        for _ in range(DRAWS):
            plan = ALL_TASKS[self.task](draw)
            row = lay_out(plan, self.length, self.vocabulary.noise, draw.random)
            if not row.has_accident(plan):
                return row.item(self.task)
        raise ValueError(
            f"{self.task} at {self.length:,} tokens: in {DRAWS} draws a key of "
            f"{self.vocabulary.key_width} ids also stood in the noise by accident: "
            "use a larger vocabulary or shorter rows"
        )

    def require(self) -> None:
        """ValueError if one of the items cannot be made: later only one rank would see it."""
        for index in range(self.count):
            self[index]

    @property
    def chance(self) -> float:
        """How often a uniform guess over all ids of the model is right."""
        return self._guess(self.vocabulary.size)

    @property
    def chance_by_form(self) -> float:
        """How often a guess without a lookup is right: any of the values that stand in the row, or,
        where that is only the answer, any of the ids of which answers are made.
        """
        values = ALL_TASKS[self.task](self._draw(0)).values
        if values > 1:
            return 1 / values
        pool = self.vocabulary.passage if self.task == "copy" else self.vocabulary.values
        return self._guess(len(pool))

    def _guess(self, ids: int) -> float:
        plan = ALL_TASKS[self.task](self._draw(0))
        answers = [question.answer for question in plan.questions if question.needle is not None]
        return ids ** -len(answers[0])

    def _draw(self, index: int) -> "Draw":
        key = [self.seed, zlib.crc32(self.task.encode()), self.length, index]
        return Draw(self.vocabulary, self.sizes, np.random.default_rng(key), index)

    def _check(self) -> None:
        plan = ALL_TASKS[self.task](self._draw(0))
        needed = plan.tokens - 1  # the last answer is a label only
        if self.length < needed:
            raise ValueError(
                f"{self.task} has needles and questions of {needed:,} tokens, more than a context "
                f"of {self.length:,}: give lengths of at least {needed:,}"
            )
        noise = self.length + 1 - plan.tokens
        if noise > NOISE:
            raise ValueError(
                f"{self.task} at {self.length:,} tokens needs {noise:,} tokens of noise, and at "
                f"most {NOISE:,} of a corpus are read for it: give shorter lengths"
            )
        if len(self.vocabulary.noise) < noise:
            raise ValueError(
                f"{self.task} at {self.length:,} tokens needs {noise:,} tokens of noise, and the "
                f"corpus has {len(self.vocabulary.noise):,}: give shorter lengths, or prepare the "
                "data with a larger --val_fraction"
            )


# --------------------------------------------------------------------------- what a row holds


class Needle(NamedTuple):
    """Tokens in the noise; depth is the share of the noise before them."""

    tokens: Ids
    depth: float


class Question(NamedTuple):
    """Tokens at the end of the row. needle: the index of what the answer asks for; None in an
    example, of which nothing is asked.
    """

    cue: Ids
    answer: Ids
    needle: int | None


class Plan(NamedTuple):
    """The needles and questions of a row, and `unique`: what must stand in it only as often as
    these wrote it, with that number. values: how many different ones the needles have. noise: the
    ids from which noise is drawn; None: a window of the vocabulary's.
    """

    needles: list[Needle]
    questions: list[Question]
    unique: dict[Ids, int]
    values: int = 1
    noise: NDArray | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the needles, questions and answers."""
        hidden = sum(len(needle.tokens) for needle in self.needles)
        return hidden + sum(len(asked.cue) + len(asked.answer) for asked in self.questions)


class Draw:
    """The random choices of one item. ValueError if a vocabulary has too few keys or values."""

    def __init__(
        self, vocabulary: Vocabulary, sizes: Sizes, random: np.random.Generator, index: int
    ):
        self.vocabulary = vocabulary
        self.sizes = sizes
        self.random = random
        self._stratum = index

    def keys(self, number: int) -> list[Ids]:
        """Different keys."""
        ids = self.vocabulary.keys
        width = self.vocabulary.key_width
        if len(ids) ** width < number:
            raise ValueError(
                f"{number} different keys of {width} ids do not exist in a vocabulary with "
                f"{len(ids)} ids for keys: ask for fewer keys, or use a larger vocabulary"
            )
        if width == 1:
            return [(int(one),) for one in self.random.choice(ids, number, replace=False)]

        found: dict[Ids, None] = {}
        while len(found) < number:
            found[tuple(self.random.choice(ids, width).tolist())] = None
        return list(found)

    def values(self, number: int) -> list[int]:
        """Different values."""
        ids = self.vocabulary.values
        if len(ids) < number:
            raise ValueError(
                f"{number} different values do not exist in a vocabulary with {len(ids)} ids for "
                "values: ask for fewer keys or values, or use a larger vocabulary"
            )
        return self.random.choice(ids, number, replace=False).tolist()

    def noise(self, kind: str, keys: Iterable[Ids]) -> NDArray:
        """The ids of a kind of noise; a key of one id is none of them."""
        known = self.vocabulary
        every = (known.keys, known.values, known.passage)
        pool = {"values": known.values, "keys": known.keys}.get(kind, np.concatenate(every))
        if known.key_width == 1:
            pool = np.setdiff1d(pool, [key[0] for key in keys])
        return self.random.choice(pool, 1) if kind == "constant" else np.unique(pool)

    def passage(self, tokens: int) -> Ids:
        """Random ids of the noise."""
        return tuple(self.random.choice(self.vocabulary.passage, tokens).tolist())

    def depth(self) -> float:
        """A random depth in the next part of the row: over all items each part has as many."""
        part = self._stratum % DEPTHS
        self._stratum += 1
        return (part + self.random.random()) / DEPTHS

    def cue(self, key: Ids) -> Ids:
        """A key as it is asked."""
        query = self.vocabulary.query
        return key if query is None else (query, *key)


# --------------------------------------------------------------------------- the tasks


def pairs(draw: Draw, number: int, asked: int, times: int = 1) -> Plan:
    """`number` keys, each written so many times with another value; the last values of `asked` of
    them are asked in random order.
    """
    keys = draw.keys(number)
    values = draw.values(number * times)
    needles = []
    for key in keys:
        for depth in sorted(draw.depth() for _ in range(times)):
            needles.append(Needle((*key, values[len(needles)]), depth))

    questions = []
    unique = dict.fromkeys(keys, times)
    for index in draw.random.permutation(number)[:asked]:
        key = keys[index]
        last = times * (int(index) + 1) - 1
        questions.append(Question(draw.cue(key), (values[last],), last))
        unique[key] += 1
    return Plan(needles, questions, unique, len(needles))


def single(draw: Draw) -> Plan:
    """One key with its value."""
    return pairs(draw, number=1, asked=1)


def multikey(draw: Draw) -> Plan:
    """Many keys, of which several are asked."""
    return pairs(draw, draw.sizes.keys, draw.sizes.asked)


def multikey_noise(draw: Draw, kind: str) -> Plan:
    """multikey in a kind of noise."""
    plan = multikey(draw)
    return plan._replace(noise=draw.noise(kind, plan.unique))


def newest(draw: Draw) -> Plan:
    """multikey in which every key is written twice: the newer value counts."""
    return pairs(draw, draw.sizes.keys, draw.sizes.asked, times=2)


def multivalue(draw: Draw) -> Plan:
    """A key with several values, asked as often, in their order; after a key that shows it."""
    number = draw.sizes.values
    keys = draw.keys(2)
    values = draw.values(2 * number)

    plan = Plan([], [], dict.fromkeys(keys, 2 * number), 2 * number)
    for key, asked in zip(keys, (False, True), strict=True):
        depths = sorted(draw.depth() for _ in range(number))
        for depth in depths:
            value = values.pop()
            needle = len(plan.needles)
            plan.needles.append(Needle((*key, value), depth))
            plan.questions.append(Question(draw.cue(key), (value,), needle if asked else None))
    return plan


def copy(draw: Draw) -> Plan:
    """A passage whose first tokens are repeated."""
    sizes = draw.sizes
    passage = draw.passage(sizes.cue + sizes.copied)
    cue = passage[: sizes.cue]
    question = Question(cue, passage[sizes.cue :], 0)
    return Plan([Needle(passage, draw.depth())], [question], {cue: 2})


def tracking(draw: Draw, hops: int) -> Plan:
    """A chain of `hops` links whose last key is asked; after a chain that shows it.

    The first needle of a chain has the value, and its depth is that of the answer. The others stand
    behind it in order, as in RULER.
    """
    keys = draw.keys(2 * (hops + 1))
    plan = Plan([], [], dict.fromkeys(keys, 2), values=2)
    for asked, value in zip((False, True), draw.values(2), strict=True):
        chain = [keys.pop() for _ in range(hops + 1)]
        first = len(plan.needles)
        depth = draw.depth()
        behind = sorted(draw.random.uniform(depth, 1, size=hops))

        plan.needles.append(Needle((*chain[0], value), depth))
        for key, before, place in zip(chain[1:], chain, behind, strict=False):
            plan.needles.append(Needle((*key, *before), float(place)))
        plan.questions.append(Question(draw.cue(chain[-1]), (value,), first if asked else None))
    return plan


TASKS: dict[str, Callable[[Draw], Plan]] = {
    "single": single,
    "multikey": multikey,
    "multivalue": multivalue,
    "copy": copy,
    "tracking2": partial(tracking, hops=2),
    "tracking4": partial(tracking, hops=4),
}
HARDER_TASKS: dict[str, Callable[[Draw], Plan]] = {  # asked only if they are named
    "multikey-values": partial(multikey_noise, kind="values"),
    "multikey-keys": partial(multikey_noise, kind="keys"),
    "multikey-all": partial(multikey_noise, kind="all"),
    "multikey-constant": partial(multikey_noise, kind="constant"),
    "newest": newest,
}
ALL_TASKS = TASKS | HARDER_TASKS


def check_task(task: str) -> None:
    """ValueError for a task that does not exist, with the one that was probably meant."""
    if task in ALL_TASKS:
        return
    nearest = difflib.get_close_matches(task, ALL_TASKS, n=1, cutoff=0.5)
    meant = f", perhaps {nearest[0]}" if nearest else ""
    names = ", ".join(ALL_TASKS)
    raise ValueError(f"there is no retrieval task {task!r}: use one of {names}{meant}")


# --------------------------------------------------------------------------- the row


@dataclass(frozen=True, eq=False)
class Row:
    """All tokens of a row and the answer after it, and the answers in it."""

    tokens: NDArray
    answers: tuple[Answer, ...]

    def has_accident(self, plan: Plan) -> bool:
        """Whether a key stands somewhere else than where the plan wrote it."""
        return any(occurrences(self.tokens, key) != times for key, times in plan.unique.items())

    def item(self, task: str) -> TaskItem:
        """The row as a model takes it."""
        tokens = torch.from_numpy(self.tokens)
        targets = tokens[1:]
        labels = torch.full_like(targets, IGNORE)
        for answer in self.answers:
            asked = slice(answer.first, answer.first + answer.tokens)
            labels[asked] = targets[asked]
        item = Item(tokens[None, :-1], labels[None])
        return TaskItem(item, task, len(targets), self.answers)


def lay_out(plan: Plan, length: int, noise: NDArray, random: np.random.Generator) -> Row:
    """The plan in its noise or in a random window of `noise`, length + 1 tokens in all."""
    size = length + 1 - plan.tokens
    if plan.noise is None:
        start = int(random.integers(len(noise) - size + 1))
        hay = noise[start : start + size]
    else:
        hay = random.choice(plan.noise, size)

    cuts = [round(needle.depth * size) for needle in plan.needles]
    parts = []
    done = 0
    for index in np.argsort(cuts, kind="stable"):
        parts += [hay[done : cuts[index]], plan.needles[index].tokens]
        done = cuts[index]
    parts.append(hay[done:])

    answers = []
    end = length + 1 - sum(len(asked.cue) + len(asked.answer) for asked in plan.questions)
    for question in plan.questions:
        parts += [question.cue, question.answer]
        end += len(question.cue)
        if question.needle is not None:
            depth = cuts[question.needle] / max(size, 1)
            answers.append(Answer(end - 1, len(question.answer), depth))
        end += len(question.answer)
    tokens = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    return Row(tokens, tuple(answers))


def occurrences(tokens: NDArray, wanted: Ids) -> int:
    """How often the wanted ids stand in the tokens one after another."""
    last = len(tokens) - len(wanted)
    starts = np.flatnonzero(tokens[: last + 1] == wanted[0])
    for offset, one in enumerate(wanted[1:], start=1):
        starts = starts[tokens[starts + offset] == one]
    return len(starts)
