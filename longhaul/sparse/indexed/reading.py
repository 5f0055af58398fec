"""Attention of a few queries over the blocks that they chose, and its gradients, for one row.

The blocks of each query are gathered, once for all heads, and multiplied in batches: the queries of
a tile share no key, so a product has the M query heads of a KV head as rows. Gradients of keys and
values are sums over the (query, block) pairs of many queries, sorted by block: an embedding bag
adds the rows of the queries while it reads them, in the order of the queries.

The alternatives read more: the union of the blocks of c neighbouring queries is nearly c times as
large if they choose independently, and a block-major order moves queries, their gradients, and
partial outputs for every block of only r keys.

Letters: C queries, A of a tile, G KV heads, M query heads per KV head, K head dim, n blocks of a
query, the last one its own, S = n*r keys, P = C*n pairs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longhaul.sparse.nsa.branches import Buffers, product_fp32

LOG2E = 1.4426950408889634


class Blocks(NamedTuple):
    """Keys or values of one row in blocks; the last, unfinished one is apart."""

    whole_Nw: Tensor  # w = r*G*K elements
    rest_sw: Tensor  # tokens of the unfinished block, G*K elements each
    shape: tuple[int, int, int]  # r, G, K

    @classmethod
    def of(
        cls,
        k_SGK: Tensor,
        r: int,
    ) -> "Blocks":
        S, G, K = k_SGK.shape
        N = S // r
        whole = k_SGK[: N * r].reshape(N, r * G * K)
        return cls(whole, k_SGK[N * r :].reshape(-1, G * K), (r, G, K))


class Tile(NamedTuple):
    """A few queries in their order, and the blocks that they read."""

    index_An: Tensor
    visible_Ar: Tensor  # keys of the own block, which is the last one
    inside: int  # queries, at the end, whose own block is the document's unfinished one


def tile_of(
    index_Am: Tensor,
    first: int,
    r: int,
    whole: int,
) -> Tile:
    """The chosen blocks and the own one of the queries from position `first` on; `whole` blocks
    are finished.
    """
    A = len(index_Am)
    device = index_Am.device
    query_A1 = torch.arange(first, first + A, device=device)[:, None]
    own_A1 = query_A1 // r
    visible_Ar = torch.arange(r, device=device) <= query_A1 - own_A1 * r
    inside = min(A, max(0, first + A - whole * r))
    return Tile(torch.cat((index_Am, own_A1), dim=1), visible_Ar, inside)


def gather(
    blocks: Blocks,
    tile: Tile,
    buffers: Buffers,
) -> list[Tensor]:
    """The keys [A, S, K] that each query reads, of each KV head."""
    A, n = tile.index_An.shape
    r, G, K = blocks.shape
    found = buffers.take("gathered", (A * n, r * G * K), blocks.whole_Nw.dtype)
    index = tile.index_An.clamp(max=len(blocks.whole_Nw) - 1).flatten()
    torch.index_select(blocks.whole_Nw, 0, index, out=found)

    found_AnrW = found.view(A, n, r, G * K)
    if tile.inside:
        found_AnrW[A - tile.inside :, -1, : len(blocks.rest_sw)] = blocks.rest_sw
    if G == 1:
        return [found.view(A, n * r, K)]
    # products of keys with other heads between them are ten times as slow
    heads_GASK = buffers.take("gathered by head", (G, A, n * r, K), found.dtype)
    heads_GASK.copy_(found.view(A, n * r, G, K).permute(2, 0, 1, 3))
    return list(heads_GASK)


def _logits(
    q_AMK: Tensor,
    k_ASK: Tensor,
    tile: Tile,
    buffers: Buffers,
    name: str,
) -> Tensor:
    """q k [A, M, S] in fp32, -inf where the query does not see the key."""
    logits_AMS = product_fp32(q_AMK.contiguous(), k_ASK, buffers, name)
    r = tile.visible_Ar.shape[1]
    logits_AMS[..., -r:].masked_fill_(~tile.visible_Ar[:, None], -torch.inf)
    return logits_AMS


def probabilities(
    q_AMK: Tensor,
    k_ASK: Tensor,
    tile: Tile,
    buffers: Buffers,
    name: str,
) -> tuple[Tensor, Tensor]:
    """p [A, M, S] of the softmax of q k / sqrt(K), in the buffer of this name, and its log-sum-exp
    [A, M].

    lse = max(logits) - log(max(p)) is cheaper than a second pass of exp.
    """
    logits_AMS = _logits(q_AMK, k_ASK, tile, buffers, "logits").mul_(q_AMK.shape[-1] ** -0.5)
    p_AMS = buffers.take(name, logits_AMS.shape, torch.float32)
    torch.softmax(logits_AMS, -1, out=p_AMS)
    return p_AMS, logits_AMS.amax(-1) - p_AMS.amax(-1).log()


def probabilities_again(
    q_AMK: Tensor,
    k_ASK: Tensor,
    lse_AM: Tensor,
    tile: Tile,
    buffers: Buffers,
) -> Tensor:
    """The same p from its log-sum-exp; exp2 is three times as fast as exp on a CPU."""
    exponent_AMS = _logits(q_AMK, k_ASK, tile, buffers, "p")
    exponent_AMS.mul_(LOG2E * q_AMK.shape[-1] ** -0.5)
    return exponent_AMS.sub_(LOG2E * lse_AM[..., None]).exp2_()


def block_mass(p_AMS: Tensor, r: int) -> Tensor:
    """[A, n - 1]: the probability of each chosen block, summed over heads."""
    p_AS = p_AMS.sum(1)
    return p_AS.unflatten(1, (-1, r)).sum(-1)[:, :-1]


def target(mass_Am: Tensor) -> Tensor:
    """The mass of the chosen blocks, normalised; 0 for a query that gives them none."""
    return mass_Am / mass_Am.sum(-1, keepdim=True).clamp(min=torch.finfo(mass_Am.dtype).tiny)


def by_pair(x_AMS: Tensor, r: int) -> Tensor:
    """[r, A, n, M]: token of a block, query, block, head."""
    A, M, _ = x_AMS.shape
    return x_AMS.view(A, M, -1, r).permute(3, 0, 2, 1)


# ---- sums over the pairs of a block


class Pairs(NamedTuple):
    """The (query, block) pairs of some queries, sorted by block."""

    order_P: Tensor  # which pair, query by query
    query_P: Tensor
    start_N: Tensor  # where the pairs of each block start, and the end of the last one


def sort_pairs(index_Cn: Tensor, blocks: int) -> Pairs:
    """The sort is stable: sums over the pairs of a block have the same order every time."""
    block_P, order_P = index_Cn.flatten().int().sort(stable=True)
    every = torch.arange(blocks + 1, device=index_Cn.device, dtype=torch.int32)
    start_N = torch.searchsorted(block_P, every)
    return Pairs(order_P, order_P // index_Cn.shape[1], start_N)


def sum_of_queries(
    x_CMK: Tensor,
    weight_PM: Tensor,
    rows_PM: Tensor,
    pairs: Pairs,
) -> Tensor:
    """y[b] = sum over the pairs of block b, and heads, of weight * x: [N, K].

    weight_PM is in the order of the sorted pairs, rows_PM from `rows_of`.
    """
    _, M, K = x_CMK.shape
    return F.embedding_bag(
        rows_PM.flatten(),
        x_CMK.reshape(-1, K),
        pairs.start_N * M,
        mode="sum",
        per_sample_weights=weight_PM.flatten(),
        include_last_offset=True,
    )


def rows_of(pairs: Pairs, heads: int) -> Tensor:
    """[P, heads]: the row of each pair and head among those of (query, head)."""
    head = torch.arange(heads, device=pairs.query_P.device)
    return pairs.query_P[:, None] * heads + head
