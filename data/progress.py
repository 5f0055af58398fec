"""How far a long operation is: a bar with rate and remaining time on a terminal, otherwise a line
every EVERY seconds, so that a log file stays readable. What takes less time prints no line.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from tqdm import tqdm

EVERY = 15.0  # seconds between two lines


class HasText(Protocol):
    """A document, or a part of one."""

    @property
    def num_chars(self) -> int:
        """The characters of its text."""


Text = TypeVar("Text", bound=HasText)
Item = TypeVar("Item")


def shown(
    texts: Iterable[Text],
    what: str,
    total: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Text]:
    """The texts, counted in characters on standard error; `total` is how many there are."""
    if sys.stderr.isatty():
        return _with_bar(texts, what, total)
    return _with_lines(texts, what, total, clock)


def _with_bar(texts: Iterable[Text], what: str, total: int | None) -> Iterator[Text]:
    with tqdm(total=total, desc=what, unit=" characters", unit_scale=True, leave=False) as bar:
        for one in texts:
            yield one
            bar.update(one.num_chars)


def _with_lines(
    texts: Iterable[Text], what: str, total: int | None, clock: Callable[[], float]
) -> Iterator[Text]:
    begin = clock()
    printed = begin
    done = 0
    for one in texts:
        yield one
        done += one.num_chars
        now = clock()
        if now - printed >= EVERY:
            print(line(what, done, total, now - begin), file=sys.stderr, flush=True)
            printed = now


def counted(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    """The items, counted on standard error as `shown` counts texts."""
    with Reached(what, total) as reached:
        for done, one in enumerate(items, 1):
            yield one
            reached.at(done)


class Reached:
    """The same for work that says itself how far it is, in any unit."""

    def __init__(self, what: str, total: int, clock: Callable[[], float] = time.monotonic):
        self.what = what
        self.total = total
        self.clock = clock
        self.printed = clock()
        self.first: tuple[int, float] | None = None  # what was done when it was first asked, when
        self.bar = tqdm(desc=what, total=total, leave=False) if sys.stderr.isatty() else None

    def __enter__(self) -> "Reached":
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def at(self, done: int) -> None:
        """So much is done."""
        if self.bar is not None:
            self.bar.update(done - self.bar.n)
            return
        now = self.clock()
        if self.first is None:
            self.first = done, now
        if now - self.printed < EVERY:
            return
        self.printed = now
        words = f"{self.what}: {done:,} of {self.total:,}"
        before, begin = self.first
        if done > before:
            left = (now - begin) * (self.total - done) / (done - before)
            words += f", about {duration(max(0.0, left))} left"
        print(words, file=sys.stderr, flush=True)


def line(what: str, done: int, total: int | None, seconds: float) -> str:
    """What is done, the rate and, if the total is known, the remaining time, in words."""
    rate = done / seconds
    words = f"{what}: {done / 1e6:,.1f} million characters, {rate / 1e6:.2f} million per second"
    if not total or not done:
        return words
    left = (total - done) / rate
    return f"{words}, {done / total:.0%} done, about {duration(left)} left"


def duration(seconds: float) -> str:
    """A time in the unit in which a person reads it: 0.35 s, 170 s, 12 min, 47 h, 12 days."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 180:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 72 * 3600:
        return f"{seconds / 3600:.0f} h"
    days = seconds / 86400
    return f"{days:,.0f} days" if days < 36525 else "over 100 years"
