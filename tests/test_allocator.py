"""The model of the caching allocator: known answers on traces made by hand, and properties that any
trace must have.
"""

import itertools
import random
from dataclasses import replace

import pytest

from footprint.cards.allocator import MIB, Allocator, OutOfMemory, of_step, replay
from footprint.cards.device import (
    Demand,
    Placement,
    beyond_the_allocator,
    card,
    multiplying_threads,
    runs_within,
    waterfall,
    with_cublas,
)
from footprint.record.trace import Event, Storage, Trace
from longhaul.config import TrainConfig
from longhaul.planner.simulate import simulate
from model import GIB


def trace_of(
    *changes: tuple[int, int], category: str = "temporary", first: int = 1, **more
) -> Trace:
    """A trace whose events are (storage, bytes), at times that count from `first`."""
    events = []
    storages = {}
    for time, (key, size) in enumerate(changes, first):
        events.append(Event(time, size, key))
        if size > 0:
            storages[key] = Storage(key, size, category, "start", "", (size,), "uint8", "")
    return Trace(events, storages, **{"stages": [(0, "start")]} | more)


def random_trace(seed: int, count: int = 600) -> Trace:
    """Allocations of 1 byte to 64 MiB and releases in any order; everything is free at the end."""
    rng = random.Random(seed)
    alive: dict[int, int] = {}
    changes = []
    for key in range(count):
        while alive and rng.random() < 0.45:
            old = rng.choice(list(alive))
            changes.append((old, -alive.pop(old)))
        alive[key] = int(2 ** rng.uniform(0, 26))
        changes.append((key, alive[key]))
    changes += [(key, -size) for key, size in alive.items()]
    return trace_of(*changes)


@pytest.mark.parametrize(
    "sizes, classic, expandable",
    [
        ([1], 2, 2),
        ([MIB], 2, 2),
        ([MIB, MIB], 2, 2),
        ([MIB, MIB, 1], 4, 4),  # small pool
        ([MIB + 1], 20, 20),
        ([10 * MIB - 512] * 2, 20, 20),
        ([9 * MIB] * 3, 40, 40),  # shared large segments
        ([10 * MIB], 10, 20),
        ([10 * MIB + 1], 12, 20),
        ([31 * MIB], 32, 40),  # its own segment
        ([3 * MIB, 30 * MIB], 20 + 30, 40),
        ([1, 3 * MIB], 2 + 20, 2 + 20),
    ],
)
def test_segments_have_the_sizes_that_the_source_gives(sizes, classic, expandable):
    trace = trace_of(*enumerate(sizes))
    assert replay(trace).peak_reserved == classic * MIB
    assert replay(trace, expandable=True).peak_reserved == expandable * MIB


def test_a_block_takes_what_is_asked_for_in_steps_of_512_bytes():
    allocator = Allocator()
    for size, taken in ((1, 512), (512, 512), (513, 1024), (2 * MIB + 1, 2 * MIB + 512)):
        before = allocator.allocated
        allocator.malloc(size)
        assert allocator.allocated - before == taken


