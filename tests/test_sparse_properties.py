"""What every attention over blocks must show, whatever computes it: a table of implementations, and
a test for each property. test_block_sparse.py, test_nsa.py, test_selectors.py and test_indexed.py
compare each kind with its equations in float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from longhaul.sparse import block_sparse_attention, choose
from longhaul.sparse.nsa.engine import nsa_attention
from longhaul.sparse.plain import plain_block_sparse_attention
from model import Standard, plain_nsa_attention
from tests import test_nsa
from tests.test_block_sparse import (
    by_triton,
    operands,
    random_choice,
    small_chunks,  # noqa: F401  (a fixture)
)
from tests.test_nsa import DEVICE, SMALL, TINY, boundaries, fused_attention, prepare_triton
from tests.test_selectors import INDEXED, LENGTHS, TAUGHT, build
from tests.tiers import slow

# NumPy, which interprets the kernels, warns of infinities that they expect.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


class Way(NamedTuple):
    """A kind of attention, and what computes it.

    inputs(lengths, seed, dtype)  tensors of rows that hold documents of these lengths
    run(inputs, cu_seqlens)       its results [B, T, ...], of which each token has its own
    counts(tokens)                entries of each input that belong to a document of so many tokens
    learned                       inputs that get gradients, the first ones
    """

    inputs: Callable
    run: Callable
    counts: Callable
    learned: int
    lengths: list[int]
    tokens: int = 200  # of a row that makes an engine take several steps
    rounding: float = 1e-6


def by_blocks(attention, tokens: int = 203, rows: int = 2) -> Way:
    """Attention over blocks that are given."""

    def inputs(lengths, seed=0, dtype=torch.float32):
        qkv, _, _ = operands(B=rows, T=sum(lengths), seed=seed, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        choices = [random_choice(length, 2, 8, 5, generator) for length in lengths]
        return [*qkv, torch.cat(choices, 1).repeat(rows, 1, 1, 1)]

    def run(inputs, cu_seqlens):
        return attention(*inputs, 8, cu_seqlens=cu_seqlens)

    return Way(inputs, run, lambda count: [count] * 4, 3, [9, 1, 17, 3], tokens)


def by_branches(attention, cfg, lengths, tokens: int = 300, **heads) -> Way:
    """Native Sparse Attention, whose packed documents have the bits of separate ones."""

    def inputs(lengths, seed=0, dtype=torch.float32):
        settings = heads | dict(cfg=cfg, documents=lengths, seed=seed, dtype=dtype)
        made = test_nsa.inputs(sum(lengths), **settings)
        return [x.detach().to(DEVICE if attention is fused_attention else "cpu") for x in made]

    def run(inputs, cu_seqlens):
        parts = attention(*inputs, cfg, cu_seqlens=cu_seqlens, return_parts=True)
        return [parts.pop("o"), *[x.detach() for x in parts.values()]]

    def counts(tokens):
        blocks = cfg.compressed_blocks(tokens)
        return [*[tokens] * 3, blocks, blocks, *[tokens] * 3]

    return Way(inputs, run, counts, 8, lengths, tokens, rounding=0.0)


def by_layer(sizes) -> Way:
    """A layer, which packs two rows of 200 tokens."""
    layer = build(sizes).layers[0].attention
    heads = [(4, 16), (2, 16), (2, 16)]
    if sizes is INDEXED:
        heads += [(2, 24), (1, 24)]

    def inputs(lengths, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        shapes = [(1, sum(lengths), *shape) for shape in heads]
        return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    def run(inputs, cu_seqlens):
        if cu_seqlens is None:
            return [layer.attend_document(*inputs)]
        inputs = [x.view(2, 200, *x.shape[2:]) for x in inputs]
        rows = layer.rows(cu_seqlens, (2, 200), "cpu")
        return [rows.attend(layer, inputs, None).view(1, 400, 4, 16)]

    return Way(inputs, run, lambda count: [count] * len(heads), 3, LENGTHS)


DOCUMENTS = [5, 200, 1, 90]
WAYS = {
    "blocks, plain": by_blocks(plain_block_sparse_attention),
    "blocks, engine": by_blocks(block_sparse_attention),
    "blocks, triton": by_blocks(by_triton(block_sparse_attention), 20, 1),
    "nsa, plain": by_branches(plain_nsa_attention, SMALL, DOCUMENTS, B=2),
    "nsa, engine": by_branches(nsa_attention, SMALL, DOCUMENTS, B=2),
    "nsa, triton": by_branches(fused_attention, TINY, [5, 19, 1, 3, 4], G=1),
    "standard": by_layer(Standard()),
    **{name: by_layer(sizes) for name, sizes in TAUGHT.items()},
}
every_way = pytest.mark.parametrize("way", WAYS, indirect=True)


@pytest.fixture
def way(request, monkeypatch, small_chunks):  # noqa: F811
    """A row of the table, in chunks so small that short rows have several."""
    monkeypatch.setattr(choose, "CPU_PRODUCTS", 2**12)
    if "triton" in request.param:
        pytest.importorskip("triton", reason="triton is not installed: its kernels do not run")
    if request.param == "nsa, triton":
        prepare_triton(monkeypatch)
        # PyTorch's attention kernels for GPUs add up by atomics otherwise
        torch.use_deterministic_algorithms(True)
    yield WAYS[request.param]
    torch.use_deterministic_algorithms(False)


def results(way: Way, inputs, cu_seqlens=None, seen=slice(None)) -> list:
    """The results, and the gradients of the sum of squares of what the tokens `seen` get."""
    leaves = [x.detach() for x in inputs]
    learned = [x.requires_grad_() for x in leaves[: way.learned]]
    found = way.run(leaves, cu_seqlens)
    total = sum(x[:, seen].float().square().sum() for x in found if x.requires_grad)
    grads = torch.autograd.grad(total, learned, materialize_grads=True)
    return [x.detach().cpu() for x in (*found, *grads)]


def in_documents(way: Way, tensors, lengths) -> list:
    """The parts of inputs, or of their gradients, that belong to each document."""
    counts = zip(*map(way.counts, lengths), strict=True)
    parts = [x.split(count, 1) for x, count in zip(tensors, counts, strict=False)]
    return list(zip(*parts, strict=True))


def assert_near(x, y, rounding: float):
    assert (x.double() - y.double()).norm() <= rounding * y.double().norm()


@every_way
def test_packed_documents_equal_separate_ones_and_leak_nothing(way):
    inputs, cu_seqlens = way.inputs(way.lengths), boundaries(way.lengths)
    packed = results(way, inputs, cu_seqlens)
    separate = [results(way, parts) for parts in in_documents(way, inputs, way.lengths)]
    for whole, parts in zip(packed, zip(*separate, strict=True), strict=True):
        assert_near(whole, torch.cat(parts, 1), way.rounding)

    longest = way.lengths.index(max(way.lengths))
    seen = slice(*cu_seqlens[longest : longest + 2].tolist())
    grads = results(way, inputs, cu_seqlens, seen)[-way.learned :]
    for number, parts in enumerate(in_documents(way, grads, way.lengths)):
        assert all(part.any() == (number == longest) for part in parts)


@pytest.mark.parametrize("way", [name for name in WAYS if "triton" not in name], indirect=True)
def test_nothing_in_the_future_matters(way):
    cut = way.tokens * 7 // 12
    counts = way.counts(cut)
    inputs, others = way.inputs([way.tokens]), way.inputs([way.tokens], seed=1)
    three = zip(inputs, others, counts, strict=True)
    mixed = [torch.cat((x[:, :count], other[:, count:]), 1) for x, other, count in three]

    found = results(way, inputs, seen=slice(cut))
    after = results(way, mixed, seen=slice(cut))
    outputs = len(found) - way.learned
    for x, y in zip(found[:outputs], after, strict=False):
        assert_near(x[:, :cut], y[:, :cut], way.rounding)
    for grad, count in zip(found[outputs:], counts, strict=False):
        assert not grad[:, count:].any()


ENGINES = [name for name in WAYS if "plain" not in name and "triton" not in name]
REPEATED = [(name, torch.bfloat16) for name in ENGINES]
REPEATED.append(slow("blocks, triton", torch.float32))


@pytest.mark.parametrize("way, dtype", REPEATED, indirect=["way"])
def test_repeats_are_the_same_bits_whatever_the_threads(way, dtype):
    inputs = way.inputs([way.tokens], dtype=dtype)
    once, again = results(way, inputs), results(way, inputs)
    torch.set_num_threads(2)
    threads = results(way, inputs)
    for x, y, z in zip(once, again, threads, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)
