"""vocab_stats and gumbel_topk against the dense float64 formulas."""

import math

import pytest
import torch

from footprint.kernels.measure import peak_bytes
from longhaul.vocab.statistics import gumbel_topk, topk_logits, vocab_stats
from tests.test_loss import HUGE, huge_logits
from tests.tiers import slow

NAMES = ("logprob", "lse", "entropy", "self_certainty", "kl_ref", "kl_from_ref")


def exact(a, b):
    return a.double() @ b.double().T


def dense(h, w, y, reference, temperature=1.0, product=exact):
    """The oracle: full logits, by default in float64."""
    z, r = product(h, w) / temperature, product(*reference) / temperature
    lp, lq = z.log_softmax(1), r.log_softmax(1)
    p, q = lp.exp(), lq.exp()
    V = z.shape[1]
    return {
        "logprob": lp.gather(1, y[:, None])[:, 0],
        "lse": z.logsumexp(1),
        "entropy": -(p * lp).sum(1),
        "self_certainty": -lp.mean(1) - math.log(V),
        "kl_ref": (p * (lp - lq)).sum(1),
        "kl_from_ref": (q * (lq - lp)).sum(1),
    }


def inputs(N=37, V=211, D=24, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g)

    y = torch.randint(V, (N,), generator=g)
    y[:2] = torch.tensor([0, V - 1])
    reference = (rand(N, 17).to(dtype), (rand(V, 17) / 17**0.5 * 2).to(dtype))
    return rand(N, D).to(dtype), (rand(V, D) / D**0.5 * 2).to(dtype), y, reference


@pytest.mark.parametrize("scale, dtype", HUGE)
def test_gradients_at_huge_logits_are_those_of_the_full_logits(scale, dtype):
    h, w, y = huge_logits(scale, dtype)
    reference = huge_logits(scale, dtype)[0], w.flip(0)
    inputs = [x.requires_grad_() for x in (h, w)]

    tiled = vocab_stats(h, w, y, reference=reference, token_tile=4, vocab_tile=77)
    full = dense(h, w, y, reference, product=lambda a, b: (a @ b.T).double())
    for name in NAMES:
        total = getattr(tiled, name).sum()
        got = torch.autograd.grad(total, inputs, retain_graph=True)
        want = torch.autograd.grad(full[name].sum(), inputs, retain_graph=True)
        # where logits tie, some gradients are the rounding of zero
        for a, b, other in zip(got, want, inputs[::-1]):
            assert (a - b).norm() < 0.01 * b.norm() + 1e-6 * other.norm(), name


@pytest.mark.parametrize(
    "temperature, tiles", [(1.0, (512, 1000)), (0.6, (5, 7)), (1.0, (37, 1)), (0.6, (1, 64))]
)
def test_every_value_and_gradient_equals_float64(tiles, temperature):
    h, w, y, reference = inputs()
    h.requires_grad_()
    w.requires_grad_()
    hd, wd = (t.detach().double().requires_grad_() for t in (h, w))
    got = vocab_stats(
        h,
        w,
        y,
        reference=reference,
        temperature=temperature,
        token_tile=tiles[0],
        vocab_tile=tiles[1],
    )
    want = dense(hd, wd, y, reference, temperature)
    g = torch.Generator().manual_seed(1)
    for name in NAMES:
        value, truth = getattr(got, name), want[name]
        assert (value - truth).abs().max() < 5e-6, name
        upstream = torch.randn(len(y), generator=g)
        grads = torch.autograd.grad(value, (h, w), upstream, retain_graph=True)
        truths = torch.autograd.grad(truth, (hd, wd), upstream.double(), retain_graph=True)
        for a, b in zip(grads, truths):
            assert (a - b).norm() / b.norm() < 1e-6, name
    assert torch.equal(got.argmax, (hd @ wd.T).argmax(1))


def test_gradcheck_of_all_together():
    h, w, y, reference = inputs(5, 11, 3, torch.float64)
    y[3] = -100
    h.requires_grad_()
    w.requires_grad_()
    options = dict(reference=reference, temperature=0.7, token_tile=2, vocab_tile=4)

    def f(h, w):
        return torch.stack(vocab_stats(h, w, y, **options)[:6])

    assert torch.autograd.gradcheck(f, (h, w))


def test_what_was_not_given_is_none_and_frozen_inputs_get_no_gradient():
    h, w, y, _ = inputs()
    h.requires_grad_()
    stats = vocab_stats(h, w)
    assert stats.logprob is None and stats.kl_ref is None and stats.kl_from_ref is None
    stats.self_certainty.sum().backward()
    assert h.grad is not None and w.grad is None
    with pytest.raises(RuntimeError):
        stats.argmax.sum().backward()


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_offsets_of_1e4_cancel(offset):
    h, w, y, reference = inputs()
    shift = torch.full((len(h), 1), offset)
    h1, w1 = torch.cat([h, shift], 1), torch.cat([w, torch.ones(len(w), 1)], 1)
    got, want = vocab_stats(h1, w1, y, vocab_tile=50), dense(h1, w1, y, reference, 1.0)
    for name in (
        "logprob",
        "entropy",
        "self_certainty",
    ):  # the fp32 logits themselves are good to 1e-3 at 1e4
        assert (getattr(got, name) - want[name]).abs().max() < 4e-3, name


