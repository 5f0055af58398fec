"""linear_cross_entropy, which recomputes, in one pass, and as the plain loss of model.py, against
the dense loss in float64: rounding errors, memory, gradients, torch.compile, bad input.

Triton's interpreter runs the kernels where there is no GPU, at tiny sizes.
"""

import functools
import itertools
import math
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import model
from footprint.kernels.measure import peak_bytes, saved_bytes
from longhaul import kernels
from longhaul.vocab import loss as vocab_loss
from longhaul.vocab.check import gradients, off_by, standard_loss
from longhaul.vocab.check import relative as rel
from longhaul.vocab.loss import linear_cross_entropy
from model import ModelConfig
from tests.tiers import slow
from verify_chunked_loss import naive_loop

pytestmark = pytest.mark.usefixtures("products_in_their_dtype")

CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the Triton kernels
TILES = [(4096, 4096), (64, 512), (100, 99), (7, 1000)]


def dense(h, w, y, *, z_loss=0.0, label_smoothing=0.0, softcap=None, reduction="mean"):
    """The oracle, through the full logits. Call it in float64."""
    z = h @ w.T
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)

    valid = y != -100
    loss = F.cross_entropy(z, y, reduction="none", label_smoothing=label_smoothing)
    loss = loss + z_loss * z.logsumexp(1).square() * valid

    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / valid.sum().clamp(min=1)


def inputs(N=203, D=32, V=1009, dtype=torch.float32, regime="flat", seed=0):
    torch.manual_seed(seed)
    h = torch.randn(N, D)
    w = torch.randn(V, D) / D**0.5
    y = torch.randint(V, (N,))
    if N > 1:
        y[:2] = torch.tensor([0, V - 1])
    if regime == "peaked":
        h = h + 14 * F.normalize(w[y], dim=1)
    return h.to(dtype), w.to(dtype), y


def truth(h, w, y, **options):
    """(loss, dh, dw) of the oracle."""
    return gradients(functools.partial(dense, **options), h.double(), w.double(), y)


def chunked(h, w, y, **options):
    """(loss, dh, dw) of linear_cross_entropy."""
    return gradients(functools.partial(linear_cross_entropy, **options), h, w, y)


one_pass_loss = functools.partial(linear_cross_entropy, one_pass=True)


def plain_loss(h, w, y, *, vocab_tile=None, **options):
    """The loss of model.py, which has no tiles of the vocabulary."""
    return model.linear_cross_entropy(h, w, y, **options)


EVERY_LOSS = pytest.mark.parametrize(
    "loss",
    [linear_cross_entropy, one_pass_loss, plain_loss],
    ids=["recomputed", "one pass", "plain"],
)
ONE_PASS = pytest.mark.parametrize("one_pass", [False, True], ids=["recomputed", "one pass"])
OPTIONS = [
    {},
    dict(z_loss=1e-3),
    dict(label_smoothing=0.1),
    dict(softcap=5.0),
    dict(z_loss=1e-3, label_smoothing=0.1, softcap=5.0),
]


