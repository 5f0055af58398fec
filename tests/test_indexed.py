"""The plain version of indexed attention against its dense float64 oracle: outputs, the
indexer's loss, all gradients; ties, budgets, documents, bounded memory.

Letters as in tests/indexed_oracle.py.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from base import machine
from longhaul.kernels import attention
from longhaul.sparse.indexed import operators, plain, recall
from longhaul.sparse.indexed.layer import IndexerConfig
from longhaul.sparse.indexed.operators import indexed_backward, indexed_forward
from longhaul.sparse.indexed.plain import block_ranks, least_rank, pooled_keys
from longhaul.sparse.indexed.recall import Reading
from tests import indexed_oracle as oracle

# (B, T, H, G, K, h, E, r, budget)
SIZES = [
    (2, 67, 4, 2, 16, 3, 16, 4, 16),
    (1, 301, 6, 2, 8, 2, 12, 5, 35),
    (1, 130, 8, 2, 16, 4, 32, 4, 4),
    (1, 64, 2, 1, 8, 1, 8, 1, 7),
    (1, 3, 2, 1, 8, 1, 8, 4, 8),
    (2, 50, 4, 1, 8, 2, 12, 4, 64),
]


@pytest.fixture(autouse=True)
def plain_version(monkeypatch):
    """tests/test_indexed_engine.py is about the other one."""
    monkeypatch.setattr(operators, "engine_for", lambda dtype: None)


def inputs(B, T, H, G, K, h, E, dtype=torch.float32) -> list[torch.Tensor]:
    """q, k, v, and the indexer's queries and keys of tokens."""
    make = torch.Generator().manual_seed(T)
    shapes = [(B, T, H, K), (B, T, G, K), (B, T, G, K), (B, T, h, E), (B, T, 1, E)]
    return [torch.randn(shape, generator=make).to(dtype).requires_grad_() for shape in shapes]


def outputs(tensors, r, budget, kernels="auto"):
    """o and the indexer's loss."""
    *others, k_idx = tensors
    sizes = r, budget // r, True, kernels
    o, kl, *_ = indexed_forward(*others, pooled_keys(k_idx, r), *sizes)
    return o, kl


def wanted(tensors, r, budget, dense=False):
    """The same in float64, their inputs, and the choice. `dense`: as in the warm-up."""
    exact = [x.detach().double().requires_grad_() for x in tensors]
    q, k, v, q_idx, k_idx = exact
    scores = oracle.scores(q_idx, oracle.pooled(k_idx[:, :, 0], r))
    chosen = oracle.choose(scores.detach(), r, q.shape[1] if dense else budget)
    o = oracle.attention(q, k, v, chosen, r)
    return o, oracle.divergence(q, k, scores, chosen, r), exact, chosen


def gradients(o, kl, tensors, seed=1) -> tuple[torch.Tensor, ...]:
    """Of a random function of both outputs, so that no gradient is that of a sum."""
    make = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=make).to(x.dtype) for x in (o, kl)]
    total = (o * weights[0]).sum() + (kl * weights[1]).sum()
    return torch.autograd.grad(total, tensors)


def relative(x: torch.Tensor, truth: torch.Tensor) -> float:
    if truth.norm() == 0:
        return float(x.double().norm())
    return ((x.double() - truth).norm() / truth.norm()).item()