@pytest.mark.parametrize("kernels", ["torch", slow("compiled")])
def test_bf16_errors_are_at_most_105_percent_of_those_of_full_bf16_logits(kernels):
    h, w, y, reference = inputs(300, 1000, 32, torch.bfloat16)
    got, want = (
        vocab_stats(h, w, y, reference=reference, vocab_tile=300, kernels=kernels),
        dense(h, w, y, reference),
    )
    plain = dense(h, w, y, reference, product=lambda a, b: (a @ b.T).float())
    for name in NAMES:
        assert (getattr(got, name) - want[name]).norm() <= 1.05 * (
            plain[name] - want[name]
        ).norm(), name


@pytest.mark.slow
def test_works_inside_a_full_graph_compile():
    h, w, y, reference = inputs()
    h.requires_grad_()

    def f(h):
        s = vocab_stats(h * 1.0, w, y, reference=reference, vocab_tile=50)
        return s.logprob.sum() + s.entropy.sum() + s.kl_ref.sum()

    (a,), (b,) = (
        torch.autograd.grad(f(h), h),
        torch.autograd.grad(torch.compile(f, fullgraph=True)(h), h),
    )
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_topk_equals_the_dense_topk_and_noise_only_reorders():
    h, w, _, _ = inputs()
    z = h @ w.T / 0.5
    index, logit, key = topk_logits(h.requires_grad_(), w, 9, temperature=0.5, vocab_tile=20)
    assert not logit.requires_grad
    assert torch.equal(topk_logits(h, w, 1)[0], index[:, :1])
    assert torch.equal(index, z.topk(9, 1).indices) and torch.equal(logit, key)
    noise = -torch.empty_like(z).exponential_(generator=torch.Generator().manual_seed(0)).log()
    index, logit, key = gumbel_topk(h, w, 9, temperature=0.5, noise_NV=noise, vocab_tile=20)
    assert torch.equal(index, (z + noise).topk(9, 1).indices)
    torch.testing.assert_close(logit, z.gather(1, index), rtol=1e-5, atol=1e-5)
    assert torch.equal(
        gumbel_topk(h, w, len(w))[0].sort(1).values,
        torch.arange(len(w)).expand(len(h), -1),
    )


@pytest.mark.slow
def test_self_certainty_over_a_frozen_head_takes_a_fiftieth_of_the_memory_of_full_logits():
    g = torch.Generator().manual_seed(0)
    h, w = (
        torch.randn(128, 16, generator=g).bfloat16(),
        torch.randn(151_936, 16, generator=g).bfloat16(),
    )

    def full(hidden):
        z = (hidden @ w.T).float()
        return z.logsumexp(1) - z.mean(1) - math.log(len(w))

    def gradient(statistic):
        hidden = h.detach().requires_grad_()
        return torch.autograd.grad(statistic(hidden).sum(), hidden)

    def tiled(hidden):
        return vocab_stats(hidden, w).self_certainty

    cpu = torch.device("cpu")
    plain = peak_bytes(lambda: gradient(full), cpu)
    assert plain > 50 * peak_bytes(lambda: gradient(tiled), cpu)


@pytest.mark.parametrize("N", [0, 1])
def test_no_token_and_one_token_work(N):
    h, w, y, _ = inputs()
    stats = vocab_stats(h[:N].requires_grad_(), w, y[:N])
    stats.entropy.sum().backward()
    assert stats.lse.shape == (N,)


def test_the_argmax_in_bf16_depends_on_neither_tiles_nor_target():
    h, w, y, _ = inputs(200, 900, dtype=torch.bfloat16)
    truth = (h @ w.T).argmax(1)
    for target, vocab_tile in ((None, None), (None, 7), (y, None), (truth, 64)):
        assert torch.equal(vocab_stats(h, w, target, vocab_tile=vocab_tile).argmax, truth)


def test_noise_of_another_shape_is_refused():
    h, w, _, _ = inputs()
    with pytest.raises(ValueError, match="noise has shape"):
        gumbel_topk(h, w, 2, noise_NV=torch.zeros(1, len(w)))


def test_gumbel_samples_follow_the_softmax():
    torch.manual_seed(0)
    w = torch.randn(7, 3)
    h = torch.randn(1, 3).expand(20_000, 3).contiguous()
    index, _, _ = gumbel_topk(h, w, 2, temperature=0.8, vocab_tile=3)
    p = (h[0] @ w.T / 0.8).softmax(0)
    assert (torch.bincount(index[:, 0], minlength=7) / 20_000 - p).abs().max() < 0.015
    assert (index[:, 0] != index[:, 1]).all()


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=0.0),
        dict(vocab_tile=0),
        dict(reference=(torch.zeros(37, 2), torch.zeros(5, 2))),
    ],
)
def test_bad_input_is_named(bad):
    h, w, y, _ = inputs()
    with pytest.raises(ValueError):
        vocab_stats(h, w, y, **bad)
    with pytest.raises(ValueError):
        topk_logits(h, w, 0)
    with pytest.raises(IndexError, match="211"):
        vocab_stats(h, w, y.fill_(211))
