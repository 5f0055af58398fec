"""Scores of blocks, and the best blocks of each query, for some queries of one row.

Scores are computed in tiles of queries x blocks, with the products in fp32. The choice is exact:
the best scores, the lower index first on a tie. The backward computes the same scores again, bit
for bit, from the same tiles, and compares them with the rank of the last chosen block.

Letters: C queries, h query heads of the indexer, E its head dim, N blocks, n chosen ones.
"""

import math

import torch
from torch import Tensor

from base.machine import platform
from longhaul.sparse.nsa.branches import Buffers, product_fp32

TILE_PRODUCTS = 2**18  # of a tile: 1 MiB in fp32
TILE_CHOICES = 2**16  # scores among which blocks are found at once
LARGEST_INDEX = 2**31 - 1


def block_scores(q_ChE: Tensor, k_NE: Tensor, buffers: Buffers) -> Tensor:
    """I[t, b] = sum over heads of relu(q[t] . k[b]) / sqrt(E), in fp32 [C, N]; none is negative.

    NaN becomes infinite, which is chosen first, as in model.py, and makes the query's loss NaN.
    """
    C, h, E = q_ChE.shape
    N = len(k_NE)
    q_RE = q_ChE.reshape(C * h, E)
    size = max(1, TILE_PRODUCTS // len(q_RE))
    scores_CN = buffers.take("scores", (C, N), torch.float32)
    for start in platform().tiles(range(0, N, size)):
        stop = min(start + size, N)
        product_RN = product_fp32(q_RE, k_NE[start:stop], buffers, "logits").relu_()
        torch.sum(product_RN.view(C, h, -1), 1, out=scores_CN[:, start:stop])
    return scores_CN.mul_(E**-0.5).nan_to_num_(nan=math.inf, posinf=math.inf)


def hide_unfinished(
    scores_CN: Tensor,
    first: int,
    r: int,
) -> None:
    """Gives -1 to the blocks that do not end before their query; queries count from `first`."""
    C, N = scores_CN.shape
    edge = min(first // r, N)
    block = torch.arange(edge, N, device=scores_CN.device)
    query_C1 = torch.arange(first, first + C, device=scores_CN.device)[:, None]
    scores_CN[:, edge:].masked_fill_(block * r + r > query_C1, -1.0)


def choose(scores_CN: Tensor, most: int) -> Tensor:
    """The `most` best blocks of each query, [C, most] in the order of their indices.

    Every query has at least as many candidates.
    """
    return _first_best(scores_CN, _least_chosen(scores_CN, most), most)


def choose_again(
    scores_CN: Tensor,
    rank_C: Tensor,
    most: int,
) -> Tensor:
    """The same as `choose`, from the same scores and the rank of the last chosen block."""
    least_C = (rank_C >> 31).int().view(torch.float32)
    return _first_best(scores_CN, least_C, most)


def _first_best(
    scores_CN: Tensor,
    least_C: Tensor,
    most: int,
) -> Tensor:
    """`least_C` is the score of rank `most`; of the blocks that have it, the first ones are taken.

    A few queries at a time: where most scores tie, what finds the blocks holds 16 bytes for each.
    """
    C, N = scores_CN.shape
    index_Cm = torch.empty((C, most), dtype=torch.int64, device=scores_CN.device)
    size = max(1, TILE_CHOICES // N)
    for start in platform().tiles(range(0, C, size)):
        few = slice(start, start + size)
        index_Cm[few] = _first_best_of_few(scores_CN[few], least_C[few], most)
    return index_Cm


def _first_best_of_few(
    scores_CN: Tensor,
    least_C: Tensor,
    most: int,
) -> Tensor:
    """One index more than `most` for each query tells whether there are too many."""
    C = len(scores_CN)
    chosen_CN = scores_CN >= least_C[:, None]
    found = torch.nonzero_static(chosen_CN, size=C * most + 1)
    if not scores_CN.is_meta and int(found[-1, 0]) >= 0:
        for chosen_N, scores_N, least in zip(chosen_CN, scores_CN, least_C, strict=True):
            surplus = int(chosen_N.sum()) - most
            if surplus:
                tied = (scores_N == least).nonzero()[:, 0]
                chosen_N[tied[len(tied) - surplus :]] = False
        found = torch.nonzero_static(chosen_CN, size=C * most + 1)
    return found[:-1, 1].view(C, most)


def least_rank(chosen_scores_Cn: Tensor, index_Cn: Tensor) -> Tensor:
    """int64 [C]: the rank of the last chosen block, as model.py's `block_ranks`.

    Scores that are not negative order like the bits of their fp32 values.
    """
    least_C = chosen_scores_Cn.amin(-1)
    is_least_Cn = chosen_scores_Cn == least_C[:, None]
    last_C = index_Cn.masked_fill(~is_least_Cn, 0).amax(-1)
    bits_C = least_C.view(torch.int32).long()
    return (bits_C << 31) + (LARGEST_INDEX - last_C)


def log_sum(scores_Cm: Tensor) -> Tensor:
    """[C]: the log-sum-exp of each query's scores. (That of PyTorch holds a copy inside.)"""
    largest_C1 = scores_Cm.amax(-1, keepdim=True)
    total_C1 = (scores_Cm - largest_C1).exp_().sum(-1, keepdim=True)
    return (largest_C1 + total_C1.log_()).squeeze(-1)


def _least_chosen(scores_CN: Tensor, most: int) -> Tensor:
    """[C]: the score of rank `most`.

    A selection takes 10 ns for a number, a maximum a tenth of it. The best blocks are in those
    `most` groups whose maxima are the largest, so groups are selected first.
    """
    C, N = scores_CN.shape
    size = math.isqrt(N // most)
    if size > 1:
        groups = N // size
        grouped = scores_CN[:, : groups * size].unflatten(1, (size, groups))
        best = grouped.amax(1).topk(most, sorted=False).indices
        inside = grouped.gather(2, best[:, None].expand(C, size, most)).flatten(1)
        scores_CN = torch.cat((inside, scores_CN[:, groups * size :]), dim=1)
    return scores_CN.topk(most, sorted=False).values.amin(-1)
