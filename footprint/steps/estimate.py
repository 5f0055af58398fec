"""The memory of a usual training step, from a model and a batch that are already there."""

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from footprint.answers.report import Report
from footprint.pretend.given import remade
from footprint.pretend.losses import returned_loss
from footprint.steps.prediction import predict


def estimate_memory(
    model: nn.Module,
    inputs: object,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    loss: Callable[[object], Tensor] | None = None,
    target: str = "cuda",
) -> Report:
    """The memory of a training step of `model` on `inputs`, both on the CPU or on meta.

    inputs: a tensor, a tuple of arguments, or a dictionary of named ones. optimizer: an optimizer
    of the model's parameters, of whose class another is made with its options, or anything that
    makes one of parameters; without one nothing is updated. loss: of the
    model's output; else what is named "loss" in it, or its only scalar, or a mean, which `assumed`
    names. If nothing is trained, the forward alone. Model and inputs stay as they are.
    """
    assumed: list[str] = []

    def usual_loss(output: object) -> Tensor:
        value, words = returned_loss(output)
        assumed[:] = [words] if words else []
        return value

    def step(state: tuple[nn.Module, Optimizer | None]) -> None:
        output = _call(model, tree_map(_imagined, inputs))
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        if loss or is_trained:
            value = (loss or usual_loss)(output)
            if value.requires_grad:
                value.backward()
        if state[1]:
            state[1].step()
        model.zero_grad()

    with contextlib.ExitStack() as swapped:

        def build() -> tuple[nn.Module, Optimizer | None]:
            fakes = _without_values(model)
            replaced = {tensor: fakes[name] for name, tensor in model.named_parameters()}
            swapped.enter_context(_reparametrize_module(model, fakes, tie_weights=True))
            if isinstance(optimizer, Optimizer):
                return model, _same_kind(optimizer, replaced)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            return model, optimizer(trained) if optimizer else None

        report = predict(build, step, target)
    report.assumed += assumed
    return report


def _call(model: nn.Module, inputs: object) -> object:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _same_kind(optimizer: Optimizer, replaced: Mapping[Tensor, Tensor]) -> Optimizer:
    """A new optimizer of the same class and options, of what replaces its parameters."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter not in replaced for parameter in held):
        raise ValueError(
            "the optimizer holds parameters of another model: make it of model.parameters()"
        )
    groups = [
        group | {"params": [replaced[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return type(optimizer)(groups)


def _imagined(value: object) -> object:
    """A fake tensor for a real one, whose values stay known if they are few."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu":
        return remade(value)
    return torch.empty_like(value, device="cpu")


def _without_values(model: nn.Module) -> dict[str, Tensor]:
    """The names of the model's parameters and buffers, and fake tensors in their place."""
    fakes = {name: _imagined(buffer) for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        made = torch.empty_like(parameter, device="cpu", requires_grad=False)
        fakes[name] = nn.Parameter(made, parameter.requires_grad)
    return fakes
