"""The selected branch of Native Sparse Attention (arXiv 2502.11089), block-major.

nsa/engine.py drives it on one document, one row of the batch and one KV head, over chunks of C
queries, from position n*l' on (before, the branch is plain causal attention).

Every query selects its own blocks, so that gathering keys per query would move n blocks of keys for
each of them. Instead, the queries come to the blocks:
- forced blocks (the first and the local ones) are the same for all queries of a block, which makes
  them one dense tile per block of queries, with a mask;
- dynamic blocks are (query, block) pairs, sorted by block and cut into tiles of R pairs, which are
  R*M matrix rows. Such a block ends before its queries, so that no tile needs a mask.

Each part is a softmax over some of a query's keys. Its log-sum-exp says which share of the whole
softmax it holds, so that the parts merge exactly: o = sum of exp(lse_part - lse) o_part. There are
no atomics: sums run over sorted segments, in a fixed order.

Letters: T tokens, C queries of a chunk, M query heads per KV head, K head dim, J selection blocks,
P dynamic blocks of a query, R pairs of a tile, or its matrix rows (query, head), N tiles, S keys of
a tile, or slots of all tiles. l' and n of the paper are sel_block and sel_count.
"""

import torch
from torch import Tensor

from longhaul.sparse.nsa.branches import Sizes
from longhaul.sparse.tiles import LOG2E as LOG2E
from longhaul.sparse.tiles import (
    TILE_ROWS,
    BackwardInputs,
    Buffers,
    Tiles,
    cut_tiles,
    merge_parts,
    pad_queries,
    tile_backward,
    tile_forward,
    tiles_backward,
    tiles_forward,
)

FORCED_AT_ONCE = 8  # tiles whose logits exist at the same time


# ---- forced blocks: a dense tile per block of queries