def blocks(h, w) -> int:
    """Blocks of tokens that one pass takes."""
    tokens = vocab_loss.block_tokens(len(h), *w.shape, h.element_size())
    return -(-len(h) // tokens)


compiled_loss = functools.partial(linear_cross_entropy, kernels="compiled")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def by_triton(loss):
    """The loss by the kernels for GPUs."""
    return functools.partial(loss, kernels="triton")


@pytest.fixture
def poisoned_allocations(monkeypatch):
    """Outputs that a kernel forgets to write are NaN."""
    empty_like = torch.empty_like

    def poisoned(*args, **kwargs):
        return empty_like(*args, **kwargs).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty_like", poisoned)


@needs_triton
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of NumPy, by infinities
@pytest.mark.parametrize(
    "loss, vocab_tile", [(linear_cross_entropy, 77), (one_pass_loss, 77), (linear_cross_entropy, 7)]
)
def test_the_kernels_are_as_exact_in_fp32(loss, vocab_tile, poisoned_allocations):
    made = inputs(9, 16, 160)
    made[2][2:] = torch.tensor([5, -100, 76, 77, 153, 154, 100])
    h, w, y = (x.to(DEVICE) for x in made)
    want = truth(*made, **OPTIONS[-1])
    tiles = dict(token_tile=4, vocab_tile=vocab_tile)
    got = gradients(functools.partial(by_triton(loss), **tiles, **OPTIONS[-1]), h, w, y)
    for a, b in zip(got, want):
        assert rel(a.cpu(), b) < 1e-6


@pytest.mark.parametrize(
    "loss, options",
    [
        *itertools.product([linear_cross_entropy, one_pass_loss], OPTIONS),
        (plain_loss, {}),
        slow(compiled_loss, {}),  # compiling takes seconds
        slow(compiled_loss, OPTIONS[-1]),
        slow(functools.partial(compiled_loss, one_pass=True), OPTIONS[-1]),
    ],
)
def test_fp32_is_within_1e6_of_float64_for_any_tiling_and_option(loss, options):
    h, w, y = inputs()
    y[5::9] = -100
    assert blocks(h, w) == 4
    want = truth(h, w, y, **options)
    is_compiled = "kernels" in getattr(loss, "keywords", {})
    for token_tile, vocab_tile in TILES[1:2] if is_compiled else TILES:
        tiles = dict(token_tile=token_tile, vocab_tile=vocab_tile)
        got = gradients(functools.partial(loss, **tiles, **options), h, w, y)
        assert abs(got[0] - want[0]) / want[0] < 1e-6
        assert rel(got[1], want[1]) < 1e-6 and rel(got[2], want[2]) < 1e-6


@pytest.mark.parametrize(
    "loss, regime",
    [
        (linear_cross_entropy, "flat"),
        (linear_cross_entropy, "peaked"),
        (one_pass_loss, "flat"),
        (one_pass_loss, "peaked"),
        slow(compiled_loss, "flat"),
    ],
)
def test_bf16_errors_are_at_most_105_percent_of_the_standard_losses_own(loss, regime):
    h, w, y = inputs(512, 128, 4099, torch.bfloat16, regime)
    want = truth(h, w, y)
    plain = gradients(standard_loss, h, w, y)
    floor = [rel(t.bfloat16(), t) for t in want[1:]]
    for token_tile, vocab_tile in [(512, 1024)] if loss is compiled_loss else TILES[::3]:
        tiles = dict(token_tile=token_tile, vocab_tile=vocab_tile)
        got = gradients(functools.partial(loss, **tiles), h, w, y)
        assert abs(got[0] - want[0]) < 1e-3
        for i in (1, 2):
            assert rel(got[i], want[i]) <= 1.05 * rel(plain[i], want[i])
            if regime == "flat":
                assert rel(got[i], want[i]) <= 1.05 * floor[i - 1]


def test_in_bf16_the_plain_loss_in_chunks_errs_no_more_than_all_logits_do():
    h, w, y = inputs(200, 24, 301)
    h, w = h.bfloat16(), (w * 24**0.5).bfloat16()
    y[::5] = -100
    want = truth(h, w, y, reduction="sum")
    chunks = functools.partial(plain_loss, reduction="sum", token_tile=4)
    got = gradients(chunks, h, w, y)
    assert [x.dtype for x in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    divisor = torch.tensor(1.0)
    whole = gradients(lambda *x: model.standard_cross_entropy(*x, divisor), h, w, y)
    for x, other, exact in zip(got, whole, want):
        assert rel(x, exact) <= 1.1 * rel(other, exact)


HUGE = [
    (1e4, torch.float32),
    (5e5, torch.bfloat16),
    (1e7, torch.float32),
    (5e7, torch.bfloat16),
    (1e8, torch.float32),
    (1e8, torch.bfloat16),
]


def huge_logits(scale: float, dtype: torch.dtype):
    """Logits near `scale` that differ by up to ten nats, or by their rounding if that is more.

    Each is the product of two numbers, and zero times a third one: whatever sums it, it has the
    same bits. The third numbers keep the gradient of hidden away from zero.
    """
    generator = torch.Generator().manual_seed(7)
    V = 300
    power = 2.0 ** round(math.log2(scale))
    step = torch.finfo(dtype).eps
    steps = torch.randint(max(2, round(10 / (power * step))), (V,), generator=generator)
    w = torch.stack([1 + steps * step, torch.randn(V, generator=generator)], dim=1)
    h = torch.tensor([power, 0.0]).repeat(6, 1)
    y = torch.tensor([int(steps.argmax()), 0, 1, 77, 298, 299])
    return h.to(dtype), w.to(dtype), y


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of NumPy, by infinities
@pytest.mark.parametrize(
    "scale, dtype, kernels",
    [
        *((*case, "torch") for case in HUGE),
        *(pytest.param(*case, "triton", marks=needs_triton) for case in HUGE),
        slow(1e7, torch.float32, "compiled"),
        slow(1e8, torch.bfloat16, "compiled"),
    ],
)
def test_gradients_of_huge_logits_are_those_of_torch(scale, dtype, kernels):
    """The logarithm of the sum is small next to such logits, and their sum would round it away."""
    h, w, y = (x.to(DEVICE) for x in huge_logits(scale, dtype))

    def torchs(h, w, y):
        return F.cross_entropy((h @ w.T).float(), y)

    want = gradients(torchs, h, w, y)
    got = chunked(h, w, y, kernels=kernels, token_tile=4, vocab_tile=77)
    for a, b in zip(got, want):
        assert rel(a, b) < 0.01
    if kernels != "torch":
        return
    in_one_pass = chunked(h, w, y, one_pass=True, token_tile=4, vocab_tile=77)
    for a, b in zip(in_one_pass, got):
        assert rel(a, b.double()) < (1e-6 if dtype == torch.float32 else 0.004)


def token_losses(h, w, y, **options):
    """The loss of each token."""
    return linear_cross_entropy(h, w, y, reduction="none", **options)


@pytest.mark.parametrize(
    "dtype, kernels",
    [(torch.bfloat16, "torch"), (torch.float16, "torch"), slow(torch.bfloat16, "compiled")],
)
def test_the_labels_logit_stays_in_fp32_so_a_tokens_loss_is_better_than_the_standard_one(
    dtype, kernels
):
    """The rounding of the other logits averages out over the vocabulary. That of the label's logit,
    which the loss subtracts, would not.
    """
    h, w, y = inputs(512, 64, 4099, dtype)
    exact = dense(h.double(), w.double(), y, reduction="none")
    standard = standard_loss(h, w, y, reduction="none")  # with a rounded logit of the label

    error = off_by(token_losses(h, w, y, kernels=kernels), exact)
    assert error < 0.1 * off_by(standard, exact)


@EVERY_LOSS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_hidden_with_fp32_master_weight_returns_fp32_gradients(dtype, loss):
    h, w, y = inputs()
    h = h.to(dtype)
    assert blocks(h, w) == 2
    want = truth(h, w.to(dtype), y)
    got = gradients(functools.partial(loss, token_tile=50, vocab_tile=100), h, w, y)
    assert got[1].dtype == dtype and got[2].dtype == torch.float32
    plain = gradients(standard_loss, h, w.to(dtype), y)
    assert abs(got[0] - want[0]) < 1e-3
    for index in (1, 2):
        assert rel(got[index], want[index]) <= 1.05 * rel(plain[index], want[index])


@EVERY_LOSS
def test_the_mean_is_over_more_targets_than_bf16_can_count(loss):
    labels = torch.arange(301) % 17
    found = loss(torch.zeros(301, 8), torch.zeros(17, 8), labels)
    torch.testing.assert_close(found, torch.tensor(17.0).log())


def test_autocast_changes_nothing_inside():
    h, w, y = inputs()
    plain = chunked(h, w, y)
    with torch.autocast("cpu", torch.bfloat16):
        cast = chunked(h, w, y)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast))