def test_a_remainder_of_the_large_pool_up_to_one_mib_stays_with_its_block():
    allocator = Allocator()
    allocator.malloc(15 * MIB)  # its segment has 16
    assert allocator.allocated == 16 * MIB
    allocator = Allocator()
    allocator.malloc(14 * MIB - 512)  # 512 bytes are left of 14 MiB
    allocator.malloc(9 * MIB)  # 11 MiB are left of 20, which become a block
    assert allocator.allocated == 23 * MIB
    assert allocator.reserved == 34 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = Allocator()
    blocks = [allocator.malloc(size * MIB) for size in (40, 20, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(18 * MIB).address == blocks[1].address
    assert allocator.malloc(18 * MIB).address == blocks[2].address
    assert allocator.reserved == 90 * MIB


def test_freed_neighbours_merge_and_hold_a_larger_request():
    allocator = Allocator()
    blocks = [allocator.malloc(5 * MIB) for _ in range(4)]
    allocator.free(blocks[1])
    allocator.free(blocks[3])
    allocator.malloc(9 * MIB)  # two holes of 5 MiB do not hold it
    assert allocator.reserved == 40 * MIB
    allocator.free(blocks[2])
    assert allocator.malloc(15 * MIB).address == blocks[1].address
    assert allocator.reserved == 40 * MIB


def test_expandable_segments_grow_by_what_their_free_end_lacks():
    allocator = Allocator(expandable=True)
    first = allocator.malloc(30 * MIB)
    second = allocator.malloc(10 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.free(second)
    assert allocator.malloc(35 * MIB).address == 30 * MIB
    assert allocator.reserved == 80 * MIB  # 25 MiB lacked, in pages of 20
    allocator.free(first)
    assert allocator.malloc(5 * MIB).address == 0, "the hole comes before the end, which can grow"


def test_a_workspace_is_freed_at_once_and_counts_in_both_peaks():
    trace = trace_of((0, 20 * MIB), (-1, 0), (1, 30 * MIB), workspaces=[(2, 50 * MIB, "op")])
    found = replay(trace, steps=1)
    assert found.peak_live == trace.peak()[0] == 70 * MIB
    assert found.peak_reserved == 70 * MIB, "the 30 MiB take the place of the workspace"


def test_a_step_behind_an_emptied_cache_finds_its_states_packed():
    state = {7: Storage(7, 12 * MIB, "optimizer", "start", "", (), "float32", "")}
    trace = trace_of((0, 40 * MIB), (0, -40 * MIB), stages=[(0, "start"), (3, "optimizer")])
    trace.events.insert(0, Event(0, 12 * MIB, 7))
    trace.storages |= state
    assert replay(trace, steps=1).peak_reserved == 40 * MIB, "the states come behind the 40 MiB"
    assert replay(trace, steps=2, emptied=True).peak_reserved == 52 * MIB


def test_optimizer_states_settle_in_segments_that_the_first_step_left():
    state = {7: Storage(7, 12 * MIB, "optimizer", "start", "", (), "float32", "")}
    trace = trace_of(
        (0, 40 * MIB), (0, -40 * MIB), (1, 64), (1, -64), stages=[(0, "start"), (3, "optimizer")]
    )
    trace.events.insert(0, Event(0, 12 * MIB, 7))
    trace.storages |= state
    assert replay(trace, steps=1).peak_reserved == 42 * MIB
    assert replay(trace).peak_reserved == 82 * MIB, (
        "28 MiB are left of the segment, so the second step needs another 40"
    )
    assert replay(trace).peak_live == 52 * MIB


def test_what_is_freed_with_the_model_after_the_step_is_no_part_of_it():
    trace = trace_of((1, 30 * MIB), (1, -30 * MIB), (0, -20 * MIB))
    trace.events.insert(0, Event(0, 20 * MIB, 0))
    trace.storages[0] = Storage(0, 20 * MIB, "parameter", "start", "weight", (), "float32", "")
    assert len(of_step(trace).events) == 3
    assert replay(trace, steps=4) == replay(trace, steps=1)


def test_a_storage_that_is_emptied_and_filled_again_gets_another_block():
    trace = trace_of((0, 30 * MIB), (0, -30 * MIB), (1, 30 * MIB), (0, 30 * MIB))
    assert replay(trace).peak_live == 60 * MIB == replay(trace).peak_reserved


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_on_any_trace_live_allocated_and_reserved_are_ordered_and_repeatable(seed, expandable):
    trace = random_trace(seed)
    found = replay(trace, expandable)
    assert found.peak_live == trace.peak()[0] <= found.peak_allocated <= found.peak_reserved
    assert found == replay(trace, expandable)
    assert found.peak_reserved == replay(trace, expandable, steps=6).peak_reserved, (
        "no leak from step to step"
    )


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_never_overlap_and_all_merge_once_everything_is_free(seed, expandable):
    allocator = Allocator(expandable)
    held = {}
    for event in random_trace(seed).events:
        if event.bytes > 0:
            held[event.storage] = allocator.malloc(event.bytes)
        else:
            allocator.free(held.pop(event.storage))
        assert allocator.allocated <= allocator.reserved
        ranges = list(map(tuple, held.values()))
        ranges += [(address, size) for pool in allocator.pools for size, address in pool.free]
        for (address, size), (following, _) in itertools.pairwise(sorted(ranges)):
            assert address + size <= following
    assert allocator.allocated == 0
    assert sum(size for pool in allocator.pools for size, _ in pool.free) == allocator.reserved
    for pool in allocator.pools:
        assert expandable or pool.segments == pool.sizes
        assert not expandable or len(pool.free) == 1
    assert expandable or sum(pool.give_back() for pool in allocator.pools) == allocator.reserved


def test_under_a_limit_free_segments_are_given_back_before_memory_runs_out():
    trace = trace_of((0, 30 * MIB), (0, -30 * MIB), (1, 40 * MIB))
    assert replay(trace).peak_reserved == 70 * MIB
    assert replay(trace, capacity=40 * MIB).peak_reserved == 40 * MIB
    with pytest.raises(OutOfMemory, match="exceed"):
        replay(trace, capacity=39 * MIB)
    split = trace_of((0, 30 * MIB), (0, -30 * MIB), (2, 2 * MIB), (1, 40 * MIB))
    with pytest.raises(OutOfMemory):  # the segment of 30 MiB is held by 2
        replay(split, capacity=69 * MIB)
    with pytest.raises(ValueError, match="not modelled"):
        replay(trace, expandable=True, capacity=GIB)


def test_the_waterfall_adds_up_from_live_to_device():
    found = replay(random_trace(0))
    for ranks in (1, 2):
        rows = dict(waterfall(found, ranks))
        added = rows["rounding to blocks"] + rows["reserved, not in use"]
        assert rows["live"] + added == rows["reserved"]
        assert rows["device"] == rows["reserved"] + GIB // 2 + rows.get("NCCL", 0)
        assert ("NCCL" in rows) == (ranks > 1)


def with_products(*stages: str) -> Trace:
    """A trace of one product in each of the stages."""
    trace = trace_of(*[(identity, MIB) for identity in range(len(stages))])
    for identity, stage in enumerate(stages):
        product = replace(trace.storages[identity], stage=stage, op="aten.mm.default")
        trace.storages[identity] = product
    return trace


@pytest.mark.parametrize(
    "stages, threads",
    [(["forward", "loss"], 1), (["forward", "mlp backward"], 2), (["recompute"], 1), ([], 0)],
)
@pytest.mark.parametrize("capability, each", [(90, 32), (80, 8.125), (86, 8.125), (89, 8.125)])
def test_each_thread_that_multiplies_has_a_workspace_of_cublas(stages, threads, capability, each):
    trace = with_products(*stages)
    found = with_cublas(trace, multiplying_threads(trace), capability)
    assert found.peak()[0] - trace.peak()[0] == threads * each * MIB
    if capability == 90 and stages:
        assert Demand.of(trace).classic.peak_allocated == found.peak()[0]
    assert with_cublas(found, multiplying_threads(found), capability) is found or not threads


def test_an_empty_trace_reserves_nothing():
    found = replay(Trace(stages=[(0, "start")]))
    assert found.peak_reserved == 0


@pytest.fixture(scope="module")
def training_step() -> Trace:
    return simulate(
        TrainConfig(model_size="tiny", context_length=2048, gradient_checkpointing="full")
    )


def test_a_training_step_reserves_the_same_from_the_second_repetition_on(training_step):
    trace = training_step
    for expandable in (False, True):
        assert replay(trace, expandable, steps=2) == replay(trace, expandable, steps=5)
        assert replay(trace, expandable).peak_live == trace.peak()[0]
    assert replay(trace, expandable=True).peak_reserved < replay(trace).peak_reserved


def test_a_step_fits_a_card_by_classic_segments_by_expandable_ones_or_not_at_all(training_step):
    demand = Demand.of(training_step)
    beyond = sum(beyond_the_allocator().values())
    assert demand.placement(demand.classic.peak_reserved + beyond) is Placement.FITS
    assert demand.placement(demand.classic.peak_live + beyond - 1) is Placement.TOO_SMALL
    classic_are_enough = runs_within(demand.trace, demand.least_bytes)
    expected = Placement.FITS if classic_are_enough else Placement.EXPANDABLE
    assert demand.placement(demand.expandable.peak_reserved + beyond) is expected


@pytest.mark.parametrize(
    "name, expected",
    [
        ("RTX 3060 Ti", (7.8, 86)),
        ("nvidia geforce rtx 3060ti", (7.8, 86)),
        ("V100 16GB", (15.8, 70)),
    ],
)
def test_a_card_is_found_by_its_name_however_it_is_written(name, expected):
    assert (card(name).gib, card(name).cc) == expected
