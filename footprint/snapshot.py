"""A predicted step in the format of torch.cuda.memory._dump_snapshot, so that the viewer which is
already in use opens it: https://docs.pytorch.org/memory_viz or torch/cuda/_memory_viz.py.

The history has the allocations and releases of one step as the model of the caching allocator plays
them, each with its operator, module and stage in place of a stack of Python frames. Times count
events. Sizes and addresses are bytes.
"""

import pickle

from footprint.allocator import Allocator, Block, Pool, Run, of_step, play
from footprint.page import write
from footprint.trace import Trace

LARGE = 2**44  # the address of the pool of large blocks


class Recorder(Run):
    """A replay that keeps what the real allocator would record."""

    def __init__(self, trace: Trace):
        super().__init__(Allocator())
        self.trace = trace
        self.history: list[dict] = []

    def resize(self, storage: int, size: int):
        if size == self.sizes.get(storage, 0):
            return
        frames = self._frames(storage)
        if storage in self.blocks:
            self._note_free(self.blocks[storage], frames)
        self._watched(super().resize, storage, size)
        if size:
            self._log("alloc", address(*self.blocks[storage]), size, frames)

    def workspace(self, size: int):
        frames = [frame("inside an operator", "workspace")]
        taken = self._watched(self.allocator.malloc, size)
        self._log("alloc", address(*taken), size, frames)
        self._note_free(taken, frames)
        self.allocator.free(*taken)

    def _watched(self, function, *args):
        """What the function returns; new segments are recorded."""
        ends = [pool.end for pool in self.allocator.pools]
        result = function(*args)
        for pool, end in zip(self.allocator.pools, ends, strict=True):
            if pool.end > end:
                self._log("segment_alloc", _start(pool) + end, pool.end - end, [])
        return result

    def _note_free(self, taken: tuple[Block, Pool], frames: list[dict]):
        for action in ("free_requested", "free_completed"):
            self._log(action, address(*taken), taken[0].size, frames)

    def _log(self, action: str, where: int, size: int, frames: list[dict]):
        event = {"action": action, "addr": where, "size": size, "stream": 0, "frames": frames}
        self.history.append(event | {"time_us": len(self.history)})

    def _frames(self, storage: int) -> list[dict]:
        found = self.trace.storages[storage]
        shape = "x".join(map(str, found.shape))
        name = f"{found.category} {found.dtype} {shape}"
        return [frame(found.op, name), frame(found.module, found.stage)]

    # ---- the segments at the end

    def segments(self) -> list[dict]:
        """Every segment with its blocks, in the order of addresses."""
        heads: dict[int, tuple[Block, Pool]] = {}
        for pool in self.allocator.pools:
            free = [block for _, _, block in pool.free]
            used = [block for block, owner in self.blocks.values() if owner is pool]
            for block in free + used:
                while block.before:
                    block = block.before
                heads[address(block, pool)] = block, pool
        return [self._segment(*heads[key]) for key in sorted(heads)]

    def _segment(self, block: Block | None, pool: Pool) -> dict:
        owners = {id(taken): storage for storage, (taken, _) in self.blocks.items()}
        blocks = []
        while block:
            storage = owners.get(id(block))
            requested = self.sizes.get(storage, 0)
            blocks.append(
                {
                    "address": address(block, pool),
                    "size": block.size,
                    "requested_size": requested,
                    "state": "inactive" if storage is None else "active_allocated",
                    "frames": [] if storage is None else self._frames(storage),
                }
            )
            block = block.after
        used = [found for found in blocks if found["state"] != "inactive"]
        held = sum(found["size"] for found in used)
        return {
            "device": 0,
            "address": blocks[0]["address"],
            "total_size": sum(found["size"] for found in blocks),
            "allocated_size": held,
            "active_size": held,
            "requested_size": sum(found["requested_size"] for found in used),
            "stream": 0,
            "segment_type": "small" if pool.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }


def frame(file: str, name: str) -> dict:
    return {"filename": file, "line": 0, "name": name}


def _start(pool: Pool) -> int:
    return 0 if pool.small else LARGE


def address(block: Block, pool: Pool) -> int:
    """Where a block is in the memory that both pools share."""
    return _start(pool) + block.address


def recorded(trace: Trace) -> dict:
    """The history of one step, after what is alive before it, and the segments at its end."""
    trace = of_step(trace)
    recorder = Recorder(trace)
    recorder.become({event.storage: event.bytes for event in trace.events if not event.time})
    play(recorder, trace, {})
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}
    return {
        "segments": recorder.segments(),
        "device_traces": [recorder.history],
        "allocator_settings": settings,
        "external_annotations": [],
    }


def write_snapshot(path: str, trace: Trace) -> None:
    """Write the step as a file for PyTorch's viewer; ValueError if that cannot be written."""
    write(path, pickle.dumps(recorded(trace)))
