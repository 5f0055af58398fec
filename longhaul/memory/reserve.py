"""What the CUDA caching allocator reserves for a training step: what decides whether it fits.

The step is simulated (simulate.py) and its trace replayed through the allocator (allocator.py),
which takes one to three seconds. Sizes are bytes.
"""

import functools
import multiprocessing
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor

import torch

from longhaul.config import TrainConfig
from longhaul.memory.allocator import OutOfMemory, replay
from longhaul.memory.deep import whole_trace

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
GROWS = -1  # a capacity: the segments are expandable


def expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether CUDA's allocator has segments that grow: installed.py asks for them, unless the user
    has set the allocator otherwise.
    """
    values = [environment.get(name, "") for name in ALLOCATOR_SETTINGS]
    return any("expandable_segments:true" in value.lower() for value in values)


def reserved(cfg: TrainConfig, ranks: int, capacity: int) -> int:
    """What one rank's allocator reserves at most during a step, on a device that has `capacity`
    left for it; more than `capacity` if the step does not fit.
    """
    return _reserved(cfg, ranks, GROWS if expandable_segments() else capacity)


@functools.lru_cache(maxsize=64)
def _reserved(cfg: TrainConfig, ranks: int, capacity: int) -> int:
    if not torch.distributed.is_initialized():
        return replayed(cfg, ranks, capacity)

    # a process has one default group, and the simulation of several ranks needs a fake one
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(replayed, cfg, ranks, capacity).result()


def replayed(cfg: TrainConfig, ranks: int, capacity: int) -> int:
    """`reserved`, computed in this process; GROWS as capacity: the segments are expandable, and no
    capacity bounds them.
    """
    trace = whole_trace(cfg, ranks)
    if capacity == GROWS:
        return replay(trace, expandable=True).peak_reserved

    # classic segments that are free are given back before the allocator fails
    try:
        return replay(trace, capacity=capacity).peak_reserved
    except OutOfMemory:
        return max(replay(trace).peak_reserved, capacity + 1)
