"""Several corpora in fixed shares, as a pure function of the position.

`--data web:0.5,books:0.3,code:0.2` gives each corpus its share of the rows, and so of the tokens:
every row has T of them. Shares are exact decimals, so the turns of the corpora repeat after a
period of a few thousand rows at most. `Turns` computes one period by the rule of Tijdeman (1980,
"The chairman assignment problem"): of the corpora that are behind their share by 1 / (2n - 2) rows
or more, that one is next which would otherwise be a whole row late first. Simply taking the corpus
with the largest deficit drifts by more than a row if there are many corpora; this rule keeps each
of n corpora within 1 - 1 / (2n - 2) rows of its share at every position.

Position p then belongs to one corpus, whose row is the one after those that it had before p. There
is no state beyond the position, and the number of ranks plays no part.

A `Split` divides every corpus by the length of its documents, and each part is packed and ordered
by itself, like a corpus.
"""

import functools
import hashlib
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.dataset import ENDLESS, Dataset, in_words, open_dataset
from data.load_tokenizer import Ids, have_same_ids
from data.loader import Batch, Loader, Order
from data.packing import too_short

DECIMALS = 4  # of a share, at most
EMBEDDED = "embedded corpus"
LONGEST_PERIOD = 10**6
SHARE = re.compile(rf"\d{{1,3}}|\d{{0,3}}\.\d{{1,{DECIMALS}}}")


# ---- what --data says


@dataclass(frozen=True)
class Corpus:
    """A dataset and its share of the rows; `name` is the last part of its path."""

    name: str
    dataset: Dataset
    share: Fraction


def is_mixture(data: str) -> bool:
    """Whether --data names several corpora, with their shares or in a TOML file."""
    if not data or Path(data).is_dir():
        return False
    return data.lower().endswith(".toml") or ":" in data or "," in data


def parse(data: str) -> dict[str, Fraction]:
    """{folder: share} of a mixture such as "web:0.5,books:0.5", or of a TOML file whose keys are
    folders.

    Raises ValueError for a share that is no decimal, a folder that is named twice, and shares that
    do not sum to 1.
    """
    pairs = _table(Path(data)) if data.lower().endswith(".toml") else _words(data)
    shares: dict[str, Fraction] = {}
    for folder, share in pairs:
        if folder in shares:
            raise ValueError(f"--data {data} names {folder} twice: keep one")
        if not SHARE.fullmatch(share) or not Fraction(share):
            raise ValueError(
                f"--data {data}: the share of {folder} is {share[:40]!r}: give a decimal between 0 "
                f"and 1 with at most {DECIMALS} digits behind the point"
            )
        shares[folder] = Fraction(share)

    total = sum(shares.values())
    if total != 1:
        raise ValueError(
            f"--data {data}: the shares sum to {float(total):g}: give shares that sum to 1"
        )
    return shares


def _words(data: str) -> list[tuple[str, str]]:
    pairs = []
    for word in data.split(","):
        folder, colon, share = word.rpartition(":")
        if not colon or not folder:
            raise ValueError(
                f"--data {data}: {word!r} has no share: give FOLDER:SHARE,FOLDER:SHARE, such as "
                "web:0.5,books:0.5"
            )
        pairs.append((folder, share))
    return pairs


def _table(path: Path) -> list[tuple[str, str]]:
    """The pairs of a file with lines such as `"data/web" = 0.5`, all at its top or in a table."""
    try:
        # as text, because a float has already rounded what was written
        table = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=str)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f'--data {path}: {error}: give a TOML file with a line such as "data/web" = 0.5 for '
            "each corpus"
        ) from None
    if len(table) == 1:
        [only] = table.values()
        table = only if isinstance(only, dict) else table
    return [(folder, str(share)) for folder, share in table.items()]


def open_corpora(data: str) -> tuple[Corpus, ...]:
    """The corpora of --data, or the only one, opened.

    Raises ValueError if one is missing, or has another tokenizer than the first.
    """
    if not is_mixture(data):
        return (Corpus(Path(data).name, open_dataset(data), Fraction(1)),)

    shares = parse(data)
    names = [Path(folder).name for folder in shares]
    corpora = []
    for folder, name in zip(shares, names, strict=True):
        unique = name if names.count(name) == 1 else folder
        corpora.append(Corpus(unique, open_dataset(folder), shares[folder]))

    first = corpora[0].dataset
    for corpus in corpora[1:]:
        check_same_ids(first, corpus.dataset)
    return tuple(corpora)


