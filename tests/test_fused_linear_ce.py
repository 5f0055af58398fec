"""longhaul/vocab/triton_bodies.py against the functions that it replaces and against float64;
test_loss.py has the loss that they compute.

The kernels run on a GPU if there is one. Otherwise Triton's interpreter runs them, in fp32 and fp16
(its bf16 products are wrong) and at tiny shapes. cuda_build/test_loss.py compiles them.

Letters: N tokens of a tile, V columns of a tile.
"""

import pytest
import torch

from longhaul.vocab import loss as vocab_loss

triton = pytest.importorskip(
    "triton", reason="triton is not installed: the kernels of the loss are not tested"
)

from longhaul.vocab import triton_bodies as linear_ce  # noqa: E402  without triton it cannot be imported
from tests.test_loss import poisoned_allocations  # noqa: E402, F401  (a fixture)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# relative rounding error of one value
EPS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# NumPy, which interprets the kernels, warns of infinities that they expect.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_allocations"),
]
tiles = pytest.mark.parametrize(
    "N, V, softcap, dtype",
    [
        (1, 1, None, torch.float32),
        (3, 7, 2.5, torch.float16),
        (5, 128, 30.0, torch.float32),
        (2, 257, None, torch.float16),
        (3, 4096, 2.5, torch.float32),
        (2, 4099, 30.0, torch.float16),
        (2, 4099, 2.5, torch.float32),
        (1, 8192, None, torch.float32),
    ],
)


def tile(N, V, dtype, padding=5, std=4.0):
    """(wide_NV, z_NV): logits inside a wider tensor of NaN, which shows accesses next to them."""
    wide_NV = torch.full((N, V + padding), torch.nan, dtype=dtype, device=DEVICE)
    generator = torch.Generator().manual_seed(1000 * N + V)
    wide_NV[:, :V] = torch.randn(N, V, generator=generator).mul(std).to(dtype)
    return wide_NV, wide_NV[:, :V]


