"""Streamed statistics against a two-pass float64 reference, within 1e-6."""

import math

import pytest
import torch

from lab.analysis import statistics
from lab.analysis.statistics import LayerStatistics, Statistics, effective_rank

EXACT = 1e-6


def reference(x: torch.Tensor) -> Statistics:
    """Two passes over all numbers in float64: first the means, then the moments about them."""
    x_ND = x.double().reshape(-1, x.shape[-1])
    deviation = x_ND - x_ND.mean()
    variance = (deviation**2).mean()
    centred = x_ND - x_ND.mean(0)
    values = torch.linalg.eigvalsh(centred.T @ centred / len(x_ND)).clamp(min=1e-300)
    share = values / values.sum()
    largest = x_ND.abs().max().item()
    return Statistics(
        tokens=len(x_ND),
        rms=(x_ND**2).mean().sqrt().item(),
        max_abs=largest,
        kurtosis=((deviation**4).mean() / variance**2).item(),
        effective_rank=math.exp(-(share * share.log()).sum()),
        fp16_headroom=65504 / largest,
    )


def assert_same(found: Statistics, expected: Statistics) -> None:
    assert found.tokens == expected.tokens
    for name, value in expected._asdict().items():
        assert getattr(found, name) == pytest.approx(value, rel=EXACT), name


def streamed(x_ND: torch.Tensor, sizes: list[int]) -> LayerStatistics:
    totals = LayerStatistics(x_ND.shape[-1])
    for part in x_ND.split(sizes):
        totals.add(part)
    return totals


def numbers(kind: str, n: int = 1000, width: int = 24) -> torch.Tensor:
    """Activations that make single-precision sums of powers fail."""
    make = torch.Generator().manual_seed(0)
    x = torch.randn(n, width, generator=make)
    if kind == "far mean":
        return x + 3000
    if kind == "outlier":
        x[7, 3] = 4000
        x[:, 5] += 90
    if kind == "low rank":
        return x[:, :3] @ torch.randn(3, width, generator=make) + 1e-3 * x
    if kind == "drifting":
        return x + torch.linspace(-50, 400, n)[:, None]
    return x


# ---- formulas


@pytest.mark.parametrize(
    "kind, sizes",
    [
        ("normal", [1000]),
        ("far mean", [333, 333, 334]),
        ("outlier", [1, 499, 500]),
        ("low rank", [1, 499, 500]),
        ("drifting", [1] * 1000),
    ],
)
def test_streamed_figures_are_those_of_two_passes(kind, sizes):
    x_ND = numbers(kind)
    assert_same(streamed(x_ND, sizes).result(), reference(x_ND))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_every_dtype_are_summed_as_they_are(dtype):
    x_ND = numbers("outlier").to(dtype)
    assert_same(streamed(x_ND, [400, 600]).result(), reference(x_ND))


def test_tiles_of_one_part_are_merged_like_parts(monkeypatch):
    monkeypatch.setattr(statistics, "TILE_ELEMENTS", 24 * 37)
    x_ND = numbers("drifting")
    totals = LayerStatistics(24)
    totals.add(x_ND.view(10, 100, 24))
    assert_same(totals.result(), reference(x_ND))


def test_the_effective_rank_of_equal_eigenvalues_is_their_number():
    for rank in (1, 2, 5):
        values = torch.zeros(9)
        values[:rank] = 7.0
        assert effective_rank(values.diag()) == pytest.approx(rank)


# ---- edges


def test_equal_numbers_have_no_spread():
    found = streamed(torch.full((10, 4), 2.5), [3, 7]).result()
    assert found.rms == found.max_abs == 2.5
    assert math.isnan(found.kurtosis) and found.effective_rank == 0.0
    assert streamed(torch.zeros(3, 4), [3]).result().fp16_headroom == math.inf


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_overflow_shows_and_stays(bad):
    x_ND = numbers("normal")
    x_ND[500, 2] = bad
    totals = streamed(x_ND, [400, 200, 400])
    found = totals.result()
    assert not totals.is_finite() and found.fp16_headroom == 0.0
    assert math.isnan(found.rms) and math.isnan(found.effective_rank)
    assert streamed(numbers("normal"), [1000]).is_finite()
