"""Of a step that is not longhaul's: the most rows or tokens that a card holds, and which changes
make the step fit it. Every candidate is predicted, none is run.

Sizes are bytes unless a name says GiB; GiB = 2^30 bytes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from footprint import Report
from footprint.device import HALF_SINCE, Card, Placement
from longhaul.memory.fit import AS_ASKED, Verdict
from longhaul.memory.hugging_face import TooLong
from model import GIB

# A request is the dataclass of the door's flags.
Predicted = Callable[[Any], Report]
Say = Callable[[str], object]  # shows a line as soon as it is known

UNITS = {"batch": 1, "seq": 64}  # rows, tokens: what is solved for is a multiple
NEARLY_ALL = 0.995  # of the device: no longer row is looked for
MOST = 2**24  # rows, tokens
FARTHEST = 8  # times the largest size so far is what is tried next


@dataclass(frozen=True)
class Tried:
    """A candidate and its prediction."""

    name: str
    request: Any
    report: Report
    placement: Placement

    @classmethod
    def of(cls, name: str, request: Any, room: int, predicted: Predicted) -> "Tried":
        report = predicted(request)
        return cls(name, request, report, report.demand.placement(room))

    @property
    def fits(self) -> bool:
        return self.placement is not Placement.TOO_SMALL

    @property
    def device(self) -> int:
        """What the card must hold at least."""
        return self.report.demand.least_bytes

    def row(self) -> str:
        live, device = self.report.peak / GIB, self.device / GIB
        return f"  {self.name:<34}{live:>10.2f}{device:>12.2f}  {self.placement}"

    def as_json(self) -> dict:
        return {
            "name": self.name,
            "peak_live_bytes": self.report.peak,
            "device_bytes": self.device,
            "placement": self.placement,
        }


@dataclass(frozen=True)
class Found:
    """What was tried, and the candidate that answers; None if nothing fits."""

    tried: list[Tried]
    answer: Tried | None
    verdict: Verdict
    words: str  # the answer in one line

    @property
    def report(self) -> Report:
        """The answer's prediction; if nothing fits, that of the smallest candidate."""
        if self.answer:
            return self.answer.report
        return min(self.tried, key=lambda one: one.device).report

    def as_json(self) -> dict:
        """Plain values, without the report."""
        answer = self.answer.request if self.answer else None
        return {
            "verdict": self.verdict.exit_code,
            "answer": dataclasses.asdict(answer) if answer else None,
            "tried": [one.as_json() for one in self.tried],
        }


def _head(card: Card) -> str:
    title = f"on {card.name} ({card.gib:g} GiB); all figures predicted, GiB"
    return f"{title}\n  {'candidate':<34}{'live':>10}{'device':>12}"


# ---- the largest size


def solve(asked: Any, name: str, card: Card, predicted: Predicted, say: Say) -> Found:
    """The largest value of the flag `name`, "batch" or "seq", with which the step fits the card."""
    room = int(card.gib * GIB)
    say(_head(card))
    tried: dict[int, Tried] = {}
    bounds = _Bounds(UNITS[name], name == "seq")
    aim: int | None = getattr(asked, name)
    while aim is not None:
        request = dataclasses.replace(asked, **{name: aim})
        try:
            one = Tried.of(f"--{name} {aim}", request, room, predicted)
        except TooLong as error:
            if not tried:
                raise
            bounds.most = error.positions
            aim = bounds.next()
            continue
        say(one.row())
        tried[aim] = one
        bounds.add(aim, one.device / room, one.fits)
        aim = bounds.next()

    candidates = list(tried.values())
    if not bounds.low:
        return Found(candidates, None, Verdict.NOTHING, f"not even --{name} {min(tried)} fits")
    best = tried[bounds.low]
    verdict = _verdict(best, candidates[0].fits)
    limit = _limit(bounds)
    words = f"the largest --{name} that fits: {bounds.low:,}{limit}{_segments(best)}"
    return Found(candidates, best, verdict, words)


def _limit(bounds: "_Bounds") -> str:
    """Why no larger size was tried, if it is not for the card."""
    if bounds.low != bounds.most:
        return ""
    return " (no more are tried)" if bounds.most == MOST else " (the model has no more positions)"


def _verdict(best: Tried, as_asked: bool) -> Verdict:
    """The verdict of the best candidate; `as_asked`: whether the request fits as it is."""
    fits = as_asked and best.placement is Placement.FITS
    return Verdict.FITS if fits else Verdict.AFTER_CHANGES


def _segments(one: Tried) -> str:
    """What else has to be set for a candidate that fits."""
    if one.placement is not Placement.EXPANDABLE:
        return ""
    return ", with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


