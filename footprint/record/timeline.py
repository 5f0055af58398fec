"""A trace at single moments: bytes by category, the peak of each stage, and the largest tensors.

Sizes are bytes; GiB = 2^30 bytes.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable

from footprint.record.trace import CATEGORIES, Storage, Trace

Sizes = dict[str, int]  # category -> bytes, without the categories that are empty
FIELDS = ("bytes", "category", "stage", "module", "shape", "dtype", "op")  # of a group of tensors
NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")  # of a module in a list


# ---- moments


def peak_times(trace: Trace, group: Callable[[int], Hashable]) -> dict[Hashable, int]:
    """Group of times -> the first time of its peak, in the order in which the groups begin."""
    best: dict[Hashable, tuple[int, int]] = {}
    for time, size in trace.levels():
        name = group(time)
        if name not in best or size > best[name][1]:
            best[name] = time, size
    return {name: time for name, (time, _) in best.items()}


def sizes_at(trace: Trace, times: Iterable[int]) -> dict[int, Sizes]:
    """Time -> category -> bytes alive after its events, the workspace inside them included."""
    inside = trace.inside()
    times = sorted(times)
    found = {}
    for time, alive in zip(times, trace.alive_at(times), strict=True):
        sizes = dict.fromkeys(CATEGORIES, 0)
        for storage in alive:
            sizes[storage.category] += storage.size
        sizes["workspace"] += inside.get(time, 0)
        found[time] = {name: size for name, size in sizes.items() if size}
    return found


def stages_at_peak(trace: Trace) -> dict[str, Sizes]:
    """Stage -> category -> bytes at the stage's largest moment, in the order of the stages."""
    times = peak_times(trace, trace.stage_at)
    sizes = sizes_at(trace, times.values())
    return {stage: sizes[time] for stage, time in times.items()}


def used_categories(groups: Iterable[Sizes]) -> list[str]:
    """The categories that any of the groups has."""
    used = set().union(*groups)
    return [name for name in CATEGORIES if name in used]


# ---- tensors


def alike(storages: list[Storage], count: int) -> list[dict]:
    """The `count` largest groups of storages that differ only by the number of their layer.

    Each has FIELDS, and the "count" of its storages.
    """
    groups: Counter[tuple] = Counter()
    for each in storages:
        module = NUMBER.sub(r"\1*", each.module, count=1)
        key = each.size, each.category, each.stage, module, each.shape, each.dtype, each.op
        groups[key] += 1

    def largest_first(group: tuple[tuple, int]) -> tuple[int, str]:
        (size, *_), number = group
        return -size * number, str(group)

    largest = sorted(groups.items(), key=largest_first)[:count]
    return [dict(zip(FIELDS, key, strict=True), count=number) for key, number in largest]
