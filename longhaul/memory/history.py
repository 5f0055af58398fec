"""What the CUDA caching allocator did, event by event, replayed through our model of it: is
allocator.py right?

Events are those of torch.cuda.memory's history (`_snapshot()["device_traces"]`): dicts with action,
addr, size and stream. Sizes are bytes. Imports longhaul.step, longhaul.memory (allocator, simulate)
of ours.
"""

import collections
import gc
from dataclasses import dataclass

import torch

from longhaul import step
from longhaul.memory.allocator import STEPS, Allocator
from longhaul.memory.simulate import row_batch

GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Curves:
    """Reserved bytes after every allocation and release: the allocator's own, and our model's of
    the same requests.
    """

    real: list[int]
    model: list[int]

    @property
    def largest_difference(self) -> int:
        """Bytes by which the two differ most, at any event."""
        return max((abs(a - b) for a, b in zip(self.real, self.model)), default=0)


def curves(events: list[dict], expandable: bool = False) -> Curves:
    """Replay a history that starts from an empty allocator; each stream has pools of its own, as
    there.
    """
    allocators, blocks, real, found = (
        collections.defaultdict(lambda: Allocator(expandable)),
        {},
        0,
        Curves([], []),
    )
    for event in events:
        action, size = event["action"], event["size"]
        real += size * ((action in GROWS) - (action in SHRINKS))
        if action == "alloc":
            stream = allocators[event["stream"]]
            blocks[event["addr"]] = stream, stream.malloc(size)
        elif action == "free_completed" and event["addr"] in blocks:
            stream, block = blocks.pop(event["addr"])
            stream.free(*block)
        else:
            continue
        found.real.append(real)
        found.model.append(sum(stream.reserved for stream in allocators.values()))
    return found


def record(cfg, device: torch.device, steps: int = STEPS) -> list[dict]:
    """The allocator's events while `cfg` (TrainConfig) is built and steps on an otherwise empty
    GPU.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(context=None)  # without stacks: the events alone
    try:
        state = step.build(cfg, cfg.model(), device)
        batch = [
            {name: value if value is None else value.to(device) for name, value in micro.items()}
            for micro in row_batch(cfg)
        ]
        for _ in range(steps):
            step.train_step(state, batch)
        torch.cuda.synchronize(device)
        return torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
