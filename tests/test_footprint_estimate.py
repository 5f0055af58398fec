"""footprint.estimate_memory: a model and a batch that are there, against build and step."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from footprint import estimate_memory, measure, predict
from tests.footprint_models import Transformer, convolutions, images, tokens

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


def loss(output):
    return F.cross_entropy(output.flatten(0, 1), torch.zeros(4 * 160, dtype=torch.long))


def train(state):
    model, optimizer = state
    output = model(tokens()[0].contiguous())
    loss(output).backward()
    optimizer.step()
    optimizer.zero_grad()


def build():
    model = Transformer()
    return model, ADAMW(model.parameters())


def test_a_given_model_takes_what_the_real_step_does_and_keeps_its_weights():
    model, inputs = Transformer(), tokens()[0].contiguous()
    before = model.head.weight.detach().clone()
    report = estimate_memory(model, inputs, ADAMW, loss, "cpu")
    assert report.peak == pytest.approx(measure(build, train), rel=1e-3)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, before)


def test_a_model_on_meta_takes_the_same_as_one_on_the_cpu():
    with torch.device("meta"):
        on_meta = Transformer()
    inputs = tokens()[0].contiguous()
    on_cpu = estimate_memory(Transformer(), inputs, ADAMW, loss)
    assert estimate_memory(on_meta, inputs.to("meta"), ADAMW, loss).peak == on_cpu.peak
    assert on_cpu.peak == pytest.approx(predict(build, train).peak, rel=1e-3)
    assert next(on_meta.parameters()).is_meta


def test_an_optimizer_that_is_there_is_one_of_the_same_class_and_options():
    model, inputs = Transformer(), tokens()[0].contiguous()
    head, *others = model.parameters()
    groups = [{"params": [head], "momentum": 0.9}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    report = estimate_memory(model, inputs, optimizer, loss)

    def plain(parameters):
        head, *others = parameters
        return torch.optim.SGD([{"params": [head], "momentum": 0.9}, {"params": others}], lr=0.1)

    assert report.peak == estimate_memory(model, inputs, plain, loss).peak
    assert report.peak > estimate_memory(model, inputs, torch.optim.SGD, loss).peak
    assert optimizer.param_groups[0]["params"][0] is head and not optimizer.state

    foreign = torch.optim.SGD(Transformer().parameters())
    with pytest.raises(ValueError, match="make it of model.parameters"):
        estimate_memory(model, inputs, foreign, loss)


def test_buffers_follow_the_step_and_stay_as_they_are():
    model, (pixels, _) = convolutions(), images()
    report = estimate_memory(model, (pixels,), torch.optim.SGD)
    assert report.stages["start"]["buffer"] > 0
    counts = [module.num_batches_tracked for module in model if hasattr(module, "running_mean")]
    assert all(count == 0 for count in counts)


class Named(nn.Module):
    """A model that is called by names and returns its loss."""

    class Output:
        def __init__(self, loss):
            self.loss = loss

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, rows, scale):
        return self.Output((self.inner(rows) * scale).mean())


def test_the_loss_that_a_model_returns_is_taken_and_nothing_is_updated_without_an_optimizer():
    report = estimate_memory(Named(), {"rows": torch.randn(8, 64), "scale": 2.0})
    assert "optimizer" not in report.by_stage
    assert any("backward" in stage for stage in report.by_stage)


def test_a_model_that_is_not_trained_runs_forward_alone():
    report = estimate_memory(Named().requires_grad_(False), {"rows": torch.ones(8, 64), "scale": 1})
    assert not any("backward" in stage for stage in report.by_stage)
