"""The record of one training step's memory: what was allocated, when, by whom, and when it went.
Imports the standard library alone.

All sizes are bytes; GiB = 2^30 bytes. Time counts events from 0: it orders, it does not measure
seconds.
"""

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

CATEGORIES = (
    "parameter",
    "gradient",
    "optimizer",
    "unsharded",
    "activation",
    "temporary",
    "buffer",
    "input",
    "workspace",
)


class Event(NamedTuple):
    """One allocation or release."""

    time: int
    bytes: int  # positive: allocated, negative: freed
    storage: int  # key of Trace.storages


@dataclass
class Storage:
    """One block of memory, shared by all tensors that are views of it."""

    id: int
    size: int  # bytes asked for; an allocator rounds up
    category: str  # one of CATEGORIES
    stage: str  # in which it was born
    module: (
        str  # name of the module whose forward, backward or parameter it belongs to; "" at the top
    )
    shape: tuple[int, ...]  # of the first tensor that was seen on it
    dtype: str  # without "torch."
    op: str  # the operator that returned it


@dataclass
class Trace:
    """One step. What was alive before it has events at time 0; `stages` are (time, name of the
    stage that starts there).
    """

    events: list[Event] = field(default_factory=list)
    storages: dict[int, Storage] = field(default_factory=dict)
    stages: list[tuple[int, str]] = field(default_factory=list)
    modules: list[tuple[int, str]] = field(
        default_factory=list
    )  # (time, name of the module that works from there)
    workspaces: list[tuple[int, int, str]] = field(
        default_factory=list
    )  # (time, bytes alive during that event alone, op)
    config: dict = field(default_factory=dict)  # the settings that were simulated
    host_peaks: dict[str, int] = field(
        default_factory=dict
    )  # stage -> most bytes that levers keep in host memory

    @property
    def host_peak(self) -> int:
        """Most bytes that levers keep in host memory at once."""
        return max(self.host_peaks.values(), default=0)

    def live(self) -> list[int]:
        """Bytes alive after each event, workspaces excluded; sums over `events` in their order."""
        total, out = 0, []
        for event in self.events:
            total += event.bytes
            out.append(total)
        return out

    def at(self, time: int) -> list[Storage]:
        """Storages alive after the events up to and including `time`, largest first."""
        alive: dict[int, int] = {}
        for event in self.events:
            if event.time > time:
                break
            alive[event.storage] = alive.get(event.storage, 0) + event.bytes
        return sorted(
            (self.storages[key] for key, size in alive.items() if size > 0),
            key=lambda storage: -storage.size,
        )

    def stage_at(self, time: int) -> str:
        """The stage that `time` lies in."""
        return _name_at(self.stages, time) or "start"

    def module_at(self, time: int) -> str:
        """The module that works at `time`; "" outside all."""
        return _name_at(self.modules, time)

    def levels(self) -> list[tuple[int, int]]:
        """(time, bytes alive, the workspace of that moment included), ascending in time."""
        points, extra, total = [], {}, 0
        for time, size, _ in self.workspaces:
            extra[time] = max(extra.get(time, 0), size)
        for index, event in enumerate(self.events):
            total += event.bytes
            last = index + 1 == len(self.events) or self.events[index + 1].time != event.time
            points.append((event.time, total + (extra.get(event.time, 0) if last else 0)))
        return points

    def peak(self) -> tuple[int, int]:
        """(bytes, time) of the largest live sum, workspaces included."""
        time, size = max(self.levels(), key=lambda point: point[1])
        return size, time

    def peak_by_stage(self) -> dict[str, int]:
        """Largest live bytes within each stage, in the order in which stages first start."""
        peaks: dict[str, int] = {}
        starts, index, name = self.stages, 0, "start"
        for time, size in self.levels():
            while index < len(starts) and starts[index][0] <= time:
                name, index = starts[index][1], index + 1
            peaks[name] = max(peaks.get(name, 0), size)
        return peaks


def _name_at(starts: list[tuple[int, str]], time: int) -> str:
    index = bisect.bisect_right(starts, time, key=lambda start: start[0])
    return starts[index - 1][1] if index else ""
