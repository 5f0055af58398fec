"""What choosing blocks costs: process CPU time of the selectors next to SDPA, in one run.

bf16, one thread, 4 query heads of 128 on one KV head, random queries and keys, so that neighbouring
queries choose different blocks: `python -m benchmarks.selectors --times 16384 65536`.

    forward and backward  of choice and attention, with the loss of an indexer: how many times as
                          fast as SDPA
    the choice alone      its share of SDPA's forward and backward
    one decoded token     how many times as fast as SDPA or two products, whichever is faster
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import attention
from longhaul.kinds import KINDS
from longhaul.sparse import block_sparse_attention
from longhaul.sparse.choose import choose_blocks
from longhaul.sparse.layer import BlockConfig

TURNS = 2  # of each side; one beyond ONCE tokens
ONCE = 16_384


class Side(NamedTuple):
    """What is timed of a kind of attention."""

    train: Callable  # forward and backward of choice and attention
    choose: Callable
    decode: Callable  # one token


def time_table(lengths: Sequence[int], selectors: dict[str, BlockConfig]) -> Iterator[str]:
    """Lines for each length, as they are measured; the settings of a selector by its name."""
    names = ["NSA", *selectors]
    yield "| tokens | what | SDPA | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 3) + "|"
    for length in lengths:
        yield from timed_rows(length, list(selectors.values()))


def timed_rows(length: int, selectors: Sequence[BlockConfig]) -> list[str]:
    """The lines of a length."""
    tensors = attention.inputs(length, torch.bfloat16)
    index_keys = attention.indexer_inputs(length, torch.bfloat16)
    sides = [side(sizes, tensors, index_keys) for sizes in selectors]
    whole = [partial(attention.train, f, tensors) for f in (attention.sdpa, attention.nsa)]
    turns = TURNS if length <= ONCE else 1
    dense, *others = attention.best_of_turns(whole + [one.train for one in sides], turns)
    ratios = [f"{dense / one:.1f}x" for one in others]
    chosen = attention.best_of_turns([one.choose for one in sides], turns)
    shares = ["", *(f"{one / dense:.3f}" for one in chosen)]

    sdpa, nsa, _ = attention.decode_row(length, "bf16")
    tokens = attention.best_of_turns([one.decode for one in sides], 40)
    decoded = [f"{sdpa / one:.2f}x" for one in (nsa, *tokens)]
    return [
        f"| {length:,} | forward and backward | {dense:.1f} s | {' | '.join(ratios)} |",
        f"| | the choice alone, of SDPA's time | | {' | '.join(shares)} |",
        f"| | one decoded token | {sdpa * 1e3:.2f} ms | {' | '.join(decoded)} |",
    ]


def side(
    sizes: BlockConfig,
    tensors: Sequence[Tensor],
    index_keys: Sequence[Tensor],
) -> Side:
    """The calls of a selector; decoding has the summary of the keys at hand."""
    q, k, v, *_ = tensors
    compared, read = [q, k], selected
    if KINDS[sizes.name].learner:
        compared = [x[..., : sizes.head_dim].detach().requires_grad_() for x in index_keys]
        read = attention.indexed
    inputs = [q, k, v, *compared]
    summary = None
    if sizes.span()[0]:
        with torch.no_grad():
            summary = sizes.summarise(k)
    return Side(
        train=partial(attention.train, partial(read, sizes=sizes), inputs),
        choose=partial(choose_blocks, sizes, *compared),
        decode=partial(decode, sizes, inputs, summary),
    )


@torch.no_grad()
def decode(sizes, inputs: Sequence[Tensor], summary: Tensor | None) -> Tensor:
    """The last query's attention."""
    q, k, v, *compared = inputs
    chosen = choose_blocks(sizes, compared[0][:, -1:], compared[1], summary)
    return block_sparse_attention(q[:, -1:], k, v, chosen, sizes.block)[0]


def selected(tensors: Sequence[Tensor], sizes) -> Tensor:
    """Choice and attention."""
    q, k, v, *_ = tensors
    return block_sparse_attention(q, k, v, choose_blocks(sizes, q, k), sizes.block)[0]
