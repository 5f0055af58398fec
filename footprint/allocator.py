"""What PyTorch's CUDA caching allocator reserves for a trace, found by replaying the trace.

The replay models c10/cuda/CUDACachingAllocator.cpp with its default settings:

- Sizes are rounded up to multiples of 512 bytes.
- Requests up to 1 MiB are cut from segments of 2 MiB, requests below 10 MiB from segments of
  20 MiB. A larger request gets a segment of its own size, rounded up to 2 MiB.
- The smallest free block that is large enough is taken, at the lowest address among equals, and
  split. Free neighbours merge.
- With expandable segments, each of the two pools is one range that grows by 2 or 20 MiB.

Not modelled: several streams, max_split_size, the private pools of CUDA graphs. A workspace counts
as one block. Sizes are bytes; GiB = 2^30 bytes.
"""

import bisect
from dataclasses import dataclass, replace

from footprint.trace import Trace, rounded_up

MIB = 2**20
GIB = 2**30
STEP = 512  # every block is a multiple of it
# The largest request of the small pool. In the large pool, a remainder up to this size is not split
# off.
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # from this size on, a request has its own segment, rounded up to ROUND
ROUND = 2 * MIB
PERMANENT = ("parameter", "buffer", "optimizer")  # categories that outlive a step
STEPS = 3  # repetitions of a step: the later ones find the segments that the first left behind


class OutOfMemory(Exception):
    """A segment does not fit the device, even after free segments were given back."""


# ---- blocks and pools


class Block:
    """A range of a segment, in use or free, and its neighbours in that segment."""

    __slots__ = ("address", "size", "free", "before", "after")

    def __init__(
        self,
        address: int,
        size: int,
        before: "Block | None" = None,
        after: "Block | None" = None,
    ):
        self.address = address
        self.size = size
        self.free = False
        self.before = before
        self.after = after

    @property
    def key(self) -> tuple[int, int]:
        """The order in which the best fit is searched."""
        return self.size, self.address


class Pool:
    """Free blocks of one size class, and the segments that they are cut from."""

    def __init__(self, small: bool):
        self.small = small
        self.end = 0  # the address behind the newest segment
        # (size, address, block), ascending; no two blocks have the same address
        self.free: list[tuple[int, int, Block]] = []

    def growth(self, size: int) -> int:
        """Bytes of the new segment for a block of `size`."""
        if self.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < OWN_SEGMENT else rounded_up(size, ROUND)

    def grow(self, growth: int) -> Block:
        """A new segment as one block, which is not in the list of free blocks."""
        self.end += growth
        return Block(self.end - growth, growth)

    def give_back(self) -> int:
        """Drop the segments that are entirely free; returns their bytes."""
        given = 0
        kept = []
        for entry in self.free:
            size, _, block = entry
            if block.before or block.after:
                kept.append(entry)
            else:
                given += size
        self.free = kept
        return given

    def splits(self, remaining: int) -> bool:
        """Whether the rest of a block that is larger than the request becomes a block."""
        return remaining >= STEP if self.small else remaining > SMALL

    def best(self, size: int) -> Block | None:
        """Remove the smallest free block of at least `size` from the list and return it."""
        return self._pop(bisect.bisect_left(self.free, (size, 0)))

    def _pop(self, index: int) -> Block | None:
        if index == len(self.free):
            return None
        _, _, block = self.free.pop(index)
        return block

    def cut(self, block: Block, size: int) -> Block:
        """The first `size` bytes of a block that is not in the list; the rest may become free."""
        if self.splits(block.size - size):
            start = block.address + size
            rest = Block(start, block.size - size, block, block.after)
            if block.after:
                block.after.before = rest
            block.after = rest
            block.size = size
            self.put(rest)
        block.free = False
        return block

    def put(self, block: Block):
        """Add a block to the list of free blocks."""
        block.free = True
        bisect.insort(self.free, (*block.key, block))

    def take(self, block: Block):
        """Remove a block from the list of free blocks."""
        del self.free[bisect.bisect_left(self.free, block.key)]
        block.free = False

    def release(self, block: Block):
        """Free a block and merge it with its free neighbours."""
        before = block.before
        if before and before.free:
            self.take(before)
            block = _merged(before, block)

        after = block.after
        if after and after.free:
            self.take(after)
            block = _merged(block, after)
        self.put(block)