@EVERY_LOSS
@pytest.mark.parametrize("N,V", [(0, 7), (1, 7), (1, 1), (3, 1), (2, 2)])
def test_tiny_sizes_work(N, V, loss):
    torch.manual_seed(0)
    h = torch.randn(N, 3)
    w = torch.randn(V, 3)
    y = torch.randint(V, (N,))
    for a, b in zip(gradients(loss, h, w, y), truth(h, w, y)):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)


def test_a_common_offset_of_1e4_changes_the_loss_only_by_the_logits_own_rounding():
    h, w, y = inputs(dtype=torch.float64)
    h1 = torch.cat([h, torch.full((len(h), 1), 1e4)], 1)
    w1 = torch.cat([w, torch.ones(len(w), 1)], 1)

    shifted = linear_cross_entropy(h1, w1, y, vocab_tile=100)
    torch.testing.assert_close(shifted, linear_cross_entropy(h, w, y), rtol=1e-12, atol=0)
    in_fp32 = linear_cross_entropy(h1.float(), w1.float(), y, vocab_tile=100)
    assert abs(in_fp32 - dense(h, w, y)) < 1e-3


@pytest.mark.parametrize("gap", [15.0, 28.0, 40.0])
def test_a_certain_target_keeps_the_relative_precision_of_its_loss(gap):
    """The subtraction logsumexp - logit, even in float64, would be good to 1e-3 only at a gap of 30
    nats. Here the error is that of exp by way of exp2: half a unit in the last place of gap log2 e.
    """
    h = torch.tensor([[1.0, 0.0]])
    w = torch.tensor([[gap, 0.0], [0.0, 1.0], [0.0, 2.0]])
    y = torch.tensor([0])
    loss, dh, _ = chunked(h, w, y)

    p = math.exp(-gap)  # of each of the two others, up to a factor of 1 - 2p
    want, want_h = math.log1p(2 * p), torch.tensor([[-2 * gap * p, 3 * p]])
    bound = gap * 2**-24 + 2e-7
    assert abs(loss - want) / want < bound and rel(dh, want_h) < bound


