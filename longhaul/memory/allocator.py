"""What PyTorch's CUDA caching allocator reserves for a trace: a replay.

The trace's allocations and releases are replayed through a model of
c10/cuda/CUDACachingAllocator.cpp with its default settings: sizes in steps of 512 bytes; requests
up to 1 MiB come out of 2 MiB segments, those below 10 MiB out of 20 MiB segments, larger ones get a
segment of their own in steps of 2 MiB; the smallest free block that is large enough is taken (the
lowest address among equals) and split; free neighbours merge. Expandable segments: each of the two
pools is one range that grows by 2 or 20 MiB. Not modelled: several streams, max_split_size, CUDA
graphs' private pools. A workspace counts as one block.

Sizes are bytes; GiB = 2^30 bytes. Imports longhaul.memory.trace of ours.
"""

import bisect
from dataclasses import dataclass

from longhaul.memory.trace import Event, Trace

MIB, GIB = 2**20, 2**30
STEP = 512  # every block is a multiple of it
# largest request of the small pool; in the large pool a remainder up to this size is not split off
SMALL = MIB
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
# requests from here on have a segment of their own size, rounded up to ROUND
OWN_SEGMENT = 10 * MIB
ROUND = 2 * MIB
PERMANENT = ("parameter", "buffer", "optimizer")  # what outlives a step
STEPS = 3  # times that a step is replayed: the later ones meet what the first left behind


