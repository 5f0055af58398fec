"""sparse/indexed/, whose time is that of what is read, against a float64 oracle and
the plain version: the same outputs, gradients and choices, in bounded memory.
"""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from footprint.measure import peak_bytes
from longhaul.memory.workspace import Workspaces
from longhaul.sparse.indexed import choice, engine, layer, operators, plain
from tests.test_indexed import SIZES, bounded_at, gradients, inputs, outputs, relative, wanted

NAMES = ("dq", "dk", "dv", "dq of the indexer", "dk of the indexer")


@pytest.fixture
def small_parts(monkeypatch):
    """Short rows have several chunks, tiles and groups; masks end where queries have a choice."""
    monkeypatch.setattr(engine, "MASKED", 1)
    monkeypatch.setattr(engine, "CHUNK_SCORES", 1)
    monkeypatch.setattr(engine, "TILE_KEYS", 2000)
    monkeypatch.setattr(engine, "GROUP_ROWS", 128)
    monkeypatch.setattr(choice, "TILE_PRODUCTS", 500)
    monkeypatch.setattr(choice, "TILE_CHOICES", 200)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_equals_the_float64_oracle_forward_and_backward(sizes, small_parts):
    *shape, r, budget = sizes
    tensors = inputs(*shape)
    o, kl = outputs(tensors, r, budget)
    true_o, true_kl, exact, _ = wanted(tensors, r, budget)
    assert relative(o, true_o) <= 1e-6
    assert (kl.double() - true_kl).abs().max() <= 2e-6

    found = gradients(o, kl, tensors)
    truth = gradients(true_o, true_kl, exact)
    for name, grad, want in zip(NAMES, found, truth, strict=True):
        assert relative(grad, want) <= 1e-5, name


def operands(B, T, H, G, K, h, E, r, dtype):
    """What the operators read, and upstream gradients: do and dkl."""
    q, k, v, q_idx, k_idx = (x.detach() for x in inputs(B, T, H, G, K, h, E, dtype=dtype))
    make = torch.Generator().manual_seed(5)
    upstream = torch.randn(q.shape, generator=make).to(dtype), torch.randn(B, T, generator=make)
    return [q, k, v, q_idx, layer.pooled_keys(k_idx, r)], upstream


def results(tensors, upstream, r, most, kernels="auto"):
    o, kl, *saved = operators.indexed_forward(*tensors, r, most, True, kernels)
    do, dkl = (x.to(like.dtype) for x, like in zip(upstream, (o, kl), strict=True))
    grads = operators.indexed_backward(do, dkl, *tensors, o, *saved, r, most, kernels)
    return dict(zip(("o", "kl", *NAMES), (o, kl, *grads), strict=True)), saved[-1]


def test_a_query_that_is_nan_changes_no_other_one(small_parts):
    tensors, upstream = operands(1, 301, 4, 2, 16, 2, 16, 4, torch.float32)
    healthy, _ = results(tensors, upstream, 4, 4)
    tensors[3][0, 200] = torch.nan
    found, _ = results(tensors, upstream, 4, 4)
    differs = (found["o"] != healthy["o"]).flatten(2).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [200]
    assert found["kl"].isnan()[0].nonzero().flatten().tolist() == [200]


def test_in_bf16_it_errs_at_most_twice_as_much_as_the_plain_version(monkeypatch, small_parts):
    """With heads of 64, from which on fp32 products are made of two bf16 ones."""
    tensors, upstream = operands(1, 600, 4, 2, 64, 2, 64, 4, torch.bfloat16)
    found, ranks = results(tensors, upstream, 4, 8)
    monkeypatch.setattr(operators, "engine_for", lambda dtype: None)
    of_plain, plain_ranks = results(tensors, upstream, 4, 8)
    truth, _ = results([x.double() for x in tensors], upstream, 4, 8)

    last = ranks & (2**31 - 1)
    assert (last == plain_ranks & (2**31 - 1)).float().mean() > 0.99
    for name in ("o", *NAMES):
        assert relative(found[name], truth[name]) <= 2 * relative(of_plain[name], truth[name]), name
    assert (found["kl"] - truth["kl"]).abs().max() <= 1e-5


def test_ties_are_the_oracles_and_repeats_are_bit_identical(small_parts):
    tensors = inputs(1, 120, 2, 1, 8, 1, 4)
    with torch.no_grad():
        tensors[3].copy_(tensors[3].round())
        tensors[4].copy_(tensors[4].round())  # few different scores, many of them 0
    runs = []
    for _ in range(2):
        o, kl = outputs(tensors, 4, 16)
        runs.append([o, kl, *gradients(o, kl, tensors)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))

    true_o, true_kl, exact, _ = wanted(tensors, 4, 16)
    assert relative(runs[0][0], true_o) <= 1e-6
    for grad, want in zip(runs[0][2:], gradients(true_o, true_kl, exact), strict=True):
        assert relative(grad, want) <= 1e-5