def _merged(low: Block, high: Block) -> Block:
    """`low`, which now also covers `high`, the block behind it."""
    low.size += high.size
    low.after = high.after
    if high.after:
        high.after.before = low
    return low


class ExpandablePool(Pool):
    """One range that grows at its end.

    The last block is followed by an empty one that is never free: the part that is not mapped yet.
    """

    def __init__(self, small: bool):
        super().__init__(small)
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.unmapped = Block(0, 0)

    def splits(self, remaining: int) -> bool:
        return remaining >= STEP

    def best(self, size: int) -> Block | None:
        """As in any pool, but the last block is used last, because it can grow."""
        index = bisect.bisect_left(self.free, (size, 0))
        if index + 1 < len(self.free):
            _, _, block = self.free[index]
            if block.after is self.unmapped:
                index += 1
        return self._pop(index)

    def growth(self, size: int) -> int:
        """What the free end of the range lacks, in whole pages."""
        return rounded_up(size - self._free_at_the_end(), self.page)

    def grow(self, growth: int) -> Block:
        """The last block if it is free, larger by `growth`; else a new last block."""
        if self._free_at_the_end():
            block = self.unmapped.before
            self.take(block)
            block.size += growth
        else:
            block = Block(self.end, growth, self.unmapped.before, self.unmapped)
            self.unmapped.before = block
            if block.before:
                block.before.after = block
        self.end += growth
        return block

    def _free_at_the_end(self) -> int:
        """Size of the last block if it is free."""
        last = self.unmapped.before
        return last.size if last and last.free else 0


class Allocator:
    """malloc and free of one device; `reserved`: bytes in segments, `allocated`: in used blocks.

    capacity: bytes that segments may take, 0 for no limit. If a new segment does not fit, segments
    that are entirely free are given back first, as the real allocator does before it fails. With
    expandable segments it gives back pages, which is not modelled.
    """

    def __init__(self, expandable: bool = False, capacity: int = 0):
        if expandable and capacity:
            raise ValueError(
                "capacity with expandable segments is not modelled: "
                "compare the replay's peak_reserved with the card"
            )
        kind = ExpandablePool if expandable else Pool
        self.pools = (kind(small=True), kind(small=False))
        self.capacity = capacity
        self.reserved = 0
        self.allocated = 0

    def malloc(self, size: int) -> tuple[Block, Pool]:
        """A block of at least `size` bytes and its pool; OutOfMemory beyond the capacity."""
        rounded = rounded_up(max(size, 1), STEP)
        small, large = self.pools
        pool = large if rounded > SMALL else small
        block = pool.best(rounded) or self._new_segment(pool, rounded)
        block = pool.cut(block, rounded)
        self.allocated += block.size
        return block, pool

    def _new_segment(self, pool: Pool, size: int) -> Block:
        growth = pool.growth(size)
        if self._exceeds(growth):
            self.reserved -= sum(each.give_back() for each in self.pools)
        if self._exceeds(growth):
            raise OutOfMemory(
                f"{growth:,} bytes more than {self.reserved:,} reserved exceed {self.capacity:,}"
            )
        self.reserved += growth
        return pool.grow(growth)

    def _exceeds(self, growth: int) -> bool:
        if not self.capacity:
            return False
        return self.reserved + growth > self.capacity

    def free(self, block: Block, pool: Pool):
        """Return a block to its pool; its segment stays reserved."""
        self.allocated -= block.size
        pool.release(block)


# ---- the replay of a trace


@dataclass(frozen=True)
class Replay:
    """The peaks of the allocator over a few repetitions of a step; bytes."""

    peak_live: int  # as requested: Trace.peak()
    peak_allocated: int  # in blocks, so rounded up
    peak_reserved: int  # in segments
    segments: str  # "classic" or "expandable"

    def scaled(self, scale: float) -> "Replay":
        """The peaks of a step that needs so many times as much."""
        peaks = (self.peak_live, self.peak_allocated, self.peak_reserved)
        return Replay(*(int(scale * peak) for peak in peaks), self.segments)


