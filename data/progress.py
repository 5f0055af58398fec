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

    text: str


Text = TypeVar("Text", bound=HasText)


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
            bar.update(len(one.text))


def _with_lines(
    texts: Iterable[Text], what: str, total: int | None, clock: Callable[[], float]
) -> Iterator[Text]:
    begin = clock()
    printed = begin
    done = 0
    for one in texts:
        yield one
        done += len(one.text)
        now = clock()
        if now - printed >= EVERY:
            print(line(what, done, total, now - begin), file=sys.stderr, flush=True)
            printed = now


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
