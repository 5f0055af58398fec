"""One search: for a step of a file or of Hugging Face, and for those of longhaul's programs.

A request is any value; a judge says what it needs on the device that is searched for. Three ways
lead to an answer: the first of several requests that fits, the largest size that fits, and changes
that are added until the request fits. Nothing is run. What is proposed has been predicted whole.

Sizes are bytes unless a name says GiB; GiB = 2^30 bytes.
"""

import enum
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from footprint.cards.allocator import GIB
from footprint.cards.device import SIZES, Placement

AS_ASKED = "as asked"
LEFT_OUT = "; saves nothing, left out"
NEARLY_ALL = 0.995  # of the device: no longer row is looked for
MOST = 2**24  # rows, tokens
FARTHEST = 64  # times the largest size so far is what is tried next

Say = Callable[[str], object]  # shows a line as soon as it is known


def silent(line: str) -> None:
    """Shows nothing."""


class Verdict(enum.Enum):
    """The answer to a request, whose value is the exit code of every program that answers: it fits
    as asked (or need not fit, because no card was named), after a printed change, or by none.
    """

    FITS = 0
    AFTER_CHANGES = 2
    NOTHING = 3

    @property
    def exit_code(self) -> int:
        return self.value


VERDICTS = {
    Placement.FITS: Verdict.FITS,
    Placement.EXPANDABLE: Verdict.AFTER_CHANGES,
    Placement.TOO_SMALL: Verdict.NOTHING,
}


def note_on_size(gib: float) -> str | None:
    """What to say if a number of GiB is what cards are sold as, which have less."""
    name = f"{gib:g} GB"
    if name not in SIZES:
        return None
    has = SIZES[name]
    return f"note: --vram counts GiB, and a card of {name} has {has:g}: give --vram {has:g} for it"


class TooLong(ValueError):
    """A size beyond the largest that a request can have."""

    def __init__(self, words: str, most: int):
        super().__init__(words)
        self.most = most


class Lever(NamedTuple):
    """A change of a request: `pull` returns it changed, or the same request if that is nothing new;
    ValueError if other settings exclude it.
    """

    name: str
    pull: Callable[[Any], Any]
    code: str = ""  # what it is in a script


def pulled(lever: Lever, request: Any) -> Any:
    """The request with the lever, or without it if its settings exclude it."""
    try:
        return lever.pull(request)
    except ValueError:
        return request


class Found(NamedTuple):
    """What a request needs, and whether the device holds it."""

    live: int
    device: int
    placement: Placement
    host: int = 0  # host memory that levers use
    seconds: float = 0.0  # of a step; 0: not known
    fixed: int = 0  # bytes of the device that no size of the request changes; 0: not known
    report: Any = None


def placed(live: int, device: int, room: int, **more: Any) -> Found:
    """What needs so many bytes of a device that has `room`."""
    placement = Placement.FITS if device <= room else Placement.TOO_SMALL
    return Found(live, device, placement, **more)


class Tried(NamedTuple):
    """A request that was judged."""

    name: str
    request: Any
    found: Found

    @property
    def fits(self) -> bool:
        return self.found.placement is not Placement.TOO_SMALL

    @property
    def device(self) -> int:
        return self.found.device

    def as_json(self) -> dict:
        return {
            "name": self.name,
            "peak_live_bytes": self.found.live,
            "device_bytes": self.found.device,
            "placement": self.found.placement,
        }


@dataclass(frozen=True)
class Climbed:
    """Where `Search.climb` has ended, and the levers that led there."""

    best: Tried
    made: list[Lever]