def check_same_ids(first: Dataset, other: Dataset) -> None:
    """Raise ValueError unless an id means the same in both datasets."""
    same_size = (first.vocab_size, first.eod_id) == (other.vocab_size, other.eod_id)
    ids = [Ids(one.tokenizer_sha256, one.tokenizer_path) for one in (first, other)]
    if same_size and have_same_ids(*ids):
        return
    remedy = f"prepare both with one tokenizer: add --tokenizer {first.tokenizer_path}"
    if first.tokenizer_path is None:
        remedy = "write both with the same ids"
    raise ValueError(f"{first.path} and {other.path} have different tokenizers: {remedy}")


def fingerprint(corpora: Sequence[Corpus]) -> str:
    """SHA-256 of all corpora in their order; of an only one, its own."""
    hashes = [corpus.dataset.fingerprint for corpus in corpora]
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


# ---- whose turn it is


class Turns:
    """Position -> (corpus, how many turns that corpus had before), for shares that sum to 1.

    Raises ValueError if the turns would repeat only after more than LONGEST_PERIOD positions.
    """

    def __init__(self, shares: Sequence[Fraction]):
        self.period = math.lcm(*[share.denominator for share in shares])
        if self.period > LONGEST_PERIOD:
            raise ValueError(
                f"the shares {', '.join(str(float(share)) for share in shares)} repeat only after "
                f"{self.period:,} rows: give shares with fewer digits behind the point"
            )
        self.corpus = _one_period(tuple(int(share * self.period) for share in shares))
        self.places = [np.flatnonzero(self.corpus == number) for number in range(len(shares))]

    def at(self, position: int) -> tuple[int, int]:
        """Whose turn it is, and how many it had before."""
        corpus = int(self.corpus[position % self.period])
        return corpus, int(self.counts(position)[corpus])

    def counts(self, position: int) -> np.ndarray:
        """The turns of each corpus before a position, int64 [corpora]."""
        periods, place = divmod(position, self.period)
        before = [periods * len(places) + places.searchsorted(place) for places in self.places]
        return np.array(before)


@functools.cache
def _one_period(rows: tuple[int, ...]) -> np.ndarray:
    """The corpus of each place of a period in which corpus i has rows[i] places, int64 [period].

    All is in units of 1 / (slack * period) rows, so that the arithmetic is exact.
    """
    period = sum(rows)
    slack = max(1, 2 * len(rows) - 2)
    late = (slack - 1) * period  # how far behind its share a corpus may be

    deficits = [0] * len(rows)
    turns = np.empty(period, dtype=np.int64)
    for place in range(period):
        chosen = -1
        room = 0  # of the corpus that is chosen, until it is late
        for corpus, share in enumerate(rows):
            deficits[corpus] += slack * share
            if deficits[corpus] < period:  # not yet behind by 1 / slack
                continue
            # it is late after (late - deficit) / share positions; compared without a division
            own_room = late - deficits[corpus]
            if chosen < 0 or own_room * rows[chosen] < room * share:
                chosen = corpus
                room = own_room
        deficits[chosen] -= slack * period
        turns[place] = chosen
    return turns


# ---- the parts of a corpus


class Part(NamedTuple):
    """A corpus, or those of its documents that have so many tokens, and its share of the rows;
    `flag` asks for those documents.
    """

    name: str
    corpus: Corpus
    share: Fraction
    lengths: range | None = None
    flag: str = ""


class Split(NamedTuple):
    """Documents of at most `tokens` tokens have a share of their own, as `flag` asks."""

    tokens: int
    short_share: Fraction
    flag: str


def parts(
    corpora: Sequence[Corpus], split: Split | None = None, longest: int | None = None
) -> list[Part]:
    """The corpora, each in two parts if there is a `split`; without documents of more than
    `longest` tokens, as --whole_documents asks.
    """
    stop = ENDLESS if longest is None else longest + 1
    if split is None:
        lengths = range(1, stop) if longest else None
        return [Part(one.name, one, one.share, lengths, "--whole_documents") for one in corpora]

    found = []
    for corpus in corpora:
        for name, lengths, share in (
            ("short", range(1, split.tokens + 1), split.short_share),
            ("long", range(split.tokens + 1, stop), 1 - split.short_share),
        ):
            part = Part(f"{corpus.name} {name}", corpus, corpus.share * share, lengths, split.flag)
            found.append(part)
    return [part for part in found if part.share]


# ---- the rows


