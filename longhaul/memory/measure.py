"""What the allocator itself records while a function runs. Imports torch alone."""

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(function, device: torch.device) -> int:
    """Peak of the bytes allocated while `function()` runs, above what was there before; what
    operators take inside counts.

    CUDA: the caching allocator's own peak. CPU: the allocator's events, which the profiler records.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = function()
        torch.cuda.synchronize(device)
        del kept
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        kept = function()
    del kept
    return peak_of(record)


def peak_of(record: profile) -> int:
    """Peak of the bytes that the CPU allocator gave out while the profiler ran, above what was
    there before.
    """
    events = [
        event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def saved_bytes(function) -> int:
    """Bytes of distinct storages that autograd keeps for the backward of `function()`."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = function()
    del kept
    return sum(storages.values())
