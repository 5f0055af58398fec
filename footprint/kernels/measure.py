"""What the allocator itself records while a function runs."""

import gc
import os
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile, record_function

LAST = "the last step"  # the name of its record


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Peak of the bytes allocated while `function()` runs, above what was allocated before; what
    operators take inside counts.

    CUDA: the caching allocator's own peak. CPU: the allocator's events, which the profiler records.
    """
    if device.type != "cuda":
        return peak_of_last(lambda: None, lambda _: function())
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = function()
    torch.cuda.synchronize(device)
    del result  # not freed before the device has finished
    return torch.cuda.max_memory_allocated(device) - before


def saved_bytes(function: Callable[[], object]) -> int:
    """Bytes of distinct storages that autograd keeps for the backward of `function()`."""
    sizes = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        result = function()
    del result  # no storage is freed, and its address used again, before the function has ended
    return sum(sizes.values())


def peak_of_last(first: Callable[[], object], last: Callable[[object], object]) -> int:
    """Peak of the bytes that the CPU allocator has given out while `last(first())` runs, with what
    `first` has left.
    """
    gc.collect()  # what earlier runs have left is not freed while the profiler runs
    return recorded_peak(first, last)


def recorded_peak(first: Callable[[], object], last: Callable[[object], object]) -> int:
    """`peak_of_last` where nothing is left that Python would collect meanwhile."""
    # otherwise Kineto prints two lines with the time of day for each record
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        state = first()
        with record_function(LAST):
            last(state)
    del state

    events = record.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == LAST)
    live = 0
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() != "[memory]":
            continue
        live += event.nbytes()
        if event.start_ns() >= begin:
            peak = max(peak, live)
    return peak