class Mixture(Order):
    """The rows of several parts in their shares, at one context length.

    Raises ValueError if a part has no documents, or the shares no short period.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        context_length: int,
        global_batch_rows: int,
        seed: int = 0,
    ):
        self.corpora = list(dict.fromkeys(part.corpus for part in parts))
        super().__init__(context_length, global_batch_rows, seed, fingerprint(self.corpora))
        self.parts = parts
        self.turns = Turns([part.share for part in parts])
        self.loaders = [_loader(part, context_length, seed) for part in parts]

    @property
    def shares(self) -> dict[str, str]:
        """The share of each part, as a fraction in words."""
        return {part.name: str(part.share) for part in self.parts}

    def place(self, position: int) -> dict:
        """{position, shares}."""
        return {"position": position, "shares": self.shares}

    def row_index(self, position: int) -> tuple[str, int]:
        """The part that a position belongs to, and the row of its plan."""
        number, turn = self.turns.at(position)
        return self.parts[number].name, self.loaders[number].row_index(turn)

    def fill(self, row: Batch, position: int) -> None:
        """Write the row at a global position into the arrays [T] of `row`."""
        number, turn = self.turns.at(position)
        self.loaders[number].fill(row, turn)

    def tokens_seen(self, step: int) -> dict[str, int]:
        """Tokens of each part before a step, padding included."""
        tokens = (self.rows_seen(step) * self.context_length).tolist()
        return dict(zip(self.shares, tokens, strict=True))

    def rows_seen(self, step: int) -> np.ndarray:
        """Rows of each part before a step, int64 [parts]."""
        position = self.first_position(step)
        rows = self.turns.counts(position)
        for begin, end in self.skip:
            rows += self.turns.counts(min(begin, position)) - self.turns.counts(min(end, position))
        return rows

    def summary(self, steps: int) -> list[str]:
        """A line for each part, with its epochs after so many steps."""
        seen = self.rows_seen(steps)
        lines = []
        for part, loader, rows in zip(self.parts, self.loaders, seen, strict=True):
            epochs = rows / loader.rows_per_epoch
            lines.append(
                f"data: {float(part.share):7.2%} {part.name}: {loader.split.num_tokens:,} tokens, "
                f"{loader.rows_per_epoch:,} rows of {self.context_length:,}, "
                f"{epochs:.2f} epochs in {steps:,} steps; half of the tokens in pieces of "
                f"{loader.effective_context().p50:,} or more{loader.targets_in_words()}"
            )
        return lines

    def warnings(self) -> list[str]:
        """Whether the parts together cannot teach this context, and of which many rows teach
        nothing.
        """
        long_share = 0.0
        for part, loader in zip(self.parts, self.loaders, strict=True):
            long_share += float(part.share) * loader.effective_context().long_share
        warning = too_short(long_share, self.context_length)
        found = [warning] if warning else []
        for part, loader in zip(self.parts, self.loaders, strict=True):
            warning = loader.target_warning()
            if warning:
                found.append(f"{part.name}: {warning}")
        return found


def order(
    corpora: Sequence[Corpus],
    context_length: int,
    global_batch_rows: int,
    seed: int = 0,
    split: Split | None = None,
    whole: bool = False,
) -> Order:
    """A Loader for one corpus that is not split, otherwise a Mixture.

    whole: without documents that are longer than a row, which would be cut.
    """
    found = parts(corpora, split, context_length if whole else None)
    if len(corpora) == 1 and split is None:
        return _loader(found[0], context_length, seed, global_batch_rows)
    return Mixture(found, context_length, global_batch_rows, seed)


def left_out(corpora: Sequence[Corpus], context_length: int) -> list[str]:
    """What --whole_documents does not read, a line for each corpus that has longer documents."""
    lines = []
    for corpus in corpora:
        lengths = corpus.dataset.split("train").lengths
        longer = lengths[lengths > context_length]
        if len(longer):
            lines.append(
                f"data: {longer.sum():,} of {lengths.sum():,} tokens of {corpus.name} are left "
                f"out: they are in documents of more than {context_length:,} tokens "
                "(--whole_documents)"
            )
    return lines


def _loader(part: Part, context_length: int, seed: int, global_batch_rows: int = 1) -> Loader:
    """The rows of one part; ValueError naming it if it has no documents."""
    dataset = part.corpus.dataset
    split = dataset.split("train")
    if not split.has(part.lengths):
        raise ValueError(
            f"{dataset.path} has no document of {in_words(part.lengths)} (they have "
            f"{split.lengths.min():,} to {split.lengths.max():,}), which {part.flag} needs: drop "
            f"{part.flag}, or give a corpus of such documents its share by --data "
            "FOLDER:SHARE,FOLDER:SHARE"
        )
    return Loader(dataset, context_length, global_batch_rows, seed=seed, lengths=part.lengths)
