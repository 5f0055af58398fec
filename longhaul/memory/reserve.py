"""What the CUDA caching allocator reserves for a training step: what decides whether it fits.

The step is simulated (simulate.py) and its trace replayed through the allocator (allocator.py),
which takes one to three seconds. Of a long response of GRADE a short one is replayed, and what is
reserved for it grows as the live bytes do. Sizes are bytes.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping

from footprint.allocator import OutOfMemory, replay
from footprint.device import Demand
from footprint.trace import Trace
from longhaul.config import TrainConfig
from longhaul.memory import soft
from longhaul.memory.deep import whole_trace
from longhaul.memory.needs import alone, largest, needs, of_memory

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
GROWS = -1  # a capacity: the segments are expandable


def expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether CUDA's allocator has segments that grow: base/installed.py asks for them, unless the
    user has set the allocator otherwise.
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
    return alone(replayed, cfg, ranks, capacity)


def replayed(cfg: TrainConfig, ranks: int, capacity: int) -> int:
    """`reserved`, computed in this process; GROWS as capacity: the segments are expandable, and no
    capacity bounds them.
    """
    trace, scale = stand_in(cfg, ranks)
    if capacity == GROWS:
        return int(scale * replay(trace, expandable=True).peak_reserved)

    # classic segments that are free are given back before the allocator fails
    try:
        return int(scale * replay(trace, capacity=int(capacity / scale)).peak_reserved)
    except OutOfMemory:
        return max(int(scale * replay(trace).peak_reserved), capacity + 1)


def stand_in(cfg: TrainConfig, ranks: int) -> tuple[Trace, float]:
    """A trace of the step on CUDA, and by what its bytes must be multiplied: 1, unless a short
    response of GRADE stands for a long one, of which every token would be simulated.
    """
    cfg = largest(cfg, ranks)
    if not soft.is_long(cfg):
        return whole_trace(cfg, ranks), 1.0
    cfg = of_memory(dataclasses.replace(cfg, device="cuda"))
    live = needs(cfg, cfg.model(), ranks).peak
    *_, (_, short) = soft.profiles(cfg, ranks, "cuda")
    of_trace, _ = short.trace.peak()
    return short.trace, live / of_trace


def demand(cfg: TrainConfig, ranks: int) -> Demand:
    """What one rank's step asks of its GPU."""
    trace, scale = stand_in(cfg, ranks)
    return Demand.of(trace, ranks, scale)
