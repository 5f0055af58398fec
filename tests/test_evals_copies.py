"""Far copies: against a quadratic oracle, and the same for everybody."""

import numpy as np
import pytest

from longhaul.evals.copies import distance_to_copy, far_copies
from tests.events import calls


def oracle(ids: list[int], short: int, ngram: int) -> list[bool]:
    """The definition, word for word."""
    found = []
    for p in range(len(ids)):
        earlier = [q for q in range(ngram, p) if ids[q - ngram : q + 1] == ids[p - ngram : p + 1]]
        found.append(bool(earlier) and p - max(earlier) > short)
    return found


def distance_oracle(ids: list[int], length: int) -> list[int]:
    distances = []
    for p in range(len(ids)):
        ends = range(length - 1, p)
        earlier = [q for q in ends if ids[q + 1 - length : q + 1] == ids[p + 1 - length : p + 1]]
        distances.append(p - max(earlier) if earlier else 0)
    return distances


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 5])
def test_far_copies_are_those_of_the_definition(vocabulary):
    make = np.random.default_rng(vocabulary)
    seen = 0
    for _ in range(60):
        ids = make.integers(0, vocabulary, make.integers(1, 80))
        short, ngram = make.integers(1, 20), make.integers(1, 10)
        found = far_copies(ids, short, ngram)
        assert found.tolist() == oracle(ids.tolist(), short, ngram)
        seen += found.sum()
    # one token only: the nearest earlier copy is always next door
    assert seen == 0 if vocabulary == 1 else seen > 20


@pytest.mark.parametrize("length", [1, 2, 8, 11])
def test_distances_are_those_of_the_definition_for_every_length(length):
    make = np.random.default_rng(length)
    block = make.integers(0, 3, 40)
    ids = np.concatenate([block, make.integers(0, 3, 15), block])
    assert distance_to_copy(ids, length).tolist() == distance_oracle(ids.tolist(), length)


def test_large_ids_and_every_integer_type_give_the_same_set():
    make = np.random.default_rng(0)
    block = make.integers(0, 60_000, 50)
    ids = np.concatenate([block, make.integers(0, 60_000, 200), block])
    expected = far_copies(ids, 100)
    assert expected.sum() == 42
    for dtype in (np.uint16, np.uint32, np.uint64, np.int32):
        assert np.array_equal(far_copies(ids.astype(dtype), 100), expected)
    spread = ids.astype(np.uint64) * np.uint64(2**47)
    assert np.array_equal(far_copies(spread, 100), expected)


@pytest.mark.parametrize("length", [0, 8])
def test_a_document_shorter_than_an_ngram_has_none(length):
    assert far_copies(np.zeros(length, np.int64), 1).tolist() == [False] * length


@pytest.mark.parametrize("given", [([1, 2], 0), ([1, 2], 5, 0), ([[1, 2]], 5)])
def test_what_has_no_copies_is_refused(given):
    with pytest.raises(ValueError, match="give"):
        far_copies(*given)


@pytest.mark.parametrize("vocabulary", [1, 150_000])
def test_no_function_is_called_for_each_token(vocabulary):
    ids = np.random.default_rng(0).integers(0, vocabulary, 131_072)
    assert calls(lambda: far_copies(ids, 4096)) < 2 * calls(lambda: far_copies(ids[:8192], 4096))