class Search:
    """Judges requests and says what it finds, line by line.

    room: what the device holds. with_costs: the table has columns for host memory and time.
    """

    def __init__(
        self,
        judge: Callable[[Any], Found],
        room: int,
        say: Say = silent,
        with_costs: bool = False,
    ):
        self.judge = judge
        self.room = room
        self.say = say
        self.with_costs = with_costs
        self.width = 54 if with_costs else 34
        self.tried: list[Tried] = []

    def head(self) -> str:
        """The first line of the table."""
        costs = f"{'host':>10}{'step s':>10}" if self.with_costs else ""
        return f"  {'candidate':<{self.width}}{'live':>10}{'device':>12}{costs}"

    def look(self, name: str, request: Any, than: Tried | None = None) -> Tried:
        """Judge a request; `than`: another one, than which it should need less."""
        one = Tried(name, request, self.judge(request))
        self.tried.append(one)
        self.say(self._row(one) + (LEFT_OUT if than and not self._is_gain(one, than) else ""))
        return one

    def _row(self, one: Tried) -> str:
        live, device, host = (size / GIB for size in (one.found.live, one.device, one.found.host))
        costs = f"{host:>10.2f}{one.found.seconds:>10.3g}" if self.with_costs else ""
        return (
            f"  {one.name:<{self.width}}{live:>10.2f}{device:>12.2f}{costs}  {one.found.placement}"
        )

    def _is_gain(self, one: Tried, than: Tried) -> bool:
        return one.fits or one.device < than.device

    def verdict(self, best: Tried | None) -> Verdict:
        """The verdict on what was tried first, as asked; `best` is what answers it."""
        if best is None:
            return Verdict.NOTHING
        fits = self.tried[0].fits and best.found.placement is Placement.FITS
        return Verdict.FITS if fits else Verdict.AFTER_CHANGES

    def first(self, requests: Iterable[tuple[str, Any]]) -> Tried | None:
        """The first of (name, request) that fits."""
        tried = (self.look(name, request) for name, request in requests)
        return next((one for one in tried if one.fits), None)

    def climb(self, asked: Any, levers: Sequence[Lever]) -> Climbed:
        """The request as asked, then with one more lever at a time until it fits.

        One that saves nothing is left out, and tried once more after the others. In the end those
        that it fits without are taken back.
        """
        best = self.look(AS_ASKED, asked)
        made: list[Lever] = []
        left_out: list[Lever] = []
        waiting = list(levers)
        while waiting and not best.fits:
            lever = waiting.pop(0)
            request = pulled(lever, best.request)
            if request == best.request:
                continue
            one = self.look(f"+ {lever.name}", request, best)
            if self._is_gain(one, best):
                best = one
                made.append(lever)
            elif lever not in left_out:
                left_out.append(lever)
                waiting.append(lever)
        return self.trimmed(asked, Climbed(best, made)) if best.fits else Climbed(best, made)

    def trimmed(self, asked: Any, climbed: Climbed) -> Climbed:
        """Without the levers that the request fits without, the dearest first."""
        best, made = climbed.best, climbed.made
        for lever in reversed(climbed.made[:-1]):
            fewer = [one for one in made if one is not lever]
            request = functools.reduce(lambda request, one: pulled(one, request), fewer, asked)
            one = self.look(f"without {lever.name}", request)
            if one.fits:
                best, made = one, fewer
        return Climbed(best, made)

    def largest(
        self, name: str, start: int, at: Callable[[int], Any], bounds: "Bounds"
    ) -> Tried | None:
        """The request at(size) of the largest size that fits; None if none does."""
        tried: dict[int, Tried] = {}
        aim: int | None = start
        while aim is not None:
            try:
                tried[aim] = one = self.look(f"{name} {aim}", at(aim))
            except TooLong as error:
                if not tried:
                    raise
                bounds.most = error.most
            else:
                fixed = one.found.fixed / self.room
                bounds.add(aim, one.device / self.room, one.fits, fixed)
            aim = bounds.next()
        return tried.get(bounds.low)


class Bounds:
    """The largest size that fits and the smallest that does not; says what to try next.

    Memory is nearly a straight line in the size, so that two candidates, or one and what the
    request takes without any size, tell where it meets what the device has. Sizes are multiples of
    `unit`, from `least` to `most`. nearly: whether NEARLY_ALL of the device is enough.
    """

    def __init__(self, unit: int, nearly: bool, least: int = 1, most: int = MOST):
        self.unit = unit
        self.nearly = nearly
        self.goal = (1 + NEARLY_ALL) / 2 if nearly else 1.0  # share of the device that is aimed at
        self.least = least
        self.low = 0  # fits
        self.high = 0  # does not fit; 0: not known
        self.most = most
        self.shares: dict[int, float] = {}  # size -> what it needs of the card
        self.fitted = True  # the last one
        self.same_side = 0  # how many before it ended like it

    def add(
        self,
        size: int,
        share: float,
        fits: bool,
        fixed: float = 0.0,
    ) -> None:
        """A size was tried; `fixed`: the share of the card that is taken whatever the size."""
        self.shares.setdefault(0, min(fixed, share))
        self.shares[size] = share
        self.same_side = self.same_side + 1 if fits == self.fitted else 1
        self.fitted = fits
        if fits:
            self.low = size
        else:
            self.high = size

    def next(self) -> int | None:
        """None if the answer is known: `low`."""
        if self.low == self.most or self._is_near():
            return None
        floor = max(self.low // self.unit * self.unit + self.unit, self.least)
        ceiling = self.high - 1 if self.high else self.most
        if floor > ceiling:
            return None
        aim = max(self._aim() // self.unit * self.unit, floor)
        if aim < ceiling:
            return aim
        return max(ceiling // self.unit * self.unit, floor) if self.high else ceiling

    def _is_near(self) -> bool:
        """Whether no larger size is worth looking for."""
        if not self.nearly or not self.low:
            return False
        narrow = self.high and self.high - self.low <= (1 - NEARLY_ALL) * self.low
        return bool(narrow) or self.shares[self.low] >= NEARLY_ALL

    def _aim(self) -> int:
        if not self.high:  # not too far from what was tried: the peak may move to another stage
            return min(self._crossing(*sorted(self.shares)[-2:]), FARTHEST * self.low)
        if self.same_side > 1:  # the line is too far from straight
            return round(math.sqrt(self.low * self.high)) if self.low else self.high // 8
        return self._crossing(self.low, self.high)

    def _crossing(self, smaller: int, larger: int) -> int:
        """Where the line through two sizes meets the card; nowhere if it does not rise."""
        rise = self.shares[larger] - self.shares[smaller]
        if rise <= 0:
            return MOST
        missing = self.goal - self.shares[smaller]
        return int(smaller + missing * (larger - smaller) / rise)
