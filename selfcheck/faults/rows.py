"""What a row of the fault matrix is: a fault, what must happen, and the check that injects it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class Failed(AssertionError):
    """The fault was injected, and what must happen did not."""


@dataclass(frozen=True)
class Row:
    """One fault. `check(trials, empty_folder)` gives the outcome in words, or raises Failed with
    what went wrong.
    """

    number: int
    fault: str
    must: str
    check: Callable[[int, Path], str]
    trials: int = 1  # in CI
    full: int = 1  # with --full


def require(held: bool, words: str):
    """Failed with `words` unless `held`."""
    if not held:
        raise Failed(words)
