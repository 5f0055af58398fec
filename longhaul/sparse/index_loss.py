"""The loss that an indexer learns from, and its gradients, in one pass and as an operator.

For a query at t under KV group g, over the blocks b that it reads:

    I[t, b] = max over the keys s <= t of b of q_g[t] . k[s] / sqrt(E)
    p[t, b] = attention's probability of b, the mean over the group's heads, normalised over them
    loss    = sum over t of the mean over g of KL(p || softmax(I))

p is a constant, so d loss / d I = softmax(I) - p, and in I only the largest key of a block has a
part. The loss is a sum that others scale by one number: the forward computes the gradients of the
sum, and the backward multiplies them. Scores of a chunk of queries are all that exists at once.

Letters: B rows, T queries, the last of S positions, G KV groups, M query heads of each, H = G*M, K
head dimension, E that of the indexer, l tokens of a block, J blocks of a document, n blocks that a
query reads, C queries of a chunk, N tiles or seen blocks, R rows of a tile.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from base import machine
from base.machine import rounds
from longhaul.sparse.engine import Tiles, Tiling, in_blocks, with_no_query
from longhaul.sparse.tiles import Buffers, gather_sum, product_fp32

CHUNK_LOGITS = 2**22  # of a dense chunk of queries: 16 MiB in fp32
MOST_QUERIES = 256  # of it
TINY = torch.finfo(torch.float32).tiny


class IndexStream(NamedTuple):
    """What the loss reads of one row under one KV group; keys are in blocks."""

    q_TE: Tensor
    k_JlE: Tensor
    q_TMK: Tensor
    k_JlK: Tensor
    first: int  # position of the first query


class Compared(NamedTuple):
    """Student and teacher of some queries."""

    queries: slice
    scores_Cn: Tensor  # before the scale; -inf where there is no block
    at_Cn: Tensor  # the positions of the largest keys
    mass_Cn: Tensor


# ---- all blocks that a query sees


def block_scores(
    q_CE: Tensor,
    k_NlE: Tensor,
    position_C: Tensor,
    buffers: Buffers,
) -> tuple[Tensor, Tensor]:
    """(scores, positions of the largest keys), both [C, N], the scores before the scale."""
    N, l, _ = k_NlE.shape
    later_CS = _later(position_C, N * l)
    logits_CS = _logits(q_CE, k_NlE.flatten(0, 1), buffers, "scores", later_CS)
    scores_CN, offset_CN = logits_CS.unflatten(1, (N, l)).max(-1)
    return scores_CN, offset_CN + torch.arange(N, device=q_CE.device) * l


def block_masses(
    q_CMK: Tensor,
    k_NlK: Tensor,
    position_C: Tensor,
    buffers: Buffers,
) -> Tensor:
    """mass [C, N]: full attention's probability of each block, the mean over the heads."""
    C, M, K = q_CMK.shape
    N, l, _ = k_NlK.shape
    logits_RS = product_fp32(q_CMK.flatten(0, 1), k_NlK.flatten(0, 1), buffers, "logits")
    logits_CMS = logits_RS.mul_(K**-0.5).unflatten(0, (C, M))
    logits_CMS.masked_fill_(_later(position_C, N * l)[:, None], -torch.inf)
    p_CMS = buffers.take("p", logits_CMS.shape, torch.float32)
    torch.softmax(logits_CMS, -1, out=p_CMS)
    return p_CMS.unflatten(2, (N, l)).sum(-1).mean(1)


def _logits(
    q: Tensor,
    k: Tensor,
    buffers: Buffers,
    name: str,
    hidden: Tensor | None,
) -> Tensor:
    """q k^T, -inf where a key is hidden."""
    logits = product_fp32(q, k, buffers, name)
    if hidden is not None:
        logits.masked_fill_(hidden, -torch.inf)
    return logits


def _later(position_C: Tensor, tokens: int) -> Tensor:
    """[C, tokens]: which keys are after the query."""
    return torch.arange(tokens, device=position_C.device) > position_C[:, None]


