"""linear_cross_entropy against the dense float64 loss: numerics, memory, gradients, compile, bad
input.
"""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

import model
from longhaul.memory.measure import peak_bytes, saved_bytes
from verify_chunked_loss import (
    gradients,
)
from verify_chunked_loss import (
    naive_loop as seed_loop,
)
from verify_chunked_loss import (
    relative as rel,
)
from verify_chunked_loss import (
    standard_loss as std,
)

linear_cross_entropy = functools.partial(model.linear_cross_entropy, reduction="mean")
CPU = torch.device("cpu")
TILES = [(4096, 4096), (64, 512), (100, 99), (7, 1000)]


def dense(h, w, y, *, z_loss=0.0, label_smoothing=0.0, softcap=None, reduction="mean"):
    """The oracle: full logits; call it in float64."""
    z = h @ w.T
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    valid = y != -100
    loss = (
        F.cross_entropy(z, y, reduction="none", label_smoothing=label_smoothing)
        + z_loss * z.logsumexp(1).square() * valid
    )
    return (
        loss
        if reduction == "none"
        else loss.sum() / (valid.sum().clamp(min=1) if reduction == "mean" else 1)
    )


def inputs(N=203, D=32, V=1009, dtype=torch.float32, regime="flat", seed=0):
    torch.manual_seed(seed)
    h, w, y = torch.randn(N, D), torch.randn(V, D) / D**0.5, torch.randint(V, (N,))
    if N > 1:
        y[:2] = torch.tensor([0, V - 1])
    if regime == "diffuse":
        h = 4 * h  # logits of std 4
    if regime == "peaked":
        h = h + 14 * F.normalize(w[y], dim=1)
    return h.to(dtype), w.to(dtype), y


def truth(h, w, y, **options):
    return gradients(lambda *a: dense(*a, **options), h.double(), w.double(), y)


OPTIONS = [
    {},
    dict(z_loss=1e-3),
    dict(label_smoothing=0.1),
    dict(softcap=5.0),
    dict(z_loss=1e-3, label_smoothing=0.1, softcap=5.0),
]


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fp32_is_within_1e6_of_float64_for_any_tiling_and_option(options, kernels):
    h, w, y = inputs()
    y[5::9] = -100
    want = truth(h, w, y, **options)
    for token_tile, vocab_tile in TILES if kernels == "torch" else TILES[1:2]:
        got = gradients(
            lambda *a: linear_cross_entropy(
                *a, token_tile=token_tile, vocab_tile=vocab_tile, kernels=kernels, **options
            ),
            h,
            w,
            y,
        )
        assert abs(got[0] - want[0]) / want[0] < 1e-6
        assert rel(got[1], want[1]) < 1e-6 and rel(got[2], want[2]) < 1e-6


@pytest.mark.parametrize("regime", ["flat", "diffuse", "peaked"])
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_bf16_errors_are_at_most_105_percent_of_the_standard_losses_own(regime, kernels):
    h, w, y = inputs(1024, 128, 4099, torch.bfloat16, regime)
    want, plain = truth(h, w, y), gradients(std, h, w, y)
    floor = [rel(t.bfloat16(), t) for t in want[1:]]
    for token_tile, vocab_tile in TILES if kernels == "torch" else [(512, 1024)]:
        got = gradients(
            lambda *a: linear_cross_entropy(
                *a, token_tile=token_tile, vocab_tile=vocab_tile, kernels=kernels
            ),
            h,
            w,
            y,
        )
        assert abs(got[0] - want[0]) < 1e-3
        for i in (1, 2):
            assert rel(got[i], want[i]) <= 1.05 * rel(plain[i], want[i])
            if regime == "flat":
                assert rel(got[i], want[i]) <= 1.05 * floor[i - 1]


