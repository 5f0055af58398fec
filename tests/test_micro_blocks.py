"""The plain reference of attention over blocks of a few tokens, against its equations."""

import pytest
import torch

from longhaul.sparse import micro_blocks
from longhaul.sparse.micro_blocks import choose, micro_block_attention
from model import causal_attention
from tests import micro_blocks_oracle as oracle

# B, T, H, G, K, h, E, r, budget
SIZES = [(2, 101, 4, 2, 16, 3, 8, 4, 24), (1, 90, 4, 1, 8, 1, 16, 6, 18)]


def inputs(B, T, H, G, K, h, E, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, T, H, K), (B, T, G, K), (B, T, G, K), (B, T, h, E), (B, T, E)]
    found = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [x.requires_grad_() for x in found]


def relative(x: torch.Tensor, truth: torch.Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm()).item()


def gradients(o, kl, tensors) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (o, kl)]
    return torch.autograd.grad((o * weights[0]).sum() + (kl * weights[1]).sum(), tensors)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_output_loss_and_gradients_are_those_of_the_equations(sizes, dtype, monkeypatch):
    monkeypatch.setattr(micro_blocks, "CHUNK_LOGITS", 1)
    *shape, r, budget = sizes
    tensors = inputs(*shape, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    q, k, v, q_idx, k_idx = exact
    scores = oracle.scores(q_idx, oracle.pooled(k_idx, r))
    chosen = oracle.choose(scores.detach(), r, budget)
    true_o = oracle.attention(q, k, v, chosen, r)
    true_kl = oracle.divergence(q, k, scores, chosen, r)

    o, kl = micro_block_attention(*tensors, r, budget)
    assert relative(o, true_o) <= 1e-6
    assert (kl.double() - true_kl).abs().max() <= 1e-6 and true_kl.max() > 0.01
    found, truth = gradients(o, kl, tensors), gradients(true_o, true_kl, exact)
    for grad, want in zip(found, truth, strict=True):
        assert relative(grad, want) <= 1e-5


def test_of_equal_scores_the_lower_index_is_read_and_a_later_block_never():
    scores = torch.zeros(1, 9, 4)
    scores[..., 2] = 1.0
    chosen = choose(scores, torch.arange(9), 2, 2)
    found = [row.nonzero()[:, 0].tolist() for row in chosen[0]]
    assert found == [[], [], [0], [0], [0, 1], [0, 1], [0, 2], [0, 2], [0, 2]]


def test_a_budget_of_the_row_is_full_attention():
    tensors = inputs(*SIZES[0][:7])
    o, _ = micro_block_attention(*tensors, 4, 104)
    assert relative(o, causal_attention(*tensors[:3]).double()) <= 1e-6


def test_the_last_queries_give_what_the_whole_row_gives():
    q, k, v, q_idx, k_idx = inputs(*SIZES[0][:7])
    whole = micro_block_attention(q, k, v, q_idx, k_idx, 4, 24)
    part = micro_block_attention(q[:, 70:], k, v, q_idx[:, 70:], k_idx, 4, 24)
    for found, want in zip(part, whole, strict=True):
        assert relative(found, want[:, 70:].double()) <= 1e-6
