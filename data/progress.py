"""How far a long operation is, by tqdm on standard error, and a time in words. In a log file the
bar is written every EVERY seconds only, and never for what takes less time.
"""

import sys
from collections.abc import Iterable, Iterator

from tqdm import tqdm

EVERY = 15.0  # seconds


def bar(what: str, total: float | None, done: int = 0, **settings: object) -> tqdm:
    """A bar that begins at `done` of `total`; `settings` as in tqdm."""
    if not sys.stderr.isatty():
        settings |= {"mininterval": EVERY, "delay": EVERY}
    return tqdm(desc=what, total=total, initial=done, leave=False, **settings)


def shown(texts: Iterable, what: str, total: int | None = None) -> Iterator:
    """The texts, whose `num_chars` are counted; `total` is how many characters there are."""
    with bar(what, total, unit=" characters", unit_scale=True) as progress:
        for one in texts:
            yield one
            progress.update(one.num_chars)


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