def targets(N, V):
    """First and last column, left of the tile, right of it within the padded block, far right."""
    special = [0, V - 1, -1, V, 10 * V + 5000]
    columns = special[:N] + [V // 2] * (N - len(special))
    return torch.tensor(columns, device=DEVICE, dtype=torch.int32)


def row_vectors(N, count):
    """`count` seeded tensors of shape [N]."""
    vectors = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        vectors.append(torch.randn(N, generator=generator).to(DEVICE))
    return vectors


def folded(module, z_NV, target_N, state, softcap):
    """The sums after a tile; `state` stays as it is."""
    after = [x_N.clone() for x_N in state]
    module.fold_logsumexp(z_NV, target_N, *after, softcap)
    return after


def logsumexp_parts(z_NV, target_N, state, softcap):
    """(max, log of the mass of all logits but the target's, total).

    The kernel computes them from a state in fp32, PyTorch from a state in float64.
    """
    module = linear_ce if state[0].dtype == torch.float32 else vocab_loss
    max_N, sum_N, total_N = folded(module, z_NV, target_N, state, softcap)
    return max_N, max_N + sum_N.log(), total_N


def tanh_error(softcap):
    """Bound on the error of softcap * tanh(z / softcap): the kernels' tanh is good to 2^-23.

    Without a softcap, it is the error of one fp32 rounding.
    """
    return 2.0**-22 if softcap is None else 2.0**-22 * softcap


def assert_close(got, want, bound):
    error = (got.double() - want.double()).abs()
    assert (error <= bound).all(), (
        f"error {error.max():.3g} at value {want.flatten()[error.argmax()]:.6g}"
    )


# ---- the two functions


@tiles
def test_a_folded_tile_equals_float64(N, V, softcap, dtype):
    wide_NV, z_NV = tile(N, V, dtype)
    before_NV = wide_NV.clone()
    max_N, sum_N, total_N = row_vectors(N, 3)
    state = [max_N, sum_N.exp(), total_N]
    exact_state = [x_N.double() for x_N in state]

    got = logsumexp_parts(z_NV, targets(N, V), state, softcap)
    want = logsumexp_parts(z_NV, targets(N, V), exact_state, softcap)

    exact = tanh_error(softcap)
    assert_close(got[0], want[0], exact)
    assert_close(got[1], want[1], exact + 1e-6 * (1 + want[1].abs()))
    assert_close(got[2], want[2], V * exact + 1e-5)
    unchanged = torch.equal(wide_NV.nan_to_num(), before_NV.nan_to_num())
    assert unchanged, "the forward must only read the tile"


@tiles
def test_a_gradient_tile_equals_float64_to_one_rounding(N, V, softcap, dtype):
    wide_NV, z_NV = tile(N, V, dtype)
    slope_N, shift_N = row_vectors(N, 2)
    lse_N = vocab_loss.capped(z_NV, softcap, torch.float64).logsumexp(1)
    exact = lse_N, slope_N.double(), shift_N.double()
    want_NV = z_NV.double()

    vocab_loss.logits_to_gradient(want_NV, targets(N, V), *exact, softcap)
    linear_ce.logits_to_gradient(z_NV, targets(N, V), lse_N.float(), slope_N, shift_N, softcap)

    rounding_NV = 1.01 * EPS[dtype] * want_NV.abs()
    subnormal = 2.0**-24 if dtype == torch.float16 else 0
    fp32_N1 = 3e-6 * (1 + shift_N.abs()[:, None]) * (1 + (softcap or 0) / 8)
    assert_close(z_NV, want_NV, rounding_NV + subnormal + fp32_N1)
    assert wide_NV[:, V:].isnan().all(), "the padding next to the tile must stay untouched"


def test_tiles_without_tokens_are_no_error():
    no_tokens_NV = torch.empty(0, 9, device=DEVICE)
    empty_N = torch.zeros(0, device=DEVICE)
    vectors = empty_N.int(), empty_N, empty_N, empty_N
    linear_ce.fold_logsumexp(no_tokens_NV, *vectors, 30.0)
    linear_ce.logits_to_gradient(no_tokens_NV, *vectors, None)


def test_an_ignored_token_gets_exact_zeros_even_if_its_exponential_overflows():
    z_NV = torch.tensor([[1e4, -1e4, torch.nan], [0.0, 1.0, 2.0]], device=DEVICE)
    slope_N = torch.tensor([0.0, 1.0], device=DEVICE)
    lse_N = torch.tensor([-200.0, 2.4], device=DEVICE)
    shift_N = torch.zeros_like(slope_N)
    linear_ce.logits_to_gradient(z_NV, targets(2, 9), lse_N, slope_N, shift_N, None)
    assert torch.equal(z_NV[0], torch.zeros(3, device=DEVICE))
    assert (z_NV[1] > 0).all()


def test_a_nan_logit_reaches_the_loss_and_the_gradient():
    z_NV = torch.tensor([[1.0, torch.nan, 2.0]], device=DEVICE)
    one_N = torch.ones(1, device=DEVICE)
    outside_N = torch.tensor([-1], device=DEVICE)
    assert folded(linear_ce, z_NV, outside_N, [one_N, one_N, one_N], None)[1].isnan().all()
    linear_ce.logits_to_gradient(z_NV, outside_N, one_N, one_N, one_N, None)
    assert z_NV[0, 1].isnan() and not z_NV[0, ::2].isnan().any()


# ---- where they run


def test_kernels_that_cannot_run_raise_and_name_the_remedy(monkeypatch):
    z = torch.zeros(1, device=DEVICE)
    linear_ce.require(z)
    with pytest.raises(ValueError, match=r"torch.float64 on .*choose kernels='auto' or 'torch'"):
        linear_ce.require(z.double())
    with pytest.raises(ValueError, match="columns must be adjacent"):
        transposed_NV = torch.zeros(3, 2, device=DEVICE).t()
        linear_ce.logits_to_gradient(transposed_NV, targets(2, 3), *row_vectors(2, 3), None)
    monkeypatch.setattr(linear_ce, "INTERPRETED", False)
    with pytest.raises(ValueError, match="on cpu; it needs .* CUDA"):
        linear_ce.require(z.cpu())


# ---- a real GPU


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: the kernels were only interpreted",
)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("softcap", [None, 30.0, 2.5])
def test_bf16_tiles_of_training_size_match_the_pytorch_versions_and_repeat(softcap):
    N, V = 4096, 8192
    _, z_NV = tile(N, V, torch.bfloat16, padding=8)
    target_N = torch.randint(-V, 2 * V, (N,), device=DEVICE, dtype=torch.int32)
    max_N, sum_N, total_N = row_vectors(N, 3)
    state = max_N, sum_N.exp(), total_N

    got = folded(linear_ce, z_NV, target_N, state, softcap)
    want = folded(vocab_loss, z_NV, target_N, state, softcap)
    assert_close(got[0], want[0], 1e-5)
    assert_close(got[0] + got[1].log(), want[0] + want[1].log(), 1e-5)
    capping = 0.0 if softcap is None else V * tanh_error(softcap)
    assert_close(got[2], want[2], 1e-4 * V**0.5 + capping)

    again = folded(linear_ce, z_NV, target_N, state, softcap)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))

    plain_NV = z_NV.clone()
    lse_N = got[0] + got[1].log()
    vocab_loss.logits_to_gradient(plain_NV, target_N, lse_N, sum_N, total_N, softcap)
    linear_ce.logits_to_gradient(z_NV, target_N, lse_N, sum_N, total_N, softcap)
    one_step_NV = 2 * EPS[torch.bfloat16] * plain_NV.double().abs()
    assert_close(z_NV, plain_NV, one_step_NV + 1e-5)


@pytest.mark.gpu
@needs_gpu
def test_addresses_beyond_2_to_the_31_elements_are_reached():
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free GPU memory")
    stride = 2**31 + 64
    storage = torch.zeros(stride + 100, dtype=torch.bfloat16, device=DEVICE)
    z_NV = storage.as_strided((2, 100), (stride, 1))
    one_N = torch.ones(2, device=DEVICE)
    linear_ce.logits_to_gradient(z_NV, targets(2, 200), one_N, one_N, one_N, None)
    assert (z_NV > 1).sum() == 199
    assert storage[100:stride].count_nonzero() == 0
