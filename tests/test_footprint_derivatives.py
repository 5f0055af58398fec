"""footprint/ on a CPU, for steps that take derivatives of other kinds than a loss's gradient: the
predicted peak against the allocator's own record.
"""

import pytest
import torch
import torch.autograd.forward_ad as dual
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp

from footprint import measure, predict
from tests.footprint_models import trained
from tests.tiers import slow

TOLERANCE = 12  # bytes


def of_a_direction(model: nn.Module, width: int) -> Tensor:
    x, direction = torch.randn(2 * width, width), torch.randn(2 * width, width)
    result, derivative = jvp(model, (x,), (direction,))
    return result.square().mean() + derivative.square().mean()


def of_dual_numbers(model: nn.Module, width: int) -> Tensor:
    x, direction = torch.randn(2 * width, width), torch.randn(2 * width, width)
    with dual.dual_level():
        found = dual.unpack_dual(model[:2](dual.make_dual(x, direction)))
    return found.primal.square().mean() + found.tangent.square().mean()


def of_the_weights(model: nn.Module, width: int) -> Tensor:
    x = torch.randn(2 * width, width)
    weights = dict(model.named_parameters())
    directions = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def loss(weights: dict) -> Tensor:
        return functional_call(model, weights, (x,)).square().mean()

    result, derivative = jvp(loss, (weights,), (directions,))
    return result + derivative


def forward_jacobian(model: nn.Module, width: int) -> Tensor:
    return jacfwd(model)(torch.randn(4, width)).square().mean()


def backward_jacobian(model: nn.Module, width: int) -> Tensor:
    return jacrev(model)(torch.randn(4, width)).square().mean()


def jacobian_row_by_row(model: nn.Module, width: int) -> Tensor:
    x = torch.randn(4, width)
    return torch.autograd.functional.jacobian(model, x, create_graph=True).square().mean()


def jacobian_by_columns(model: nn.Module, width: int) -> Tensor:
    x = torch.randn(4, width)
    options = dict(vectorize=True, strategy="forward-mode")
    return torch.autograd.functional.jacobian(model, x, **options).square().mean()


def product_by_two_backwards(model: nn.Module, width: int) -> Tensor:
    x, direction = torch.randn(4, width), torch.randn(4, width)
    found = torch.autograd.functional.jvp(model, x, direction, create_graph=True)
    return found[1].square().mean()


def forward_over_backward(model: nn.Module, width: int) -> Tensor:
    """The second derivative along one direction."""

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum()

    x, direction = torch.randn(4, width), torch.randn(4, width)
    return jvp(grad(loss), (x,), (direction,))[1].square().mean()


def second_derivatives(model: nn.Module, width: int) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        return model[:2](x).square().sum()

    return hessian(loss)(torch.randn(width)).square().mean()


def double_backward(model: nn.Module, width: int) -> Tensor:
    x = torch.randn(4, width, requires_grad=True)
    (found,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return found.square().mean()


DERIVATIVES = (
    of_a_direction,
    of_dual_numbers,
    of_the_weights,
    forward_jacobian,
    backward_jacobian,
    slow(jacobian_row_by_row),
    slow(jacobian_by_columns),
    product_by_two_backwards,
    forward_over_backward,
    second_derivatives,
    double_backward,
)


@pytest.mark.parametrize("derive", DERIVATIVES)
def test_derivatives_take_what_the_allocator_records(derive):
    width = 33

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(width, 2 * width), nn.Tanh(), nn.LayerNorm(2 * width), nn.Linear(2 * width, 8)
        )

    build, step = trained(make, lambda model: derive(model, width))
    assert predict(build, step, "cpu").peak == pytest.approx(measure(build, step), abs=TOLERANCE)
