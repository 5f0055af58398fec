"""The history that the CUDA caching allocator records, replayed through our model of it.

It shows whether allocator.py is right. Events are those of torch.cuda.memory's history
(`_snapshot()["device_traces"]`): dicts with action, addr, size and stream. Sizes are bytes.
"""

import collections
import gc
from dataclasses import dataclass, field

import torch

from footprint.allocator import STEPS, Allocator
from longhaul import step
from longhaul.config import TrainConfig
from longhaul.memory.batches import row_batch

GROWS = ("segment_alloc", "segment_map")
SHRINKS = ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Curves:
    """Reserved bytes after every allocation and release: the real allocator's, and our model's."""

    real: list[int] = field(default_factory=list)
    model: list[int] = field(default_factory=list)

    @property
    def largest_difference(self) -> int:
        """The largest difference at any event, in bytes."""
        pairs = zip(self.real, self.model, strict=True)
        return max((abs(real - model) for real, model in pairs), default=0)


def curves(events: list[dict], expandable: bool = False) -> Curves:
    """Replay a history that starts from an empty allocator; each stream has its own pools."""
    streams = collections.defaultdict(lambda: Allocator(expandable))
    blocks = {}
    reserved = 0
    found = Curves()
    for event in events:
        reserved += _segment_bytes(event)
        if event["action"] == "alloc":
            stream = streams[event["stream"]]
            blocks[event["addr"]] = stream, stream.malloc(event["size"])
        elif event["action"] == "free_completed" and event["addr"] in blocks:
            stream, block = blocks.pop(event["addr"])
            stream.free(block)
        else:
            continue
        found.real.append(reserved)
        found.model.append(sum(stream.reserved for stream in streams.values()))
    return found


def _segment_bytes(event: dict) -> int:
    """By how much an event changes what the allocator reserves."""
    if event["action"] in GROWS:
        return event["size"]
    if event["action"] in SHRINKS:
        return -event["size"]
    return 0


def record(cfg: TrainConfig, device: torch.device, steps: int = STEPS) -> list[dict]:
    """The allocator's events while a model is built and steps on an otherwise empty GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(context=None)  # events without stack traces
    try:
        state = step.build(cfg, cfg.model(), device)
        batch = [_on_device(micro, device) for micro in row_batch(cfg)]
        for _ in range(steps):
            step.train_step(state, batch)
        torch.cuda.synchronize(device)
        return torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _on_device(micro: dict, device: torch.device) -> dict:
    """A micro-batch on the device; an entry that is None stays None."""
    moved = {}
    for name, value in micro.items():
        moved[name] = None if value is None else value.to(device)
    return moved