def up(size: int, multiple: int) -> int:
    """The smallest multiple that is no less than `size`."""
    return -(-size // multiple) * multiple


class OutOfMemory(Exception):
    """A segment that does not fit the device, after free segments were given back."""


class Block:
    """A range of a segment, in use or free, between its neighbours."""

    __slots__ = ("address", "size", "free", "before", "after")

    def __init__(self, address: int, size: int, before=None, after=None):
        self.address, self.size, self.free, self.before, self.after = (
            address,
            size,
            False,
            before,
            after,
        )

    @property
    def key(self) -> tuple[int, int]:
        """Order of best fit."""
        return self.size, self.address


class Pool:
    """Free blocks of one size class, and the segments that they are cut from."""

    def __init__(self, small: bool):
        self.small, self.end = small, 0  # address behind the newest segment
        self.free: list[
            tuple[int, int, Block]
        ] = []  # ascending (size, address, block); addresses are unique

    def growth(self, size: int) -> int:
        """Bytes that must be reserved anew for a block of `size`."""
        if self.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < OWN_SEGMENT else up(size, ROUND)

    def grow(self, growth: int) -> Block:
        """A fresh segment as one block, not listed."""
        self.end += growth
        return Block(self.end - growth, growth)

    def give_back(self) -> int:
        """Drop the segments that are wholly free; returns their bytes."""
        whole = [entry for entry in self.free if not entry[2].before and not entry[2].after]
        self.free = [entry for entry in self.free if entry[2].before or entry[2].after]
        return sum(size for size, _, _ in whole)

    def splits(self, remaining: int) -> bool:
        """Whether what a block has beyond the request becomes a block of its own."""
        return remaining >= STEP if self.small else remaining > SMALL

    def best(self, size: int) -> Block | None:
        """Take the smallest free block of at least `size` out of the list."""
        index = bisect.bisect_left(self.free, (size, 0))
        return self.free.pop(index)[2] if index < len(self.free) else None

    def cut(self, block: Block, size: int) -> Block:
        """The first `size` bytes of a block that is no longer listed; the rest is listed where it
        is worth it.
        """
        if self.splits(block.size - size):
            rest = Block(block.address + size, block.size - size, block, block.after)
            if block.after:
                block.after.before = rest
            block.after, block.size = rest, size
            self.put(rest)
        block.free = False
        return block

    def put(self, block: Block):
        """List a block as free."""
        block.free = True
        bisect.insort(self.free, (*block.key, block))

    def take(self, block: Block):
        """Drop a free block from the list."""
        del self.free[bisect.bisect_left(self.free, block.key)]
        block.free = False

    def release(self, block: Block):
        """Free a block, as one with its free neighbours."""
        for other in (block.before, block.after):
            if other and other.free:
                self.take(other)
                block = _joined(*sorted((block, other), key=lambda part: part.address))
        self.put(block)


def _joined(low: Block, high: Block) -> Block:
    low.size += high.size
    low.after = high.after
    if high.after:
        high.after.before = low
    return low


class ExpandablePool(Pool):
    """One range that grows at its end; behind the last block stands an empty one that is never
    free, the unmapped rest.
    """

    def __init__(self, small: bool):
        super().__init__(small)
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.unmapped = Block(0, 0)

    def splits(self, remaining: int) -> bool:
        return remaining >= STEP

    def best(self, size: int) -> Block | None:
        """As in any pool, but the last block counts as the largest, since it can grow."""
        index = bisect.bisect_left(self.free, (size, 0))
        if index + 1 < len(self.free) and self.free[index][2].after is self.unmapped:
            index += 1
        return self.free.pop(index)[2] if index < len(self.free) else None

    def growth(self, size: int) -> int:
        return up(size - self._at_the_end(), self.page)

    def grow(self, growth: int) -> Block:
        """The last block, if it is free, with as many more bytes; else a new last one; not listed."""
        if self._at_the_end():
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

    def _at_the_end(self) -> int:
        """Free bytes of the last block."""
        last = self.unmapped.before
        return last.size if last and last.free else 0


class Allocator:
    """malloc and free of one device; `reserved` and `allocated` are bytes of segments and of blocks
    in use.

    capacity: bytes that segments may take, 0 for no limit. Where a new segment does not fit, those
    that are wholly free are given
    back first, as the real allocator does before it fails; with expandable segments it gives back
    pages, which is not modelled.
    """

    def __init__(self, expandable: bool = False, capacity: int = 0):
        if expandable and capacity:
            raise ValueError(
                "capacity with expandable segments is not modelled: compare the replay's peak_reserved with the card"
            )
        kind = ExpandablePool if expandable else Pool
        self.pools = kind(small=True), kind(small=False)
        self.capacity, self.reserved, self.allocated = capacity, 0, 0

    def _pool(self, size: int) -> Pool:
        return self.pools[size > SMALL]

    def malloc(self, size: int) -> tuple[Block, Pool]:
        """A block of at least `size` bytes and its pool; OutOfMemory beyond the capacity."""
        rounded = up(max(size, 1), STEP)
        pool = self._pool(rounded)
        block = pool.best(rounded) or self._fresh(pool, rounded)
        block = pool.cut(block, rounded)
        self.allocated += block.size
        return block, pool

    def _fresh(self, pool: Pool, size: int) -> Block:
        growth = pool.growth(size)
        if self.capacity and self.reserved + growth > self.capacity:
            self.reserved -= sum(each.give_back() for each in self.pools)
            if self.reserved + growth > self.capacity:
                raise OutOfMemory(
                    f"{growth:,} bytes more than {self.reserved:,} reserved exceed {self.capacity:,}"
                )
        self.reserved += growth
        return pool.grow(growth)

    def free(self, block: Block, pool: Pool):
        """Give a block back to its pool; its segment stays reserved."""
        self.allocated -= block.size
        pool.release(block)


# ---- a trace through it


@dataclass(frozen=True)
class Replay:
    """What the allocator held over a few repetitions of a step; bytes."""

    peak_live: int  # as asked for: Trace.peak()
    peak_allocated: int  # in blocks, so rounded up
    peak_reserved: int  # in segments
    segments: str  # "classic" or "expandable"

    @property
    def fragmentation(self) -> float:
        """The part of the reserved memory that is never live, from 0 to 1."""
        return 1 - self.peak_live / self.peak_reserved if self.peak_reserved else 0.0


class _Run:
    """An allocator, and which block each storage has."""

    def __init__(self, allocator: Allocator):
        self.allocator, self.blocks, self.sizes = allocator, {}, {}
        self.live = self.peak_live = self.peak_allocated = self.peak_reserved = 0

    def resize(self, storage: int, size: int):
        """A storage of `size` bytes from now on; 0 frees it."""
        if size == self.sizes.get(storage, 0):
            return
        if storage in self.blocks:
            self.live -= self.sizes.pop(storage)
            self.allocator.free(*self.blocks.pop(storage))
        if size:
            self.blocks[storage], self.sizes[storage] = self.allocator.malloc(size), size
            self.live += size
            self._note()

    def inside(self, size: int):
        """A workspace: there and gone."""
        block = self.allocator.malloc(size)
        self._note(size)
        self.allocator.free(*block)

    def _note(self, more: int = 0):
        self.peak_live = max(self.peak_live, self.live + more)
        self.peak_allocated = max(self.peak_allocated, self.allocator.allocated)
        self.peak_reserved = max(self.peak_reserved, self.allocator.reserved)


def step_events(trace: Trace) -> list[Event]:
    """The events up to where a parameter, buffer or optimizer state is released: there the step is
    over and the model goes.
    """
    last = next(
        (
            index
            for index, event in enumerate(trace.events)
            if event.time
            and event.bytes < 0
            and trace.storages[event.storage].category in PERMANENT
        ),
        len(trace.events),
    )
    return trace.events[:last]


def replay(trace: Trace, expandable: bool = False, capacity: int = 0, steps: int = STEPS) -> Replay:
    """Peaks over `steps` repetitions of the trace's step; OutOfMemory where a capacity in bytes is
    given and exceeded.

    In the first repetition the optimizer's states are born when the optimizer first runs, as in
    training: they settle in
    segments that activations left, which the later steps must replace.
    """
    run, events = _Run(Allocator(expandable, capacity)), step_events(trace)
    before = {event.storage: event.bytes for event in events if event.time == 0}
    states = {
        key: size
        for key, size in before.items()
        if size and trace.storages[key].category == "optimizer"
    }
    _become(run, {key: size for key, size in before.items() if key not in states})
    for index in range(steps):
        _step(run, trace, events, states if index == 0 else {})
        _become(run, before)
    return Replay(
        run.peak_live,
        run.peak_allocated,
        run.peak_reserved,
        "expandable" if expandable else "classic",
    )


def _become(run: _Run, wanted: dict[int, int]):
    """Free what a step left beyond what is there before one, then allocate what is missing."""
    for storage in [key for key in run.sizes if key not in wanted]:
        run.resize(storage, 0)
    for storage, size in wanted.items():
        run.resize(storage, size)


def _step(run: _Run, trace: Trace, events: list[Event], states: dict[int, int]):
    """The events after time 0; `states` are allocated where the optimizer starts, or at the end."""
    extra: dict[int, int] = {}
    for time, size, _ in trace.workspaces:
        extra[time] = max(extra.get(time, 0), size)
    first = next((time for time, name in trace.stages if name == "optimizer"), None)
    for index, event in enumerate(events):
        if states and first is not None and event.time >= first:
            _become(run, run.sizes | states)
            states = {}
        if event.time and event.bytes:
            run.resize(event.storage, run.sizes.get(event.storage, 0) + event.bytes)
        last = index + 1 == len(events) or events[index + 1].time != event.time
        if last and extra.get(event.time):
            run.inside(extra[event.time])
    _become(run, run.sizes | states)