@pytest.mark.parametrize(
    "loss",
    [linear_cross_entropy, one_pass_loss, plain_loss, slow(compiled_loss)],
    ids=["recomputed", "one pass", "plain", "compiled"],
)
def test_no_valid_token_gives_zero_loss_and_exact_zero_gradients_still_attached(loss):
    h, w, y = inputs()
    zero, dh, dw = gradients(loss, h, w, torch.full_like(y, -100))
    assert zero == 0 and not dh.any() and not dw.any()
    assert dh.shape == h.shape and dw.shape == w.shape


@ONE_PASS
def test_the_unpacked_rows_of_cuda_give_the_same_result_even_if_their_logits_are_huge(
    one_pass, monkeypatch
):
    h, w, y = inputs()
    y[::3] = -100
    h[::3] *= 1e3
    packed = chunked(h, w, y, one_pass=one_pass)
    monkeypatch.setattr(
        vocab_loss,
        "pack_valid",
        lambda labels, ignore: (slice(None), torch.where(labels != ignore, labels, -1)),
    )
    for a, b in zip(packed, chunked(h, w, y, one_pass=one_pass)):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", ["standard", "chunked"])
def test_a_validating_decoder_names_the_bad_label_whichever_loss_runs(kind):
    decoder = kernels.decoder(ModelConfig.preset("tiny", vocab_size=32, num_layers=1, loss=kind))
    decoder.validate, tokens = True, torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(IndexError, match="label 32 at position 2: allowed are 0 to 31"):
        decoder(tokens, torch.tensor([[0, 1, 32, 3]]))


