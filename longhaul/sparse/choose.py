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

    room  numbers that may exist at once
    """

    def __init__(self, q: Tensor, room: int):
        self.room = room
        self._buffers = Buffers(q)

    def __call__(self, a_ZJW: Tensor, b_ZRW: Tensor) -> Tensor:
        """a b^T [Z, J, R] in fp32; the next product overwrites it."""
        return product_fp32(a_ZJW, b_ZRW, self._buffers, "product")

    def tiles(self, blocks: int, numbers: int) -> Sequence[range]:
        """The blocks in tiles, if a block has so many numbers."""
        size = max(1, self.room // numbers)
        tiles = [range(b, min(b + size, blocks)) for b in range(0, blocks, size)]
        return platform().tiles(tiles)


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
    return choose_operator(q_BTHK, k_BSGK, summary_BJGW, sizes.name, json.dumps(asdict(sizes)))


@torch.library.custom_op("longhaul::choose_blocks", mutates_args=())
def choose_operator(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    summary_BJGW: Tensor | None,
    name: str,
    settings: str,
) -> Tensor:
    """As `choose_blocks`; the settings are JSON."""
    sizes = selector(name, settings)
    if summary_BJGW is None:
        summary_BJGW = sizes.summarise(k_BSGK)
    chosen_BTGn = _empty_choice(q_BTHK, k_BSGK, sizes)
    chosen_BGTn = chosen_BTGn.transpose(1, 2)

    S, G = k_BSGK.shape[1:3]
    q_BGTMK = q_BTHK.unflatten(2, (G, -1)).transpose(1, 2)
    on_cuda = platform().device(q_BTHK).type == "cuda"
    products = Products(q_BTHK, CUDA_PRODUCTS if on_cuda else CPU_PRODUCTS)
    for b, groups in platform().tiles(_streams(*q_BGTMK.shape[:2], on_cuda)):
        q_ZTMK = q_BGTMK[b, groups]
        summary_ZJW = summary_BJGW[b, :, groups].transpose(0, 1).contiguous()
        _choose_of_streams(q_ZTMK, summary_ZJW, S, sizes, products, chosen_BGTn[b, groups])
    return chosen_BTGn


@choose_operator.register_fake
def _(q_BTHK, k_BSGK, summary_BJGW, name, settings):
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


def _streams(rows: int, groups: int, at_once: bool) -> list[tuple[int, slice]]:
    """The streams that are computed together: on a GPU all of a row, on a CPU one."""
    size = groups if at_once else 1
    starts = range(0, groups, size)
    return [(b, slice(g, g + size)) for b in range(rows) for g in starts]


def _choose_of_streams(
    q_ZTMK: Tensor,
    summary_ZJW: Tensor,
    S: int,
    sizes,
    products: Products,
    chosen_ZTn: Tensor,
) -> None:
    """Fills chosen_ZTn, a chunk of queries after the other."""
    Z, T, M, _ = q_ZTMK.shape
    numbers = Z * M * max(1, sizes.columns(S))
    size = max(1, min(MOST_QUERIES, products.room // numbers))
    starts = list(range(0, T, size))
    for start in platform().last(starts):
        few = slice(start, min(start + size, T))
        first = S - T + few.start
        own_C = torch.arange(first, S - T + few.stop, device=q_ZTMK.device) // sizes.block
        # blocks before the local ones of the last query, which is the one that has most of them
        N = max(0, (S - T + few.stop - 1) // sizes.block + 1 - sizes.local)
        free_ZCf = chosen_ZTn.new_empty((Z, len(own_C), 0))
        free = chosen_ZTn.shape[-1] - sizes.init - sizes.local
        if free > 0 and N > sizes.init:
            q_ZCMK = q_ZTMK[:, few].contiguous()
            scores_ZCN = sizes.scores(q_ZCMK, summary_ZJW, first, N, products)
            free_ZCf = best_blocks(hidden(scores_ZCN, own_C, sizes), min(free, N))
        fill(chosen_ZTn[:, few], free_ZCf, own_C, sizes)


def hidden(scores_ZCN: Tensor, own_C: Tensor, sizes) -> Tensor:
    """The scores, with -inf for the blocks that are forced or not complete. All others are finite:
    NaN is chosen first, so that it shows.
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


def fill(
    chosen_ZCn: Tensor,
    free_ZCf: Tensor,
    own_C: Tensor,
    sizes,
) -> None:
    """Writes the forced blocks and the chosen others."""
    own_C1 = own_C[:, None].int()
    near_Cl = own_C1 - torch.arange(sizes.local, device=own_C.device, dtype=torch.int32)
    first_i = torch.arange(sizes.init, device=own_C.device, dtype=torch.int32)
    first_Ci = first_i.expand(len(own_C), -1)
    # the first blocks may be among the near ones, and there may be fewer of either
    first_Ci = first_Ci.masked_fill(first_Ci > own_C1 - sizes.local, NO_BLOCK)
    forced_Cf = torch.cat((near_Cl.clamp(min=NO_BLOCK), first_Ci), dim=1)

    n = chosen_ZCn.shape[-1]
    forced = min(n, forced_Cf.shape[1])
    chosen_ZCn.fill_(NO_BLOCK)
    chosen_ZCn[..., :forced] = forced_Cf[:, :forced]
    chosen_ZCn[..., forced : forced + free_ZCf.shape[-1]] = free_ZCf
