"""What is known of a script's memory: the report on its steady step, the peaks of the phases before
it, and whether a card holds all of them. Sizes are bytes; GiB = 2^30 bytes.
"""

from dataclasses import dataclass, field

from footprint.answers.report import Report
from footprint.cards.allocator import GIB, of_step, replay
from footprint.cards.device import (
    Card,
    Demand,
    Placement,
    cublas_size,
    multiplying_threads,
    with_cublas,
)
from footprint.record.trace import Trace, name_at

BUILDING = "building and loading"
EVALUATION = "evaluation before the first step"
FIRST = "first step"
STEADY = "steady step"
HOST = "host memory"
NOT_SEEN = "later evaluation, generation and saving: the script was ended after its recorded step"
# from the one that fits best
ORDER = (Placement.FITS, Placement.EXPANDABLE, Placement.TOO_SMALL)


class Phases:
    """Which phase of a script runs, and the most bytes of each that is over."""

    def __init__(self, card: Card | None):
        self.card = card
        self.current = BUILDING
        self.starts = [(0, BUILDING)]  # (time, the phase that starts then)
        self.peaks: dict[str, int] = {}
        self.host_peak = 0

    def enter(self, phase: str, time: int) -> bool:
        """A phase runs from now on; whether it is another one."""
        is_other = phase != self.current
        if is_other:
            self.starts.append((time + 1, phase))
            self.current = phase
        return is_other

    def close(self, trace: Trace) -> None:
        """Note the peaks of a trace, which is over; the next one starts with the steady step."""
        self.host_peak = max(self.host_peak, trace.host_peak)
        threads = multiplying_threads(trace) if self.card else set()
        beside = len(threads) * cublas_size(self.card.cc) if threads else 0
        for time, size in trace.levels():
            phase = name_at(self.starts, time)
            held = size if phase == BUILDING else size + beside
            self.peaks[phase] = max(self.peaks.get(phase, 0), held)
        self.starts = [(0, STEADY)]
        self.current = STEADY


def demand_before(trace: Trace, card: Card, ranks: int) -> Demand:
    """What a script asks of a GPU before its steady step, which comes once."""
    trace = with_cublas(of_step(trace), multiplying_threads(trace), card.cc)
    classic = replay(trace, steps=1)
    return Demand(trace, ranks, classic, replay(trace, expandable=True, steps=1))


@dataclass
class ScriptReport(Report):
    """The memory of one rank of a script. Its tables are of the steady step; whether a card holds
    it is a question about all phases.
    """

    phases: dict[str, int] = field(default_factory=dict)  # phase -> most bytes alive
    before: list[Demand] = field(default_factory=list)  # of what ran before the steady step
    segments_grow: bool = False  # whether the script asks for expandable segments itself

    def placement(self, device_bytes: int) -> Placement:
        demands = [self.demand, *self.before]
        found = [demand.placement(device_bytes) for demand in demands]
        worst = max(found, key=ORDER.index)
        if worst is Placement.EXPANDABLE and self.segments_grow:
            return Placement.FITS
        return worst

    @property
    def least_bytes(self) -> int:
        """What the device must hold at least."""
        return max(demand.least_bytes for demand in [self.demand, *self.before])

    def __str__(self) -> str:
        rows = [super().__str__(), "", "phases, live GiB at the peak of each:"]
        rows += [f"  {phase:<34}{size / GIB:>10.3f}" for phase, size in self.phases.items()]
        rows.append(f"not seen: {NOT_SEEN}")
        return "\n".join(rows)

    def json(self) -> dict:
        return super().json() | {"phases": self.phases, "not_seen": NOT_SEEN}
