"""A predicted step in the format of torch.cuda.memory._dump_snapshot, so that the viewer which is
already in use opens it: https://docs.pytorch.org/memory_viz or torch/cuda/_memory_viz.py.

The history has the allocations and releases of one step as the model of the caching allocator plays
them, each with its operator, module and stage in place of a stack of Python frames. Times count
events. Sizes and addresses are bytes.
"""

from pickle import dumps

from footprint.answers.page import write
from footprint.cards.allocator import Allocator, Block, Pool, Run, held_before, of_step, play
from footprint.record.trace import Trace


class Recorder(Allocator):
    """An allocator that keeps what the real one would record."""

    def __init__(self):
        super().__init__()
        self.history: list[dict] = []
        self.frames: list[dict] = []  # of what is allocated or freed now

    def malloc(self, size: int) -> Block:
        block = super().malloc(size)
        self._log("alloc", block.address, size)
        return block

    def free(self, block: Block):
        for action in ("free_requested", "free_completed"):
            self._log(action, *block)
        super().free(block)

    def new_segment(self, pool: Pool, size: int) -> None:
        super().new_segment(pool, size)
        *_, segment = pool.segments.items()
        self._log("segment_alloc", *segment)

    def _log(
        self,
        action: str,
        where: int,
        size: int,
    ):
        event = {"action": action, "addr": where, "size": size, "stream": 0, "frames": self.frames}
        self.history.append(event | {"time_us": len(self.history)})


class Recording(Run):
    """A replay by an allocator that records."""

    def __init__(self, trace: Trace):
        super().__init__(Recorder())
        self.trace = trace

    def resize(self, storage: int, size: int):
        self.allocator.frames = self._frames(storage)
        super().resize(storage, size)

    def workspace(self, size: int):
        self.allocator.frames = [frame("inside an operator", "workspace")]
        super().workspace(size)

    def _frames(self, storage: int) -> list[dict]:
        found = self.trace.storages[storage]
        shape = "x".join(map(str, found.shape))
        name = f"{found.category} {found.dtype} {shape}"
        return [frame(found.op, name), frame(found.module, found.stage)]

    # ---- the segments at the end

    def segments(self) -> list[dict]:
        """Every segment with its blocks, in the order of addresses."""
        owners = {block.address: storage for storage, block in self.blocks.items()}
        found = []
        for pool in reversed(self.allocator.pools):
            free = [(address, size) for size, address in pool.free]
            ranges = sorted([*free, *self.blocks.values()])
            for start, length in pool.segments.items():
                inside = [each for each in ranges if start <= each[0] < start + length]
                blocks = [self._block(*each, owners) for each in inside]
                held = sum(block["size"] for block in blocks if block["frames"])
                segment = {
                    "device": 0,
                    "address": start,
                    "total_size": length,
                    "allocated_size": held,
                    "active_size": held,
                    "requested_size": sum(block["requested_size"] for block in blocks),
                    "stream": 0,
                    "segment_pool_id": (0, 0),
                    "segment_type": "small" if pool.small else "large",
                    "is_expandable": False,
                    "frames": [],
                    "blocks": blocks,
                }
                found.append(segment)
        return found

    def _block(self, address: int, size: int, owners: dict[int, int]) -> dict:
        block = {"address": address, "size": size, "requested_size": 0}
        if address not in owners:
            return block | {"state": "inactive", "frames": []}
        storage = owners[address]
        requested = self.sizes[storage]
        state = {"state": "active_allocated", "frames": self._frames(storage)}
        return block | state | {"requested_size": requested}


def frame(file: str, name: str) -> dict:
    return {"filename": file, "line": 0, "name": name}


def recorded(trace: Trace) -> dict:
    """The history of one step, after what is alive before it, and the segments at its end."""
    trace = of_step(trace)
    recording = Recording(trace)
    recording.become(held_before(trace))
    play(recording, trace, {})
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}
    return {
        "segments": recording.segments(),
        "device_traces": [recording.allocator.history],
        "allocator_settings": settings,
        "external_annotations": [],
    }


def write_snapshot(path: str, trace: Trace) -> None:
    """Write the step as a file for PyTorch's viewer; ValueError if that cannot be written."""
    write(path, dumps(recorded(trace)))
