"""Which blocks of keys each query reads, by the scores of a selector. What all selectors share is
here: chunks of queries, documents that a cache holds, the forced blocks, the best of the others.

A query in block `own` of its document reads the first `init` blocks, its own one with those before
it, `local` in all, and of the blocks between them those with the largest scores, until they are
`count`. On a tie the lower index is read. The choice has no gradient, and equal inputs give equal
bits.

Letters: B rows, T queries, the last of S positions, G KV heads, M query heads of each, K head
dimension, Z = B*G streams, C queries of a chunk, R = C*M rows of a product, N blocks, n chosen
ones, J entries of a summary, W their width.
"""

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from base import machine
from base.machine import rounds
from longhaul.sparse.tiles import Buffers, product_fp32

# Numbers of a product that exist at once: 4 MiB in fp32 on a CPU, whose cache holds it.
CPU_PRODUCTS = 2**20
CUDA_PRODUCTS = 2**26
MOST_QUERIES = 256  # of a chunk
NO_BLOCK = -1

SELECTORS: dict[str, type] = {}  # the settings of each selector, by name


class Products:
    """The products of one call, in fp32 and in buffers that are used again.

    dtype  of what is multiplied
    room   numbers that may exist at once
    """

    def __init__(self, q: Tensor, dtype: torch.dtype):
        self.dtype = dtype
        self.room = CPU_PRODUCTS
        if on_cuda(q):
            self.room = CUDA_PRODUCTS
        self._buffers = Buffers(q)

    def __call__(self, a_ZJW: Tensor, b_ZRW: Tensor) -> Tensor:
        """a b^T [Z, J, R] in fp32; the next product overwrites it."""
        return product_fp32(a_ZJW, b_ZRW, self._buffers, "product")

    def tiles(self, blocks: int, numbers: int) -> Sequence[range]:
        """The blocks in tiles, if a block has so many numbers."""
        size = max(1, self.room // numbers)
        tiles = []
        for start in range(0, blocks, size):
            stop = min(start + size, blocks)
            tiles.append(range(start, stop))
        return rounds(tiles)


class Chunk(NamedTuple):
    """Some queries of a few streams, and how many blocks are scored for them."""

    q_ZCMK: Tensor
    first: int  # position of the first query
    N: int
    products: Products


@torch.no_grad()
def choose_blocks(
    sizes,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    summary_BJGW: Tensor | None = None,
) -> Tensor:
    """int32 [B, T, G, n]: the blocks that the last T of the S positions of one document read, in
    any order, with -1 behind fewer than n = min(count, N).

    sizes         the settings of a selector (layer.py)
    summary_BJGW  what it keeps of the keys, if that is at hand
    """
    dtype = machine.product_dtype(q_BTHK)
    return choose_operator(
        q_BTHK,
        k_BSGK,
        summary_BJGW,
        sizes.name,
        sizes.text,
        dtype,
    )


@torch.library.custom_op("longhaul::choose_blocks", mutates_args=())
def choose_operator(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    summary_BJGW: Tensor | None,
    name: str,
    settings: str,
    dtype: torch.dtype,
) -> Tensor:
    """As `choose_blocks`; the settings are JSON. `dtype`: of what is multiplied."""
    sizes = selector(name, settings)
    if summary_BJGW is None:
        summary_BJGW = k_BSGK
        if k_BSGK.shape[1] > sizes.block:  # otherwise every query is in the first block
            summary_BJGW = sizes.summarise(k_BSGK)
    summary_dtype = summary_BJGW.dtype
    if summary_dtype == q_BTHK.dtype:  # others are fp32, and stay so
        summary_dtype = dtype

    T = q_BTHK.shape[1]
    _, S, G, _ = k_BSGK.shape
    chosen_BTGn = _empty_choice(q_BTHK, k_BSGK, sizes)
    products = Products(q_BTHK, dtype)
    # streams that are computed together: on a GPU all of a row, on a CPU one
    together = G if on_cuda(q_BTHK) else 1
    streams = itertools.product(range(len(q_BTHK)), range(0, G, together))
    for b, g in rounds(list(streams)):
        groups = slice(g, g + together)
        q_TZMK = q_BTHK[b].unflatten(1, (G, -1))[:, groups]
        q_ZTMK, chosen_ZTn = (x.transpose(0, 1) for x in (q_TZMK, chosen_BTGn[b, :, groups]))
        summary_JZW = summary_BJGW[b, :, groups].to(summary_dtype)
        summary_ZJW = summary_JZW.transpose(0, 1).contiguous()
        for few in _chunks(q_ZTMK, S, sizes, products):
            first = S - T + few.start
            scores = functools.partial(_scores, sizes, products, q_ZTMK[:, few], summary_ZJW, first)
            fill_choice(chosen_ZTn[:, few], first, sizes, scores)
    return chosen_BTGn


@choose_operator.register_fake
def _(q_BTHK, k_BSGK, summary_BJGW, name, settings, dtype):
    return _empty_choice(q_BTHK, k_BSGK, selector(name, settings))


@functools.lru_cache(maxsize=256)
def selector(name: str, settings: str):
    """The settings object of a selector."""
    return SELECTORS[name](**json.loads(settings))


def on_cuda(x: Tensor) -> bool:
    """Whether x is computed on a GPU."""
    return x.device.type == "cuda"


def _empty_choice(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    sizes,
) -> Tensor:
    B, T, _, _ = q_BTHK.shape
    _, S, G, _ = k_BSGK.shape
    blocks = -(-S // sizes.block)
    n = min(sizes.count, blocks)
    return q_BTHK.new_empty((B, T, G, n), dtype=torch.int32)


def _chunks(
    q_ZTMK: Tensor,
    S: int,
    sizes,
    products: Products,
) -> list[slice]:
    """Chunks of the queries that are scored together."""
    Z, T, M, _ = q_ZTMK.shape
    size = products.room // (Z * M * max(1, sizes.columns(S)))
    size = max(1, min(MOST_QUERIES, size))
    starts = rounds(range(0, T, size), grow=True)
    return [slice(start, min(start + size, T)) for start in starts]


def _scores(
    sizes,
    products: Products,
    q_ZCMK: Tensor,
    summary_ZJW: Tensor,
    first: int,
    N: int,
) -> Tensor:
    """[Z, C, N] of the first N blocks."""
    q_ZCMK = q_ZCMK.to(products.dtype).contiguous()
    return sizes.scores(Chunk(q_ZCMK, first, N, products), summary_ZJW)


def fill_choice(
    chosen_ZCn: Tensor,
    first: int,
    sizes,
    scores: Callable[[int], Tensor],
) -> None:
    """Fills the choice of some queries, of which the first one has the position `first`: the forced
    blocks, and the best of the others. scores(N): [Z, C, N] of the first N blocks.
    """
    _, C, n = chosen_ZCn.shape
    position_C = torch.arange(first, first + C, device=chosen_ZCn.device)
    own_C = position_C // sizes.block
    forced = sizes.init + sizes.local
    write_forced(chosen_ZCn, own_C, sizes)

    # blocks before the local ones of the last query, which has most of them
    N = (first + C - 1) // sizes.block + 1 - sizes.local
    free = min(N, n - forced)
    if free <= 0 or N <= sizes.init:
        return
    scores_ZCN = hide_others(scores(N), own_C, sizes)
    chosen_ZCn[..., forced : forced + free] = best_blocks(scores_ZCN, free)


def write_forced(
    chosen_ZCn: Tensor,
    own_C: Tensor,
    sizes,
) -> None:
    """Writes the forced blocks, and behind them that there are no others."""
    own_C1 = own_C[:, None].int()
    device = own_C.device
    back_l = torch.arange(sizes.local, dtype=torch.int32, device=device)
    near_Cl = own_C1 - back_l
    near_Cl = near_Cl.clamp(min=NO_BLOCK)

    # the first blocks may be among the near ones, and there may be fewer of either
    first_i = torch.arange(sizes.init, dtype=torch.int32, device=device)
    first_Ci = first_i.expand(len(own_C), -1)
    is_near_Ci = first_Ci > own_C1 - sizes.local
    first_Ci = first_Ci.masked_fill(is_near_Ci, NO_BLOCK)

    forced_Cf = torch.cat((near_Cl, first_Ci), dim=1)
    forced_Cf = forced_Cf[:, : chosen_ZCn.shape[-1]]
    chosen_ZCn.fill_(NO_BLOCK)
    chosen_ZCn[..., : forced_Cf.shape[1]] = forced_Cf


def hide_others(
    scores_ZCN: Tensor,
    own_C: Tensor,
    sizes,
) -> Tensor:
    """The scores, with -inf for the blocks that are forced or not complete. All others are finite,
    and NaN is chosen first, so that it shows.
    """
    most = torch.finfo(scores_ZCN.dtype).max
    scores_ZCN = scores_ZCN.nan_to_num(nan=most, posinf=most, neginf=-most)
    N = scores_ZCN.shape[-1]
    block_N = torch.arange(N, device=own_C.device)
    last_C1 = own_C[:, None] - sizes.local
    is_other_CN = block_N > last_C1
    is_other_CN |= block_N < sizes.init
    return scores_ZCN.masked_fill_(is_other_CN, -torch.inf)


def best_blocks(scores_ZCN: Tensor, most: int) -> Tensor:
    """int32 [Z, C, most]: the largest scores, the lower index first on a tie; -1 for -inf."""
    scores_ZCN = scores_ZCN.contiguous()
    best_ZCm, block_ZCm = scores_ZCN.topk(most, sorted=False)
    least_ZC1 = best_ZCm.amin(-1, keepdim=True)
    # of equal scores, only the least ones that are taken may be taken in another order
    is_least_ZCm = best_ZCm == least_ZC1
    rank_ZCN = (scores_ZCN == least_ZC1).int().cumsum_(-1)
    place_ZCm = is_least_ZCm.int().cumsum_(-1)
    lowest_ZCm = torch.searchsorted(rank_ZCN, place_ZCm)
    block_ZCm = torch.where(is_least_ZCm, lowest_ZCm, block_ZCm)
    return block_ZCm.int().masked_fill_(best_ZCm == -torch.inf, NO_BLOCK)