def few_logits(monkeypatch):
    """Chunks of 16 queries and small tiles of keys, so that short rows have several."""
    monkeypatch.setattr(plain, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(recall, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(plain, "TILE_KEYS", 1000)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_equals_the_float64_oracle_forward_and_backward(sizes, monkeypatch):
    few_logits(monkeypatch)
    *shape, r, budget = sizes
    tensors = inputs(*shape)
    o, kl = outputs(tensors, r, budget)
    true_o, true_kl, exact, _ = wanted(tensors, r, budget)
    assert relative(o, true_o) <= 1e-6
    assert (kl.double() - true_kl).abs().max() <= 1e-6

    found = gradients(o, kl, tensors)
    truth = gradients(true_o, true_kl, exact)
    names = ("dq", "dk", "dv", "dq of the indexer", "dk of the indexer")
    for name, grad, want in zip(names, found, truth, strict=True):
        assert relative(grad, want) <= 1e-5, name


def test_the_dense_warm_up_is_a_budget_of_all_blocks(monkeypatch):
    few_logits(monkeypatch)
    *shape, r, budget = SIZES[0]
    tensors = inputs(*shape)
    o, kl = outputs(tensors, r, r * 1000)
    true_o, true_kl, exact, _ = wanted(tensors, r, budget, dense=True)
    assert relative(o, true_o) <= 1e-6
    found = gradients(o, kl, tensors)
    for grad, want in zip(found, gradients(true_o, true_kl, exact), strict=True):
        assert relative(grad, want) <= 1e-5


def test_a_budget_of_the_whole_row_is_standard_attention():
    *shape, r, _ = SIZES[1]
    tensors = inputs(*shape)
    o, _ = outputs(tensors, r, 300)
    standard = attention(*tensors[:3])
    assert relative(o, standard.double()) <= 1e-6
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((o * weight).sum(), tensors[:3])
    truth = torch.autograd.grad((standard * weight).sum(), tensors[:3])
    for grad, want in zip(found, truth, strict=True):
        assert relative(grad, want.double()) <= 1e-6


def test_the_model_and_the_indexer_do_not_see_each_other():
    *shape, r, budget = SIZES[0]
    tensors = inputs(*shape)
    o, kl = outputs(tensors, r, budget)
    of_o = torch.autograd.grad(o.sum(), tensors, retain_graph=True, materialize_grads=True)
    of_kl = torch.autograd.grad(kl.sum(), tensors, materialize_grads=True)
    assert [bool(grad.abs().max() > 0) for grad in of_o] == [True] * 3 + [False] * 2
    assert [bool(grad.abs().max() > 0) for grad in of_kl] == [False] * 3 + [True] * 2


def test_equal_scores_choose_the_lower_index_and_future_blocks_are_never_chosen():
    scores = torch.zeros(1, 9, 4)
    scores[0, :, 2] = 1.0
    query = torch.arange(9)[:, None]
    rank = block_ranks(scores, query, 2)
    chosen = rank >= least_rank(rank, 2)[..., None]
    found = [row.nonzero()[:, 0].tolist() for row in chosen[0]]
    assert found == [[], [], [0], [0], [0, 1], [0, 1], [0, 2], [0, 2], [0, 2]]


def test_relu_makes_many_ties_and_the_choice_is_still_the_oracles(monkeypatch):
    few_logits(monkeypatch)
    tensors = inputs(1, 120, 2, 1, 8, 1, 4)
    with torch.no_grad():
        tensors[3].copy_(tensors[3].round())
        tensors[4].copy_(tensors[4][:, :1].abs())  # equal keys: every candidate has one score
    o, kl = outputs(tensors, 4, 16)
    true_o, true_kl, _, chosen = wanted(tensors, 4, 16)
    assert chosen[0, -1].nonzero()[:, 0].tolist() == [0, 1, 2, 3]
    assert relative(o, true_o) <= 1e-6
    assert (kl.double() - true_kl).abs().max() <= 1e-6


def test_repeats_are_bit_identical():
    *shape, r, budget = SIZES[1]
    runs = []
    for _ in range(2):
        tensors = inputs(*shape)
        o, kl = outputs(tensors, r, budget)
        runs.append([o, kl, *gradients(o, kl, tensors)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_in_bf16_the_error_is_that_of_its_rounding(monkeypatch):
    few_logits(monkeypatch)
    *shape, r, budget = SIZES[0]
    tensors = inputs(*shape, dtype=torch.bfloat16)
    o, kl = outputs(tensors, r, budget)
    q, k, v, q_idx, k_idx = (x.detach().double() for x in tensors)
    kbar = pooled_keys(tensors[4], r).double()  # rounded, as the choice is sensitive to it
    scores = oracle.scores(q_idx, kbar)
    chosen = oracle.choose(scores, r, budget)
    assert relative(o, oracle.attention(q, k, v, chosen, r)) <= 2**-8
    assert (kl - oracle.divergence(q, k, scores, chosen, r)).abs().max() <= 1e-5


def test_the_last_queries_of_a_row_give_what_the_whole_row_gives(monkeypatch):
    few_logits(monkeypatch)
    *shape, r, budget = SIZES[0]
    q, k, v, q_idx, k_idx = inputs(*shape)
    whole, _ = outputs((q, k, v, q_idx, k_idx), r, budget)
    for last in (1, 2, 40):
        end = slice(shape[1] - last, None)
        part, *_ = indexed_forward(
            q[:, end], k, v, q_idx[:, end], pooled_keys(k_idx, r), r, budget // r, False
        )
        assert relative(part, whole[:, end].double()) <= 1e-6


def test_the_recall_is_the_share_of_full_attention_that_is_read():
    q, k, _, q_idx, k_idx = (x.detach() for x in inputs(2, 200, 4, 2, 16, 2, 16))
    k_BNE = pooled_keys(k_idx, 4)
    reading = Reading(r=4, most=4, warming=False, learns=True)
    total, limit, count = reading.recall(q, k, q_idx, k_BNE, 200)
    *_, chosen = wanted((q, k, k, q_idx, k_idx), 4, 16)
    sampled = [199 - i * 180 // 16 for i in range(16)]
    truth = oracle.recall(q, k, chosen, 4)[:, sampled]
    assert count == 2 * 16 and 0.05 < truth.mean() < 0.95
    assert float(total) == pytest.approx(float(truth.sum()), rel=1e-6)

    # the best choice is the one by attention's mass itself
    every = oracle.candidates(200, 4).expand_as(chosen)
    mass = oracle.probabilities(q, k, every, 4).sum(1).unflatten(-1, (-1, 4)).sum(-1)
    best = oracle.recall(q, k, oracle.choose(mass, 4, 16), 4)[:, sampled]
    assert float(limit) == pytest.approx(float(best.sum()), rel=1e-6)
    assert truth.mean() < best.mean() < 0.99

    # of a part of the queries, over the keys that these may see
    part = [at for at in sampled if 70 <= at < 150]
    some = slice(70, 150), slice(0, 150)
    found = reading.recall(q[:, some[0]], k[:, some[1]], q_idx[:, some[0]], k_BNE[:, :37], 200)
    want = oracle.recall(q, k, chosen, 4)[:, part].sum()
    assert found[::2].tolist() == pytest.approx([float(want), 2 * len(part)], rel=1e-6)


def test_the_recall_counts_no_query_that_has_no_choice():
    q, k, _, q_idx, k_idx = (x.detach() for x in inputs(1, 23, 4, 2, 16, 2, 16))
    sizes = dict(r=4, warming=False, learns=True)
    k_BNE = pooled_keys(k_idx, 4)
    # from five whole blocks on: the last three queries
    assert Reading(most=4, **sizes).recall(q, k, q_idx, k_BNE, 23)[2] == 3
    assert Reading(most=5, **sizes).recall(q, k, q_idx, k_BNE, 23).tolist() == [0, 0, 0]


class Largest(TorchDispatchMode):
    """The most elements of any tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return found


def test_nothing_of_size_tokens_by_blocks_exists_at_131072_tokens():
    bounded_at(131_072)


def bounded_at(T: int, kernels: str = "auto") -> None:
    """Runs the bodies of the operators over their largest chunk, on tensors without values."""
    q, k, v, q_idx, k_idx = (x.to("meta") for x in inputs(1, 16, 2, 1, 8, 1, 8))
    q, k, v, q_idx = (x.new_empty((1, T, *x.shape[2:])) for x in (q, k, v, q_idx))
    k_idx = k_idx.new_empty((1, T // 4, 8))
    with Largest() as largest, machine.running_on(OneChunk()):
        o, kl, *saved = indexed_forward._init_fn(q, k, v, q_idx, k_idx, 4, 512, True, kernels)
        indexed_backward._init_fn(o, kl, q, k, v, q_idx, k_idx, o, *saved, 4, 512, kernels)
    assert 1e6 < largest.elements < T * (T // 4) / 16
    assert sum(x.numel() * x.itemsize for x in saved) / T <= 8 + 4 + 2 * 4


class OneChunk(machine.Platform):
    """Runs only the largest chunk of queries, which is the last one of longhaul/sparse/indexed/."""

    def parts(self, parts, size):
        return [max(parts, key=size)]

    def last(self, parts):
        return parts[-1:]


@pytest.mark.parametrize(
    "given, allowed",
    [
        (dict(budget=2), r"given budget=2, r=4; allowed: budget >= r.*; remedy: raise budget"),
        (dict(budget=10), r"given budget=10, r=4; allowed: budget a multiple of r; remedy"),
        (dict(r=0), r"given r=0; allowed: r an integer >= 1; remedy: change r"),
        (dict(heads=1.5), r"given heads=1.5; allowed: heads an integer"),
        (dict(head_dim=7), r"given head_dim=7; allowed: an even head_dim"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_used_are_refused_with_the_remedy(given, allowed):
    with pytest.raises(ValueError, match=allowed):
        IndexerConfig(**given)


def test_attention_without_mass_on_its_chosen_blocks_teaches_the_indexer_nothing():
    q, k, v, q_idx, k_idx = (x.detach() for x in inputs(1, 8, 1, 1, 8, 1, 8))
    q = torch.full_like(q, 100.0)
    # the mass of the first block underflows to 0
    k[:, :4] = -100.0
    k[:, 4:] = 100.0
    q_idx.requires_grad_()
    o, kl = outputs((q, k, v, q_idx, k_idx), 4, 4)
    (grad,) = torch.autograd.grad(kl.sum(), [q_idx])
    assert torch.equal(kl, torch.zeros_like(kl))
    assert torch.equal(grad, torch.zeros_like(grad))
    assert math.isfinite(float(o.detach().sum()))
