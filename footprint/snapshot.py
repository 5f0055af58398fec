"""A predicted step in the format of torch.cuda.memory._dump_snapshot, so that the viewer which is
already in use opens it: https://docs.pytorch.org/memory_viz or torch/cuda/_memory_viz.py.

The history has the allocations and releases of one step as the model of the caching allocator plays
them, each with its operator, module and stage in place of a stack of Python frames. Times count
events. Sizes and addresses are bytes.
"""

from pickle import dumps

from footprint.allocator import Allocator, Block, Pool, Run, of_step, play
from footprint.page import write
from footprint.trace import Trace

LARGE = 2**44  # the address of the pool of large blocks


class Recorder(Allocator):
    """An allocator that keeps what the real one would record."""

    def __init__(self):
        super().__init__()
        self.history: list[dict] = []
        self.frames: list[dict] = []  # of what is allocated or freed now

    def malloc(self, size: int) -> tuple[Block, Pool]:
        taken = super().malloc(size)
        self._log("alloc", address(*taken), size)
        return taken

    def free(self, block: Block, pool: Pool):
        for action in ("free_requested", "free_completed"):
            self._log(action, address(block, pool), block.size)
        super().free(block, pool)

    def _new_segment(self, pool: Pool, size: int) -> Block:
        block = super()._new_segment(pool, size)
        self._log("segment_alloc", address(block, pool), block.size)
        return block

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


def address(block: Block, pool: Pool) -> int:
    """Where a block is in the memory that both pools share."""
    return block.address if pool.small else LARGE + block.address


def recorded(trace: Trace) -> dict:
    """The history of one step, after what is alive before it, and the segments at its end."""
    trace = of_step(trace)
    recording = Recording(trace)
    recording.become({event.storage: event.bytes for event in trace.events if not event.time})
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
