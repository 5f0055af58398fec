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
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor

from base.machine import platform
from longhaul.sparse.nsa.branches import Buffers, product_fp32

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
        on_cuda = platform().device(q).type == "cuda"
        self.room = CUDA_PRODUCTS if on_cuda else CPU_PRODUCTS
        self.dtype = dtype
        self._buffers = Buffers(q)

    def __call__(self, a_ZJW: Tensor, b_ZRW: Tensor) -> Tensor:
        """a b^T [Z, J, R] in fp32; the next product overwrites it."""
        return product_fp32(a_ZJW, b_ZRW, self._buffers, "product")

    def tiles(self, blocks: int, numbers: int) -> Sequence[range]:
        """The blocks in tiles, if a block has so many numbers."""
        size = max(1, self.room // numbers)
        tiles = [range(b, min(b + size, blocks)) for b in range(0, blocks, size)]
        return platform().tiles(tiles)


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
    settings = json.dumps(asdict(sizes))
    dtype = platform().product_dtype(q_BTHK)
    return choose_operator(q_BTHK, k_BSGK, summary_BJGW, sizes.name, settings, dtype)


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
        scored = k_BSGK.shape[1] > sizes.block  # otherwise every query is in the first block
        summary_BJGW = sizes.summarise(k_BSGK) if scored else k_BSGK
    chosen_BTGn = _empty_choice(q_BTHK, k_BSGK, sizes)
    chosen_BGTn = chosen_BTGn.transpose(1, 2)

    S, G = k_BSGK.shape[1:3]
    q_BGTMK = q_BTHK.unflatten(2, (G, -1)).transpose(1, 2)
    products = Products(q_BTHK, dtype)
    for b, groups in platform().tiles(_streams(q_BGTMK)):
        summary_ZJW = summary_BJGW[b, :, groups].transpose(0, 1).contiguous()
        if summary_ZJW.dtype == q_BTHK.dtype:
            summary_ZJW = summary_ZJW.to(dtype)
        streams = q_BGTMK[b, groups], summary_ZJW, chosen_BGTn[b, groups]
        _choose_of_streams(*streams, S, sizes, products)
    return chosen_BTGn


@choose_operator.register_fake
def _(q_BTHK, k_BSGK, summary_BJGW, name, settings, dtype):
    return _empty_choice(q_BTHK, k_BSGK, selector(name, settings))


@functools.lru_cache(maxsize=256)
def selector(name: str, settings: str):
    """The settings object of a selector."""
    return SELECTORS[name](**json.loads(settings))


def _empty_choice(q_BTHK: Tensor, k_BSGK: Tensor, sizes) -> Tensor:
    B, T, _, _ = q_BTHK.shape
    S, G = k_BSGK.shape[1:3]
    n = min(sizes.count, -(-S // sizes.block))
    return q_BTHK.new_empty((B, T, G, n), dtype=torch.int32)


def _streams(q_BGTMK: Tensor) -> list[tuple[int, slice]]:
    """The streams that are computed together: on a GPU all of a row, on a CPU one."""
    rows, groups = q_BGTMK.shape[:2]
    on_cuda = platform().device(q_BGTMK).type == "cuda"
    size = groups if on_cuda else 1
    return [(b, slice(g, g + size)) for b in range(rows) for g in range(0, groups, size)]


def _choose_of_streams(
    q_ZTMK: Tensor,
    summary_ZJW: Tensor,
    chosen_ZTn: Tensor,
    S: int,
    sizes,
    products: Products,
) -> None:
    """Fills chosen_ZTn, a chunk of queries after the other."""
    Z, T, M, _ = q_ZTMK.shape
    numbers = Z * M * max(1, sizes.columns(S))
    size = max(1, min(MOST_QUERIES, products.room // numbers))
    forced = sizes.init + sizes.local
    free = chosen_ZTn.shape[-1] - forced
    for start in platform().last(list(range(0, T, size))):
        few = slice(start, min(start + size, T))
        first = S - T + start
        own_C = torch.arange(first, S - T + few.stop, device=q_ZTMK.device) // sizes.block
        write_forced(chosen_ZTn[:, few], own_C, sizes)

        N = (S - T + few.stop - 1) // sizes.block + 1 - sizes.local  # of the last query
        if free > 0 and N > sizes.init:
            q_ZCMK = q_ZTMK[:, few].to(products.dtype).contiguous()
            scores_ZCN = sizes.scores(Chunk(q_ZCMK, first, N, products), summary_ZJW)
            best_ZCf = best_blocks(hidden(scores_ZCN, own_C, sizes), min(free, N))
            chosen_ZTn[:, few, forced : forced + best_ZCf.shape[-1]] = best_ZCf


def write_forced(chosen_ZCn: Tensor, own_C: Tensor, sizes) -> None:
    """Writes the forced blocks, and behind them that there are no others."""
    own_C1 = own_C[:, None].int()
    integers = dict(device=own_C.device, dtype=torch.int32)
    near_Cl = own_C1 - torch.arange(sizes.local, **integers)
    first_Ci = torch.arange(sizes.init, **integers).expand(len(own_C), -1)
    # the first blocks may be among the near ones, and there may be fewer of either
    first_Ci = first_Ci.masked_fill(first_Ci > own_C1 - sizes.local, NO_BLOCK)
    forced_Cf = torch.cat((near_Cl.clamp(min=NO_BLOCK), first_Ci), dim=1)

    forced_Cf = forced_Cf[:, : chosen_ZCn.shape[-1]]
    chosen_ZCn.fill_(NO_BLOCK)
    chosen_ZCn[..., : forced_Cf.shape[1]] = forced_Cf


def hidden(scores_ZCN: Tensor, own_C: Tensor, sizes) -> Tensor:
    """The scores, with -inf for the blocks that are forced or not complete. All others are finite,
    and NaN is chosen first, so that it shows.
    """
    most = torch.finfo(scores_ZCN.dtype).max
    scores_ZCN = scores_ZCN.nan_to_num(nan=most, posinf=most, neginf=-most)
    block_N = torch.arange(scores_ZCN.shape[-1], device=scores_ZCN.device)
    is_candidate_CN = block_N <= own_C[:, None] - sizes.local
    is_candidate_CN &= block_N >= sizes.init
    return scores_ZCN.masked_fill_(~is_candidate_CN, -torch.inf)


def best_blocks(scores_ZCN: Tensor, most: int) -> Tensor:
    """int32 [Z, C, most]: the largest scores, the lower index first on a tie; -1 for -inf."""
    least_ZC1 = scores_ZCN.topk(most, sorted=False).values.amin(-1, keepdim=True)
    taken_ZCN = scores_ZCN > least_ZC1
    tied_ZCN = scores_ZCN == least_ZC1
    left_ZC1 = most - taken_ZCN.sum(-1, keepdim=True, dtype=torch.int32)
    taken_ZCN |= tied_ZCN & (tied_ZCN.cumsum(-1, dtype=torch.int32) <= left_ZC1)

    Z, C, _ = scores_ZCN.shape
    found = torch.nonzero_static(taken_ZCN, size=Z * C * most)[:, 2].view(Z, C, most)
    is_none_ZCm = scores_ZCN.gather(-1, found) == -torch.inf
    return found.int().masked_fill_(is_none_ZCm, NO_BLOCK)