@EVERY_LOSS
def test_another_ignore_index_is_ignored(loss):
    h, w, y = inputs()
    y[::3] = 7
    want = gradients(loss, h, w, torch.where(y == 7, -100, y))
    for a, b in zip(gradients(functools.partial(loss, ignore_index=7), h, w, y), want):
        assert torch.equal(a, b)


@EVERY_LOSS
def test_num_valid_divides_by_the_global_count(loss):
    h, w, y = inputs()
    total = loss(h, w, y, reduction="sum")
    torch.testing.assert_close(total.double(), truth(h, w, y, reduction="sum")[0])
    for count in (1000, torch.tensor(1000)):
        torch.testing.assert_close(loss(h, w, y, num_valid=count), total / 1000)
    assert loss(h, w, y.fill_(-100), num_valid=torch.tensor(0)) == 0


@EVERY_LOSS
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_the_other_the_same_one(frozen, loss):
    h, w, y = inputs()
    _, dh, dw = gradients(loss, h, w, y)
    h.requires_grad_(frozen != "hidden")
    w.requires_grad_(frozen != "weight")
    loss(h, w, y).backward()
    assert (h.grad is None, w.grad is None) == (frozen == "hidden", frozen == "weight")
    assert torch.equal(w.grad, dw) if frozen == "hidden" else torch.equal(h.grad, dh)


def test_backward_twice_with_another_gradient_scales_exactly():
    h, w, y = inputs()
    h.requires_grad_()
    w.requires_grad_()
    loss = linear_cross_entropy(h, w, y)
    first = torch.autograd.grad(loss, (h, w), retain_graph=True)
    second = torch.autograd.grad(loss, (h, w), torch.tensor(-4.0))
    assert all(torch.equal(-4 * a, b) for a, b in zip(first, second))


@EVERY_LOSS
def test_a_tied_weight_accumulates_both_gradients(loss):
    _, w, y = inputs()
    exact_w = w.double().requires_grad_()
    (want,) = torch.autograd.grad(dense(exact_w[y], exact_w, y.roll(1)), exact_w)

    w.requires_grad_()
    (got,) = torch.autograd.grad(loss(w[y], w, y.roll(1)), w)
    assert rel(got, want) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("one_pass, dynamic", [(False, None), (False, True), (True, True)])
def test_a_full_graph_compile_equals_eager_at_several_lengths_with_ignored_labels(
    one_pass, dynamic
):
    options = dict(z_loss=1e-3, vocab_tile=300, one_pass=one_pass)

    @functools.partial(torch.compile, fullgraph=True, dynamic=dynamic)
    def compiled(h, w, y):
        return linear_cross_entropy(h * 1.0, w, y, **options)

    for N in (50, 203):
        h, w, y = inputs(N)
        y[::4] = -100
        for a, b in zip(gradients(compiled, h, w, y), chunked(h, w, y, **options)):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@EVERY_LOSS
def test_recomputation_under_checkpointing_gives_the_same_gradients(loss):
    h, w, y = inputs()
    recomputed = functools.partial(checkpoint, loss, use_reentrant=False)
    for a, b in zip(gradients(recomputed, h, w, y), gradients(loss, h, w, y)):
        assert torch.equal(a, b)


def test_8_bytes_per_token_are_saved_4_more_with_a_z_loss_and_a_naive_loop_saves_all_logits(
    monkeypatch,
):
    h, w, y = inputs(1000, 16, 4000, torch.bfloat16)
    y[::5] = -100
    h.requires_grad_()
    w.requires_grad_()
    own = h.nbytes + w.nbytes + y.nbytes
    for options in OPTIONS:
        saved = saved_bytes(functools.partial(linear_cross_entropy, h, w, y, **options))
        bytes_per_token = 12 if options.get("z_loss") else 8
        assert saved - own <= bytes_per_token * 1000 + 64, options

    # on a CPU that is faster in fp32, too
    monkeypatch.setattr("base.machine.fp32_is_faster", lambda dtype: True)
    saved = saved_bytes(functools.partial(linear_cross_entropy, h, w, y))
    assert saved - own <= 8 * 1000 + 64

    # the negative control
    saved = saved_bytes(lambda: naive_loop(h, w, y, chunk=100))
    assert saved - own >= 1000 * 4000 * 4


