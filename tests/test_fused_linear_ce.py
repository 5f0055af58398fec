"""fused/linear_ce.py against the bodies of model.py that it replaces and against float64: on a GPU
if there is one, else interpreted.

Letters: N tokens, V columns of the tile. Without a GPU no speed and no bf16 matter here: fp32 and
fp16, tiny shapes.
"""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import model as reference

triton = pytest.importorskip(
    "triton", reason="triton is not installed: the twins of the loss bodies are not tested"
)

from fused import linear_ce  # noqa: E402  without triton it cannot be imported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}  # relative rounding error of one value
pytestmark = pytest.mark.filterwarnings(
    "ignore:.* encountered in:RuntimeWarning"
)  # numpy's remarks on inf, which the kernels expect
sizes = pytest.mark.parametrize(
    "N, V", [(1, 1), (3, 7), (5, 128), (2, 257), (3, 4096), (2, 4099), (1, 8192)]
)
softcaps = pytest.mark.parametrize("softcap", [None, 30.0, 2.5])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch):
    """Outputs that a kernel forgets to write are NaN."""
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(torch.nan)
    )


def tile(N, V, dtype, padding=5, std=4.0):
    """Logits whose row stride is V + padding, in a NaN sea: reading or writing beside the tile
    shows.
    """
    wide_NV = torch.full((N, V + padding), torch.nan, dtype=dtype, device=DEVICE)
    generator = torch.Generator().manual_seed(1000 * N + V)
    wide_NV[:, :V] = torch.randn(N, V, generator=generator).mul(std).to(dtype)
    return wide_NV, wide_NV[:, :V]


