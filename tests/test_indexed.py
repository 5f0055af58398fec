"""Attention over the blocks that an indexer chooses, and what the indexer learns from, against
their equations, dense and in float64. test_selectors.py has what all selectors must show.
"""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longhaul.sparse import choose, engine, index_loss
from longhaul.sparse.choose import choose_blocks
from longhaul.sparse.index_loss import index_loss_operator
from longhaul.sparse.indexer import Indexed, own_losses, recall
from tests import indexed_oracle as oracle
from tests.test_selectors import INDEXED, build, relative

FORCED = Indexed(count=5, block=16, init=1, local=2, head_dim=24)
NAMES = ("dq", "dk", "dv", "dq of the indexer", "dk of the indexer")


def drawn(T: int = 200, dtype=torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v and the indexer's queries and keys of two rows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, 16), (2, 16), (2, 16), (2, 24), (1, 24)]
    found = [torch.randn((2, T, *shape), generator=generator) for shape in shapes]
    found[3] *= 1.7  # so that the student is far from uniform
    return [x.to(dtype).requires_grad_() for x in found]


def gradients(o: torch.Tensor, loss: torch.Tensor, inputs) -> tuple[torch.Tensor, ...]:
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o.dtype)
    total = (o * weight).sum() + 0.37 * loss
    return torch.autograd.grad(total, inputs, materialize_grads=True)


