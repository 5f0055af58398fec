"""Intervals: Wilson against published values, the bootstrap by its coverage."""

import math

import numpy as np
import pytest

from longhaul.evals.intervals import (
    Interval,
    bootstrap,
    mean_of_shares,
    paired_bootstrap,
    wilson,
    wilson_of_items,
)


@pytest.mark.parametrize(
    "hits, n, low, high",
    [  # Newcombe (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_has_the_published_values(hits, n, low, high):
    assert wilson(hits, n) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(n - hits, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_without_trials_says_nothing():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(7, 7).high == 1.0
    assert wilson(0, 7).low == 0.0


def test_items_with_one_answer_have_the_interval_of_wilson():
    hits = np.arange(50) < 33
    assert wilson_of_items(hits, np.ones(50)) == pytest.approx(wilson(33, 50), rel=1e-12)
    with_empty = np.append(hits, 0), np.append(np.ones(50), 0)
    assert wilson_of_items(*with_empty) == wilson_of_items(hits, np.ones(50))


def test_answers_that_are_right_together_count_once():
    asked = np.full(200, 4)
    make = np.random.default_rng(0)
    together = np.where(make.random(200) < 0.7, 4, 0)
    apart = make.binomial(4, 0.7, 200)
    assert wilson_of_items(together, asked) == pytest.approx(wilson(together.sum() / 4, 200))
    assert wilson_of_items(apart, asked) == pytest.approx(wilson(apart.sum(), 800), abs=0.01)

    # Without a miss, nothing shows that the answers of an item are independent.
    assert wilson_of_items(asked, asked) == wilson(200, 200)
    assert wilson_of_items([0], [4]) == wilson(0, 1)
    assert wilson_of_items([2, 2, 2], [4, 4, 4]) == wilson(6, 12)
    assert wilson_of_items([], []) == (0.0, 1.0)


def test_the_interval_of_items_covers_the_true_share_as_often_as_it_says():
    make = np.random.default_rng(2)
    covered = 0
    for _ in range(2000):
        share = make.beta(4, 1, 64)  # of an item, whose four answers are alike; 0.8 on average
        low, high = wilson_of_items(make.binomial(4, share), np.full(64, 4))
        covered += low <= 0.8 <= high
    assert 0.93 <= covered / 2000 <= 0.97


def test_the_interval_of_a_mean_of_shares():
    shares = [0.5, 0.5, 0.5, 0.5]
    intervals = [Interval(0.4, 0.6)] * 4
    assert mean_of_shares(shares, intervals) == pytest.approx((0.45, 0.55))
    assert mean_of_shares(shares[:1], intervals[:1]) == pytest.approx((0.4, 0.6))
    assert mean_of_shares([1.0, 0.5], [Interval(0.8, 1.0), Interval(0.5, 0.9)]) == (0.65, 0.95)


def corpus(make: np.random.Generator, documents: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Means of documents whose difficulty differs, and their lengths; the true mean is 2."""
    lengths = make.integers(50, 500, documents)
    difficulty = make.normal(2, 0.3, documents)
    return difficulty + make.normal(0, 1, documents) / np.sqrt(lengths), lengths


def test_the_bootstrap_covers_the_true_mean_as_often_as_it_says():
    make = np.random.default_rng(7)
    covered = 0
    for trial in range(400):
        low, high = bootstrap(*corpus(make), samples=300, seed=trial)
        covered += low <= 2 <= high
    assert 0.91 <= covered / 400 <= 0.975


def test_the_bootstrap_weighs_documents_by_their_tokens():
    values, weights = corpus(np.random.default_rng(3))
    assert bootstrap(values, weights) == bootstrap(values, 2 * weights)
    assert bootstrap(values, weights) != bootstrap(values)

    # A document that has no token changes nothing, whatever its mean is.
    with_empty = np.append(values, np.nan), np.append(weights, 0)
    assert bootstrap(*with_empty) == bootstrap(values, weights)


def test_the_bootstrap_is_the_same_for_every_run_and_other_with_another_seed():
    values, weights = corpus(np.random.default_rng(3))
    assert bootstrap(values, weights) == bootstrap(list(values), list(weights))
    assert bootstrap(values, weights, seed=1) != bootstrap(values, weights)


def test_one_document_says_nothing_of_the_spread():
    assert all(math.isnan(end) for end in bootstrap([1.0]))
    assert all(math.isnan(end) for end in bootstrap([1.0, 2.0], weights=[3, 0]))


def test_pairs_find_a_difference_that_documents_hide():
    values, weights = corpus(np.random.default_rng(5))
    better = values - 0.02
    low, high = paired_bootstrap(values, better, weights)
    assert low == pytest.approx(0.02) and high == pytest.approx(0.02)

    alone, other = bootstrap(values, weights), bootstrap(better, weights)
    assert alone.low < other.high  # the intervals of the two overlap
    assert paired_bootstrap(better, values, weights).high < 0


@pytest.mark.parametrize(
    "function, given",
    [
        (paired_bootstrap, ([1, 2], [1, 2, 3])),
        (bootstrap, ([1, 2], [1])),
        (bootstrap, ([1, 2], [1, -1])),
        (wilson, (-1, 5)),
        (wilson, (6, 5)),
        (wilson_of_items, ([2], [1])),
    ],
)
def test_what_cannot_be_counted_is_refused(function, given):
    with pytest.raises(ValueError, match="pass|score both"):
        function(*given)