def _dense_chunks(stream: IndexStream, buffers: Buffers) -> Iterator[Compared]:
    """Every query with all blocks that it sees."""
    T, M, _ = stream.q_TMK.shape
    J, l, _ = stream.k_JlE.shape
    size = max(16, min(MOST_QUERIES, CHUNK_LOGITS // (M * J * l)))
    for start in rounds(range(0, T, size), grow=True):
        queries = slice(start, min(start + size, T))
        position_C = stream.first + torch.arange(
            queries.start, queries.stop, device=stream.q_TE.device
        )
        seen = slice(0, -(-(stream.first + queries.stop) // l))
        of_scores = _rows(stream.q_TE[queries], stream.k_JlE), stream.k_JlE[seen]
        of_masses = _rows(stream.q_TMK[queries], stream.k_JlK), stream.k_JlK[seen]
        scores_CN, at_CN = block_scores(*of_scores, position_C, buffers)
        mass_CN = block_masses(*of_masses, position_C, buffers)
        yield Compared(queries, scores_CN, at_CN, mass_CN)


def _rows(q_C_: Tensor, k_Jl_: Tensor) -> Tensor:
    return q_C_.to(k_Jl_.dtype).contiguous()


# ---- the blocks that a query has chosen


def _chosen_chunks(
    stream: IndexStream,
    chosen_Tn: Tensor,
    lse_TM: Tensor,
    buffers: Buffers,
) -> Iterator[Compared]:
    """Every query with the blocks that it has chosen."""
    T, M, _ = stream.q_TMK.shape
    tiling = Tiling(T, M, chosen_Tn.shape[1], stream.k_JlE.shape[1], stream.first)
    for queries in tiling.chunks():
        tiles = tiling.tiles(queries, chosen_Tn[queries])
        scores_S, offset_S, lse_SM = _tile_results(stream, queries, tiles, buffers)
        slot_Cn = tiles.slot_Cn
        finite_CM = lse_TM[queries].clamp_min(torch.finfo(torch.float32).min)
        mass_CnM = lse_SM[slot_Cn].sub_(finite_CM[:, None]).exp_()
        at_Cn = chosen_Tn[queries].clamp(min=0) * tiling.l + offset_S[slot_Cn]
        yield Compared(queries, scores_S[slot_Cn], at_Cn, mass_CnM.mean(-1))


def _tile_results(
    stream: IndexStream,
    queries: slice,
    tiles: Tiles,
    buffers: Buffers,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each slot: the score, the offset of the largest key, and the heads' log-sum-exps."""
    q_CMK = with_no_query(_rows(stream.q_TMK[queries], stream.k_JlK))
    q_C1E = with_no_query(_rows(stream.q_TE[queries], stream.k_JlE)[:, None])
    _, M, K = q_CMK.shape
    scale = K**-0.5
    scores_S = q_CMK.new_full((tiles.slots,), -torch.inf, dtype=torch.float32)
    offset_S = torch.zeros_like(scores_S, dtype=torch.int64)
    lse_SM = scores_S[:, None].repeat(1, M)
    for group in tiles.groups:
        hidden_NRl = of_pairs = group.hidden_NRS
        if hidden_NRl is not None:
            of_pairs = hidden_NRl[:, ::M]
        k_NlE, k_NlK = group.keys((stream.k_JlE, stream.k_JlK))
        found = _logits(group.rows(q_C1E), k_NlE, buffers, "scores", of_pairs).max(-1)
        scores_S[group.slots], offset_S[group.slots] = (x.flatten() for x in found)
        logits_NRl = _logits(group.rows(q_CMK), k_NlK, buffers, "logits", hidden_NRl)
        lse_SM[group.slots] = _tile_lse(logits_NRl.mul_(scale)).view(-1, M)
    return scores_S, offset_S, lse_SM


def _tile_lse(logits_NRl: Tensor) -> Tensor:
    # logsumexp would hold a copy that the planner does not see
    most_NR1 = logits_NRl.amax(-1, keepdim=True)
    sum_NR = logits_NRl.sub_(most_NR1).exp_().sum(-1)
    return sum_NR.log_().add_(most_NR1.squeeze(-1))


# ---- the loss of what was compared, and its gradients


def _divergence(scores_Cn: Tensor, mass_Cn: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || softmax(scores)) [C], and its gradient by the scores [C, n]."""
    p_Cn = mass_Cn / mass_Cn.sum(-1, keepdim=True).clamp(min=TINY)
    log_share_Cn = scores_Cn.log_softmax(-1)
    # a block that draws nothing adds nothing, also where there is none
    told_Cn = p_Cn * log_share_Cn.masked_fill(p_Cn == 0, 0.0)
    kl_C = (torch.xlogy(p_Cn, p_Cn) - told_Cn).sum(-1)
    return kl_C, log_share_Cn.exp_().sub_(p_Cn)


def _key_gradients(
    d_Cn: Tensor,
    at_Cn: Tensor,
    q_CE: Tensor,
    keys: int,
) -> Tensor:
    """[keys, E]: the sum over the pairs whose largest key it is of d q, in a fixed order."""
    at, order = at_Cn.flatten().sort(stable=True)
    starts = torch.searchsorted(at, torch.arange(keys, device=at.device))
    weights = d_Cn.flatten()[order]
    query = order // at_Cn.shape[1]
    return F.embedding_bag(query, q_CE, starts, mode="sum", per_sample_weights=weights)


def _learn(
    stream: IndexStream,
    parts: Iterator[Compared],
    scale: float,
    dq_TE: Tensor,
    dk_SE: Tensor,
) -> Tensor:
    """The sum of the loss over the queries; fills dq and adds to dk. `scale`: of the gradients."""
    total = dk_SE.new_zeros(())
    k_S1E = stream.k_JlE.flatten(0, 1)[:, None].float()
    root = stream.q_TE.shape[-1] ** -0.5
    for queries, scores_Cn, at_Cn, mass_Cn in parts:
        kl_C, d_Cn = _divergence(scores_Cn * root, mass_Cn)
        total += kl_C.sum()
        d_Cn.mul_(root * scale)
        dq_TE[queries] = gather_sum(k_S1E, at_Cn, d_Cn[:, None])[:, 0]
        keys = min(len(dk_SE), stream.first + queries.stop)
        dk_SE[:keys] += _key_gradients(d_Cn, at_Cn, stream.q_TE[queries].float(), keys)
    return total


@torch.library.custom_op("longhaul::index_loss", mutates_args=())
def index_loss_operator(
    q_BTGE: Tensor,
    k_BSE: Tensor,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    chosen_BTGn: Tensor | None,
    lse_BTH: Tensor | None,
    block: int,
    products: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dq_BTGE, dk_BSE); `products` is the dtype in which products are computed."""
    G = k_BSGK.shape[2]
    first = k_BSE.shape[1] - q_BTGE.shape[1]
    loss, dq_BTGE, dk_BSE = _empty_results(q_BTGE, k_BSE)
    q_BTGMK = q_BTHK.unflatten(2, (G, -1))
    for b, k_SE in enumerate(k_BSE):
        dk_SE = torch.zeros_like(k_SE, dtype=torch.float32)
        k_JlE = in_blocks(k_SE, block, products)
        for g in rounds(range(G)):
            k_JlK = in_blocks(k_BSGK[b, :, g], block, products)
            of_group = q_BTGE[b, :, g], k_JlE, q_BTGMK[b, :, g], k_JlK
            stream = IndexStream(*of_group, first)
            buffers = Buffers(k_JlE)
            parts = _dense_chunks(stream, buffers)
            if chosen_BTGn is not None:
                lse_TM = lse_BTH[b].unflatten(1, (G, -1))[:, g]
                parts = _chosen_chunks(stream, chosen_BTGn[b, :, g], lse_TM, buffers)
            loss += _learn(stream, parts, 1 / G, dq_BTGE[b, :, g], dk_SE)
        dk_BSE[b] = dk_SE
    return loss.div_(G), dq_BTGE, dk_BSE


def _empty_results(q_BTGE: Tensor, k_BSE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss = q_BTGE.new_zeros((), dtype=torch.float32)
    return loss, q_BTGE.new_empty(q_BTGE.shape), k_BSE.new_empty(k_BSE.shape)


@index_loss_operator.register_fake
def _(
    q_BTGE,
    k_BSE,
    *_,
):
    return _empty_results(q_BTGE, k_BSE)


def _save(
    ctx,
    inputs,
    output,
):
    _, *gradients = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*gradients)
    ctx.save_for_backward(*gradients)


def _backward(
    ctx,
    dloss,
    *_,
):
    gradients = [None, None]
    if dloss is not None:
        gradients = [x * dloss for x in ctx.saved_tensors]
    return *gradients, *[None] * 6


index_loss_operator.register_autograd(_backward, setup_context=_save)


def index_loss(
    q_BTGE: Tensor,
    k_BSE: Tensor,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    block: int,
    chosen_BTGn: Tensor | None = None,
    lse_BTH: Tensor | None = None,
) -> Tensor:
    """The loss, 0-d in fp32, of the last T of the S positions of one document in each row; its
    gradients reach the indexer's queries and keys only.

    q_BTGE, k_BSE     those of the indexer
    q_BTHK, k_BSGK    those of attention
    chosen_BTGn, lse  what a query reads, and what attention over it returned; None: all blocks
    """
    products = machine.product_dtype(q_BTHK)
    inputs = q_BTGE, k_BSE, q_BTHK.detach(), k_BSGK.detach(), chosen_BTGn
    lse_BTH = None if lse_BTH is None else lse_BTH.detach()
    return index_loss_operator(*inputs, lse_BTH, block, products)[0]
