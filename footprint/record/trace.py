"""The record of one training step's memory: what was allocated, when, by whom, when it was freed.

All sizes are bytes; GiB = 2^30 bytes. Time counts events from 0: it orders them and does not
measure seconds.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
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
    stage: str  # the stage in which it was allocated
    # name of the module whose forward, backward or parameter it belongs to; "" outside of all
    module: str
    shape: tuple[int, ...]  # of the first tensor that was seen on it
    dtype: str  # without "torch."
    op: str  # the operator that returned it


@dataclass
class Trace:
    """One step. What was alive before it has events at time 0."""

    events: list[Event] = field(default_factory=list)
    storages: dict[int, Storage] = field(default_factory=dict)
    # (time, the stage that starts then) and (time, the module that runs from then on)
    stages: list[tuple[int, str]] = field(default_factory=list)
    modules: list[tuple[int, str]] = field(default_factory=list)
    # (time, bytes that an operator holds inside during that event only, the operator)
    workspaces: list[tuple[int, int, str]] = field(default_factory=list)
    # stage -> most bytes that levers keep in host memory
    host_peaks: dict[str, int] = field(default_factory=dict)

    @property
    def host_peak(self) -> int:
        """Most bytes that levers keep in host memory at once."""
        return max(self.host_peaks.values(), default=0)

    def at(self, time: int) -> list[Storage]:
        """Storages alive after the events up to and including `time`, largest first."""
        (found,) = self.alive_at([time])
        return sorted(found, key=lambda storage: -storage.size)

    def alive_at(self, times: list[int]) -> Iterator[list[Storage]]:
        """The storages alive at each of ascending times, in one pass over the events."""
        alive: dict[int, int] = {}
        index = 0
        for time in times:
            while index < len(self.events) and self.events[index].time <= time:
                event = self.events[index]
                alive[event.storage] = alive.get(event.storage, 0) + event.bytes
                if not alive[event.storage]:
                    del alive[event.storage]
                index += 1
            yield [self.storages[identity] for identity in alive]

    def stage_at(self, time: int) -> str:
        """The stage that `time` lies in."""
        return name_at(self.stages, time) or "start"

    @property
    def phases(self) -> list[tuple[int, str]]:
        """(time, the phase that starts then)."""
        named = [(time, phase_of(stage)) for time, stage in self.stages]
        return first_of_each(named)

    def module_at(self, time: int) -> str:
        """The module that runs at `time`; "" outside of all."""
        return name_at(self.modules, time)

    def inside(self) -> dict[int, int]:
        """Time -> bytes of the workspace inside its events."""
        sizes: dict[int, int] = {}
        for time, size, _ in self.workspaces:
            sizes[time] = max(sizes.get(time, 0), size)
        return sizes

    def by_time(self) -> Iterator[tuple[int, list[Event], int]]:
        """(time, its events, bytes of the workspace inside them), ascending in time."""
        inside = self.inside()
        for time, events in groupby(self.events, itemgetter(0)):
            yield time, list(events), inside.get(time, 0)

    def levels(self, block: int = 1) -> Iterator[tuple[int, int]]:
        """(time, bytes alive, the workspace of that moment included), ascending in time; each
        storage takes whole blocks of so many bytes.
        """
        sizes: dict[int, int] = {}
        alive = 0
        for time, events, inside in self.by_time():
            for event in events:
                size = sizes.get(event.storage, 0)
                sizes[event.storage] = size + event.bytes
                alive += rounded_up(size + event.bytes, block) - rounded_up(size, block)
            yield time, alive + rounded_up(inside, block)

    def peak(self) -> tuple[int, int]:
        """(bytes, time) of the most bytes alive, workspaces included; zeros if there never were."""
        time, size = max(self.levels(), key=lambda point: point[1], default=(0, 0))
        return size, time

    def peak_by_stage(self) -> dict[str, int]:
        """Most bytes alive within each stage, in the order in which stages first start."""
        peaks: dict[str, int] = {}
        for time, size in self.levels():
            stage = self.stage_at(time)
            peaks[stage] = max(peaks.get(stage, 0), size)
        return peaks


def rounded_up(size: int, multiple: int) -> int:
    """The smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple


def first_of_each(starts: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Where each name starts, without what repeats the name before it."""
    return [next(same) for _, same in groupby(starts, itemgetter(1))]


def phase_of(stage: str) -> str:
    """The last word of a stage's name."""
    return stage.rpartition(" ")[2]


def name_at(starts: list[tuple[int, str]], time: int) -> str:
    """The last name that has started at `time`; "" before the first one."""
    index = bisect.bisect_right(starts, time, key=lambda start: start[0])
    return starts[index - 1][1] if index else ""