def test_bf16_errors_do_not_grow_with_the_number_of_chunks_but_the_seeds_do():
    h, w, y = inputs(2048, 64, 1000, torch.bfloat16)
    want = truth(h, w, y)
    errors = [
        rel(
            gradients(lambda *a: linear_cross_entropy(*a, token_tile=t, vocab_tile=v), h, w, y)[2],
            want[2],
        )
        for t, v in ((2048, 1000), (16, 1000), (16, 20))
    ]
    assert max(errors) < 1.01 * min(errors)
    assert rel(gradients(lambda *a: seed_loop(*a, chunk=16), h, w, y)[2], want[2]) > 3 * errors[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_hidden_with_fp32_master_weight_returns_fp32_gradients(dtype):
    h, w, y = inputs()
    h = h.to(dtype)
    want = truth(h, w.to(dtype), y)
    got = gradients(lambda *a: linear_cross_entropy(*a, token_tile=50, vocab_tile=100), h, w, y)
    assert got[1].dtype == dtype and got[2].dtype == torch.float32
    plain = gradients(std, h, w.to(dtype), y)
    assert abs(got[0] - want[0]) < 1e-3
    assert rel(got[1], want[1]) <= 1.05 * rel(plain[1], want[1]) and rel(
        got[2], want[2]
    ) <= 1.05 * rel(plain[2], want[2])


def test_autocast_changes_nothing_inside():
    h, w, y = inputs()
    plain = gradients(linear_cross_entropy, h, w, y)
    with torch.autocast("cpu", torch.bfloat16):
        cast = gradients(linear_cross_entropy, h, w, y)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast))


@pytest.mark.parametrize("N,V", [(0, 7), (1, 7), (1, 1), (3, 1), (2, 2)])
def test_tiny_sizes_work(N, V):
    torch.manual_seed(0)
    h, w, y = torch.randn(N, 3), torch.randn(V, 3), torch.randint(V, (N,))
    got, want = gradients(linear_cross_entropy, h, w, y), truth(h, w, y)
    for a, b in zip(got, want):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)


def test_a_common_offset_of_1e4_changes_the_loss_only_by_the_logits_own_rounding():
    h, w, y = inputs(dtype=torch.float64)
    h1, w1 = (
        torch.cat([h, torch.full((len(h), 1), 1e4)], 1),
        torch.cat([w, torch.ones(len(w), 1)], 1),
    )
    torch.testing.assert_close(
        linear_cross_entropy(h1, w1, y, vocab_tile=100),
        linear_cross_entropy(h, w, y),
        rtol=1e-12,
        atol=0,
    )
    assert (
        abs(linear_cross_entropy(h1.float(), w1.float(), y, vocab_tile=100) - dense(h, w, y)) < 1e-3
    )