class _Bounds:
    """The largest size that fits and the smallest that does not; says what to try next.

    Memory is nearly a straight line in the size, so that two candidates tell where it meets what
    the card has.
    """

    def __init__(self, unit: int, nearly: bool):
        self.unit = unit
        self.nearly = nearly  # whether NEARLY_ALL of the card is enough
        self.low = 0  # fits
        self.high = 0  # does not fit; 0: not known
        self.most = MOST
        self.shares: dict[int, float] = {}  # size -> what it needs of the card
        self.fitted = True  # the last one
        self.same_side = 0  # how many before it ended like it

    def add(self, size: int, share: float, fits: bool) -> None:
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
        floor = self.low // self.unit * self.unit + self.unit
        ceiling = self.high - 1 if self.high else self.most
        if floor > ceiling:
            return None
        aim = max(self._aim() // self.unit * self.unit, floor)
        if aim < ceiling:
            return aim
        return ceiling // self.unit * self.unit if self.high else ceiling

    def _is_near(self) -> bool:
        """Whether no larger size is worth looking for."""
        if not self.nearly or not self.low:
            return False
        narrow = self.high and self.high - self.low <= (1 - NEARLY_ALL) * self.low
        return bool(narrow) or self.shares[self.low] >= NEARLY_ALL

    def _aim(self) -> int:
        if not self.high:
            return self._beyond()
        if not self.low:
            return self.high // 2
        if self.same_side > 1:  # the line is too far from straight
            return round(math.sqrt(self.low * self.high))
        return self._crossing(self.low, self.high)

    def _beyond(self) -> int:
        """Where the line through the two largest sizes meets the card, but not too far from them:
        the peak may move to another stage.
        """
        sizes = sorted(self.shares)
        if len(sizes) == 1 or self.shares[sizes[-2]] >= self.shares[sizes[-1]]:
            return FARTHEST * self.low
        return min(self._crossing(*sizes[-2:]), FARTHEST * self.low)

    def _crossing(self, smaller: int, larger: int) -> int:
        rise = self.shares[larger] - self.shares[smaller]
        missing = 1 - self.shares[smaller]
        return int(smaller + missing * (larger - smaller) / rise)


# ---- changes


class Change(NamedTuple):
    """A change of a training, cheapest first; `code`: what it is in a script."""

    name: str
    code: str
    settings: dict


FUSED = Change("AdamW fused", "torch.optim.AdamW(..., fused=True)", dict(optimizer="adamw_fused"))
AUTOCAST = Change(
    "autocast to bf16",
    'with torch.autocast("cuda", torch.bfloat16): the forward and the loss',
    dict(autocast="bf16"),
)
CHECKPOINTING = Change(
    "gradient checkpointing",
    "model.gradient_checkpointing_enable()",
    dict(checkpointing=True),
)
EIGHT_BIT = Change(
    "AdamW with 8-bit states",
    "an AdamW that stores its moments in 8 bits",
    dict(optimizer="adamw_8bit"),
)


def changes(asked: Any, card: Card) -> Iterator[Change]:
    """What can be changed, the cheapest first."""
    if asked.optimizer == "adamw":
        yield FUSED
    if asked.dtype == "fp32" and asked.autocast == "none" and card.cc >= HALF_SINCE:
        yield AUTOCAST
    if not asked.checkpointing:
        yield CHECKPOINTING
    if asked.optimizer in ("adamw", "adamw_fused"):
        yield EIGHT_BIT
    rows = asked.batch
    while rows > 1:
        rows //= 2
        code = f"micro-batches of {rows} rows: more of them make a step"
        yield Change(f"{rows} rows of a micro-batch", code, dict(batch=rows))
    ranks = 2 * asked.fsdp
    while ranks <= asked.gpus:
        yield Change(f"FSDP2 over {ranks} GPUs", "fully_shard", dict(fsdp=ranks))
        ranks *= 2


def advise(asked: Any, card: Card, predicted: Predicted, say: Say) -> Found:
    """Add changes until the step fits the card. One that makes it larger is left out, and tried
    once more at the end.
    """
    room = int(card.gib * GIB)
    say(_head(card))
    best = Tried.of(AS_ASKED, asked, room, predicted)
    say(best.row())
    tried = [best]
    made: list[Change] = []
    left_out: list[Change] = []
    waiting = list(changes(asked, card))
    while waiting and not best.fits:
        change = waiting.pop(0)
        request = dataclasses.replace(best.request, **change.settings)
        one = Tried.of(f"+ {change.name}", request, room, predicted)
        tried.append(one)
        if one.device > best.device:
            say(f"{one.row()}; larger, left out")
            if change not in left_out:  # once more, after the others
                left_out.append(change)
                waiting.append(change)
            continue
        say(one.row())
        best = one
        made.append(change)

    if not best.fits:
        words = "no change is enough: give --gpus, --seq or --vram"
        return Found(tried, None, Verdict.NOTHING, words)
    rows = ["fits after these changes:" if made else "fits as asked"]
    rows += [f"  {change.name}: {change.code}" for change in made]
    words = "\n".join(rows) + _segments(best)
    return Found(tried, best, _verdict(best, not made), words)
