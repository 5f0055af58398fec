"""longhaul/elementwise/operators.py against model.py's operators and float64, forward and backward.

The kernels run on a GPU if there is one. Otherwise Triton's interpreter runs them, in fp32 and in
fp16.
"""

import pytest
import torch

import model
from base import machine
from longhaul import kernels
from longhaul.planner.simulate import on_target
from model import ModelConfig, NSAConfig, Standard
from tests import oracle

triton = pytest.importorskip(
    "triton", reason="triton is not installed: the fused elementwise kernels are not tested"
)

from longhaul.elementwise import kernels as elementwise_kernels  # noqa: E402
from longhaul.elementwise import operators as elementwise  # noqa: E402
from longhaul.elementwise import sizes  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10}  # of one rounding
# rows, tokens, heads, head dimension: one vector, odd counts, a half that is no power of two;
# whether all rows share a table of angles
cases = pytest.mark.parametrize(
    "shape, dtype, shared",
    [
        ((1, 1, 1, 2), torch.float32, True),
        ((2, 5, 3, 8), torch.float32, False),
        ((2, 5, 3, 8), torch.float16, True),
        ((1, 7, 5, 12), torch.float32, True),
        ((2, 3, 8, 128), torch.float32, True),
        ((2, 3, 8, 128), torch.float16, False),
    ],
)


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch):
    """Outputs that a kernel forgets to write are NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        return empty(*args, **kwargs).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", poisoned)


def draw(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def angles(rows: int, tokens: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    turn = draw(rows, tokens, 1, K // 2, seed=9) * 3
    return turn.cos(), turn.sin()


def gradients(function, inputs, dy) -> list[torch.Tensor]:
    """[y, d inputs ...] of y = function(*inputs)."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def assert_as_exact(fused, plain, truth, dtype):
    """Each result is as near to float64 as the plain one, or as one rounding."""
    for ours, theirs, exact in zip(fused, plain, truth, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        error = (ours.double() - exact).abs().max()
        allowed = (theirs.double() - exact).abs().max()
        one_rounding = EPS[dtype] * exact.abs().max()
        assert error <= 1.1 * allowed + one_rounding


def exact_angles(rope) -> list[torch.Tensor]:
    return [x.double() for x in rope]


def rotated(x, cos, sin) -> torch.Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def exact_norm_rotate(rope):
    table = exact_angles(rope)
    return lambda x, weight: rotated(oracle.rms_norm(x, weight, 1e-6), *table)


@cases
def test_rotation_equals_the_plain_one(shape, dtype, shared):
    B, T, _, K = shape
    rope = angles(1 if shared else B, T, K)
    x, dy = draw(*shape, dtype=dtype), draw(*shape, seed=1)
    fused = gradients(lambda x: elementwise.rotate(x, *rope), [x], dy)
    plain = gradients(lambda x: model.rotate(x, *rope), [x], dy)
    truth = gradients(lambda x: rotated(x, *exact_angles(rope)), [x.double()], dy)
    assert_as_exact(fused, plain, truth, dtype)


@cases
def test_norm_with_rotation_equals_the_two_plain_steps(shape, dtype, shared):
    B, T, _, K = shape
    rope = angles(1 if shared else B, T, K)
    x, dy = draw(*shape, dtype=dtype), draw(*shape, seed=1)
    weight = draw(K, seed=2) + 1

    def plain(x, weight):
        return model.rotate(model._RMSNorm.apply(x, weight, 1e-6), *rope)

    fused = gradients(lambda x, w: elementwise.norm_rotate(x, w, *rope, 1e-6), [x, weight], dy)
    truth = gradients(exact_norm_rotate(rope), [x.double(), weight.double()], dy)
    assert_as_exact(fused, gradients(plain, [x, weight], dy), truth, dtype)


def test_a_program_that_has_several_parts_adds_their_gradients_of_the_weight(monkeypatch):
    monkeypatch.setattr(sizes, "PROGRAMS", 2)
    rope = angles(1, 9, 8)
    x = draw(1, 9, 11, 8)
    dy = draw(1, 9, 11, 8, seed=1)
    weight = draw(8, seed=2)
    fused = gradients(lambda x, w: elementwise.norm_rotate(x, w, *rope, 1e-6), [x, weight], dy)

    exact = gradients(exact_norm_rotate(rope), [x.double(), weight.double()], dy)
    for ours, truth in zip(fused, exact, strict=True):
        torch.testing.assert_close(ours.double(), truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "count, dtype",
    [
        (1, torch.float32),
        (7, torch.float16),
        (elementwise_kernels.ELEMENTS + 3, torch.float32),
        (elementwise_kernels.ELEMENTS + 3, torch.float16),
    ],
)
def test_swiglu_equals_the_plain_one(count, dtype):
    gate, up = draw(1, count, dtype=dtype) * 4, draw(1, count, seed=1, dtype=dtype)
    dy = draw(1, count, seed=2)
    fused = gradients(elementwise.swiglu, [gate, up], dy)
    plain = gradients(model._SwiGLU.apply, [gate, up], dy)
    truth = gradients(lambda g, u: g * g.sigmoid() * u, [gate.double(), up.double()], dy)
    assert_as_exact(fused, plain, truth, dtype)


def test_swiglu_of_large_gates_is_finite():
    gate = torch.tensor([-3e4, -200.0, 0.0, 200.0, 3e4], device=DEVICE)
    ones = torch.ones_like(gate)
    y, d_gate, d_up = gradients(elementwise.swiglu, [gate, ones], ones)
    assert torch.equal(y, gate.clamp(min=0) + 0.0)
    assert torch.equal(d_gate, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0], device=DEVICE))
    assert torch.equal(d_up, y)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    "attention", [Standard(), NSAConfig(8, 4, 8, 3, 1, 1, 6)], ids=["standard", "nsa"]
)
def test_a_layer_with_fused_operators_has_the_results_of_the_plain_one(attention, monkeypatch):
    config = ModelConfig.preset("tiny", num_layers=1, vocab_size=64, attention=attention)
    decoder = kernels.decoder(config).to(DEVICE)
    tokens = torch.arange(2 * 21, device=DEVICE).view(2, 21) % 64
    doc_ids = torch.tensor([[0] * 9 + [1] * 12, [2] * 21])

    def run() -> list[torch.Tensor]:
        decoder.zero_grad()
        loss = decoder(tokens, tokens, doc_ids=doc_ids)
        loss.backward()
        return [loss.detach(), *(p.grad for p in decoder.parameters())]

    plain = run()
    monkeypatch.setattr(machine, "takes_elementwise", lambda x, kernels: kernels == "auto")
    fused = run()
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_other_kernels_are_not_replaced(kernels):
    assert not machine.takes_elementwise(torch.zeros(2), "auto")  # a CPU
    with on_target():
        x = torch.zeros(2, device="cuda")
        assert machine.takes_elementwise(x, "auto")
        assert not machine.takes_elementwise(x, kernels)
