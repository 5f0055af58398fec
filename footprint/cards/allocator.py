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
from typing import NamedTuple

from footprint.record.trace import Trace, rounded_up

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
SMALL_BLOCKS = 2**44  # the address of the small pool, far behind the large one
STEPS = 3  # repetitions of a step: the later ones find the segments that the first left behind


class OutOfMemory(Exception):
    """A segment does not fit the device, even after free segments were given back."""


# ---- blocks and pools


class Block(NamedTuple):
    """A range of memory that is in use."""

    address: int
    size: int


class Pool:
    """Free ranges of one size class, and the segments that they are cut from.

    A gap follows each segment, so that ranges of two segments never touch and never merge.
    """

    def __init__(self, small: bool):
        self.small = small
        # the address behind the newest segment
        self.end = SMALL_BLOCKS if small else 0
        self.segments: dict[int, int] = {}  # address -> bytes
        self.free: list[tuple[int, int]] = []  # (bytes, address), ascending
        self.sizes: dict[int, int] = {}  # address of a free range -> bytes
        self.starts: dict[int, int] = {}  # address behind a free range -> its address

    def growth(self, size: int) -> int:
        """Bytes of the new segment for a block of `size`."""
        if self.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < OWN_SEGMENT else rounded_up(size, ROUND)

    def grow(self, growth: int) -> None:
        """Add a segment, which is free."""
        self.segments[self.end] = growth
        self.release(self.end, growth)
        self.end += growth + ROUND

    def give_back(self) -> int:
        """Drop the segments that are entirely free; returns their bytes."""
        unused = self.segments.items() & self.sizes.items()
        for address, _ in unused:
            self.take(address)
            del self.segments[address]
        return sum(size for _, size in unused)

    def splits(self, remaining: int) -> bool:
        """Whether the rest of a range that is larger than the request becomes a range."""
        return remaining >= STEP if self.small else remaining > SMALL

    def best(self, size: int) -> int | None:
        """Address of the smallest free range of at least `size`."""
        index = bisect.bisect_left(self.free, (size, 0))
        return self.free[index][1] if index < len(self.free) else None

    def take(self, address: int) -> int:
        """Remove a range from the free ones; returns its bytes."""
        size = self.sizes.pop(address)
        del self.starts[address + size]
        del self.free[bisect.bisect_left(self.free, (size, address))]
        return size

    def release(self, address: int, size: int) -> None:
        """Free a range and merge it with its free neighbours."""
        before = self.starts.get(address)
        if before is not None:
            size += self.take(before)
            address = before
        if address + size in self.sizes:
            size += self.take(address + size)
        self.sizes[address] = size
        self.starts[address + size] = address
        bisect.insort(self.free, (size, address))


class ExpandablePool(Pool):
    """One segment that grows at its end."""

    def growth(self, size: int) -> int:
        """What the free end of the segment lacks, in whole pages."""
        free_end = self.sizes.get(self.starts.get(self.end), 0)
        return rounded_up(size - free_end, SMALL_SEGMENT if self.small else LARGE_SEGMENT)

    def grow(self, growth: int) -> None:
        self.release(self.end, growth)
        self.end += growth

    def splits(self, remaining: int) -> bool:
        return remaining >= STEP

    def best(self, size: int) -> int | None:
        """As in any pool, but the end is used last, because it can grow."""
        index = bisect.bisect_left(self.free, (size, 0))
        for length, address in self.free[index : index + 2]:
            if address + length != self.end:
                return address
        return super().best(size)


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
        self.reserved = self.peak_reserved = 0
        self.allocated = self.peak_allocated = 0

    def malloc(self, size: int) -> Block:
        """A block of at least `size` bytes; OutOfMemory beyond the capacity."""
        wanted = rounded_up(max(size, 1), STEP)
        small, large = self.pools
        pool = large if wanted > SMALL else small
        if pool.best(wanted) is None:
            self.new_segment(pool, wanted)
        address = pool.best(wanted)
        taken = pool.take(address)
        if pool.splits(taken - wanted):
            pool.release(address + wanted, taken - wanted)
            taken = wanted
        self.allocated += taken
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return Block(address, taken)

    def new_segment(self, pool: Pool, size: int) -> None:
        """Reserve a segment for a block of `size`."""
        growth = pool.growth(size)
        if self._exceeds(growth):
            self.empty_cache()
        if self._exceeds(growth):
            raise OutOfMemory(
                f"{growth:,} bytes more than {self.reserved:,} reserved exceed {self.capacity:,}"
            )
        pool.grow(growth)
        self.reserved += growth
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def empty_cache(self) -> None:
        """Give back the segments that are entirely free."""
        self.reserved -= sum(each.give_back() for each in self.pools)

    def _exceeds(self, growth: int) -> bool:
        if not self.capacity:
            return False
        return self.reserved + growth > self.capacity

    def free(self, block: Block):
        """Return a block to its pool; its segment stays reserved."""
        self.allocated -= block.size
        small, large = self.pools
        pool = small if block.address >= SMALL_BLOCKS else large
        pool.release(*block)