def test_a_certain_target_keeps_the_relative_precision_of_its_loss():
    h = torch.tensor([[1.0, 0.0]])
    w = torch.tensor([[30.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    y = torch.tensor([0])
    loss, dh, _ = gradients(linear_cross_entropy, h, w, y)
    p = math.exp(
        -30
    )  # of each of the two others; float64's own logsumexp - logit is good to 1e-3 here
    want, want_h = math.log1p(2 * p), torch.tensor([[-60 * p, 3 * p]])
    assert abs(loss - want) / want < 1e-6 and rel(dh, want_h) < 1e-6


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_no_valid_token_gives_zero_loss_and_exact_zero_gradients_still_attached(kernels):
    h, w, y = inputs()
    loss, dh, dw = gradients(
        lambda *a: linear_cross_entropy(*a, kernels=kernels), h, w, torch.full_like(y, -100)
    )
    assert loss == 0 and not dh.any() and not dw.any()
    assert linear_cross_entropy(h, w.requires_grad_(), torch.full_like(y, -100)).requires_grad


def test_the_unpacked_rows_of_cuda_give_the_same_result(monkeypatch):
    h, w, y = inputs()
    y[::3] = -100
    packed = gradients(linear_cross_entropy, h, w, y)
    monkeypatch.setattr(
        model,
        "pack_valid",
        lambda labels, ignore: (slice(None), torch.where(labels != ignore, labels, -1)),
    )
    for a, b in zip(packed, gradients(linear_cross_entropy, h, w, y)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_ignored_rows_with_huge_logits_give_no_nan_where_they_are_not_packed_away(monkeypatch):
    h, w, y = inputs()
    y[::3] = -100
    h[::3] *= 1e3
    packed = gradients(linear_cross_entropy, h, w, y)
    monkeypatch.setattr(
        model,
        "pack_valid",
        lambda labels, ignore: (slice(None), torch.where(labels != ignore, labels, -1)),
    )
    for a, b in zip(packed, gradients(linear_cross_entropy, h, w, y)):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_a_transposed_hidden_compiles_and_the_operators_pass_their_checks():
    h, w, y = inputs(32, 16, 64)
    y = y[:16] % 64
    compiled = torch.compile(
        lambda a, w, y: linear_cross_entropy((a * 1.0).t(), w, y, kernels="torch"), fullgraph=True
    )
    a, w = torch.randn(16, 16), torch.randn(64, 16)
    for x, z in zip(
        gradients(compiled, a, w, y),
        gradients(lambda a, w, y: linear_cross_entropy(a.t(), w, y), a, w, y),
    ):
        torch.testing.assert_close(x, z, rtol=1e-5, atol=1e-7)
    nll, lse, mean = model.vocab_nll(a.t(), w, y, -100, None, [8, 16], "torch", False)
    arguments = ([nll, lse, mean], nll, lse, a.t(), w, y, -100, None, [8, 16], "torch", True, True)
    torch.library.opcheck(model.vocab_nll_backward, arguments)


@pytest.mark.parametrize(
    "options",
    [
        dict(softcap=0.0),
        dict(softcap=-5.0),
        dict(label_smoothing=1.5),
        dict(z_loss=math.nan),
        dict(num_valid=-3),
        dict(num_valid=torch.tensor([10])),
        dict(vocab_tile=1.5),
    ],
    ids=str,
)
def test_numbers_that_make_no_loss_are_refused(options):
    with pytest.raises(ValueError, match=list(options)[0]):
        linear_cross_entropy(*inputs(), **options)


@pytest.mark.parametrize("kind", ["standard", "chunked"])
def test_a_validating_decoder_names_the_bad_label_whichever_loss_runs(kind):
    decoder = model.Decoder(
        model.ModelConfig.preset("tiny", vocab_size=32, num_layers=1, loss=kind)
    )
    decoder.validate, tokens = True, torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(IndexError, match="label 32 at position 2: allowed are 0 to 31"):
        decoder(tokens, torch.tensor([[0, 1, 32, 3]]))


def test_another_ignore_index_is_ignored():
    h, w, y = inputs()
    y[::3] = 7
    want = gradients(linear_cross_entropy, h, w, torch.where(y == 7, -100, y))
    for a, b in zip(
        gradients(functools.partial(linear_cross_entropy, ignore_index=7), h, w, y), want
    ):
        assert torch.equal(a, b)


def test_per_token_weights_pass_through_reduction_none():
    h, w, y = inputs()
    y[3] = -100
    weight = torch.randn(len(y))
    got = gradients(
        lambda *a: (linear_cross_entropy(*a, reduction="none", z_loss=0.01) * weight).sum(), h, w, y
    )
    want = gradients(
        lambda *a: (dense(*a, reduction="none", z_loss=0.01) * weight).sum(),
        h.double(),
        w.double(),
        y,
    )
    assert (
        abs(got[0] - want[0]) < 1e-4 and rel(got[1], want[1]) < 1e-6 and rel(got[2], want[2]) < 1e-6
    )


@pytest.mark.parametrize("kernels", ["fast", "triton"])
def test_kernels_that_cannot_run_are_refused(kernels):
    h, w, y = inputs(dtype=torch.float64)  # which the twins do not serve anywhere
    with pytest.raises(ValueError, match="choose"):
        linear_cross_entropy(h, w, y, kernels=kernels)


def test_num_valid_divides_by_the_global_count():
    h, w, y = inputs()
    total = linear_cross_entropy(h, w, y, reduction="sum")
    for count in (1000, torch.tensor(1000)):
        torch.testing.assert_close(linear_cross_entropy(h, w, y, num_valid=count), total / 1000)
    assert linear_cross_entropy(h, w, y.fill_(-100), num_valid=torch.tensor(0)) == 0


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_the_other_the_same_one(frozen):
    h, w, y = inputs()
    _, dh, dw = gradients(linear_cross_entropy, h, w, y)
    h.requires_grad_(frozen != "hidden"), w.requires_grad_(frozen != "weight")
    linear_cross_entropy(h, w, y).backward()
    assert (h.grad is None, w.grad is None) == (frozen == "hidden", frozen == "weight")
    assert torch.equal(w.grad, dw) if frozen == "hidden" else torch.equal(h.grad, dh)


def test_backward_twice_with_another_gradient_scales_exactly():
    h, w, y = inputs()
    h.requires_grad_(), w.requires_grad_()
    loss = linear_cross_entropy(h, w, y)
    first = torch.autograd.grad(loss, (h, w), retain_graph=True)
    second = torch.autograd.grad(loss, (h, w), torch.tensor(-4.0))
    assert all(torch.equal(-4 * a, b) for a, b in zip(first, second))


def test_a_tied_weight_accumulates_both_gradients():
    _, w, y = inputs()
    got = torch.autograd.grad(
        linear_cross_entropy(w.requires_grad_()[y], w, y.roll(1), vocab_tile=64), w
    )[0]
    wd = w.detach().double().requires_grad_()
    assert rel(got, torch.autograd.grad(dense(wd[y], wd, y.roll(1)), wd)[0]) < 1e-6


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck_passes_in_float64(options, reduction):
    h, w, y = inputs(5, 4, 7, torch.float64)
    y[2] = -100
    f = lambda h, w: linear_cross_entropy(
        h, w, y, reduction=reduction, token_tile=2, vocab_tile=3, **options
    )
    assert torch.autograd.gradcheck(f, (h.requires_grad_(), w.requires_grad_()))


def test_a_full_graph_compile_equals_eager_at_several_lengths_with_ignored_labels():
    f = torch.compile(
        lambda h, w, y: linear_cross_entropy(h * 1.0, w, y, z_loss=1e-3, vocab_tile=300),
        fullgraph=True,
    )
    for N in (50, 203, 117):
        h, w, y = inputs(N)
        y[::4] = -100
        for a, b in zip(
            gradients(f, h, w, y),
            gradients(lambda *a: linear_cross_entropy(*a, z_loss=1e-3, vocab_tile=300), h, w, y),
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_recomputation_under_checkpointing_gives_the_same_gradients():
    h, w, y = inputs()
    wrapped = lambda *a: torch.utils.checkpoint.checkpoint(
        linear_cross_entropy, *a, use_reentrant=False
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(gradients(wrapped, h, w, y), gradients(linear_cross_entropy, h, w, y))
    )


def test_at_most_12_bytes_per_token_are_saved_where_the_seeds_loop_saves_all_logits():
    h, w, y = inputs(1000, 16, 4000, torch.bfloat16)
    y[::5] = -100
    h.requires_grad_(), w.requires_grad_()
    own = h.nbytes + w.nbytes + y.nbytes
    for options in OPTIONS:
        assert (
            saved_bytes(lambda: linear_cross_entropy(h, w, y, **options)) - own <= 12 * 1000 + 64
        ), options
    assert (
        saved_bytes(lambda: seed_loop(h, w, y, chunk=100)) - own >= 1000 * 4000 * 4
    )  # negative control


def test_peak_memory_through_backward_is_under_2_percent_of_the_standard_loss():
    h, w, y = inputs(2048, 64, 40_000, torch.bfloat16)
    mandatory = 2 * (h.numel() + w.numel())
    ours, plain = (
        peak_bytes(lambda: gradients(f, h, w, y), CPU) - mandatory
        for f in (linear_cross_entropy, std)
    )
    assert plain > 2048 * 40_000 * 8 and ours < 0.02 * plain


def test_doubling_the_vocabulary_adds_no_memory_beyond_the_weights_gradient():
    peaks = []
    for V in (20_000, 40_000):
        h, w, y = inputs(512, 64, V, torch.bfloat16)
        peaks.append(
            peak_bytes(lambda: gradients(linear_cross_entropy, h, w, y), CPU) - 2 * w.numel()
        )
    assert abs(peaks[1] - peaks[0]) < 1e5


@pytest.mark.parametrize("label", [1009, -1, -101])
def test_a_bad_label_is_named_with_its_position_and_the_allowed_range(label):
    h, w, y = inputs()
    y[17] = label
    with pytest.raises(IndexError, match=rf"label {label} at position 17: allowed are 0 to 1008"):
        linear_cross_entropy(h, w, y, validate=True)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(hidden=torch.zeros(203, 31)), r"\(203, 31\), \(1009, 32\)"),
        (dict(labels=torch.zeros(202, dtype=torch.long)), r"\(202,\)"),
        (dict(hidden=torch.zeros(203, 32, dtype=torch.long)), "torch.int64"),
        (dict(labels=torch.zeros(203)), "labels torch.float32"),
        (dict(vocab_tile=0), "0"),
        (dict(token_tile=-3), "-3"),
        (dict(reduction="avg"), "avg"),
        (dict(hidden=torch.zeros(203, 32, device="meta")), "meta"),
        (dict(weight=torch.zeros(0, 32)), "V >= 1"),
    ],
    ids=str,
)
def test_bad_input_is_named(change, message):
    h, w, y = inputs()
    h, w, y = change.pop("hidden", h), change.pop("weight", w), change.pop("labels", y)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(h, w, y, **change)