class Run:
    """An allocator, the block of each storage, and the peaks so far."""

    def __init__(self, allocator: Allocator):
        self.allocator = allocator
        self.blocks: dict[int, tuple[Block, Pool]] = {}
        self.sizes: dict[int, int] = {}
        self.live = 0
        self.peak_live = 0
        self.peak_allocated = 0
        self.peak_reserved = 0

    def resize(self, storage: int, size: int):
        """Give a storage `size` bytes; 0 frees it."""
        if size == self.sizes.get(storage, 0):
            return
        if storage in self.blocks:
            self.live -= self.sizes.pop(storage)
            self.allocator.free(*self.blocks.pop(storage))
        if size:
            self.blocks[storage] = self.allocator.malloc(size)
            self.sizes[storage] = size
            self.live += size
            self._note()

    def workspace(self, size: int):
        """Allocate a workspace and free it."""
        block, pool = self.allocator.malloc(size)
        self._note(size)
        self.allocator.free(block, pool)

    def become(self, wanted: dict[int, int]):
        """Free every storage that is not in `wanted`, then allocate those that are missing."""
        for storage in [key for key in self.sizes if key not in wanted]:
            self.resize(storage, 0)
        for storage, size in wanted.items():
            self.resize(storage, size)

    def _note(self, workspace: int = 0):
        self.peak_live = max(self.peak_live, self.live + workspace)
        self.peak_allocated = max(self.peak_allocated, self.allocator.allocated)
        self.peak_reserved = max(self.peak_reserved, self.allocator.reserved)


def of_step(trace: Trace) -> Trace:
    """The trace without what follows the step.

    The step ends where a parameter, buffer or optimizer state is freed that was there before it,
    because then the model is dropped. The keys and values of a rollout are buffers of the step
    itself.
    """
    before = {event.storage for event in trace.events if not event.time}
    for index, event in enumerate(trace.events):
        freed = event.bytes < 0 and event.time and event.storage in before
        if freed and trace.storages[event.storage].category in PERMANENT:
            return replace(trace, events=trace.events[:index])
    return trace


def replay(trace: Trace, expandable: bool = False, capacity: int = 0, steps: int = STEPS) -> Replay:
    """Peaks over `steps` repetitions of the trace's step; OutOfMemory beyond a capacity in bytes.

    In the first repetition the optimizer's states are allocated when the optimizer first runs, as
    in training: they settle in segments that activations left, and later steps must replace those.
    """
    trace = of_step(trace)
    before = {event.storage: event.bytes for event in trace.events if event.time == 0}
    states = {}
    for storage, size in before.items():
        if size and trace.storages[storage].category == "optimizer":
            states[storage] = size

    run = Run(Allocator(expandable, capacity))
    stateless = {storage: size for storage, size in before.items() if storage not in states}
    run.become(stateless)
    for _ in range(steps):
        play(run, trace, states)
        run.become(before)
        states = {}

    segments = "expandable" if expandable else "classic"
    return Replay(run.peak_live, run.peak_allocated, run.peak_reserved, segments)


def replays_of(trace: Trace) -> tuple[Replay, Replay]:
    """What classic and expandable segments reserve for the trace."""
    return replay(trace), replay(trace, expandable=True)


def play(run: Run, trace: Trace, states: dict[int, int]):
    """The events after time 0; `states` are allocated when the optimizer starts, or at the end."""
    starts = [time for time, name in trace.stages if name == "optimizer"]
    for time, events, workspace in trace.by_time():
        if states and starts and time >= starts[0]:
            run.become(run.sizes | states)
            states = {}
        for event in events:
            if time and event.bytes:
                size = run.sizes.get(event.storage, 0)
                run.resize(event.storage, size + event.bytes)
        if workspace:
            run.workspace(workspace)
    run.become(run.sizes | states)
