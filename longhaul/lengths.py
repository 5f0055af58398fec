"""What --length_schedule and --schedule say. --length_schedule is training at one context length
after the other, such as 4096:1000,32768:500:2e6,131072:200, which is LENGTH:STEPS[:THETA] for each
stage.

Length and rotary base grow together: without a THETA of its own, a stage has the base of the stage
before it times the ratio of their lengths. Four times the length at an unchanged base was not
learned within 16 steps; doubling both was learned at once.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

WANTED = "give LENGTH:STEPS or LENGTH:STEPS:THETA for each stage, such as 4096:1000,32768:500:2e6"


class Length(NamedTuple):
    """A stage: tokens of a row, optimizer steps, and its rotary base if one is given."""

    tokens: int
    steps: int
    theta: float | None


def parse(text: str) -> tuple[Length, ...]:
    """The stages of a schedule; none for an empty text.

    ValueError for a word that is no stage, and unless lengths rise and each divides the longest.
    """
    if not text:
        return ()
    lengths = tuple(_parse_stage(word) for word in text.split(","))
    for before, after in zip(lengths, lengths[1:], strict=False):
        if after.tokens <= before.tokens:
            raise ValueError(
                f"--length_schedule {text}: {after.tokens} comes after {before.tokens}: give "
                "lengths that rise"
            )

    longest = lengths[-1].tokens
    for length in lengths:
        if longest % length.tokens:
            raise ValueError(
                f"--length_schedule {text}: {length.tokens} does not divide {longest}, so that a "
                "step could not have the same number of tokens at both: give lengths that divide "
                "the longest"
            )
    return lengths


def _parse_stage(word: str) -> Length:
    found = re.fullmatch(r"(\d{1,12}):(\d{1,12})(?::([0-9.e+]{1,20}))?", word)
    if found is None:
        raise ValueError(f"--length_schedule {word[:60]!r} is no stage: {WANTED}")

    tokens = int(found[1])
    steps = int(found[2])
    if tokens < 2 or steps < 1:
        raise ValueError(
            f"--length_schedule {word}: a stage has at least 2 tokens and 1 step: {WANTED}"
        )
    return Length(tokens, steps, _parse_theta(word, found[3]))


def _parse_theta(word: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        theta = float(text)
    except ValueError:
        theta = math.nan
    if not 1 < theta < math.inf:
        raise ValueError(
            f"--length_schedule {word}: the rotary base is {text}: give a number above 1"
        )
    return theta


def thetas(lengths: Sequence[Length], first: float, proportional: bool) -> list[float]:
    """The rotary base of each stage, `first` being that of the model.

    proportional: a stage without a base has that of the stage before it times the ratio of their
    lengths, otherwise the same one.
    """
    found = [lengths[0].theta or first]
    for before, length in zip(lengths, lengths[1:], strict=False):
        ratio = length.tokens / before.tokens if proportional else 1.0
        found.append(length.theta or found[-1] * ratio)
    return found


# ---- the learning rate


class RateSchedule(NamedTuple):
    """What --schedule says."""

    kind: str
    decay_fraction: float = 0.2  # of wsd
    min_ratio: float = 0.1  # final learning rate / peak

    def in_words(self) -> str:
        """The one spelling of its numbers."""
        if self == RateSchedule(self.kind):
            return self.kind
        numbers = [str(getattr(self, name)) for name in RATE_SCHEDULES[self.kind]]
        return ":".join([self.kind, *numbers])


# The numbers that may follow the kind.
RATE_SCHEDULES = {
    "cosine": ("min_ratio",),
    "wsd": ("decay_fraction", "min_ratio"),
    "constant": (),
}


def rate_schedule(text: str) -> RateSchedule:
    """--schedule, such as wsd:0.2; ValueError for others."""
    kind, *words = text.split(":")
    names = RATE_SCHEDULES.get(kind, ())
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = [math.nan]
    is_known = kind in RATE_SCHEDULES and len(numbers) <= len(names)
    if not is_known or not all(0 <= number <= 1 for number in numbers):
        raise ValueError(
            f"--schedule {text[:40]} is unknown: give cosine[:MIN], wsd[:DECAY[:MIN]] or constant, "
            "with numbers from 0 to 1"
        )
    return RateSchedule(kind, **dict(zip(names, numbers, strict=False)))


# ---- the lengths of an evaluation


def numbers(flag: str, words: str) -> tuple[int, ...]:
    """The numbers of `words`, rising; ValueError naming the flag for another word."""
    found = words.split(",")
    for word in found:
        if not re.fullmatch(r"[1-9]\d{0,11}", word.strip()):
            raise ValueError(
                f"{flag} {words[:60]} has {word[:20]!r}: give numbers of tokens, such as 4096,8192"
            )
    return tuple(sorted({int(word) for word in found}))


def doublings(shortest: int, longest: int) -> tuple[int, ...]:
    """`shortest`, twice that, and so on up to `longest`; only `longest` if it is shorter."""
    first = min(shortest, longest)
    count = (longest // first).bit_length()
    return tuple(first * 2**power for power in range(count))
