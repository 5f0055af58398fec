"""How far a long operation is: a bar with rate and remaining time on a terminal, otherwise a line
every EVERY seconds, so that a log file stays readable. What takes less time prints no line.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator

from tqdm import tqdm

from data.sources import Document

EVERY = 15.0  # seconds between two lines


def shown(
    documents: Iterable[Document],
    what: str,
    total: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Document]:
    """The documents, counted in characters on standard error; `total` is how many there are."""
    if sys.stderr.isatty():
        return _with_bar(documents, what, total)
    return _with_lines(documents, what, total, clock)


def _with_bar(documents: Iterable[Document], what: str, total: int | None) -> Iterator[Document]:
    with tqdm(total=total, desc=what, unit=" characters", unit_scale=True, leave=False) as bar:
        for document in documents:
            yield document
            bar.update(len(document.text))


def _with_lines(
    documents: Iterable[Document], what: str, total: int | None, clock: Callable[[], float]
) -> Iterator[Document]:
    begin = clock()
    printed = begin
    done = 0
    for document in documents:
        yield document
        done += len(document.text)
        now = clock()
        if now - printed >= EVERY:
            print(line(what, done, total, now - begin), file=sys.stderr, flush=True)
            printed = now


def line(what: str, done: int, total: int | None, seconds: float) -> str:
    """What is done, the rate and, if the total is known, the remaining time, in words."""
    rate = done / seconds
    words = f"{what}: {done / 1e6:,.1f} million characters, {rate / 1e6:.2f} million per second"
    if total is None:
        return words
    left = (total - done) / rate
    return f"{words}, {done / total:.0%} done, about {_duration(left)} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
