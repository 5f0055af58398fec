"""The three branches of Native Sparse Attention (arXiv 2502.11089), forward and backward, exact and
block-major.

Imports torch only; nsa/engine.py drives it. Everything here works on ONE document, ONE row of the
batch and ONE KV head, over
chunks of C queries:
- rows at once: a few queries against all the keys that they see, so that one softmax serves the
output and the scores (no
  second pass) and the backward needs no saved log-sum-exp. Compressed branch, window, and the
  selected branch's first n*l'
  tokens, where it is plain causal attention;
- selected branch after that: the forced blocks (first and local) are a dense tile per block of
queries; the dynamic ones
  are (query, block) pairs sorted by block and cut into tiles of R pairs = R*M rows, which need no
  mask. Partial results
  merge by log-sum-exp. No atomics: sums run over sorted segments.

Letters: T tokens, M query heads per KV head, K head dim, N compressed blocks (or tiles), J
selection blocks, C queries of a
chunk, P dynamic blocks of a query, R pairs of a tile (or rows), S keys (or slots). t is a position
inside its document.
l, s, l', n, w of the paper are cmp_block, cmp_stride, sel_block, sel_count, window.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.platform import platform

LOG2E = 1.4426950408889634
TILE_ROWS = (
    64  # rows (pairs x heads) of a selected tile; fewer waste the matrix unit, more are padding
)
TILES_AT_ONCE = 64  # tiles whose logits exist at the same time: 64*64*64 fp32 = 1 MiB
# few counts of tiles: a library keeps every shape that it saw, the heap every size. At 32k in bf16,
TILES_STEP = 16
# forward and backward add 266 MiB, where any count added 365
STEP_LOGITS = 2**19  # logits that exist at once in the compressed branch: 2 MiB in fp32
BAND_QUERIES = 128  # queries of a band step: they meet window + 127 keys


class Sizes(NamedTuple):
    """NSAConfig's numbers as the custom ops receive them."""

    cmp_block: int
    cmp_stride: int
    sel_block: int
    sel_count: int
    sel_init: int
    sel_local: int
    window: int

    @property
    def forced(self):
        return self.sel_init + self.sel_local

    @property
    def dense_tokens(self):
        return self.sel_count * self.sel_block  # before this position every block is selected

    def compressed_blocks(self, tokens):
        return 0 if tokens < self.cmp_block else (tokens - self.cmp_block) // self.cmp_stride + 1


class BranchKV(NamedTuple):
    """Keys and values of the three branches, or their gradients."""

    k_slc: Tensor
    v_slc: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_win: Tensor
    v_win: Tensor

    def contiguous(self) -> "BranchKV":
        return BranchKV(*(x.contiguous() for x in self))


# ----------------------------------------------------------------------------- products and softmax
def _dot(a, b):
    """a b^T with fp32 results.

    A CPU bf16 product only returns bf16, too coarse for logits and ranks. Subtracting the rounded
    result inside a second
    product's fp32 accumulator returns what rounding lost: relative error 2^-17 at 0.6x the time of
    an fp32 product (K = 128;
    below K = 64 reading and writing the result is what costs, and an fp32 product takes 0.85x as
    long).
    """
    if a.dtype == torch.float32:
        return a @ b.mT
    mm, addmm = (torch.mm, torch.addmm) if a.ndim == 2 else (torch.bmm, torch.baddbmm)
    if platform().device(a).type == "cuda":
        return mm(a, b.mT, out_dtype=torch.float32)
    if a.dtype != torch.bfloat16 or a.shape[-1] < 64:
        return a.float() @ b.float().mT  # fp16 would overflow at 65504
    high = mm(a, b.mT)
    return high.float().add_(addmm(high, a, b.mT, beta=-1))


def _add_product(total, a, b):
    """total += a^T b, the running sum in fp32."""
    if a.dtype == torch.float32:
        total.addmm_(a.mT, b)
    else:
        total.add_(a.mT @ b)


def _softmax_backward(p_RS, q_RK, do_RK, gate_R1, k_SK, v_SK, dk_SK, dv_SK):
    """Backward of o = gate * softmax(q k) v from its probabilities; adds to dk, dv; returns (dq,
    dgate), dq unscaled.
    """
    dp_RS = _dot(do_RK, v_SK).mul_(p_RS)
    delta_R1 = dp_RS.sum(
        -1, keepdim=True
    )  # = do . o: the gate's gradient, so that o need not be saved
    ds_RS = dp_RS.addcmul_(p_RS, delta_R1, value=-1).to(q_RK.dtype)
    gate = gate_R1.to(q_RK.dtype)
    _add_product(dv_SK, p_RS.to(q_RK.dtype), do_RK * gate)
    _add_product(dk_SK, ds_RS, q_RK * gate)
    return (ds_RS @ k_SK) * gate_R1, delta_R1


