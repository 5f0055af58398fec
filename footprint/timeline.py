"""A trace cut into moments: bytes by category, the largest tensors, and the peak of each stage.

Sizes are bytes; GiB = 2^30 bytes.
"""

import re
from collections import Counter
from typing import NamedTuple

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


# ---- moments


def moments(trace: Trace) -> list[Moment]:
    """One moment per time at which something changes; ValueError for a trace without events."""
    sizes = dict.fromkeys(CATEGORIES, 0)
    found = []
    for time, events, inside in trace.by_time():
        for event in events:
            if event.bytes:
                sizes[trace.storages[event.storage].category] += event.bytes
        now = sizes | {"workspace": sizes["workspace"] + inside}
        found.append(Moment(time, tuple(now.values())))
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
    return [name for name in CATEGORIES if any(sizes.get(name) for sizes in stages.values())]


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
    for group in columns(found, count):
        chosen.add(largest(group))
        chosen.add(min(group, key=lambda moment: moment.total))
    return sorted(chosen)


# ---- tensors


def alike(storages: list[Storage], count: int) -> list[dict]:
    """The `count` largest groups of storages that differ only by the number of their layer.

    Each has the fields of one storage, its "bytes", and the "count" of its storages.
    """
    groups: Counter[tuple] = Counter()
    for storage in storages:
        module = NUMBER.sub(r"\1*", storage.module, count=1)
        fields = vars(storage) | {"module": module}
        _, *common = fields.items()
        groups[tuple(common)] += 1

    found = []
    for common, number in groups.items():
        fields = dict(common)
        found.append({"bytes": fields.pop("size"), **fields, "count": number})
    return sorted(found, key=_largest_first)[:count]


def _largest_first(group: dict) -> tuple[int, str]:
    *common, count = group.values()
    return -group["bytes"] * count, str(tuple(common))
