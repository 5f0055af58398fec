"""What the CUDA caching allocator reserves for a training step: what decides whether it fits.

Sizes are bytes.
"""

import os
from collections.abc import Mapping

from footprint.cards.device import Demand, Placement, beyond_the_allocator, runs_within
from longhaul.config import TrainConfig
from longhaul.planner.needs import Needs, alone, demand

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether CUDA's allocator has segments that grow: base/installed.py asks for them, unless the
    user has set the allocator otherwise.
    """
    values = [environment.get(name, "") for name in ALLOCATOR_SETTINGS]
    return any("expandable_segments:true" in value.lower() for value in values)


def reserved(
    found: Needs,
    cfg: TrainConfig,
    ranks: int,
    device_bytes: int,
) -> int:
    """What one rank's allocator reserves at most during a step on a device of that size; classic
    segments that are free are given back before the allocator fails.
    """
    if expandable_segments():
        return found.expandable
    room = device_bytes - sum(beyond_the_allocator(ranks).values())
    if found.classic > room > found.peak and alone(_runs, cfg, ranks, device_bytes):
        return room
    return found.classic


def placement(asked: Demand, device_bytes: int) -> Placement:
    """Whether a device of that size holds a step of ours. Segments that grow are no change of it:
    every command asks for them.
    """
    found = asked.placement(device_bytes)
    if found is Placement.EXPANDABLE and expandable_segments():
        return Placement.FITS
    return found


def _runs(
    cfg: TrainConfig,
    ranks: int,
    device_bytes: int,
) -> bool:
    """Whether classic segments hold the step."""
    one = demand(cfg, ranks)
    return runs_within(one.trace, device_bytes, ranks)
