"""Statistics of activations, streamed: what comes in parts has the figures of the whole.

Nothing but totals is kept; the largest is [D, D]. A tile of tokens is centred in float64, and its
central moments are merged into the totals (Chan, Golub and LeVeque 1983; Pebay, SAND2008-6212).
Sums of powers would lose the digits of a kurtosis as soon as the mean is larger than the deviation.
Letters: N tokens, n those of a tile, D model width.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from base.machine import rounds
from model import Device

FP16_MAX = 65_504.0
TILE_ELEMENTS = 2**20  # 8 MiB in float64, of which three or four exist at a time


class Statistics(NamedTuple):
    """Figures of the N x D numbers of an activation.

    rms             root of the mean square
    max_abs         the largest magnitude; inf or nan after an overflow, and then the rest is nan
    kurtosis        fourth central moment over the squared variance: 3 for normal numbers, and up
                    to N x D for a single outlier; nan if all numbers are equal
    effective_rank  exp(entropy) of the eigenvalues of the covariance [D, D], as shares of their
                    sum: between 1 and D (Roy and Vetterli 2007); 0 if all tokens are equal
    fp16_headroom   65,504 / max_abs: how many times larger the numbers could be in float16
    """

    tokens: int
    rms: float
    max_abs: float
    kurtosis: float
    effective_rank: float
    fp16_headroom: float


class LayerStatistics:
    """Totals of an activation of width D, from as many parts as there are.

    moments  [4] of all numbers: their mean m, and the sums of (x - m)^2, (x - m)^3 and (x - m)^4
    mean_D   of each channel
    scatter_DD  the sum over tokens of (x - mean)(x - mean)^T

    The totals are float64, on `device`. Nothing waits for the device before `result`.
    """

    def __init__(self, width: int, device: Device = "cpu"):
        self.tokens = 0
        self.max_abs = torch.zeros((), device=device, dtype=torch.float64)
        self.moments = torch.zeros(4, device=device, dtype=torch.float64)
        self.mean_D = torch.zeros(width, device=device, dtype=torch.float64)
        self.scatter_DD = torch.zeros(width, width, device=device, dtype=torch.float64)

    @property
    def width(self) -> int:
        return len(self.mean_D)

    def add(self, x: Tensor) -> None:
        """Take in the numbers of x [..., D], of any floating dtype."""
        x_ND = x.detach().reshape(-1, self.width)
        size = max(1, TILE_ELEMENTS // self.width)
        for start in rounds(range(0, len(x_ND), size)):
            self._add_tile(x_ND[start : start + size])

    def _add_tile(self, x_nD: Tensor) -> None:
        x_nD = x_nD.double()
        mean_D = x_nD.mean(0)
        scatter_DD = _scatter(x_nD, mean_D)
        moments = _moments(x_nD, mean_D.mean())
        self._fold(len(x_nD), magnitude(x_nD), moments, mean_D, scatter_DD)

    def _fold(
        self,
        tokens: int,
        max_abs: Tensor,
        moments: Tensor,
        mean_D: Tensor,
        scatter_DD: Tensor,
    ) -> None:
        """Totals of both sets of tokens, in place."""
        total = self.tokens + tokens
        between_D = mean_D - self.mean_D
        weight = self.tokens / total * tokens
        self.scatter_DD.add_(scatter_DD).addr_(between_D, between_D, alpha=weight)
        self.mean_D.add_(between_D, alpha=tokens / total)

        numbers = self.tokens * self.width
        self.moments = merged_moments(self.moments, numbers, moments, tokens * self.width)
        self.max_abs = torch.maximum(self.max_abs, max_abs)
        self.tokens = total

    def is_finite(self) -> bool:
        """Whether no number overflowed."""
        return math.isfinite(self.max_abs.item())

    def result(self) -> Statistics:
        """The figures of all that was taken in."""
        max_abs = self.max_abs.item()
        if not math.isfinite(max_abs):
            return Statistics(self.tokens, math.nan, max_abs, math.nan, math.nan, 0.0)

        mean, second, _, fourth = self.moments.tolist()
        numbers = self.tokens * self.width
        return Statistics(
            tokens=self.tokens,
            rms=math.sqrt(mean**2 + second / numbers),
            max_abs=max_abs,
            kurtosis=numbers * fourth / second**2 if second else math.nan,
            effective_rank=effective_rank(self.scatter_DD),
            fp16_headroom=FP16_MAX / max_abs if max_abs else math.inf,
        )


# ---- formulas


def magnitude(x: Tensor) -> Tensor:
    """The largest magnitude, 0-d; nan if there is one. No copy of x is made."""
    return torch.maximum(x.amax(), -x.amin())  # both keep a nan


def _scatter(x_nD: Tensor, mean_D: Tensor) -> Tensor:
    centred_nD = x_nD - mean_D
    return centred_nD.T @ centred_nD


def _moments(x_nD: Tensor, mean: Tensor) -> Tensor:
    """`LayerStatistics.moments` of a tile, whose mean is given."""
    x = (x_nD - mean).flatten()
    squared = x.square()
    return torch.stack([mean, squared.sum(), squared @ x, squared @ squared])


def merged_moments(
    a: Tensor,
    count_a: int,
    b: Tensor,
    count_b: int,
) -> Tensor:
    """The mean and the sums of the second to fourth power about it [4], over two sets of numbers.

    With p = a's share of the numbers, q = b's, n their count and d = mean_b - mean_a:

        M2 = M2a + M2b + n p q d^2
        M3 = M3a + M3b + n p q (p - q) d^3 + 3 d (p M2b - q M2a)
        M4 = M4a + M4b + n p q (p^2 - p q + q^2) d^4 + 6 d^2 (p^2 M2b + q^2 M2a)
             + 4 d (p M3b - q M3a)

    Source: Pebay, SAND2008-6212, equations 1.5 and 1.6.
    """
    count = count_a + count_b
    p = count_a / count
    q = count_b / count
    mean_a, second_a, third_a, fourth_a = a
    mean_b, second_b, third_b, fourth_b = b

    d = mean_b - mean_a
    squared = d * d
    mean = mean_a + q * d
    second = second_a + second_b + count * p * q * squared

    third = third_a + third_b + count * p * q * (p - q) * squared * d
    third = third + 3 * d * (p * second_b - q * second_a)

    fourth = fourth_a + fourth_b + count * p * q * (p * p - p * q + q * q) * squared * squared
    fourth = fourth + 6 * squared * (p * p * second_b + q * q * second_a)
    fourth = fourth + 4 * d * (p * third_b - q * third_a)
    return torch.stack([mean, second, third, fourth])


def effective_rank(covariance_DD: Tensor) -> float:
    """exp(-sum of p log p) with p the eigenvalues as shares of their sum; any scale of the
    covariance gives the same. 0 if all of them are 0.
    """
    values_D = torch.linalg.eigvalsh(covariance_DD.double()).clamp(min=0)
    total = values_D.sum()
    if total == 0:
        return 0.0
    share_D = values_D / total
    entropy = -torch.special.xlogy(share_D, share_D).sum()
    return entropy.exp().item()
