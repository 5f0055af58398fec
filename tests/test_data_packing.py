"""Packing puts every token into exactly one row, cuts only what is too long, and wastes next to
nothing.
"""

import numpy as np
import pytest

from data.packing import CHUNK_DOCUMENTS, best_fit, effective_context, pack
from tests.events import calls


def lengths_of(seed: int, n: int, scale: float = 5.0, spread: float = 1.3) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(scale, spread, n).astype(np.int64) + 1


@pytest.mark.parametrize("context", [1, 7, 64, 4096])
def test_every_token_is_in_exactly_one_row_and_no_row_overflows(context):
    lengths = lengths_of(context, 100)
    plan, seen = pack(lengths, context), [np.zeros(n, dtype=int) for n in lengths]
    for r in range(plan.num_rows):
        row = plan.row(r)
        assert 0 < sum(length for _, _, length in row) <= context
        for document, start, length in row:
            seen[document][start : start + length] += 1
    assert all((counts == 1).all() for counts in seen)


def test_documents_are_cut_only_at_multiples_of_the_context():
    lengths = np.array([100, 64, 65, 128, 1, 640])
    plan = pack(lengths, 64)
    assert (plan.start % 64 == 0).all()
    fitting = [d for d in range(len(lengths)) if lengths[d] <= 64]
    assert all((plan.document == d).sum() == 1 for d in fitting)


def test_best_fit_equals_the_obvious_search():
    rng = np.random.default_rng(0)
    for capacity in (10, 100, 1000):
        lengths = sorted(rng.integers(1, capacity + 1, 300).tolist(), reverse=True)
        rooms: list[int] = []
        for length in lengths:
            fitting = [room for room in rooms if room >= length]
            rooms.remove(min(fitting)) if fitting else None
            rooms.append((min(fitting) if fitting else capacity) - length)
        row = best_fit(lengths, capacity)
        used = np.bincount(row, weights=lengths).astype(int)
        assert sorted(capacity - used) == sorted(rooms)


def test_longer_documents_go_first_and_equal_ones_in_their_order():
    plan = pack(np.array([2, 7, 3, 9, 7, 3]), 10)
    assert [plan.row(r) for r in range(plan.num_rows)] == [
        [(3, 0, 9)],
        [(1, 0, 7), (5, 0, 3)],
        [(4, 0, 7), (2, 0, 3)],
        [(0, 0, 2)],
    ]


def test_padding_is_far_below_one_percent():
    for context in (2048, 8192, 32768):
        assert pack(lengths_of(2, 20_000, scale=6.5), context).padding() < 0.005


def test_blocks_beyond_the_first_keep_their_documents_apart():
    n = CHUNK_DOCUMENTS + 1000
    plan = pack(np.full(n, 3), 10)
    assert np.bincount(plan.document, minlength=n).tolist() == [1] * n
    blocks = plan.document >= CHUNK_DOCUMENTS
    assert blocks.tolist() == sorted(blocks.tolist())  # rows never mix two blocks
    assert plan.first[-1] == len(plan.document)


def test_the_work_of_packing_grows_with_the_number_of_documents():
    lengths = lengths_of(3, 40_000, scale=7.0)
    few = calls(lambda: pack(lengths[:10_000], 131_072))
    plans = []
    assert calls(lambda: plans.append(pack(lengths, 131_072))) < 5 * few
    assert plans[0].length.sum() == lengths.sum()


@pytest.mark.parametrize("lengths, context", [([3], 0), ([3], -5), ([], 8), ([3, 0], 8)])
def test_impossible_requests_are_refused(lengths, context):
    with pytest.raises(ValueError, match="give"):
        pack(lengths, context)


def test_effective_context_sees_through_packed_short_documents():
    short = effective_context(np.full(1000, 100), 1000)
    assert (short.p10, short.p50, short.p90) == (100, 100, 100)
    assert short.long_share == 0 and short.causal_share == pytest.approx(0.1)
    assert "0% " in short.warning and "500 " in short.warning
    long = effective_context(np.array([10_500]), 1000)
    assert (long.p50, long.long_share, long.warning) == (1000, 1.0, None)


def test_the_warning_starts_below_thirty_percent():
    assert effective_context(np.array([500] * 3 + [1] * 3500), 1000).warning is None
    assert effective_context(np.array([500] * 3 + [1] * 3600), 1000).warning is not None
