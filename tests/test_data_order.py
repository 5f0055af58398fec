"""The order is a bijection that is computed from {seed, epoch, position} and nothing else."""

import numpy as np
import pytest

from data.order import mix, parse_ranges, permute

SIZES = sorted({1, 2, 3, *(2**k + d for k in range(2, 12) for d in (-1, 0, 1))})


def rows_at(seed: int, epoch: int, n: int, positions) -> np.ndarray:
    return np.array([permute(seed, epoch, n, int(position)) for position in positions])


def test_every_row_comes_exactly_once_in_an_epoch():
    for n in SIZES:
        for seed, epoch in ((0, 0), (12345, 7)):
            assert sorted(rows_at(seed, epoch, n, range(n))) == list(range(n))


def test_every_row_is_inside_the_epoch_for_any_number_of_rows():
    for n in (1, 2, 3, 5, 1000, 10**9, 2**40 + 1):
        rows = rows_at(3, 4, n, np.unique(np.linspace(0, n - 1, 200, dtype=np.int64)))
        assert (rows < n).all() and (rows >= 0).all()
        assert len(np.unique(rows)) == min(n, 200)


def test_known_values_never_change():
    assert [permute(0, 0, 10, p) for p in range(10)] == [9, 4, 6, 8, 7, 3, 1, 5, 2, 0]
    assert permute(42, 3, 10**9, 123456789) == 754980091


def test_seed_and_epoch_change_the_order():
    orders = {
        tuple(rows_at(seed, epoch, 1000, range(1000))) for seed in (0, 1, 2) for epoch in (0, 1, 2)
    }
    assert len(orders) == 9


def test_the_order_looks_random():
    rows = rows_at(0, 0, 10_000, range(10_000)).astype(float)
    assert abs(np.corrcoef(np.arange(10_000), rows)[0, 1]) < 0.05
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.05

    # a random permutation has one fixed point on average
    assert (rows == np.arange(10_000)).sum() < 10


def test_a_large_or_negative_seed_works():
    assert 0 <= permute(2**64 + 5, 2**40, 17, 3) < 17
    assert 0 <= permute(-1, 0, 17, 3) < 17


@pytest.mark.parametrize("position", [-1, 10, 11])
def test_a_position_outside_the_epoch_is_refused(position):
    with pytest.raises(ValueError, match="allowed are 0 to 9"):
        permute(0, 0, 10, position)


def test_rows_beyond_what_a_checkpoint_records_are_refused():
    assert parse_ranges(["5:9"]) == ((5, 9),)
    for word in ("5:5", "9:5", f"0:{2**53}", "0:99999999999999999"):
        with pytest.raises(ValueError, match="b below 2"):
            parse_ranges([word])


def test_mixing_is_one_to_one():
    assert len({mix(x) for x in range(10_000)}) == 10_000


def test_mixing_an_array_is_mixing_each_of_its_numbers():
    numbers = [0, 1, 2**32, 2**63, 2**64 - 1]
    assert mix(np.array(numbers, dtype=np.uint64)).tolist() == [mix(x) for x in numbers]
