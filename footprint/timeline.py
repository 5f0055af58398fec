"""A trace cut into moments: bytes by category, the largest tensors, and the peak of each stage.

Sizes are bytes; GiB = 2^30 bytes.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from footprint.allocator import ends_a_moment, largest_workspaces, step_events
from footprint.trace import CATEGORIES, Storage, Trace

Sizes = dict[str, int]  # category -> bytes
NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")  # of a module in a list


class Moment(NamedTuple):
    """Bytes alive after the events of one time, in the order of CATEGORIES, workspace included."""

    time: int
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.sizes)


def of_step(trace: Trace) -> Trace:
    """The trace without what follows the step, when the model itself is dropped."""
    return dataclasses.replace(trace, events=step_events(trace))


# ---- moments


def moments(trace: Trace) -> list[Moment]:
    """One moment per time at which something changes; ValueError for a trace without events."""
    workspaces = largest_workspaces(trace)
    sizes = dict.fromkeys(CATEGORIES, 0)
    found = []
    for index, event in enumerate(trace.events):
        if event.bytes:
            sizes[trace.storages[event.storage].category] += event.bytes

        if ends_a_moment(trace.events, index):
            inside = workspaces.get(event.time, 0)
            now = sizes | {"workspace": sizes["workspace"] + inside}
            found.append(Moment(event.time, tuple(now.values())))
    if not found:
        raise ValueError("the trace has no events: nothing was recorded, so record a step first")
    return found


def largest(found: list[Moment]) -> Moment:
    """The first moment of the peak."""
    return max(found, key=lambda moment: moment.total)


def by_name(moment: Moment) -> Sizes:
    """Category -> bytes, without the categories that are empty."""
    named = zip(CATEGORIES, moment.sizes, strict=True)
    return {name: size for name, size in named if size}


def stages_at_peak(trace: Trace, found: list[Moment]) -> dict[str, Sizes]:
    """Stage -> category -> bytes at the stage's largest moment, in the order of the stages."""
    best: dict[str, Moment] = {}
    for moment in found:
        stage = trace.stage_at(moment.time)
        if stage not in best or moment.total > best[stage].total:
            best[stage] = moment
    return {stage: by_name(moment) for stage, moment in best.items()}


def used_categories(stages: dict[str, Sizes]) -> list[str]:
    """The categories that any stage has."""
    used = set()
    for sizes in stages.values():
        used |= {name for name, size in sizes.items() if size}
    return [name for name in CATEGORIES if name in used]


# ---- fewer moments, for a picture


def columns(found: list[Moment], count: int) -> list[list[Moment]]:
    """The moments in at most `count` groups of equal duration, without empty groups."""
    first = found[0].time
    width = (found[-1].time + 1 - first) / count
    groups: dict[int, list[Moment]] = {}
    for moment in found:
        column = int((moment.time - first) / width)
        groups.setdefault(column, []).append(moment)
    return list(groups.values())


def sampled(found: list[Moment], count: int) -> list[Moment]:
    """At most 2 * count + 2 moments, without losing a peak.

    The first, the last, and of each group the smallest and the largest.
    """
    chosen = {found[0], found[-1]}
    chosen.add(largest(found))
    for group in columns(found, count):
        chosen.add(largest(group))
        chosen.add(min(group, key=lambda moment: moment.total))
    return sorted(chosen)


# ---- tensors


class Alike(NamedTuple):
    """What storages of one group have in common; layers are counted, not listed."""

    bytes: int
    category: str
    stage: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    op: str


def alike(storages: list[Storage], count: int) -> list[dict]:
    """The `count` largest groups of storages that differ only by the number of their layer.

    Each has the fields of `Alike`, for one storage, and the "count" of its storages.
    """
    groups: dict[Alike, int] = {}
    for storage in storages:
        module = NUMBER.sub(r"\1*", storage.module, count=1)
        key = Alike(
            storage.size,
            storage.category,
            storage.stage,
            module,
            storage.shape,
            storage.dtype,
            storage.op,
        )
        groups[key] = groups.get(key, 0) + 1

    ordered = sorted(groups.items(), key=_largest_first)
    return [key._asdict() | {"count": number} for key, number in ordered[:count]]


def _largest_first(group: tuple[Alike, int]) -> tuple[int, str]:
    key, number = group
    return -key.bytes * number, str(tuple(key))


def alive_at(trace: Trace, times: list[int]) -> Iterator[tuple[int, list[Storage]]]:
    """(time, storages alive) for ascending times, in one pass over the events."""
    alive: dict[int, int] = {}
    index = 0
    for time in times:
        while index < len(trace.events) and trace.events[index].time <= time:
            event = trace.events[index]
            alive[event.storage] = alive.get(event.storage, 0) + event.bytes
            if not alive[event.storage]:
                del alive[event.storage]
            index += 1
        yield time, [trace.storages[key] for key in alive]
