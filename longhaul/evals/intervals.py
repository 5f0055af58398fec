"""Intervals of 95% for what an evaluation counts: a share by Wilson, a mean by the bootstrap.

The tokens of a document are not independent, so a document is the unit that is drawn, with all of
its tokens. Seeded: the same values have the same interval on every rank and in every run.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Interval(NamedTuple):
    """Where a figure lies with the given confidence."""

    low: float
    high: float

    def half(self, digits: int = 4) -> str:
        """Half the width in words, such as " +- 0.0041"; nothing if it is not known."""
        if math.isnan(self.low):
            return ""
        return f" +- {(self.high - self.low) / 2:.{digits}f}"


# --------------------------------------------------------------------------- shares


def wilson(hits: float, n: float, confidence: float = 0.95) -> Interval:
    """The interval of a share of which `hits` of n independent trials were seen.

    With p = hits / n and z the normal quantile: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) /
    (1 + z^2/n). Without a trial it is 0 to 1. ValueError for hits outside 0..n.
    Source: E. B. Wilson, JASA 22 (1927); method 3 of Newcombe, Statistics in Medicine 17 (1998).
    """
    if not 0 <= hits <= n:
        raise ValueError(f"{hits} hits of {n}: pass 0 <= hits <= n")
    if n == 0:
        return Interval(0.0, 1.0)

    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = hits / n
    middle = share + z**2 / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    whole = 1 + z**2 / n

    # At no hit or no miss the two terms are equal but for their rounding.
    low = 0.0 if hits == 0 else (middle - half) / whole
    high = 1.0 if hits == n else (middle + half) / whole
    return Interval(low, high)


def wilson_of_items(hits: ArrayLike, asked: ArrayLike, confidence: float = 0.95) -> Interval:
    """The interval of the share of all answers that are right, if an item asks for several.

    `hits` and `asked` hold the numbers of each item. The answers of an item may be right or wrong
    together, so they count as n = p (1 - p) / variance of p between items, but at least as many as
    there are items and at most as many as there are answers. Items in which nothing is asked are
    left out. ValueError for hits outside 0..asked.
    Source: E. Korn and B. Graubard, Survey Methodology 24 (1998), with Wilson's interval.
    """
    hits = np.asarray(hits, dtype=np.float64)
    asked = np.asarray(asked, dtype=np.float64)
    if ((hits < 0) | (hits > asked)).any():
        raise ValueError("an item has more hits than answers: pass 0 <= hits <= asked")
    items = int((asked > 0).sum())
    answers = float(asked.sum())
    if not items:
        return Interval(0.0, 1.0)

    share = float(hits.sum()) / answers
    independent = share * (1 - share)
    if independent == 0 or items == 1:  # nothing is known of the spread between items
        return wilson(share * items, items, confidence)

    deviation = hits - share * asked
    variance = items / (items - 1) * float((deviation**2).sum()) / answers**2
    n = answers if variance == 0 else independent / variance
    n = min(max(n, items), answers)
    return wilson(share * n, n, confidence)


def mean_of_shares(shares: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """The interval of the mean of independent shares from their own intervals.

    Below and above the mean, the distances of the ends add up as squares.
    Source: G. Zou and A. Donner, Statistics in Medicine 27 (2008), the MOVER.
    """
    shares = np.asarray(shares, dtype=np.float64)
    low, high = np.asarray(intervals, dtype=np.float64).T
    below = float(np.linalg.norm(shares - low)) / len(shares)
    above = float(np.linalg.norm(high - shares)) / len(shares)
    mean = float(shares.mean())
    return Interval(max(0.0, mean - below), min(1.0, mean + above))


# --------------------------------------------------------------------------- means


def bootstrap(
    values: ArrayLike,
    weights: ArrayLike | None = None,
    samples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval:
    """The percentile interval of sum(weights * values) / sum(weights) over documents.

    `values` holds the mean of each document and `weights` its number of tokens (1 each without
    them); documents are drawn with both. A document of weight 0 is left out. Below two documents
    nothing can be said of the spread: NaN, NaN. From about 40 documents on the interval covers what
    it says (tests/test_evals_intervals.py); with fewer it is too narrow.
    Source: B. Efron, Annals of Statistics 7 (1979).
    """
    values, weights = _documents(values, weights)
    documents = len(values)
    if documents < 2:
        return Interval(math.nan, math.nan)

    sums = values * weights
    make = np.random.default_rng(seed)
    means = np.empty(samples)
    for sample in range(samples):
        drawn = make.integers(documents, size=documents)
        means[sample] = sums[drawn].sum() / weights[drawn].sum()

    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(low), float(high))


def paired_bootstrap(
    a: ArrayLike,
    b: ArrayLike,
    weights: ArrayLike | None = None,
    samples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Interval:
    """The interval of mean(a) - mean(b) over the same documents, with the weights that both have.

    Both models are drawn together, so what makes a document easy for both cancels. ValueError for
    different numbers of documents.
    """
    a = np.asarray(a, dtype=np.float64)
    b = np.asarray(b, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(
            f"{a.size} and {b.size} documents cannot be paired: score both models on the same ones"
        )
    return bootstrap(a - b, weights, samples, seed, confidence)


def _documents(values: ArrayLike, weights: ArrayLike | None) -> tuple[NDArray, NDArray]:
    """Means and weights of the documents that have a weight."""
    values = np.asarray(values, dtype=np.float64)
    if weights is None:
        return values, np.ones_like(values)

    weights = np.asarray(weights, dtype=np.float64)
    if values.shape != weights.shape:
        raise ValueError(
            f"{values.size} values with {weights.size} weights: pass one weight for each document"
        )
    if (weights < 0).any():
        raise ValueError("a document has a negative weight: pass its number of tokens")
    counted = weights > 0
    return values[counted], weights[counted]
