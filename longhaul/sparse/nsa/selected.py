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

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from base.machine import platform
from longhaul.sparse.nsa.branches import Buffers, Sizes, product_fp32

LOG2E = 1.4426950408889634
TILE_ROWS = 64  # pairs x heads of a tile: fewer waste the matrix unit, more are padding
TILES_AT_ONCE = 64  # tiles whose logits exist at the same time: 64*64*64 fp32 = 1 MiB
FORCED_AT_ONCE = 8  # the same for the tiles of forced blocks, which have more rows and keys
# The number of tiles is a multiple of this: a library keeps every shape that it saw, the heap every
# size. At 32k tokens in bf16, forward and backward add 266 MiB; any number of tiles added 365.
TILES_STEP = 16


class BackwardInputs(NamedTuple):
    """What the backward reads of each query and head; do carries the gate."""

    q: Tensor
    do: Tensor
    lse: Tensor
    delta: Tensor  # do . o


# ---- attention inside tiles


def tile_forward(
    q_NRK: Tensor,
    k_NSK: Tensor,
    v_NSK: Tensor,
    buffers: Buffers,
    hidden_RS: Tensor | None = None,
    out_NRK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(o_NRK, lse_NR) of each tile; hidden logits are -inf, so that exp makes exact zeros of them.

    lse = max(logits) - log(max(p)) is cheaper than a second pass of exp.
    """
    scale = q_NRK.shape[-1] ** -0.5
    logits_NRS = product_fp32(q_NRK, k_NSK, buffers, "logits").mul_(scale)
    if hidden_RS is not None:
        logits_NRS.masked_fill_(hidden_RS, -torch.inf)
    p_NRS = buffers.take("p", logits_NRS.shape, torch.float32)
    torch.softmax(logits_NRS, -1, out=p_NRS)
    o_NRK = torch.bmm(buffers.rounded("high", p_NRS), v_NSK, out=out_NRK)
    lse_NR = logits_NRS.amax(-1) - p_NRS.amax(-1).log()
    return o_NRK, lse_NR


def tile_backward(
    inputs: BackwardInputs,
    k_NSK: Tensor,
    v_NSK: Tensor,
    buffers: Buffers,
    hidden_RS: Tensor | None = None,
    out_NRK: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of each tile; `inputs` has tensors [N,R,...], with the lse over all blocks.

    dq and dk lack the factor 1 / sqrt(K).
    """
    q_NRK, do_NRK, lse_NR, delta_NR = inputs
    scale = q_NRK.shape[-1] ** -0.5

    # exp2 is three times as fast as exp on a CPU.
    exponent_NRS = product_fp32(q_NRK, k_NSK, buffers, "p")
    torch.add(
        lse_NR.unsqueeze(-1) * -LOG2E,
        exponent_NRS,
        alpha=scale * LOG2E,
        out=exponent_NRS,
    )
    if hidden_RS is not None:
        exponent_NRS.masked_fill_(hidden_RS, -torch.inf)
    p_NRS = exponent_NRS.exp2_()

    ds_NRS = product_fp32(do_NRK, v_NSK, buffers, "logits")
    ds_NRS.sub_(delta_NR.unsqueeze(-1))
    ds_NRS.mul_(p_NRS)
    ds_NRS = buffers.rounded("low", ds_NRS)
    dq_NRK = torch.bmm(ds_NRS, k_NSK, out=out_NRK)
    dk_NSK = ds_NRS.mT @ q_NRK
    dv_NSK = buffers.rounded("high", p_NRS).mT @ do_NRK
    return dq_NRK, dk_NSK, dv_NSK


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


def pad_queries(
    x_CM_: Tensor,
    count: int,
    value: float,
) -> Tensor:
    """[C+count,M,...] with the value in the new queries."""
    other_dims = (0, 0) * (x_CM_.ndim - 1)
    return F.pad(x_CM_, (*other_dims, 0, count), value=value)


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


# ---- dynamic blocks: tiles of pairs of one block


class Tiles(NamedTuple):
    """Pairs sorted by block and cut into tiles of R pairs; the slots of a tile share a block."""

    slot_CP: Tensor  # the slot of each query's p-th pair
    query_S: Tensor  # the query of each slot, C for padding; the last slot is that of no pair
    block_N: Tensor  # the block of each tile
    R: int


def slot_count(pairs: int, J: int, R: int) -> int:
    """Slots for the most tiles that so many pairs can need, and the one of no pair."""
    most = pairs // R + min(J, pairs)
    return most * R + 1


def cut_tiles(
    block_CP: Tensor,
    J: int,
    R: int,
    pairs: int,
) -> Tiles:
    """Sorts at most `pairs` pairs by block and gives each block as many tiles of R as it needs.

    Block J stands for no pair: its slot is the last one, which is in no tile. The number of slots
    does not depend on the values, nor does the number of tiles whose logits exist at the same time.
    On CUDA there are as many tiles as slots, so that the host never waits for the device, and on
    meta tensors, which have no values.
    """
    C, P = block_CP.shape
    device = block_CP.device

    # A stable sort: sums over a block's pairs have the same order every time.
    sorted_block, order = block_CP.flatten().sort(stable=True)
    all_blocks = torch.arange(J + 1, device=device)
    start_J = torch.searchsorted(sorted_block, all_blocks)
    tiles_J = (start_J.diff() + R - 1) // R
    end_J = tiles_J.cumsum(0)
    first_J = F.pad(end_J, (1, 0))

    slots = slot_count(pairs, J, R)
    count = most = (slots - 1) // R
    if not (block_CP.is_cuda or block_CP.is_meta):
        needed = int(end_J[-1])
        rounded = -(-needed // TILES_STEP) * TILES_STEP
        count = min(most, max(rounded, TILES_AT_ONCE))

    pair = torch.arange(C * P, device=device)
    position = pair - start_J[sorted_block]  # among the pairs of its block
    slot = first_J[sorted_block] * R + position
    slot.masked_fill_(sorted_block == J, slots - 1)
    query_S = torch.full((slots,), C, device=device)
    query_S.index_copy_(0, slot, order // P)
    query_S[-1] = C
    slot_P = torch.empty_like(order)
    slot_P.index_copy_(0, order, slot)

    tile = torch.arange(count, device=device)
    block_N = torch.searchsorted(end_J, tile, right=True)
    block_N.clamp_max_(J - 1)
    return Tiles(slot_P.view(C, P), query_S, block_N, R)


def tile_groups(tiles: Tiles) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """(block of each tile, slots, query of each slot) of a few tiles at a time."""
    starts = range(0, len(tiles.block_N), TILES_AT_ONCE)
    for x in platform().tiles(starts):
        y = min(x + TILES_AT_ONCE, len(tiles.block_N))
        slots = slice(x * tiles.R, y * tiles.R)
        yield tiles.block_N[x:y], slots, tiles.query_S[slots]


def queries_of(
    x_CM_: Tensor,
    query_S: Tensor,
    tiles: Tiles,
) -> Tensor:
    """The queries and heads [N,R*M,...] of a few tiles."""
    N = len(query_S) // tiles.R
    rest = x_CM_.shape[2:]
    return x_CM_.index_select(0, query_S).view(N, -1, *rest)


def _blocks(x_TK: Tensor, l: int) -> Tensor:
    """[J,l,K] of whole blocks: a dynamic block is never the unfinished last one."""
    T, K = x_TK.shape
    J = T // l
    return x_TK[: J * l].view(J, l, K)


def gather_sum(
    x_SMK: Tensor,
    slot_CP: Tensor,
    weight_CMP: Tensor | None = None,
) -> Tensor:
    """y[c,m] = sum over p of weight[c,m,p] * x[slot[c,p],m].

    An embedding bag sums while it reads, and so never holds what it gathers.
    """
    C, P = slot_CP.shape
    _, M, K = x_SMK.shape
    if weight_CMP is None:
        bag = F.embedding_bag(slot_CP, x_SMK.view(-1, M * K), mode="sum")
        return bag.view(C, M, K)

    head_M1 = torch.arange(M, device=x_SMK.device)[:, None]
    row_CMP = slot_CP[:, None] * M + head_M1
    weight_RP = weight_CMP.reshape(C * M, P)
    bag = F.embedding_bag(
        row_CMP.view(C * M, P),
        x_SMK.view(-1, K),
        mode="sum",
        per_sample_weights=weight_RP.to(x_SMK.dtype),
    )
    return bag.view(C, M, K)


def add_tiles(
    total_JSK: Tensor,
    block_N: Tensor,
    part_NSK: Tensor,
) -> None:
    """total[block[i]] += part[i] in a fixed order.

    index_add_ is serial on a CPU; on CUDA, index_put_ sorts first.
    """
    if platform().device(total_JSK).type == "cuda":
        total_JSK.index_put_((block_N,), part_NSK.float(), accumulate=True)
    else:
        total_JSK.index_add_(0, block_N, part_NSK.float())


def tiles_forward(
    q_CMK: Tensor,
    k_JSK: Tensor,
    v_JSK: Tensor,
    tiles: Tiles,
    buffers: Buffers,
    out_SMK: Tensor,
) -> Tensor:
    """Fills o of the slots of all tiles, with any content behind the last one, and returns lse_SM;
    the slot of no pair has the log-sum-exp of no key.
    """
    slots, M, K = out_SMK.shape
    lse_SM = q_CMK.new_empty(slots, M, dtype=torch.float32)
    out_SMK[-1] = 0
    lse_SM[-1] = -torch.inf

    q_CMK = pad_queries(q_CMK, 1, 0.0)  # query C is that of padding slots
    for block_N, part, query_S in tile_groups(tiles):
        q_NRK = queries_of(q_CMK, query_S, tiles)
        _, lse_NR = tile_forward(
            q_NRK,
            k_JSK.index_select(0, block_N),
            v_JSK.index_select(0, block_N),
            buffers,
            out_NRK=out_SMK[part].view(q_NRK.shape),
        )
        lse_SM[part] = lse_NR.view(-1, M)
    return lse_SM


def tiles_backward(
    inputs: BackwardInputs,
    k_JSK: Tensor,
    v_JSK: Tensor,
    tiles: Tiles,
    dk_JSK: Tensor,
    dv_JSK: Tensor,
    buffers: Buffers,
    dq_SMK: Tensor,
) -> Tensor:
    """dq_CMK over the pairs of all tiles; fills dq of the slots, and adds to dk and dv.

    dq and dk lack the factor 1 / sqrt(K).
    """
    dq_SMK[-1] = 0

    # Query C is that of padding slots; with lse = inf, exp(-inf) = 0, and it adds nothing.
    inputs = BackwardInputs(
        q=pad_queries(inputs.q, 1, 0.0),
        do=pad_queries(inputs.do, 1, 0.0),
        lse=pad_queries(inputs.lse, 1, torch.inf),
        delta=pad_queries(inputs.delta, 1, 0.0),
    )
    for block_N, part, query_S in tile_groups(tiles):
        rows = BackwardInputs(*(queries_of(x, query_S, tiles) for x in inputs))
        _group_backward(rows, k_JSK, v_JSK, block_N, dk_JSK, dv_JSK, buffers, dq_SMK[part])
        del rows  # before those of the next group exist
    return gather_sum(dq_SMK, tiles.slot_CP)


def _group_backward(
    rows: BackwardInputs,
    k_JSK: Tensor,
    v_JSK: Tensor,
    block_N: Tensor,
    dk_JSK: Tensor,
    dv_JSK: Tensor,
    buffers: Buffers,
    dq_SMK: Tensor,
) -> None:
    """A few tiles of `tiles_backward`."""
    _, dk_NSK, dv_NSK = tile_backward(
        rows,
        k_JSK.index_select(0, block_N),
        v_JSK.index_select(0, block_N),
        buffers,
        out_NRK=dq_SMK.view(rows.q.shape),
    )
    add_tiles(dk_JSK, block_N, dk_NSK)
    add_tiles(dv_JSK, block_N, dv_NSK)


def merge_parts(
    o_CMK: Tensor,
    lse_CM: Tensor,
    o_SMK: Tensor,
    lse_SM: Tensor,
    slot_CP: Tensor,
) -> tuple[Tensor, Tensor]:
    """(o_CMK, lse_CM) of one softmax over the keys of a first part and those of a query's slots.

    A query without any key has o = 0 and lse = -inf.
    """
    lse_CPM = torch.cat([lse_CM[:, None], lse_SM[slot_CP]], 1)
    total_CM = lse_CPM.logsumexp(1)
    finite_CM = total_CM.clamp_min(torch.finfo(torch.float32).min)
    weight_CPM = (lse_CPM - finite_CM[:, None]).exp()
    weight_CMP = weight_CPM.transpose(1, 2)

    first = o_CMK * weight_CMP[..., :1]
    others = gather_sum(o_SMK, slot_CP, weight_CMP[..., 1:])
    return first + others, total_CM


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