def test_peak_memory_through_backward_is_under_2_percent_of_the_standard_loss():
    h, w, y = inputs(1024, 16, 40_000, torch.bfloat16)
    results = 2 * (h.numel() + w.numel())  # the gradients, in bf16
    ours = peak_bytes(lambda: chunked(h, w, y), CPU) - results
    plain = peak_bytes(lambda: gradients(standard_loss, h, w, y), CPU) - results
    assert plain > 1024 * 40_000 * 8 and ours < 0.02 * plain


@pytest.mark.parametrize("label", [1009, -101])
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
        (dict(softcap=0.0), "softcap"),
        (dict(label_smoothing=1.5), "label_smoothing"),
        (dict(z_loss=math.nan), "z_loss"),
        (dict(num_valid=-3), "num_valid"),
        (dict(num_valid=torch.tensor([10])), "num_valid"),
        (dict(vocab_tile=1.5), "vocab_tile"),
        (dict(kernels="fast"), "choose"),
        (dict(vocab_tile=0), "0"),
        (dict(token_tile=-3), "-3"),
        (dict(reduction="avg"), "avg"),
        (dict(hidden=torch.zeros(203, 32, device="meta")), "meta"),
        (dict(weight=torch.zeros(0, 32)), "V >= 1"),
    ],
    ids=str,
)
def test_bad_input_is_named(change, message):
    arguments = dict(zip(("hidden", "weight", "labels"), inputs())) | change
    tensors = [arguments.pop(name) for name in ("hidden", "weight", "labels")]
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*tensors, **arguments)


REDUCTIONS = ("mean", "sum", "none", "mean", "none"), ("mean", "sum", "mean", "sum", "mean")


@pytest.mark.parametrize(
    "loss, reduction, options",
    [
        *zip(itertools.repeat(linear_cross_entropy), REDUCTIONS[0], OPTIONS),
        *zip(itertools.repeat(one_pass_loss), REDUCTIONS[1], OPTIONS),
    ],
)
def test_float64_is_float64(loss, reduction, options):
    h, w, y = inputs(37, 8, 50, torch.float64)
    y[2] = -100
    assert blocks(h, w) == 5
    weight_N = torch.linspace(1, 2, 37, dtype=torch.float64)

    def weighted(loss, **tiles):
        def total(h, w, y):
            return (loss(h, w, y, reduction=reduction, **tiles, **options) * weight_N).sum()

        return gradients(total, h, w, y)

    got = weighted(loss, token_tile=3, vocab_tile=7)
    for a, b in zip(got, weighted(dense)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_the_operators_pass_their_checks():
    h, w, y = inputs(16, 16, 64)
    h = h.t().contiguous().t()
    _, *sums, mean = vocab_loss.vocab_nll(h, w, y, -100, None, [8, 16], "torch", False)
    options = -100, None, [8, 16], "torch", True, True
    arguments = [mean, mean, mean], *sums, h, w, y, *options
    torch.library.opcheck(vocab_loss.vocab_nll_backward, arguments)

    options = -100, 0.1, 0.01, 5.0, [8, 16, 32], "torch", False, True, True
    arguments = h, w, y, torch.tensor(7.0), *options
    torch.library.opcheck(vocab_loss.vocab_loss_one_pass, arguments)
    torch.library.opcheck(vocab_loss.scale_gradients, ([w, w.clone()], torch.tensor(2.0)))


# ---- one pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_one_block_all_bits_are_those_of_the_loss_that_recomputes(dtype):
    h, w, y = inputs(200, 256, dtype=dtype)
    y[::7] = -100
    assert blocks(h, w) == 1
    for count in (None, 1000, torch.tensor(777)):
        options = dict(token_tile=64, vocab_tile=300, num_valid=count)
        got = chunked(h, w, y, one_pass=True, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, chunked(h, w, y, **options)))