@pytest.fixture
def few_logits(monkeypatch):
    """Chunks of few queries, so that short rows have several."""
    monkeypatch.setattr(index_loss, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(choose, "CPU_PRODUCTS", 2**12)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return found


@pytest.mark.parametrize("warming", [False, True], ids=["sparse", "warm-up"])
def test_nothing_of_size_tokens_by_blocks_exists_at_131072_tokens(warming, monkeypatch):
    # the last chunk of queries sees most keys
    monkeypatch.setattr(index_loss, "rounds", lambda parts, grow=False: parts[-1:])
    monkeypatch.setattr(engine, "tile_count", lambda end_J, most: most)
    T = 131_072
    shapes = [(1, T, 2, 16), (1, T, 16), (1, T, 4, 16), (1, T, 2, 16)]
    inputs = [torch.empty(shape, device="meta") for shape in shapes]
    chosen = torch.empty((1, T, 2, 16), dtype=torch.int32, device="meta")
    read = (None, None) if warming else (chosen, torch.empty((1, T, 4), device="meta"))
    with Largest() as largest:
        index_loss_operator._init_fn(*inputs, *read, 64, torch.float32)
    assert 1e6 < largest.elements < T * (T // 64) / 16


# ---- the layer against them


@pytest.mark.parametrize(
    "sizes, warming",
    [(INDEXED, False), (INDEXED, True), (FORCED, False)],
    ids=["own", "own, warm-up", "first and two local"],
)
def test_choice_output_loss_and_gradients_are_those_of_the_equations(sizes, warming, few_logits):
    inputs = drawn()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    true_o, true_loss, reads = oracle.outputs(exact, sizes, warming)
    if not warming:
        chosen = choose_blocks(sizes, inputs[3], inputs[4].expand(-1, -1, 2, -1)).long()
        found = torch.zeros(*chosen.shape[:3], 14, dtype=torch.bool).scatter_(-1, chosen + 1, True)
        assert torch.equal(found[..., 1:], reads)

    decoder = build(sizes)
    layer = decoder.layers[0].attention
    with own_losses(decoder, warming):
        o, loss = layer.attend_indexed(*inputs, learns=True)
    assert relative(o, true_o) <= 1e-5
    assert relative(loss, true_loss.detach()) <= 1e-5 and true_loss > 100

    truth = gradients(true_o, true_loss, exact)
    if warming:  # in which the model learns nothing
        found = torch.autograd.grad(0.37 * loss, inputs[3:])
        truth = truth[3:]
    else:
        found = gradients(o, loss, inputs)
    for name, grad, want in zip(NAMES[-len(found) :], found, truth, strict=True):
        assert want.norm() > 0 and relative(grad, want) <= 1e-5, name


@pytest.mark.parametrize("warming", [False, True], ids=["sparse", "warm-up"])
def test_repeats_are_bit_identical(warming):
    decoder, runs = build(INDEXED), []
    for _ in range(2):
        inputs = drawn()
        with own_losses(decoder, warming):
            o, loss = decoder.layers[0].attention.attend_indexed(*inputs, learns=True)
        runs.append([o, loss, *torch.autograd.grad(loss, inputs[3:])])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_in_bf16_loss_and_gradients_are_those_of_the_rounded_inputs():
    inputs = drawn(dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    true_o, true_loss, _ = oracle.outputs(exact, INDEXED)
    o, loss = build(INDEXED).layers[0].attention.attend_indexed(*inputs, learns=True)
    assert relative(o, true_o) <= 2**-7
    assert relative(loss, true_loss.detach()) <= 1e-3
    found = torch.autograd.grad(loss, inputs[3:])
    for grad, want in zip(found, torch.autograd.grad(true_loss, exact[3:]), strict=True):
        assert relative(grad, want) <= 2**-7


def test_a_layer_turns_and_norms_its_index_heads_as_the_models():
    for width, part, turning in ((24, 0.5, 8), (16, 0.5, 8), (8, 1.0, 8), (24, 1.0, 16), (8, 0, 0)):
        sizes = dataclasses.replace(INDEXED, head_dim=width, partial_rotary_factor=part)
        decoder = build(sizes)
        layer = decoder.layers[0].attention
        x = torch.randn(1, 70, 64, generator=torch.Generator().manual_seed(2))
        q, k = layer.indexer(x, decoder.rotary(70, x.device))
        assert q.shape == (1, 70, 2, width) and k.shape == (1, 70, 1, width)
        raw = (x.double() @ layer.indexer.k_proj.weight.double().T)[0]
        normed = raw / (raw.square().mean(-1, keepdim=True) + decoder.config.norm_eps).sqrt()
        frequencies = decoder.config.rope_theta ** -(torch.arange(0, turning, 2) / max(1, turning))
        angles = torch.arange(70)[:, None] * frequencies.double()
        a, b, rest = normed.split((turning // 2, turning // 2, width - turning), -1)
        turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos(), rest
        assert relative(k[0, :, 0].detach(), torch.cat(turned, -1).detach()) <= 1e-5


def test_the_recall_is_the_share_of_full_attention_that_is_read():
    inputs = [x.detach() for x in drawn()]
    read, best, count = recall(INDEXED, *inputs).tolist()
    sampled = [199 - i * 120 // 16 for i in range(16)]
    exact = [x.double() for x in inputs]
    scores = oracle.scores(*exact[3:], INDEXED.block)
    logits = torch.einsum("btgmk,bsgk->btgms", exact[0].unflatten(2, (2, 2)), exact[1]) / 4
    logits.masked_fill_(torch.ones(200, 200, dtype=torch.bool).triu(1)[:, None, None], -torch.inf)
    p = logits.softmax(-1).mean(3)
    mass = torch.stack([part.sum(-1) for part in p.split(INDEXED.block, dim=-1)], -1)
    want = (mass * oracle.choose(scores, INDEXED)).sum(-1).mean(2)[:, sampled].sum()
    limit = (mass * oracle.choose(mass, INDEXED)).sum(-1).mean(2)[:, sampled].sum()
    assert count == 32 and 0.05 < want / count < limit / count < 0.999
    assert read == pytest.approx(float(want), rel=1e-5)
    assert best == pytest.approx(float(limit), rel=1e-5)
    few = [x[:, :80] for x in inputs]  # which all queries read whole
    assert recall(INDEXED, *few).tolist() == [0, 0, 0]