def _forced_tiles(
    q_CMK: Tensor,
    start: int,
    tokens: int,
    cfg: Sizes,
) -> tuple[Tensor, Tensor]:
    """(index_NS, hidden_RS): the keys of the forced blocks of each block of queries.

    A matrix row is (query, head). A key after the document's end is hidden, whatever its index.
    """
    device = q_CMK.device
    M = q_CMK.shape[1]
    l = cfg.sel_block
    first_block = start // l
    end_block = -(-(start + len(q_CMK)) // l)
    own_N1 = torch.arange(first_block, end_block, device=device)[:, None]

    first = torch.arange(cfg.sel_init * l, device=device)
    first_NS = first.expand(len(own_N1), -1)
    local = torch.arange(cfg.sel_local * l, device=device)
    local_NS = (own_N1 - cfg.sel_local + 1) * l + local
    index_NS = torch.cat([first_NS, local_NS], 1)
    index_NS.clamp_max_(tokens - 1)

    # Only the own block, the last one, hides keys. Both positions count from its first token.
    query = torch.arange(l, device=device)
    first_key = (1 - cfg.forced) * l
    key = torch.arange(first_key, l, device=device)
    hidden_lS = key > query[:, None]
    return index_NS, hidden_lS.repeat_interleave(M, 0)


def _by_block(x_CM_: Tensor, l: int) -> Tensor:
    """[C,M,...] as [blocks of l queries, l*M, ...], the last one padded with zeros."""
    M, *rest = x_CM_.shape[1:]
    missing = -len(x_CM_) % l
    return pad_queries(x_CM_, missing, 0.0).view(-1, l * M, *rest)


def _forced_forward(
    q_CMK: Tensor,
    k_TK: Tensor,
    v_TK: Tensor,
    start: int,
    cfg: Sizes,
    buffers: Buffers,
) -> tuple[Tensor, Tensor]:
    """(o_CMK, lse_CM) over the forced blocks."""
    C, M, K = q_CMK.shape
    index_NS, hidden_RS = _forced_tiles(q_CMK, start, len(k_TK), cfg)
    q_parts = _by_block(q_CMK, cfg.sel_block).split(FORCED_AT_ONCE)
    index_parts = index_NS.split(FORCED_AT_ONCE)

    outs = []
    for q, index in zip(q_parts, index_parts, strict=True):
        outs.append(tile_forward(q, k_TK[index], v_TK[index], buffers, hidden_RS))
    o_NRK = torch.cat([o for o, _ in outs])
    lse_NR = torch.cat([lse for _, lse in outs])
    o_CMK = o_NRK.view(-1, M, K)[:C]
    lse_CM = lse_NR.view(-1, M)[:C]
    return o_CMK, lse_CM


def _forced_backward(
    inputs: BackwardInputs,
    k_TK: Tensor,
    v_TK: Tensor,
    start: int,
    cfg: Sizes,
    dk_JSK: Tensor,
    dv_JSK: Tensor,
    buffers: Buffers,
) -> Tensor:
    """dq_CMK over the forced blocks; adds to dk and dv."""
    C, M, K = inputs.q.shape
    index_NS, hidden_RS = _forced_tiles(inputs.q, start, len(k_TK), cfg)
    input_parts = [_by_block(x, cfg.sel_block).split(FORCED_AT_ONCE) for x in inputs]
    index_parts = index_NS.split(FORCED_AT_ONCE)

    dq_parts = []
    block = start // cfg.sel_block
    for *parts, index in zip(*input_parts, index_parts, strict=True):
        dq_NRK, dk_NSK, dv_NSK = tile_backward(
            BackwardInputs(*parts),
            k_TK[index],
            v_TK[index],
            buffers,
            hidden_RS,
        )
        dq_parts.append(dq_NRK)
        _add_forced(dk_JSK, dk_NSK, block, cfg)
        _add_forced(dv_JSK, dv_NSK, block, cfg)
        block += len(index)
    dq_NRK = torch.cat(dq_parts)
    return dq_NRK.view(-1, M, K)[:C]


def _add_forced(
    total_JSK: Tensor,
    part_NSK: Tensor,
    block: int,
    cfg: Sizes,
) -> None:
    """Adds the gradients of the forced blocks of the query blocks from `block` on."""
    N, _, K = part_NSK.shape
    part = part_NSK.view(N, cfg.forced, cfg.sel_block, K)
    first = part[:, : cfg.sel_init]
    total_JSK[: cfg.sel_init] += first.float().sum(0)
    for i in range(cfg.sel_local):
        low = block - cfg.sel_local + 1 + i
        total_JSK[low : low + N] += part[:, cfg.sel_init + i]


def _blocks(x_TK: Tensor, l: int) -> Tensor:
    """[J,l,K] of whole blocks: a dynamic block is never the unfinished last one."""
    T, K = x_TK.shape
    J = T // l
    return x_TK[: J * l].view(J, l, K)


# ---- the branch


def _dynamic_tiles(block_idx_Cn: Tensor, J: int, M: int, cfg: Sizes) -> Tiles:
    """The tiles of the dynamic pairs of a chunk."""
    dynamic_CP = block_idx_Cn[:, cfg.forced :]
    return cut_tiles(dynamic_CP.long(), J, max(1, TILE_ROWS // M), dynamic_CP.numel())


def selected_forward(
    q_CMK: Tensor,
    k_TK: Tensor,
    v_TK: Tensor,
    start: int,
    block_idx_Cn: Tensor,
    cfg: Sizes,
    buffers: Buffers,
) -> tuple[Tensor, Tensor]:
    """(o_CMK, lse_CM) of the queries from position `start` >= n*l' on."""
    forced_o_CMK, forced_lse_CM = _forced_forward(q_CMK, k_TK, v_TK, start, cfg, buffers)
    if cfg.sel_count == cfg.forced:
        return forced_o_CMK, forced_lse_CM

    k_JSK = _blocks(k_TK, cfg.sel_block)
    v_JSK = _blocks(v_TK, cfg.sel_block)
    tiles = _dynamic_tiles(block_idx_Cn, len(k_JSK), q_CMK.shape[1], cfg)
    o_SMK = q_CMK.new_empty(len(tiles.query_S), *q_CMK.shape[1:])
    lse_SM = tiles_forward(q_CMK, k_JSK, v_JSK, tiles, buffers, o_SMK)
    return merge_parts(forced_o_CMK, forced_lse_CM, o_SMK, lse_SM, tiles.slot_CP)


def selected_backward(
    inputs: BackwardInputs,
    k_TK: Tensor,
    v_TK: Tensor,
    start: int,
    block_idx_Cn: Tensor,
    cfg: Sizes,
    dk_JSK: Tensor,
    dv_JSK: Tensor,
    buffers: Buffers,
) -> Tensor:
    """dq_CMK of the queries from position `start` >= n*l' on; adds to dk and dv.

    dq and dk lack the factor 1 / sqrt(K).
    """
    forced_dq_CMK = _forced_backward(inputs, k_TK, v_TK, start, cfg, dk_JSK, dv_JSK, buffers)
    if cfg.sel_count == cfg.forced:
        return forced_dq_CMK

    k_JSK = _blocks(k_TK, cfg.sel_block)
    v_JSK = _blocks(v_TK, cfg.sel_block)
    tiles = _dynamic_tiles(block_idx_Cn, len(k_JSK), inputs.q.shape[1], cfg)
    dq_SMK = inputs.q.new_empty(len(tiles.query_S), *inputs.q.shape[1:])
    dq_CMK = tiles_backward(inputs, k_JSK, v_JSK, tiles, dk_JSK, dv_JSK, buffers, dq_SMK)
    return forced_dq_CMK + dq_CMK
