"""A trace cut into moments: what is alive by category, which tensors are largest, what each stage
peaks at.

Sizes are bytes; GiB = 2^30 bytes. Imports longhaul.memory (allocator, trace) of ours.
"""

import dataclasses
import re
from typing import NamedTuple

from longhaul.memory.allocator import step_events
from longhaul.memory.trace import CATEGORIES, Storage, Trace


class Moment(NamedTuple):
    """Bytes alive after the events of one time, in the order of CATEGORIES; the workspace of that
    time is among them.
    """

    time: int
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.sizes)


def of_step(trace: Trace) -> Trace:
    """The trace without what follows the step, where the model itself goes."""
    return dataclasses.replace(trace, events=step_events(trace))


def moments(trace: Trace) -> list[Moment]:
    """One moment per time at which something changes."""
    sizes, found, inside = dict.fromkeys(CATEGORIES, 0), [], {}
    for time, size, _ in trace.workspaces:
        inside[time] = max(inside.get(time, 0), size)
    for index, event in enumerate(trace.events):
        if event.bytes:
            sizes[trace.storages[event.storage].category] += event.bytes
        if index + 1 == len(trace.events) or trace.events[index + 1].time != event.time:
            found.append(
                Moment(
                    event.time, tuple((sizes | dict(workspace=inside.get(event.time, 0))).values())
                )
            )
    if not found:
        raise ValueError("the trace has no events: nothing was recorded that a picture could show")
    return found


def largest(found: list[Moment]) -> Moment:
    """The first moment of the peak."""
    return max(found, key=lambda moment: moment.total)


def columns(found: list[Moment], count: int) -> list[list[Moment]]:
    """The moments in at most `count` groups of equal duration, empty ones left out."""
    width = (found[-1].time + 1 - found[0].time) / count
    groups: dict[int, list[Moment]] = {}
    for moment in found:
        groups.setdefault(int((moment.time - found[0].time) / width), []).append(moment)
    return list(groups.values())


def sampled(found: list[Moment], count: int) -> list[Moment]:
    """At most 2 * count + 2 moments: the first, the last, and of each group its smallest and its
    largest, so that no peak is lost.
    """
    kept = {found[0], found[-1], largest(found)}
    for group in columns(found, count):
        kept |= {largest(group), min(group, key=lambda moment: moment.total)}
    return sorted(kept)


def alike(storages: list[Storage], count: int) -> list[dict]:
    """The largest groups of storages that differ by their layer's number alone: bytes of one, how
    many, and their names.
    """
    groups: dict[tuple, int] = {}
    for storage in storages:
        key = (
            storage.size,
            storage.category,
            storage.stage,
            re.sub(r"^layers\.\d+", "layers.*", storage.module),
            storage.shape,
            storage.dtype,
            storage.op,
        )
        groups[key] = groups.get(key, 0) + 1
    ordered = sorted(groups.items(), key=lambda group: (-group[0][0] * group[1], str(group[0])))
    names = ("bytes", "category", "stage", "module", "shape", "dtype", "op")
    return [dict(zip(names, key)) | dict(count=number) for key, number in ordered[:count]]


def alive_at(trace: Trace, times: list[int]):
    """(time, storages alive) for ascending times, in one pass."""
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


def stages_at_peak(trace: Trace, found: list[Moment]) -> dict[str, dict[str, int]]:
    """Stage -> category -> bytes at the stage's largest moment; stages in the order in which they
    first start.
    """
    best: dict[str, Moment] = {}
    for moment in found:
        stage = trace.stage_at(moment.time)
        if stage not in best or moment.total > best[stage].total:
            best[stage] = moment
    return {stage: by_name(moment) for stage, moment in best.items()}


def by_name(moment: Moment) -> dict[str, int]:
    """Category -> bytes, those without any left out."""
    return {name: size for name, size in zip(CATEGORIES, moment.sizes) if size}
