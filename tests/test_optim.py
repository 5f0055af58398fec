"""Schedules as functions of the step, parameter groups, clipping."""

import math

import pytest
import torch

from footprint import measure
from longhaul import optim
from longhaul.config import TrainConfig
from model import Decoder, ModelConfig


def rates(**changes) -> list[float]:
    cfg = TrainConfig(model_size="tiny", lr=1.0, max_steps=101, warmup_steps=10, **changes)
    return [optim.learning_rate(step, cfg) for step in range(cfg.max_steps)]


def test_warmup_rises_linearly_to_the_peak_at_its_last_step():
    assert rates()[:10] == pytest.approx([0.1 * step for step in range(1, 11)])


def test_cosine_passes_the_middle_at_half_and_ends_at_the_floor():
    curve = rates(schedule="cosine:0.2")
    assert curve[10] == 1.0 and curve[100] == pytest.approx(0.2) and curve[55] == pytest.approx(0.6)
    assert all(a >= b for a, b in zip(curve[10:], curve[11:]))


def test_wsd_is_flat_then_falls_linearly_over_its_last_part():
    curve = rates(schedule="wsd:0.25:0")
    start = round(101 * 0.75)
    assert set(curve[10 : start + 1]) == {1.0} and curve[100] == 0.0
    drops = [a - b for a, b in zip(curve[start:], curve[start + 1 :])]
    assert drops == pytest.approx([1 / (100 - start)] * len(drops))


def test_a_constant_schedule_stays_and_no_warmup_starts_at_the_peak():
    cfg = TrainConfig(model_size="tiny", lr=1.0, schedule="constant", warmup_steps=0)
    assert {optim.learning_rate(step, cfg) for step in (0, 1, 999)} == {1.0}


def test_matrices_decay_and_norms_do_not():
    model = Decoder(ModelConfig.preset("tiny", vocab_size=32))
    groups = optim.parameter_groups(model, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.ndim == 2 for p in groups[0]["params"]) and all(
        p.ndim == 1 for p in groups[1]["params"]
    )
    assert sum(p.numel() for group in groups for p in group["params"]) == model.num_params()


@pytest.mark.parametrize("largest", [0.0, 0.5, 1e6])
def test_clipping_scales_to_the_largest_norm_and_reports_the_one_before(largest):
    model = Decoder(ModelConfig.preset("tiny", vocab_size=32))
    for index, parameter in enumerate(model.parameters()):
        size = 0.01 if parameter.ndim > 1 else 1.0  # so that the few vectors count
        parameter.grad = torch.full_like(parameter, size * (index + 1))
    before = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    assert float(optim.clip_gradients(model, largest)) == pytest.approx(before, rel=1e-6)
    after = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    assert after == pytest.approx(largest if largest == 0.5 else before, rel=1e-5)


def test_the_norm_of_gradients_copies_no_matrix():
    def build() -> Decoder:
        model = Decoder(ModelConfig.preset("tiny", vocab_size=32, num_layers=1))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return model

    weights = [parameter.nbytes for parameter in build().parameters()]
    held = 2 * sum(weights)
    peak = measure(build, lambda model: optim.clip_gradients(model, 1.0))
    assert held < peak < held + max(weights) / 4
