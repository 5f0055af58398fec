"""Two models over the same documents and items: what differs, with paired intervals.

What makes a document or an item hard for both models cancels in the difference, so these intervals
are narrower than the two figures' own would say. A difference is first - second.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from longhaul.evals.gain import Compared
from longhaul.evals.intervals import Interval, paired_bootstrap
from longhaul.evals.measures import Report
from longhaul.evals.position import Losses
from longhaul.evals.retrieval import Retrieval

NOTES = (
    "* the interval excludes 0; with fewer than 40 documents or items it is too narrow",
    "losses and gains in nats/token; retrieval as a share of right answers, of all tasks together",
)


@dataclass(frozen=True)
class Difference:
    """One figure of both models, over `number` documents or items of both."""

    name: str
    first: float
    second: float
    interval: Interval  # of first - second; NaN below two documents or items
    number: int
    unit: str  # "documents" or "items"
    in_table: bool = True

    @property
    def difference(self) -> float:
        """first - second."""
        return self.first - self.second

    @property
    def excludes_zero(self) -> bool:
        """Whether chance does not explain the difference."""
        return self.interval.low > 0 or self.interval.high < 0

    def record(self) -> dict:
        """For JSON."""
        known = not math.isnan(self.interval.low)
        return {
            "first": self.first,
            "second": self.second,
            "difference": self.difference,
            "interval": list(self.interval) if known else None,
            self.unit: self.number,
        }

    def line(self) -> str:
        """A line of the table, with a star if the interval excludes 0."""
        low, high = self.interval
        words = f"{self.name:<28}{self.first:>9.4f}{self.second:>9.4f}{self.difference:>+11.4f}"
        interval = "no interval" if math.isnan(low) else f"[{low:+.4f}, {high:+.4f}]"
        star = " *" if self.excludes_zero else ""
        return f"{words}  {interval:<20} {self.number:,} {self.unit}{star}"


@dataclass(frozen=True)
class Comparison:
    """Two reports of the same measures."""

    first: Report
    second: Report

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Of every figure that both reports have."""
        found = []
        for name, of_parts in self.first.found.items():
            for part, one in of_parts.items():
                other = self.second.found.get(name, {}).get(part)
                if other is not None:
                    title = f" {part}" if len(of_parts) > 1 else ""
                    found += COMPARE[name](title, one, other)
        return tuple(found)

    def record(self) -> dict:
        """All differences for JSON."""
        return {one.name: one.record() for one in self.differences}

    def lines(self) -> list[str]:
        """The table: losses and gains in nats per token, retrieval as a share."""
        head = f"{'':<28}{'this':>9}{'other':>9}{'this-other':>11}  95% interval of the difference"
        found = [one.line() for one in self.differences if one.in_table]
        return [head, *found, *NOTES]


def _of_losses(title: str, first: Losses, second: Losses) -> list[Difference]:
    """The validation loss, and each bucket."""
    found = [
        _weighted(
            f"loss{title}", first.sums_DE.sum(1), second.sums_DE.sum(1), first.counts_DE.sum(1)
        )
    ]
    names = [f"{bucket.name}" for bucket in first.buckets]
    filled_E = np.flatnonzero(first.counts_DE.sum(0))
    for name, bucket in zip(names, filled_E, strict=True):
        counts_D = first.counts_DE[:, bucket]
        sums = first.sums_DE[:, bucket], second.sums_DE[:, bucket]
        found.append(_weighted(f"loss{title} at {name}", *sums, counts_D))
    return found


def _of_gains(title: str, first, second) -> list[Difference]:
    """Over all tokens and over far copies; each model's own key tokens are different sets."""
    sets: dict[str, tuple[Compared, Compared]] = {
        "all": (first.all, second.all),
        "far copies": (first.far_copies, second.far_copies),
    }
    return [
        _weighted(f"gain{title}, {name}", one.gained_D, other.gained_D, one.tokens_D)
        for name, (one, other) in sets.items()
        if one.tokens
    ]


def _of_retrieval(_title: str, first: Retrieval, second: Retrieval) -> list[Difference]:
    """Every task at every length; the mean over tasks, if there are several, is what is shown."""
    found = []
    for length in first.lengths:
        firsts = [score.of_items for score in first.at(length)]
        seconds = [score.of_items for score in second.at(length)]
        several = len(firsts) > 1
        for task, one, other in zip(first.tasks, firsts, seconds, strict=True):
            found.append(_of_items(f"{task} at {length:,}", one, other, in_table=not several))
        if several:
            means = np.concatenate(firsts), np.concatenate(seconds)
            found.append(_of_items(f"retrieval at {length:,}", *means))
    return found


def _weighted(name: str, first_D: NDArray, second_D: NDArray, tokens_D: NDArray) -> Difference:
    """The means of two sums over the same tokens of documents."""
    asked = tokens_D > 0
    first_D = first_D[asked]
    second_D = second_D[asked]
    tokens_D = tokens_D[asked]
    return Difference(
        name=name,
        first=float(first_D.sum() / tokens_D.sum()),
        second=float(second_D.sum() / tokens_D.sum()),
        interval=paired_bootstrap(first_D / tokens_D, second_D / tokens_D, tokens_D),
        number=len(tokens_D),
        unit="documents",
    )


def _of_items(name: str, first_I: NDArray, second_I: NDArray, in_table: bool = True) -> Difference:
    """The mean scores of the same items."""
    return Difference(
        name=name,
        first=float(first_I.mean()),
        second=float(second_I.mean()),
        interval=paired_bootstrap(first_I, second_I),
        number=len(first_I),
        unit="items",
        in_table=in_table,
    )


COMPARE = {"loss": _of_losses, "gain": _of_gains, "retrieval": _of_retrieval}