def test_the_choice_is_that_of_a_sort_and_is_made_again_from_its_rank():
    make = torch.Generator().manual_seed(0)
    scores = torch.randint(40, (30, 301), generator=make).float()
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :17]
    chosen = choice.choose(scores, 17)
    assert torch.equal(chosen, order.sort(-1).values)
    rank = choice.least_rank(scores.gather(1, chosen), chosen)
    assert torch.equal(choice.choose_again(scores, rank, 17), chosen)
    ranks = plain.block_ranks(scores[None], torch.full((30, 1), 10_000), 4)
    assert torch.equal(rank, plain.least_rank(ranks, 17)[0])


def test_the_last_queries_of_a_row_give_what_the_whole_row_gives(small_parts):
    tensors, _ = operands(2, 67, 4, 2, 16, 3, 16, 4, torch.float32)
    whole, *_ = operators.indexed_forward(*tensors, 4, 4, False)
    q, k, v, q_idx, k_idx = tensors
    for last in (1, 2, 20, 40):
        end = slice(67 - last, None)
        part, *_ = operators.indexed_forward(q[:, end], k, v, q_idx[:, end], k_idx, 4, 4, False)
        assert relative(part, whole[:, end].double()) <= 1e-6


class KeysRead(TorchDispatchMode):
    """The most elements that any operator made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        if isinstance(found, torch.Tensor) and not func.is_view:
            self.elements = max(self.elements, found.numel())
        return found


def test_a_decoded_token_copies_only_the_keys_that_it_reads(small_parts):
    """A row of 4,003 tokens has 128,096 elements of keys; 4 blocks and the own one have 640."""
    tensors, _ = operands(1, 4003, 4, 2, 16, 1, 16, 4, torch.float32)
    q, k, v, q_idx, k_idx = tensors
    last = [x.contiguous() for x in (q[:, -1:], k, v, q_idx[:, -1:], k_idx)]
    with KeysRead() as read:
        operators.indexed_forward._init_fn(*last, 4, 4, False)
    assert 640 <= read.elements <= 2 * 1024  # the scores of 1,000 blocks, in a buffer of 2^k


def test_nothing_of_size_tokens_by_blocks_exists_at_131072_tokens():
    bounded_at(131_072)


@pytest.mark.parametrize("warming", [False, True], ids=["sparse", "dense warm-up"])
def test_indexer_and_kl_take_at_most_twice_the_bytes_of_keys_and_values_at_131072_tokens(warming):
    """The indexer's inputs and gradients, the statistics, and all that is inside the operators but
    attention's fp32 sums of dk and dv; for 32 heads of 128 over 8 KV heads in bf16.
    """
    T = 131_072
    most = T // 4 if warming else 512
    make = functools.partial(torch.empty, device="meta", dtype=torch.bfloat16)
    q, k, v, q_idx = (make(1, T, heads, 128) for heads in (32, 8, 8, 4))
    k_idx = make(1, T // 4, 128)
    o, kl, *saved = (x.to("meta") for x in plain.IndexedOutputs.empty(q))

    inputs = (q, k, v, q_idx, k_idx)
    forward = inside(operators.indexed_forward, (*inputs, 4, most, True))
    do = None if warming else q
    backward = inside(operators.indexed_backward, (do, kl, *inputs, o, *saved, 4, most))
    sums = 0 if warming else 2 * k.numel() * 4
    assert backward > sums

    of_indexer = [q_idx, q_idx, k_idx, k_idx, kl, kl, *saved]
    own = max(forward, backward - sums) + sum(x.nbytes for x in of_indexer)
    assert own <= 2 * (k.nbytes + v.nbytes)


def inside(operator, arguments) -> int:
    """Bytes at the peak of its body, without inputs and results, as the planner counts them."""
    return Workspaces("cpu")._inside(operator._qualname, arguments)


@pytest.mark.parametrize("most", [4, 100])
def test_gradients_that_nothing_needs_are_of_no_token(most, small_parts):
    tensors, (do, dkl) = operands(1, 203, 4, 2, 16, 2, 16, 4, torch.float32)
    tensors[0], tensors[3] = (tensors[i][:, 103:].contiguous() for i in (0, 3))
    o, _, *saved = operators.indexed_forward(*tensors, 4, most, True)
    given = (*tensors, o, *saved, 4, most)
    both = operators.indexed_backward(do[:, 103:], dkl[:, 103:], *given)
    of_model = operators.indexed_backward(do[:, 103:], None, *given)
    of_indexer = operators.indexed_backward(None, dkl[:, 103:], *given)
    assert [x.numel() for x in (*of_model[3:], *of_indexer[:3])] == [0] * 5
    for found, want in zip((*of_model[:3], *of_indexer[3:]), both, strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inside_it_takes_what_the_planner_says(dtype):
    """The operators alone, of which the planner visits the last chunks."""
    tensors, upstream = operands(1, 1500, 4, 2, 64, 2, 64, 4, dtype)
    o, _, *saved = operators.indexed_forward(*tensors, 4, 64, True)
    forward = functools.partial(operators.indexed_forward, *tensors, 4, 64, True)
    backward = functools.partial(operators.indexed_backward, *upstream, *tensors, o, *saved, 4, 64)
    for call in (forward, backward):
        planned = inside(call.func, call.args)
        planned += sum(x.untyped_storage().nbytes() for x in call())
        assert planned == pytest.approx(peak_bytes(call, torch.device("cpu")), rel=0.01)