def test_the_gradient_of_the_loss_scales_both_and_micro_batches_are_added():
    h, w, y = inputs()
    _, dh, dw = chunked(h, w, y, one_pass=True)
    h.requires_grad_()
    w.requires_grad_()
    (-4 * one_pass_loss(h, w, y)).backward()
    assert torch.equal(h.grad, -4 * dh) and torch.equal(w.grad, -4 * dw)

    one_pass_loss(h, w, y).backward()
    assert torch.equal(h.grad, -3 * dh) and torch.equal(w.grad, -4 * dw + dw)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_second_backward_is_refused_with_the_remedy(factor):
    h, w, y = inputs()
    loss = factor * one_pass_loss(h, w.requires_grad_(), y)
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match=r"second backward.*: call the backward once, or take"):
        loss.backward()


def test_a_low_precision_weight_in_several_blocks_is_refused_with_the_remedy():
    h, w, y = inputs(dtype=torch.bfloat16)
    assert blocks(h, w) == 2
    with pytest.raises(ValueError, match=r"203 tokens, which makes blocks of 102.*: give fewer"):
        one_pass_loss(h, w, y)


def test_per_token_losses_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="reduction='none'.*: give reduction='mean' or 'sum'"):
        one_pass_loss(*inputs(), reduction="none")


# ---- memory of one pass


def test_it_keeps_its_gradients_and_nothing_else():
    h, w, y = inputs(1000, 16, 4000)
    h.requires_grad_()
    w.requires_grad_()
    own = h.nbytes + w.nbytes
    assert saved_bytes(lambda: one_pass_loss(h, w, y)) <= own + 64


def test_without_gradients_it_keeps_nothing_and_computes_none():
    h, w, y = inputs(300, 64, 4000)
    with torch.no_grad():
        peak = peak_bytes(lambda: one_pass_loss(h, w.requires_grad_(), y, vocab_tile=100), CPU)
    assert peak < w.nbytes / 2


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_block_of_logits_is_bounded_whatever_the_number_of_tokens(factor):
    """Scaling by the gradient of the loss and adding to a leaf allocate nothing either."""
    beyond = []
    for N in (256, 1024):
        h, w, y = inputs(N, 64, 10_000)
        h.requires_grad_()
        w.requires_grad_()
        peak = peak_bytes(lambda: (factor * one_pass_loss(h, w, y)).backward(), CPU)  # noqa: B023
        beyond.append(peak - h.nbytes - w.nbytes)

    block = 2 * w.nbytes  # the logits of a block
    tile = 4 * 4 * 128 * 2048  # temporaries of one tile
    assert max(beyond) < block + tile
    assert abs(beyond[1] - beyond[0]) < 1024 * 64


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_the_backward_hands_over_what_the_forward_has_made_and_allocates_nothing(factor):
    h, w, y = inputs(100, 64, 5000)
    loss = factor * one_pass_loss(h.requires_grad_(), w.requires_grad_(), y)
    assert peak_bytes(loss.backward, CPU) < h.nbytes


def test_a_block_has_a_largest_size_and_blocks_are_equal():
    for N in (1, 1000, 1_000_000):
        tokens = vocab_loss.block_tokens(N, 151_936, 2560, 2)
        assert 2 * 151_936 * tokens <= vocab_loss.BLOCK_BYTES
        count = -(-N // tokens)
        assert tokens == -(-N // count)
    assert vocab_loss.block_tokens(10**6, 8192, 256, 4) <= 2 * 256  # twice dW in fp32
    assert vocab_loss.block_tokens(0, 8192, 256, 4) == 1