# ---- the replay of a trace


@dataclass(frozen=True)
class Replay:
    """The peaks of the allocator over a few repetitions of a step; bytes."""

    peak_live: int  # as requested: Trace.peak()
    peak_allocated: int  # in blocks, so rounded up
    peak_reserved: int  # in segments
    segments: str  # "classic" or "expandable"


class Run:
    """An allocator, and the block and the bytes of each storage."""

    def __init__(self, allocator: Allocator):
        self.allocator = allocator
        self.blocks: dict[int, Block] = {}
        self.sizes: dict[int, int] = {}

    def resize(self, storage: int, size: int):
        """Give a storage `size` bytes; 0 frees it."""
        if size == self.sizes.get(storage, 0):
            return
        if storage in self.blocks:
            del self.sizes[storage]
            self.allocator.free(self.blocks.pop(storage))
        if size:
            self.blocks[storage] = self.allocator.malloc(size)
            self.sizes[storage] = size

    def workspace(self, size: int):
        """Allocate a workspace and free it."""
        self.allocator.free(self.allocator.malloc(size))

    def become(self, wanted: dict[int, int]):
        """Free every storage that is not in `wanted`, then allocate those that are missing."""
        for storage in [key for key in self.sizes if key not in wanted]:
            self.resize(storage, 0)
        for storage, size in wanted.items():
            self.resize(storage, size)


def of_step(trace: Trace) -> Trace:
    """The trace without what follows the step.

    The step ends where a parameter, buffer or optimizer state is freed that was there before it,
    because then the model is dropped. The keys and values of a rollout are buffers of the step
    itself.
    """
    before = held_before(trace)
    for index, event in enumerate(trace.events):
        freed = event.bytes < 0 and event.time and event.storage in before
        if freed and trace.storages[event.storage].category in PERMANENT:
            return replace(trace, events=trace.events[:index])
    return trace


def replay(
    trace: Trace,
    expandable: bool = False,
    capacity: int = 0,
    steps: int = STEPS,
    emptied: bool = False,
) -> Replay:
    """Peaks over `steps` repetitions of the trace's step; OutOfMemory beyond a capacity in bytes.

    In the first repetition the optimizer's states are allocated when the optimizer first runs, as
    in training: they settle in segments that activations left, and later steps must replace those.
    """
    trace = of_step(trace)
    before = held_before(trace)
    states = {}
    for storage, size in before.items():
        if trace.storages[storage].category == "optimizer":
            states[storage] = size

    allocator = Allocator(expandable, capacity)
    run = Run(allocator)
    if emptied:
        states = {}
    run.become({storage: size for storage, size in before.items() if storage not in states})
    for _ in range(steps):
        play(run, trace, states)
        run.become(before)
        states = {}
        if emptied:
            allocator.empty_cache()

    live, _ = trace.peak()
    segments = "expandable" if expandable else "classic"
    return Replay(live, allocator.peak_allocated, allocator.peak_reserved, segments)


def held_before(trace: Trace) -> dict[int, int]:
    """Storage -> bytes of what is alive before the step."""
    return {event.storage: event.bytes for event in trace.events if not event.time}


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
