"""footprint/: what kernels copy inside, one operator at a time against the allocator."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from footprint import measure, predict

N = 512
ROWS = 4 * N * N  # bytes
TOLERANCE = 0.005  # of the peak: a copy that is missed is at least a twentieth


def turned(y):
    """A result whose gradient is not contiguous."""
    return y.t() * torch.ones(N, N)


def products(x):
    return F.linear(x, torch.ones(N, N))


def scattered(x, columns):
    """x in place of all elements, by a mask of so many columns."""
    return torch.zeros(N, N).masked_scatter(torch.ones(N, columns).bool(), x)


CASES = {
    "softmax, turned": lambda x: turned(x.t().softmax(-1)),
    "softmax, expanded": lambda x: x.softmax(-1),
    "softmax, another dtype": lambda x: turned(x.softmax(-1, dtype=torch.float64).float()),
    "log_softmax": lambda x: turned(x.log_softmax(-1)),
    "layer_norm": lambda x: turned(F.layer_norm(x.t(), (N,))),
    "gelu": lambda x: turned(F.gelu(x)),
    "embedding": lambda x: turned(F.embedding(torch.zeros(N, 2, dtype=torch.long).t()[0], x)),
    "a product's gradient": products,
    "a product's gradient as the second operand": lambda x: torch.ones(N, N) @ x,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True) * 1.0,
    "masked_scatter": lambda x: scattered(x, N) * torch.ones(N, N),
    "masked_scatter, expanded gradient": lambda x: scattered(x, N),
    "masked_scatter, expanded mask": lambda x: scattered(x, 1) * torch.ones(N, N),
    "sum of integers": lambda x: x * torch.ones(N, N, dtype=torch.int32).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("compute", CASES.values(), ids=CASES.keys())
def test_what_one_operator_copies_is_in_the_peak(compute):
    def build():
        return torch.rand(N, N, requires_grad=True)

    def step(x):
        x.grad = None
        compute(x).sum().backward()

    recorded = measure(build, step)
    assert predict(build, step, "cpu").peak == pytest.approx(recorded, rel=TOLERANCE)


def grown(compute) -> float:
    """How many matrices more a step takes on CUDA if the gradient is turned."""

    def peak(last) -> int:
        def step(x):
            x.grad = None
            with torch.no_grad():
                grad = last(torch.ones(N, N))
            compute(x).backward(grad)

        return predict(lambda: torch.rand(N, N, requires_grad=True), step, "cuda").peak

    return (peak(torch.t) - peak(torch.clone)) / ROWS


@pytest.mark.parametrize(
    "compute",
    [lambda x: x.softmax(-1), lambda x: F.layer_norm(x, (N,)), lambda x: F.rms_norm(x, (N,))],
)
def test_on_cuda_norms_and_softmax_copy_a_gradient_that_is_not_contiguous(compute):
    assert grown(compute) == pytest.approx(1, abs=0.01)


def test_on_cuda_softmax_holds_the_product_of_its_gradient_and_its_result():
    def peak(compute) -> int:
        def step(x):
            x.grad = None
            compute(x).backward(torch.ones(N, N))

        return predict(lambda: torch.rand(N, N, requires_grad=True), step, "cuda").peak

    assert peak(lambda x: x.softmax(-1)) - peak(torch.sigmoid) == ROWS


@pytest.mark.parametrize(
    "compute, words",
    [
        (torch.matrix_exp, "linear algebra"),
        (lambda x: torch.linalg.cholesky(x @ x.t()), "linear algebra"),
        (lambda x: F.embedding_bag(torch.zeros(2, 4).long(), x, mode="max"), "bags"),
    ],
)
def test_an_operator_whose_inside_is_not_known_is_named(compute, words):
    report = predict(lambda: torch.rand(64, 64, requires_grad=True), compute)
    assert any(words in left_out for left_out in report.not_modelled)


def test_on_cuda_operands_of_two_dtypes_are_not_copied():
    def step(model):
        with torch.no_grad():
            return model.weight * torch.ones(N, N, dtype=torch.bool)

    report = predict(lambda: nn.Linear(N, N, bias=False), step, "cuda")
    assert report.peak == 2 * ROWS + N * N