# --- whole rows at once: the compressed branch, the window, the selected branch's first n*l' tokens
class _Step(NamedTuple):
    """A few queries and all the keys that they see."""

    here: slice  # the queries, counted from the chunk's first
    keys: slice  # the keys, counted from the first key given
    edge: int  # the keys before it are visible to all these queries
    hidden_CE: Tensor  # of the others, which are not


def compressed_steps(start, stop, heads, N, cfg, device):
    """The queries of a chunk that see a compressed block, as many at a time as STEP_LOGITS allows."""
    rows = max(16, STEP_LOGITS // (max(1, N) * heads) // 16 * 16)
    for x in platform().tiles(range(max(start, cfg.cmp_block - 1), stop, min(256, rows))):
        y = min(x + min(256, rows), stop)
        edge, seen = cfg.compressed_blocks(x + 1), cfg.compressed_blocks(y)
        keys = min(
            N, -(-seen // 128) * 128
        )  # few shapes: each costs 0.3 ms once; 64 added 35 MiB more
        last = torch.arange(edge, keys, device=device) * cfg.cmp_stride + cfg.cmp_block - 1
        yield _Step(
            slice(x - start, y - start),
            slice(0, keys),
            edge,
            last > torch.arange(x, y, device=device)[:, None],
        )


def band_steps(start, stop, first, width, device):
    """All the queries of a chunk, each seeing keys t-width < u <= t; `first` is the position of the
    first key given.
    """
    for x in platform().tiles(range(start, stop, BAND_QUERIES)):
        y = min(x + BAND_QUERIES, stop)
        low = max(0, x - width + 1)
        t, u = torch.arange(x, y, device=device)[:, None], torch.arange(low, y, device=device)
        yield _Step(
            slice(x - start, y - start),
            slice(low - first, y - first),
            0,
            (u > t) | (u <= t - width),
        )


def _probabilities(q_CMK, k_SK, step):
    """p [C*M, S] of a step, fp32."""
    q_cMK = q_CMK[step.here]
    logits_RS = _dot(q_cMK.flatten(0, 1), k_SK[step.keys]).mul_(q_CMK.shape[-1] ** -0.5)
    logits_cMS = logits_RS.view(*q_cMK.shape[:2], -1)
    logits_cMS[:, :, step.edge :].masked_fill_(step.hidden_CE[:, None], -torch.inf)
    return logits_RS.softmax(-1)


def rows_forward(q_CMK, k_SK, v_SK, steps, look=None):
    """o_CMK, zero where no step goes; look(step, p_RS) sees the probabilities."""
    o_CMK = torch.zeros_like(q_CMK)
    for step in steps:
        p_RS = _probabilities(q_CMK, k_SK, step)
        o_CMK[step.here] = (p_RS.to(v_SK.dtype) @ v_SK[step.keys]).view_as(o_CMK[step.here])
        if look is not None:
            look(step, p_RS)
    return o_CMK


def rows_backward(q_CMK, do_CMK, gate_CM1, k_SK, v_SK, steps, dk_SK, dv_SK, dq_CMK, dgate_CM1):
    """Adds to dk, dv and dq (dk and dq unscaled), fills dgate."""
    for step in steps:
        q, do, gate = (x[step.here].flatten(0, 1) for x in (q_CMK, do_CMK, gate_CM1))
        dq, dgate = _softmax_backward(
            _probabilities(q_CMK, k_SK, step),
            q,
            do,
            gate,
            *(x[step.keys] for x in (k_SK, v_SK, dk_SK, dv_SK)),
        )
        dq_CMK[step.here] += dq.view_as(dq_CMK[step.here])
        dgate_CM1[step.here] = dgate.view_as(dgate_CM1[step.here])


# --------------------------------------------------------------------------------- choice of blocks
def fill_early(block_idx_Cn, cfg):
    """Positions before n*l' keep every block up to their own; -1 = unused."""
    j = torch.arange(cfg.sel_count, device=block_idx_Cn.device, dtype=block_idx_Cn.dtype)
    own_C1 = torch.arange(len(block_idx_Cn), device=block_idx_Cn.device)[:, None] // cfg.sel_block
    block_idx_Cn.copy_(torch.where(j <= own_C1, j, -1))


def _pool(p_CN, J, cfg):
    """Importance of J selection blocks: every compressed block's mass, once per stride that it
    shares with the block.
    """
    per, spread = cfg.sel_block // cfg.cmp_stride, cfg.cmp_block // cfg.cmp_stride
    padded = F.pad(p_CN, (spread - 1, J * per - p_CN.shape[1]))
    imp_CJ = p_CN.new_zeros(len(p_CN), J)
    for offset in range(per + spread - 1):  # weights 1, 2, 2, 2, 1 with the default sizes
        weight = min(offset + 1, spread, per, per + spread - 1 - offset)
        imp_CJ.add_(padded[:, offset::per][:, :J], alpha=weight)
    return imp_CJ


def choose(p_CN, x, cfg):
    """block_idx_Cn: first blocks, local blocks, then the most important others; the lower index on
    a tie.

    Ranks fp32 importance and index as one int64: non-negative floats order like their bits, and no
    two keys are equal, so that the answer does not depend on how a device breaks ties.
    """
    C, device = len(p_CN), p_CN.device
    own = torch.arange(x, x + C, device=device)[:, None] // cfg.sel_block
    J = (x + C - 1) // cfg.sel_block + 1
    key_CJ = _pool(p_CN, J, cfg).view(torch.int32).to(torch.int64) << 32
    key_CJ += J - 1 - torch.arange(J, device=device)
    tail = (
        x // cfg.sel_block - cfg.sel_local + 1
    )  # from here on a block may be local or in the future
    key_CJ[:, tail:].masked_fill_(torch.arange(tail, J, device=device) > own - cfg.sel_local, -1)
    best = key_CJ[:, cfg.sel_init :].topk(cfg.sel_count - cfg.forced, sorted=False).values
    dynamic = (J - 1 - (best & 0xFFFFFFFF)).clamp_(
        0, J - 1
    )  # the clamp keeps NaN inputs from reading out of bounds
    first = torch.arange(cfg.sel_init, device=device).expand(C, -1)
    local = own + torch.arange(1 - cfg.sel_local, 1, device=device)
    return torch.cat([first, local, dynamic], 1)


# --------------------------------------------------------------------------- selected branch: tiles
class _Tiles(NamedTuple):
    """Pairs (query, dynamic block) sorted by block and cut into tiles of R pairs; a tile's slots
    belong to one block.
    """

    slot_CP: Tensor  # where the p-th dynamic pair of a query lies
    query_S: Tensor  # the query of each slot, C where the slot is padding
    block_N: Tensor  # the block of each tile
    R: int


def _tiles(block_CP, J, M):
    """Sorts the pairs by block. On CUDA the number of tiles is an upper bound, so that nothing
    waits for the host.
    """
    C, P = block_CP.shape
    R, device = max(1, TILE_ROWS // M), block_CP.device
    sorted_block, order = block_CP.flatten().sort(stable=True)
    start_J = torch.searchsorted(sorted_block, torch.arange(J + 1, device=device))
    end_J = ((start_J.diff() + R - 1) // R).cumsum(0)
    first_J = F.pad(end_J, (1, 0))[:-1]
    bound = (
        block_CP.is_cuda or block_CP.is_meta
    )  # meta: the memory planner runs this without values
    count = C * P // R + min(J, C * P) if bound else -(-int(end_J[-1]) // TILES_STEP) * TILES_STEP
    slot = first_J[sorted_block] * R + torch.arange(C * P, device=device) - start_J[sorted_block]
    query_S = torch.full((count * R,), C, device=device).index_copy_(0, slot, order // P)
    block_N = torch.searchsorted(end_J, torch.arange(count, device=device), right=True).clamp_max_(
        J - 1
    )
    return _Tiles(
        torch.empty_like(order).index_copy_(0, order, slot).view(C, P), query_S, block_N, R
    )


def _tile_forward(q_NRK, k_NSK, v_NSK, hidden_RS=None):
    """Attention inside each tile: (o_NRK, lse_NR); lse = max s - log max p, cheaper than a second
    pass of exp.
    """
    s_NRS = _dot(q_NRK, k_NSK).mul_(q_NRK.shape[-1] ** -0.5)
    if hidden_RS is not None:
        s_NRS.masked_fill_(hidden_RS, -torch.inf)
    p_NRS = s_NRS.softmax(-1)
    return p_NRS.to(v_NSK.dtype) @ v_NSK, s_NRS.amax(-1) - p_NRS.amax(-1).log()


def _tile_backward(q_NRK, do_NRK, lse_NR, delta_NR, k_NSK, v_NSK, hidden_RS=None):
    """(dq, dk, dv) of each tile from the row's global lse and delta = do . o; dq and dk unscaled."""
    exponent_NRS = torch.add(
        lse_NR.unsqueeze(-1) * -LOG2E, _dot(q_NRK, k_NSK), alpha=q_NRK.shape[-1] ** -0.5 * LOG2E
    )
    if hidden_RS is not None:
        exponent_NRS.masked_fill_(hidden_RS, -torch.inf)
    p_NRS = exponent_NRS.exp2_()  # exp2: three times as fast as exp on a CPU
    ds_NRS = _dot(do_NRK, v_NSK).sub_(delta_NR.unsqueeze(-1)).mul_(p_NRS).to(q_NRK.dtype)
    return ds_NRS @ k_NSK, ds_NRS.mT @ q_NRK, p_NRS.to(q_NRK.dtype).mT @ do_NRK


def _forced_tiles(q_CMK, start, tokens, cfg):
    """Key index_NS and hidden_RS of the forced blocks for each block of queries from `start`; rows
    are (query, head).
    """
    device, l = q_CMK.device, cfg.sel_block
    own_N1 = torch.arange(start // l, -(-(start + len(q_CMK)) // l), device=device)[:, None]
    first = torch.arange(cfg.sel_init * l, device=device).expand(len(own_N1), -1)
    local = (own_N1 - cfg.sel_local + 1) * l + torch.arange(cfg.sel_local * l, device=device)
    query, key = (
        torch.arange(l, device=device),
        torch.arange((1 - cfg.forced) * l, l, device=device),
    )
    hidden_RS = (key > query[:, None]).repeat_interleave(q_CMK.shape[1], 0)
    return torch.cat([first, local], 1).clamp_max_(
        tokens - 1
    ), hidden_RS  # past the end: hidden, any key will do


def _by_block(x_CM_, l):
    """[C, M, ...] as [blocks of l queries, l*M, ...], the last one padded with zeros."""
    x = F.pad(x_CM_, (0, 0) * (x_CM_.ndim - 1) + (0, -len(x_CM_) % l))
    return x.view(-1, l * x.shape[1], *x.shape[2:])


def _forced_forward(q_CMK, k_TK, v_TK, start, cfg):
    index_NS, hidden_RS = _forced_tiles(q_CMK, start, len(k_TK), cfg)
    q_NRK, outs = _by_block(q_CMK, cfg.sel_block), []
    for q, index in zip(q_NRK.split(8), index_NS.split(8)):
        outs.append(_tile_forward(q, k_TK[index], v_TK[index], hidden_RS))
    o_NRK, lse_NR = (torch.cat(x) for x in zip(*outs))
    C, M, K = q_CMK.shape
    return o_NRK.view(-1, M, K)[:C], lse_NR.view(-1, M)[:C]


def _forced_backward(rows, k_TK, v_TK, start, cfg, dk_JSK, dv_JSK):
    """dq_CMK of the forced blocks; adds to dk, dv; rows: q, do, lse, delta."""
    index_NS, hidden_RS = _forced_tiles(rows[0], start, len(k_TK), cfg)
    splits = [_by_block(x, cfg.sel_block).split(8) for x in rows]
    dq, block = [], start // cfg.sel_block
    for *parts, index in zip(*splits, index_NS.split(8)):
        dq_NRK, *dkv = _tile_backward(*parts, k_TK[index], v_TK[index], hidden_RS)
        dq.append(dq_NRK)
        for total_JSK, part in zip((dk_JSK, dv_JSK), dkv):
            part = part.view(len(index), cfg.forced, cfg.sel_block, -1)
            total_JSK[: cfg.sel_init] += part[:, : cfg.sel_init].float().sum(0)
            for i in range(cfg.sel_local):
                low = block - cfg.sel_local + 1 + i
                total_JSK[low : low + len(index)] += part[:, cfg.sel_init + i]
        block += len(index)
    return torch.cat(dq).view(-1, *rows[0].shape[1:])[: len(rows[0])]


def _gather_sum(x_SMK, slot_CP, weight_CMP=None):
    """y[c, m] = sum over p of weight[c, m, p] * x[slot[c, p], m]: an embedding bag, which never
    holds the gathered rows.
    """
    C, P = slot_CP.shape
    _, M, K = x_SMK.shape
    if weight_CMP is None:
        return F.embedding_bag(slot_CP, x_SMK.view(-1, M * K), mode="sum").view(C, M, K)
    row_CMP = slot_CP[:, None] * M + torch.arange(M, device=x_SMK.device)[:, None]
    return F.embedding_bag(
        row_CMP.view(C * M, P),
        x_SMK.view(-1, K),
        mode="sum",
        per_sample_weights=weight_CMP.reshape(C * M, P).to(x_SMK.dtype),
    ).view(C, M, K)


def _tile_groups(tiles):
    """(block of each tile, slots, query of each slot) of a few tiles at a time."""
    for x in platform().tiles(range(0, len(tiles.block_N), TILES_AT_ONCE)):
        slots = slice(x * tiles.R, (x + TILES_AT_ONCE) * tiles.R)
        yield tiles.block_N[x : x + TILES_AT_ONCE], slots, tiles.query_S[slots]


def _rows_of(x_CM_, query_S, tiles):
    return x_CM_.index_select(0, query_S).view(len(query_S) // tiles.R, -1, *x_CM_.shape[2:])


def _blocks(x_TK, l):
    return x_TK[: len(x_TK) // l * l].view(
        -1, l, x_TK.shape[-1]
    )  # a dynamic block is never the unfinished last one


def _padding(x_CM_, value):
    return F.pad(
        x_CM_, (0, 0) * (x_CM_.ndim - 1) + (0, 1), value=value
    )  # the query of padding slots


def selected_forward(q_CMK, k_TK, v_TK, start, block_idx_Cn, cfg):
    """(o_CMK, lse_CM) of the selected branch for queries from n*l' on."""
    o_CMK, lse_CM = _forced_forward(q_CMK, k_TK, v_TK, start, cfg)
    if cfg.sel_count == cfg.forced:
        return o_CMK, lse_CM
    k_JSK, v_JSK = _blocks(k_TK, cfg.sel_block), _blocks(v_TK, cfg.sel_block)
    tiles, M, K = (
        _tiles(block_idx_Cn[:, cfg.forced :].long(), len(k_JSK), q_CMK.shape[1]),
        *q_CMK.shape[1:],
    )
    o_SMK, lse_SM = (
        q_CMK.new_empty(len(tiles.query_S), M, K),
        lse_CM.new_empty(len(tiles.query_S), M),
    )
    q_CMK = _padding(q_CMK, 0.0)
    for block_N, slots, query_S in _tile_groups(tiles):
        o, lse = _tile_forward(_rows_of(q_CMK, query_S, tiles), k_JSK[block_N], v_JSK[block_N])
        o_SMK[slots], lse_SM[slots] = o.view(-1, M, K), lse.view(-1, M)
    parts_CPM = torch.cat([lse_CM[:, None], lse_SM[tiles.slot_CP]], 1)
    total_CM = parts_CPM.logsumexp(1)
    weight_CMP = (parts_CPM - total_CM[:, None]).exp().transpose(1, 2)
    return o_CMK * weight_CMP[..., :1] + _gather_sum(
        o_SMK, tiles.slot_CP, weight_CMP[..., 1:]
    ), total_CM


def selected_backward(rows, k_TK, v_TK, start, block_idx_Cn, cfg, dk_JSK, dv_JSK):
    """dq_CMK, unscaled, of the selected branch for queries from n*l' on; adds to dk, dv.

    rows: q, do, lse, delta = do . o, where do carries the gate."""
    dq_CMK = _forced_backward(rows, k_TK, v_TK, start, cfg, dk_JSK, dv_JSK)
    if cfg.sel_count == cfg.forced:
        return dq_CMK
    k_JSK, v_JSK = _blocks(k_TK, cfg.sel_block), _blocks(v_TK, cfg.sel_block)
    tiles = _tiles(block_idx_Cn[:, cfg.forced :].long(), len(k_JSK), dq_CMK.shape[1])
    dq_SMK = dq_CMK.new_empty(len(tiles.query_S), *dq_CMK.shape[1:])
    rows = [
        _padding(x, value) for x, value in zip(rows, (0.0, 0.0, torch.inf, 0.0))
    ]  # exp(-inf) = 0: padding adds nothing
    for block_N, slots, query_S in _tile_groups(tiles):
        dq, *dkv = _tile_backward(
            *(_rows_of(x, query_S, tiles) for x in rows), k_JSK[block_N], v_JSK[block_N]
        )
        dq_SMK[slots] = dq.view(-1, *dq_SMK.shape[1:])
        for total_JSK, part_NSK in zip((dk_JSK, dv_JSK), dkv):
            _add_tiles(total_JSK, block_N, part_NSK)
    return dq_CMK + _gather_sum(dq_SMK, tiles.slot_CP)


def _add_tiles(total_JSK, block_N, part_NSK):
    """total[block[i]] += part[i] in a fixed order: index_add_ is serial on a CPU, index_put_ sorts
    first on CUDA.
    """
    if platform().device(total_JSK).type == "cuda":
        total_JSK.index_put_((block_N,), part_NSK.float(), accumulate=True)
    else:
        total_JSK.index_add_(0, block_N, part_NSK.float())
