"""The loss in one pass, which computes gradients with the loss: against float64, against the loss
that recomputes, and what it keeps. test_loss.py has what both losses must show.
"""

import pytest
import torch

from footprint.measure import peak_bytes, saved_bytes
from longhaul.vocab import loss as vocab_loss
from longhaul.vocab.check import relative as rel
from tests.test_loss import CPU, HUGE, OPTIONS, blocks, chunked, huge_logits, inputs, truth
from tests.test_loss import one_pass_loss as one_pass

pytestmark = pytest.mark.usefixtures("products_in_their_dtype")


def in_one_pass(h, w, y, **options):
    """(loss, dh, dw)."""
    return chunked(h, w, y, one_pass=True, **options)


# ---- the same function


@pytest.mark.parametrize(
    "reduction, options", zip(("mean", "sum", "mean", "sum", "mean"), OPTIONS), ids=str
)
def test_float64_is_float64(options, reduction):
    h, w, y = inputs(37, 8, 50, torch.float64)
    y[2] = -100
    assert blocks(h, w) == 5
    want = truth(h, w, y, reduction=reduction, **options)
    got = in_one_pass(h, w, y, token_tile=3, vocab_tile=7, reduction=reduction, **options)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale, dtype", HUGE)
def test_gradients_of_huge_logits_are_those_of_the_loss_that_recomputes(scale, dtype):
    h, w, y = huge_logits(scale, dtype)
    want = chunked(h, w, y, token_tile=4, vocab_tile=77)
    got = in_one_pass(h, w, y, token_tile=4, vocab_tile=77)
    for a, b in zip(got, want):
        assert rel(a, b.double()) < 1e-6 if dtype == torch.float32 else rel(a, b.double()) < 0.004


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_one_block_all_bits_are_those_of_the_loss_that_recomputes(dtype):
    h, w, y = inputs(200, 256, dtype=dtype)
    y[::7] = -100
    assert blocks(h, w) == 1
    for count in (None, 1000, torch.tensor(777)):
        options = dict(token_tile=64, vocab_tile=300, num_valid=count)
        got = in_one_pass(h, w, y, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, chunked(h, w, y, **options)))


# ---- inside autograd


def test_the_gradient_of_the_loss_scales_both_and_micro_batches_are_added():
    h, w, y = inputs()
    _, dh, dw = in_one_pass(h, w, y)
    h.requires_grad_()
    w.requires_grad_()
    (-4 * one_pass(h, w, y)).backward()
    assert torch.equal(h.grad, -4 * dh) and torch.equal(w.grad, -4 * dw)

    one_pass(h, w, y).backward()
    assert torch.equal(h.grad, -3 * dh) and torch.equal(w.grad, -4 * dw + dw)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_second_backward_is_refused_with_the_remedy(factor):
    h, w, y = inputs()
    loss = factor * one_pass(h, w.requires_grad_(), y)
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match=r"second backward.*: call the backward once, or take"):
        loss.backward()


def test_the_operators_pass_their_checks():
    h, w, y = inputs(16, 16, 64)
    options = -100, 0.1, 0.01, 5.0, [8, 16, 32], "torch", False, True, True
    arguments = h.t().contiguous().t(), w, y, torch.tensor(7.0), *options
    torch.library.opcheck(vocab_loss.vocab_loss_one_pass, arguments)
    torch.library.opcheck(vocab_loss.scale_gradients, ([h, w], torch.tensor(2.0)))


def test_a_low_precision_weight_in_several_blocks_is_refused_with_the_remedy():
    h, w, y = inputs(dtype=torch.bfloat16)
    assert blocks(h, w) == 2
    with pytest.raises(ValueError, match=r"203 tokens, which makes blocks of 102.*: give fewer"):
        one_pass(h, w, y)


def test_per_token_losses_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="reduction='none'.*: give reduction='mean' or 'sum'"):
        one_pass(*inputs(), reduction="none")


# ---- memory


def test_it_keeps_its_gradients_and_nothing_else():
    h, w, y = inputs(1000, 16, 4000)
    h.requires_grad_()
    w.requires_grad_()
    own = h.nbytes + w.nbytes
    assert saved_bytes(lambda: one_pass(h, w, y)) <= own + 64


def test_without_gradients_it_keeps_nothing_and_computes_none():
    h, w, y = inputs(300, 64, 4000)
    with torch.no_grad():
        peak = peak_bytes(lambda: one_pass(h, w.requires_grad_(), y, vocab_tile=100), CPU)
    assert peak < w.nbytes / 2


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_block_of_logits_is_bounded_whatever_the_number_of_tokens(factor):
    """Scaling by the gradient of the loss and adding to a leaf allocate nothing either."""
    beyond = []
    for N in (256, 1024):
        h, w, y = inputs(N, 64, 10_000)
        h.requires_grad_()
        w.requires_grad_()
        peak = peak_bytes(lambda: (factor * one_pass(h, w, y)).backward(), CPU)  # noqa: B023
        beyond.append(peak - h.nbytes - w.nbytes)

    block = 2 * w.nbytes  # the logits of a block
    tile = 4 * 4 * 128 * 2048  # temporaries of one tile
    assert max(beyond) < block + tile
    assert abs(beyond[1] - beyond[0]) < 1024 * 64


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_the_backward_hands_over_what_the_forward_has_made_and_allocates_nothing(factor):
    h, w, y = inputs(100, 64, 5000)
    loss = factor * one_pass(h.requires_grad_(), w.requires_grad_(), y)
    assert peak_bytes(loss.backward, CPU) < h.nbytes


def test_a_block_has_a_largest_size_and_blocks_are_equal():
    for N in (1, 1000, 1_000_000):
        tokens = vocab_loss.block_tokens(N, 151_936, 2560, 2)
        assert 2 * 151_936 * tokens <= vocab_loss.BLOCK_BYTES
        count = -(-N // tokens)
        assert tokens == -(-N // count)
    assert vocab_loss.block_tokens(10**6, 8192, 256, 4) <= 2 * 256  # twice dW in fp32
    assert vocab_loss.block_tokens(0, 8192, 256, 4) == 1