def targets(N, V):
    """First and last column, left of the tile, right of it within the padded block, far right."""
    return torch.tensor(
        [0, V - 1, -1, V, 10 * V + 5000][:N] + [V // 2] * (N - 5), device=DEVICE, dtype=torch.int32
    )


def row_vectors(N, count):
    return [
        torch.randn(N, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        for seed in range(count)
    ]


def logsumexp_parts(z_NV, target_N, state, softcap):
    """(max, log of the mass of all logits but the target's, total): what the sums mean, by the twin
    in fp32 or by PyTorch in float64.
    """
    module = linear_ce if state[0].dtype == torch.float32 else reference
    max_N, sum_N, total_N = module.fold_logsumexp(z_NV, target_N, *state, softcap)
    return max_N, max_N + sum_N.log(), total_N


def assert_close(got, want, bound):
    error = (got.double() - want.double()).abs()
    assert (error <= bound).all(), (
        f"error {error.max():.3g} at value {want.flatten()[error.argmax()]:.6g}"
    )


# ---- the two bodies


@sizes
@softcaps
@dtypes
def test_a_folded_tile_equals_float64(N, V, softcap, dtype):
    sea_NV, z_NV = tile(N, V, dtype)
    before_NV = sea_NV.clone()
    max_N, sum_N, total_N = row_vectors(N, 3)
    state = max_N, sum_N.exp(), total_N
    got = logsumexp_parts(z_NV, targets(N, V), state, softcap)
    want = logsumexp_parts(z_NV, targets(N, V), [x_N.double() for x_N in state], softcap)
    exact = 2.0**-22 * (softcap or 1)  # tanh through exp is good to 2^-23 absolute, times softcap
    assert_close(got[0], want[0], exact)
    assert_close(got[1], want[1], exact + 1e-6 * (1 + want[1].abs()))
    assert_close(got[2], want[2], V * exact + 1e-5)
    assert torch.equal(sea_NV.nan_to_num(), before_NV.nan_to_num()), (
        "the forward must only read the tile"
    )


@sizes
@softcaps
@dtypes
def test_a_gradient_tile_equals_float64_to_one_rounding(N, V, softcap, dtype):
    sea_NV, z_NV = tile(N, V, dtype)
    slope_N, shift_N = row_vectors(N, 2)
    x_NV = reference.capped(z_NV, softcap, torch.float64)
    lse_N = x_NV.logsumexp(1)
    want_NV = z_NV.double()
    reference.logits_to_gradient(
        want_NV, targets(N, V), lse_N, slope_N.double(), shift_N.double(), softcap
    )
    linear_ce.logits_to_gradient(z_NV, targets(N, V), lse_N.float(), slope_N, shift_N, softcap)
    tiny = 2.0**-24 if dtype == torch.float16 else 0  # fp16 subnormals
    assert_close(
        z_NV,
        want_NV,
        1.01 * EPS[dtype] * want_NV.abs()
        + tiny
        + 3e-6 * (1 + shift_N.abs()[:, None]) * (1 + (softcap or 0) / 8),
    )
    assert sea_NV[:, V:].isnan().all(), "the padding beside the tile must stay untouched"


@softcaps
def test_errors_against_float64_stay_within_a_small_factor_of_the_pytorch_bodies_own(softcap):
    N, V = 8, 1000
    _, z_NV = tile(N, V, torch.float32)
    target_N, (slope_N, shift_N) = targets(N, V), row_vectors(N, 2)
    lse_N = reference.capped(z_NV, softcap, torch.float64).logsumexp(1).float()
    truth_NV, plain_NV, twin_NV = z_NV.double(), z_NV.clone(), z_NV.clone()
    reference.logits_to_gradient(
        truth_NV, target_N, lse_N.double(), slope_N.double(), shift_N.double(), softcap
    )
    reference.logits_to_gradient(plain_NV, target_N, lse_N, slope_N, shift_N, softcap)
    linear_ce.logits_to_gradient(twin_NV, target_N, lse_N, slope_N, shift_N, softcap)
    plain, twin = ((x_NV - truth_NV).norm() / truth_NV.norm() for x_NV in (plain_NV, twin_NV))
    assert twin <= 3 * plain + 1e-7


@pytest.mark.parametrize(
    "widths",
    [[300], [128, 128, 44], [1, 299], [7] * 42 + [6]],
    ids=lambda widths: f"{len(widths)} tiles",
)
def test_folding_tile_after_tile_gives_the_exact_loss_for_any_tiling(widths):
    N, V = 4, 300
    _, z_NV = tile(N, V, torch.float32)
    target_N = torch.tensor([0, 299, 128, 5], device=DEVICE)
    z_target_N = z_NV[torch.arange(N), target_N]
    state, start = (z_target_N, torch.zeros_like(z_target_N), torch.zeros_like(z_target_N)), 0
    for width in widths:
        state = linear_ce.fold_logsumexp(
            z_NV[:, start : start + width], target_N - start, *state, None
        )
        start += width
    assert start == V
    nll_N = torch.logaddexp(state[0] - z_target_N + state[1].log(), torch.zeros_like(z_target_N))
    want_N = torch.nn.functional.cross_entropy(z_NV.double(), target_N, reduction="none")
    assert_close(nll_N, want_N, 2e-6 * (1 + want_N))
    assert_close(state[2], z_NV.double().sum(1), 2e-4)


def test_empty_tiles_leave_the_sums_and_the_memory_alone():
    state = row_vectors(3, 3)
    none_N = torch.zeros(0, device=DEVICE)
    folded = linear_ce.fold_logsumexp(torch.empty(3, 0, device=DEVICE), targets(3, 1), *state, None)
    assert all(torch.equal(new_N, old_N) for new_N, old_N in zip(folded, state, strict=True))
    nothing_0V = torch.empty(0, 9, device=DEVICE)
    assert [
        len(x_N)
        for x_N in linear_ce.fold_logsumexp(nothing_0V, none_N.int(), none_N, none_N, none_N, 30.0)
    ] == [0, 0, 0]
    linear_ce.logits_to_gradient(nothing_0V, none_N.int(), none_N, none_N, none_N, None)
    linear_ce.logits_to_gradient(torch.empty(3, 0, device=DEVICE), targets(3, 1), *state, None)


def test_logits_with_a_large_common_offset_neither_overflow_nor_lose_the_loss():
    z_NV = torch.tensor([[1e4, 1e4 + 1, 1e4 - 2]], device=DEVICE)
    start_N, zero_N = z_NV[:, 1].clone(), torch.zeros(1, device=DEVICE)
    max_N, sum_N, _ = linear_ce.fold_logsumexp(
        z_NV, torch.tensor([1], device=DEVICE), start_N, zero_N, zero_N, None
    )
    nll_N = torch.logaddexp(max_N - start_N + sum_N.log(), zero_N)
    assert_close(
        nll_N,
        torch.tensor(
            [1 + torch.tensor([-1.0, 0.0, -3.0]).double().exp().sum().log() - 1], device=DEVICE
        ),
        1e-6,
    )


def test_an_ignored_row_gets_exact_zeros_even_where_its_exponential_overflows():
    z_NV = torch.tensor([[1e4, -1e4, torch.nan], [0.0, 1.0, 2.0]], device=DEVICE)
    slope_N, lse_N = (
        torch.tensor([0.0, 1.0], device=DEVICE),
        torch.tensor([-200.0, 2.4], device=DEVICE),
    )
    linear_ce.logits_to_gradient(
        z_NV, targets(2, 9), lse_N, slope_N, torch.zeros_like(slope_N), None
    )
    assert torch.equal(z_NV[0], torch.zeros(3, device=DEVICE)) and (z_NV[1] > 0).all()


def test_a_nan_logit_reaches_the_loss_and_the_gradient():
    z_NV = torch.tensor([[1.0, torch.nan, 2.0]], device=DEVICE)
    one_N, outside_N = torch.ones(1, device=DEVICE), torch.tensor([-1], device=DEVICE)
    assert linear_ce.fold_logsumexp(z_NV, outside_N, one_N, one_N, one_N, None)[1].isnan().all()
    linear_ce.logits_to_gradient(z_NV, outside_N, one_N, one_N, one_N, None)
    assert z_NV[0, 1].isnan() and not z_NV[0, ::2].isnan().any()


def test_expanded_gradients_and_int64_targets_are_taken_as_they_come():
    _, z_NV = tile(3, 20, torch.float32)
    copy_NV, lse_N, one_N = z_NV.clone(), z_NV.logsumexp(1), torch.ones((), device=DEVICE).expand(3)
    linear_ce.logits_to_gradient(z_NV, targets(3, 20), lse_N, one_N, one_N, None)
    linear_ce.logits_to_gradient(
        copy_NV, targets(3, 20).long(), lse_N, one_N.clone(), one_N.clone(), None
    )
    assert torch.equal(z_NV, copy_NV)


# ---- where they run


def test_asking_for_triton_where_it_cannot_run_raises_and_names_the_remedy(monkeypatch):
    z = torch.zeros(1, device=DEVICE)
    linear_ce.require(z)
    with pytest.raises(ValueError, match=r"torch.float64 on .*choose kernels='auto' or 'torch'"):
        linear_ce.require(z.double())
    with pytest.raises(ValueError, match="columns must be adjacent"):
        linear_ce.logits_to_gradient(
            torch.zeros(3, 2, device=DEVICE).t(), targets(2, 3), *row_vectors(2, 3), None
        )
    monkeypatch.setattr(linear_ce, "INTERPRETED", False)
    with pytest.raises(ValueError, match="on cpu; it needs .* CUDA"):
        linear_ce.require(z.cpu())


def test_the_loss_computed_with_the_twins_equals_float64_forward_and_backward():
    generator = torch.Generator().manual_seed(0)
    hidden_ND, weight_VD = (
        torch.randn(rows, 16, generator=generator).to(DEVICE) for rows in (9, 300)
    )
    labels_N = torch.tensor([0, 299, 5, -100, 76, 77, 153, 154, 200], device=DEVICE)

    def run(kernels, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (hidden_ND, weight_VD)]
        loss = reference.linear_cross_entropy(
            *inputs,
            labels_N,
            kernels=kernels,
            token_tile=4,
            vocab_tile=77,
            softcap=20.0,
            z_loss=1e-3,
            label_smoothing=0.1,
        )
        return loss.detach(), *torch.autograd.grad(loss, inputs)

    for got, plain, want in zip(
        run("triton", torch.float32),
        run("torch", torch.float32),
        run("torch", torch.float64),
        strict=True,
    ):
        error, own = ((x.double() - want).norm() / want.norm() for x in (got, plain))
        assert error <= max(2 * own, 1e-6)


def test_both_kernels_compile_for_an_h100_without_having_one(tmp_path):
    """The interpreter accepts code that the compiler refuses; Triton's compiler needs no GPU. Also:
    16-byte loads, no spilled registers.
    """
    program = """
        import triton
        from fused import linear_ce
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        target = GPUTarget("cuda", 90, 32)
        vectors = {"fold_kernel": ["max", "sum", "total", "new_max", "new_sum", "new_total"], "gradient_kernel": ["lse", "slope", "shift"]}
        for name, names in vectors.items():
            for softcap in (None, "fp32"):
                kernel = getattr(linear_ce, name)
                signature = {"z_ptr": "*bf16", "target_ptr": "*i32", **{f"{v}_ptr": "*fp32" for v in names}, "V": "i32", "stride": "i64",
                             "softcap": softcap or "constexpr", "BLOCK": "constexpr"}
                constants = {"BLOCK": 4096, **({} if softcap else {"softcap": None})}
                aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if n.endswith("_ptr") or n in ("V", "stride")}
                built = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options={"num_warps": 8})
                ptx = built.asm["ptx"]
                assert "ld.global.v4.b32" in ptx, "bf16 must be loaded 16 bytes at a time"
                assert ("st.global.v4.b32" in ptx) == (name == "gradient_kernel") and "atom." not in ptx
                assert ".local" not in ptx and len(built.asm["cubin"]) > 0
        print("compiled")
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=os.path.dirname(reference.__file__),
        timeout=300,
    )
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]


# ---- a real GPU


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: the bf16 kernels were interpreted, never run",
)


@pytest.mark.gpu
@needs_gpu
@softcaps
def test_bf16_tiles_of_training_size_match_the_pytorch_bodies_bit_stable(softcap):
    N, V = 4096, 8192
    _, z_NV = tile(N, V, torch.bfloat16, padding=8)
    target_N = torch.randint(-V, 2 * V, (N,), device=DEVICE, dtype=torch.int32)
    max_N, sum_N, total_N = row_vectors(N, 3)
    state = max_N, sum_N.exp(), total_N
    got, want = (
        module.fold_logsumexp(z_NV, target_N, *state, softcap) for module in (linear_ce, reference)
    )
    assert_close(got[0], want[0], 1e-5)
    assert_close(got[0] + got[1].log(), want[0] + want[1].log(), 1e-5)
    assert_close(got[2], want[2], 1e-4 * V**0.5 + V * 2.0**-22 * (softcap or 0))
    again = linear_ce.fold_logsumexp(z_NV, target_N, *state, softcap)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    plain_NV, lse_N = z_NV.clone(), got[0] + got[1].log()
    reference.logits_to_gradient(plain_NV, target_N, lse_N, sum_N, total_N, softcap)
    linear_ce.logits_to_gradient(z_NV, target_N, lse_N, sum_N, total_N, softcap)
    assert_close(
        z_NV, plain_NV, 2 * EPS[torch.bfloat16] * plain_NV.double().abs() + 1e-5
    )  # one step of bf16 apart at most


@pytest.mark.gpu
@needs_gpu
def test_addresses_beyond_2_to_the_31_elements_are_reached():
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free GPU memory")
    stride = 2**31 + 64
    storage = torch.zeros(stride + 100, dtype=torch.bfloat16, device=DEVICE)
    z_NV = storage.as_strided((2, 100), (stride, 1))
    linear_ce.logits_to_gradient(
        z_NV, targets(2, 200), *(torch.ones(2, device=DEVICE) for _ in range(3)), None
    )
    assert (z_NV > 1).sum() == 199 and storage[100:stride].count_nonzero() == 0
