"""Native Sparse Attention (arXiv 2502.11089) as Triton kernels: the twin of nsa/engine.py, forward
and backward, for GPUs.

Imports nsa/ (the checks and the sizes), nsa/triton/layout.py (tables), nsa/triton/forward.py and
nsa/triton/backward.py (kernels).

Letters: B batch, T tokens, Z = B*T, H query heads, G KV heads, M = H/G, K head dim, N compressed
blocks of a row, J selection blocks of all
rows, n selected blocks per query, P (query, block) pairs of a chunk.

How a GPU does it. Compressed branch and window are one flash kernel over a range of keys per query;
a tile's rows are (query, head), so
that a group of 4 heads fills the tensor cores. A second pass over the compressed keys turns the
saved log-sum-exp into probabilities,
pools them and keeps the top n of each query on the chip. The selected branch is block-major: pairs
sorted by block, one dense tile per
piece of a block's pairs, results merged by log-sum-exp; its backward cuts the pairs of popular
blocks into segments, whose sums are added
in a fixed order. All n blocks are pairs, the forced ones included: 3 of 16 more partial results
through memory (about 2 ms of 10 per
forward at 131,072 tokens and 3.35 TB/s, by computation), and no special case. Documents and rows of
the batch share every launch.
Everything is deterministic, without atomics, and waits for no host. fp32 products are three tf32
ones: error near 2^-21.

The window does not use PyTorch's stock flash attention: its backward adds up dq by atomics and so
does not repeat bit for bit, and the operator that takes a window (aten::_flash_attention_forward)
is private.

Memory at T = 131,072, H = 32, G = 8, K = 128, bf16, beyond inputs, o and the gradients returned (GB
= 1e9 bytes; a test counts it):
saved from forward to backward: o_cmp and o_slc 2.15, log-sum-exps and indices 0.07;
forward: partial results of a chunk of pairs 0.27, later o_win of one KV head 0.13, sorting 0.02: at
most 2.5 in all;
backward: dq of a chunk of pairs 0.27, dk and dv of its segments 0.20, in fp32 dq of one KV head
0.27 and its dk_slc and dv_slc 0.13,
deltas 0.05, sorting 0.02: at most 3.2 with what was saved.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nsa.branches import LOG2E, Sizes
from nsa.engine import attend
from nsa.triton.backward import (
    delta_kernel,
    pair_backward_kernel,
    ranged_dkv_kernel,
    ranged_dq_kernel,
    segment_sum_kernel,
)
from nsa.triton.forward import (
    INTERPRETED,
    choose_kernel,
    combine_kernel,
    gather_kernel,
    pair_forward_kernel,
    ranged_forward_kernel,
)
from nsa.triton.layout import Pairs, lay_out, sort_pairs

DTYPES = torch.float32, torch.bfloat16, torch.float16
PAIR_NUMBERS = 2**27  # numbers in the partial results of a chunk of pairs: 256 MiB in bf16
FOREVER = 2**30  # a compressed block stays visible; positions are int32


# ---- where the kernels run


def require(q: Tensor):
    """ValueError where the kernels cannot serve tensors like `q`."""
    given, remedy = (
        f"nsa_attention of nsa.triton.attention was given {q.dtype} on {q.device}",
        "or use nsa.engine.nsa_attention",
    )
    on_gpu = (
        q.is_cuda
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )
    if q.dtype not in DTYPES or not (INTERPRETED or on_gpu):
        raise ValueError(
            f"{given}; it needs float32, bfloat16 or float16 on a CUDA device of compute capability >= 8.0 "
            f"(or TRITON_INTERPRET=1, set before triton is imported, for tests): move the tensors there, {remedy}"
        )
    if INTERPRETED and q.dtype == torch.bfloat16:
        raise ValueError(
            f"{given} under TRITON_INTERPRET=1, whose bf16 products are wrong; it needs float32 or float16: cast, {remedy}"
        )


def require_sizes(M: int, K: int, itemsize: int, cfg: Sizes):
    """ValueError for sizes whose tiles would not fit the chip."""
    kib = triton.next_power_of_2(cfg.sel_block) * triton.next_power_of_2(K) * itemsize / 1024
    if M > 64 or K > 256 or cfg.sel_block > 128 or kib > 32:
        raise ValueError(
            f"nsa_attention of nsa.triton.attention was given {M} query heads per KV head, head dim {K}, sel_block={cfg.sel_block}, whose keys "
            f"take {kib:g} KiB; it needs at most 64, 256, 128 and 32 KiB: lower them, or use nsa.engine.nsa_attention"
        )


class Blocks(NamedTuple):
    """Tile sizes, powers of two from 16 on: rows (query, head) where results belong to rows and
    where they belong to keys; keys; steps of a loop in flight; rows of a segment of the selected
    branch's backward.
    """

    rows: int
    key_rows: int
    keys: int
    stages: int
    segment_rows: int = 1024


def blocks(K: int, itemsize: int) -> Blocks:
    """Tiles that fit the 227 KiB of shared memory of an H100: bf16 with K = 128 takes 192 KiB (113
    KiB on an A100), fp32 216 KiB.
    """
    # bytes of a row: fp32 from K = 128, 16-bit numbers from K = 256
    wide = triton.next_power_of_2(K) * itemsize > 256
    return Blocks(64, 16, 32, 1) if wide else Blocks(128, 64, 64, 2)


# ---- one call


class Call:
    """What all launches of one forward or backward share: sizes, documents, tiles of queries."""

    def __init__(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        k_cmp_BNGK: Tensor,
        cu_seqlens: Tensor | None,
        sizes: Sequence[int],
    ):
        B, T, self.H, self.K = q_BTHK.shape
        self.cfg, self.G, self.Z, self.itemsize = (
            Sizes(*sizes),
            k_BTGK.shape[2],
            B * T,
            q_BTHK.element_size(),
        )
        self.M, self.MP = self.H // self.G, triton.next_power_of_2(self.H // self.G)
        require(q_BTHK)
        require_sizes(self.M, self.K, self.itemsize, self.cfg)
        self.blocks = blocks(self.K, self.itemsize)
        self.documents = lay_out(q_BTHK, k_cmp_BNGK.shape[1], cu_seqlens, self.cfg)
        self.table = self.documents.table_D4
        self.rows, self.key_rows = (
            max(self.blocks.rows, self.MP),
            max(self.blocks.key_rows, self.MP),
        )
        self.tiles = self.documents.tiles(self.documents.tokens, self.rows // self.MP)
        self.block_tiles = self.documents.tiles(self.documents.tokens, self.cfg.sel_block)
        self.base_Z = self.table[:, 3].repeat_interleave(self.table[:, 1], output_size=self.Z)
        # one group of KV heads at a time bounds what a head needs; one chunk of its pairs bounds
        # the partial results
        self.chunk = max(1, PAIR_NUMBERS // (self.cfg.sel_count * self.M * self.K))
        self.group = min(self.G, max(1, self.chunk // self.Z))

    def head_groups(self):
        for g in range(0, self.G, self.group):
            yield slice(g, min(g + self.group, self.G))

    def chunks(self, heads: slice):
        queries = (heads.stop - heads.start) * self.Z
        for x in range(0, queries, self.chunk):
            yield slice(x, min(x + self.chunk, queries))

    @property
    def head(self):
        """Constants of kernels whose rows are (query, head)."""
        return dict(M=self.M, MP=self.MP, **self.dims)

    @property
    def dims(self):
        return dict(K=self.K, KP=max(16, triton.next_power_of_2(self.K)))

    @property
    def scales(self):
        return self.K**-0.5, self.K**-0.5 * LOG2E

    @property
    def compressed(self):
        """The range of keys of the compressed branch, as the kernels' constants."""
        return dict(STRIDE=self.cfg.cmp_stride, SPAN=self.cfg.cmp_block, WINDOW=FOREVER, KEYS=2)

    @property
    def window(self):
        return dict(STRIDE=1, SPAN=1, WINDOW=self.cfg.window, KEYS=0)

    @property
    def selection(self):
        return dict(L=self.cfg.sel_block, LP=max(16, triton.next_power_of_2(self.cfg.sel_block)))


def of_heads(x: Tensor, heads: slice) -> Tensor:
    """[B, T, H, ...] or [B, T, G, ...] from the group's first KV head on: a view whose pointer the
    kernels take.
    """
    return x.flatten(0, 1)[:, heads.start :]


# ---- forward


def ranged_forward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    heads_o: int,
    number: int,
    keys: dict,
):
    """Fills o and lse of `number` KV heads, whose first one the tensors start at."""
    ranged_forward_kernel[(len(call.tiles), number)](
        q,
        k,
        v,
        o,
        lse,
        call.tiles,
        call.table,
        call.scales[1],
        call.H,
        call.G,
        heads_o,
        **call.head,
        R=call.rows,
        S=call.blocks.keys,
        **keys,
        num_warps=8,
        num_stages=call.blocks.stages,
    )


def choose(call: Call, q: Tensor, k_cmp: Tensor, lse: Tensor, block_idx: Tensor):
    cfg, per, spread = (
        call.cfg,
        call.cfg.sel_block // call.cfg.cmp_stride,
        call.cfg.cmp_block // call.cfg.cmp_stride,
    )
    weights = tuple(
        min(i + 1, spread, per, per + spread - 1 - i) for i in range(per + spread - 1)
    )  # strides shared with the block
    stages = call.blocks.stages if len(weights) <= 5 else 1  # two stages hold 2 * 5 tiles of 16 KiB
    best = triton.next_power_of_2(max(2, cfg.sel_count - cfg.forced))
    choose_kernel[(len(call.tiles), call.G)](
        q,
        k_cmp,
        lse,
        block_idx,
        call.tiles,
        call.table,
        call.scales[1],
        call.H,
        call.G,
        **call.head,
        R=call.rows,
        JB=max(call.blocks.keys, best),
        STRIDE=cfg.cmp_stride,
        SPAN=cfg.cmp_block,
        PER=per,
        SPREAD=spread,
        WEIGHTS=weights,
        COUNT=cfg.sel_count,
        INIT=cfg.sel_init,
        LOCAL=cfg.sel_local,
        BEST=best,
        COLUMNS=triton.next_power_of_2(cfg.sel_count),
        num_warps=8,
        num_stages=stages,
    )


def gather(
    call: Call,
    x: Tensor,
    pairs: Pairs,
    queries: slice,
    o: Tensor,
    heads_o: int,
    part_lse: Tensor,
    lse: Tensor,
    merge: bool,
):
    """Sums each query's partial results, weighted by their log-sum-exps where `merge`."""
    count, R = queries.stop - queries.start, max(32, call.MP)
    gather_kernel[(triton.cdiv(count, R // call.MP),)](
        x,
        part_lse,
        pairs.place_P,
        o,
        lse,
        queries.start,
        count,
        call.cfg.sel_count,
        call.Z,
        call.H,
        heads_o,
        **call.head,
        R=R,
        MERGE=merge,
        num_warps=4,
        num_stages=2,
    )


def selected_forward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_idx: Tensor,
    o: Tensor,
    lse: Tensor,
    heads: slice,
    queries: slice,
):
    """Fills o and lse of a chunk of queries of a group of KV heads."""
    J, number = len(call.block_tiles), heads.stop - heads.start
    pairs = sort_pairs(block_idx[:, :number], call.base_Z, J, queries)
    piece, first = pairs.pieces(call.rows // call.MP)
    part = q.new_empty(len(pairs.order_P), call.M, call.K)
    part_lse = lse.new_empty(len(pairs.order_P), call.M)
    pair_forward_kernel[(len(piece),)](
        q,
        k,
        v,
        part,
        part_lse,
        piece,
        first,
        pairs.start_J1,
        pairs.order_P,
        call.block_tiles,
        call.table,
        queries.start,
        call.scales[1],
        call.cfg.sel_count,
        call.Z,
        call.H,
        call.G,
        J,
        J * number,
        **call.head,
        R=call.rows,
        **call.selection,
        num_warps=8,
        num_stages=1,
    )
    gather(call, part, pairs, queries, o, call.H, part_lse, lse, merge=True)


def window_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, heads: slice, lse: Tensor
) -> Tensor:
    """o_win of a group of KV heads, [Z, heads of the group, K]; fills lse."""
    number = heads.stop - heads.start
    o_win = q.new_empty(call.Z, number * call.M, call.K)
    ranged_forward(call, q, k, v, o_win, lse, number * call.M, number, call.window)
    return o_win


def per_row(kernel, call: Call, *tensors: Tensor, heads: slice):
    """Launches a kernel that treats every (token, head) of a group by itself."""
    number, R = (heads.stop - heads.start) * call.M, 16
    kernel[(triton.cdiv(call.Z * number, R),)](
        *tensors, call.Z * number, call.H, number, **call.dims, R=R, num_warps=4, num_stages=1
    )


def empty_outputs(q: Tensor, k_slc: Tensor, cfg: Sizes) -> tuple[Tensor, ...]:
    """o, o_cmp, o_slc, the log-sum-exps of both branches in base 2, and block_idx."""
    B, T, H, _ = q.shape
    dtype = torch.int16 if T <= 32768 * cfg.sel_block else torch.int32
    lse = q.new_empty((B, T, H), dtype=torch.float32)
    return (
        *(torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(3)),
        lse,
        torch.empty_like(lse),
        q.new_empty((B, T, k_slc.shape[2], cfg.sel_count), dtype=dtype),
    )


@torch.library.custom_op("longhaul::nsa_triton_forward", mutates_args=())
def nsa_triton_forward(
    q: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    cu_seqlens: Tensor | None,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(o, o_cmp, o_slc, their log-sum-exps, block_idx); only o has gradients."""
    call = Call(q, k_slc, k_cmp, cu_seqlens, sizes)
    inputs = [x.contiguous() for x in (q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates)]
    outputs = empty_outputs(q, k_slc, call.cfg)
    with torch.cuda.device_of(
        q
    ):  # triton launches on the current device, which need not be the tensors'; no effect on CPU
        everything = slice(0, call.G)
        q_all, _, _, k_cmp_all, v_cmp_all, *_ = (of_heads(x, everything) for x in inputs)
        _, o_cmp_all, _, lse_cmp_all, _, block_idx_all = (of_heads(x, everything) for x in outputs)
        ranged_forward(
            call,
            q_all,
            k_cmp_all,
            v_cmp_all,
            o_cmp_all,
            lse_cmp_all,
            call.H,
            call.G,
            call.compressed,
        )
        choose(call, q_all, k_cmp_all, lse_cmp_all, block_idx_all)
        lse_win = torch.empty_like(outputs[3])
        for heads in call.head_groups():
            of_queries = slice(heads.start * call.M, heads.stop * call.M)
            q_g, gates_g, o, o_cmp, o_slc, lse_slc, lse_w = (
                of_heads(x, of_queries)
                for x in (inputs[0], inputs[7], *outputs[:3], outputs[4], lse_win)
            )
            k_g, v_g, k_win_g, v_win_g, idx_g = (
                of_heads(x, heads) for x in (*inputs[1:3], *inputs[5:7], outputs[5])
            )
            for queries in call.chunks(heads):
                selected_forward(call, q_g, k_g, v_g, idx_g, o_slc, lse_slc, heads, queries)
            per_row(
                combine_kernel,
                call,
                o,
                o_cmp,
                o_slc,
                window_forward(call, q_g, k_win_g, v_win_g, heads, lse_w),
                gates_g,
                heads=heads,
            )
    return outputs


# ---- backward


class Rows(NamedTuple):
    """Tensors of a group of KV heads that every backward kernel reads, [Z, H, ...]."""

    q: Tensor
    do: Tensor
    lse_3: tuple[Tensor, Tensor, Tensor]
    delta: Tensor
    gates: Tensor

    def of(self, branch: int):
        """Branch 0 is the compressed one, 1 the selected one, 2 the window."""
        return self.q, self.do, self.lse_3[branch], self.delta[..., branch], self.gates[..., branch]


def ranged_backward(
    call: Call,
    rows: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    heads: slice,
    counts: list[int],
    keys: dict,
):
    """Adds to dq, fills dk and dv; `counts` keys per document."""
    number = heads.stop - heads.start
    ranged_dq_kernel[(len(call.tiles), number)](
        *rows,
        k,
        v,
        dq,
        call.tiles,
        call.table,
        *call.scales,
        call.H,
        call.G,
        number * call.M,
        **call.head,
        R=call.rows,
        S=call.blocks.keys,
        **keys,
        num_warps=8,
        num_stages=call.blocks.stages,
    )
    tiles = call.documents.tiles(counts, call.blocks.keys)
    if len(tiles):
        ranged_dkv_kernel[(len(tiles), number)](
            *rows,
            k,
            v,
            dk,
            dv,
            tiles,
            call.table,
            *call.scales,
            call.H,
            call.G,
            **call.head,
            R=call.key_rows,
            S=call.blocks.keys,
            **keys,
            num_warps=8,
            num_stages=call.blocks.stages,
        )


def selected_backward(
    call: Call,
    rows: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    block_idx: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    heads: slice,
    queries: slice,
):
    """Fills dq of a chunk of queries; adds to dk and dv [Z, KV heads of the group, K], fp32 because
    many sums meet there.
    """
    q, _, lse, *_ = rows
    J, number, L = len(call.block_tiles), heads.stop - heads.start, call.cfg.sel_block
    pairs, size = (
        sort_pairs(block_idx[:, :number], call.base_Z, J, queries),
        max(call.blocks.segment_rows, call.MP) // call.MP,
    )
    piece, first = pairs.pieces(size)
    part = q.new_empty(len(pairs.order_P), call.M, call.K)
    part_dk, part_dv = q.new_empty((2, len(piece), L, call.K), dtype=torch.float32)
    pair_backward_kernel[(len(piece),)](
        *rows,
        k,
        v,
        part,
        part_dk,
        part_dv,
        piece,
        first,
        pairs.start_J1,
        pairs.order_P,
        call.block_tiles,
        call.table,
        queries.start,
        *call.scales,
        call.cfg.sel_count,
        call.Z,
        call.H,
        call.G,
        J,
        J * number,
        **call.head,
        R=call.key_rows,
        SIZE=size,
        **call.selection,
        num_warps=8,
        num_stages=call.blocks.stages,
    )
    segment_sum_kernel[(J * number,)](
        part_dk,
        part_dv,
        dk,
        dv,
        first,
        call.block_tiles,
        call.table,
        number,
        J,
        **call.dims,
        **call.selection,
        num_warps=8,
        num_stages=1,
    )
    gather(call, part, pairs, queries, dq, number * call.M, lse, lse, merge=False)


def group_backward(
    call: Call,
    heads: slice,
    rows: Rows,
    kv: Sequence[Tensor],
    o_cmp: Tensor,
    o_slc: Tensor,
    block_idx: Tensor,
    grads: Sequence[Tensor],
):
    """Fills the gradients and the deltas of a group of KV heads; o_win is computed again, since
    saving it would cost 1 GiB.
    """
    k_slc, v_slc, k_cmp, v_cmp, k_win, v_win = kv
    dq, dk_slc, dv_slc, dk_cmp, dv_cmp, dk_win, dv_win = grads
    number = heads.stop - heads.start
    o_win = window_forward(call, rows.q, k_win, v_win, heads, rows.lse_3[2])
    per_row(delta_kernel, call, rows.do, o_cmp, o_slc, o_win, rows.delta, heads=heads)
    del o_win
    total = rows.q.new_empty((call.Z, number * call.M, call.K), dtype=torch.float32)
    dk, dv = total.new_zeros((2, call.Z, number, call.K))
    for queries in call.chunks(heads):
        selected_backward(call, rows.of(1), k_slc, v_slc, block_idx, total, dk, dv, heads, queries)
    dk_slc[:, :number], dv_slc[:, :number] = dk, dv
    ranged_backward(
        call,
        rows.of(0),
        k_cmp,
        v_cmp,
        total,
        dk_cmp,
        dv_cmp,
        heads,
        call.documents.compressed,
        call.compressed,
    )
    ranged_backward(
        call,
        rows.of(2),
        k_win,
        v_win,
        total,
        dk_win,
        dv_win,
        heads,
        call.documents.tokens,
        call.window,
    )
    dq[:, : number * call.M] = total


@torch.library.custom_op("longhaul::nsa_triton_backward", mutates_args=())
def nsa_triton_backward(
    do: Tensor,
    q: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    o_cmp: Tensor,
    o_slc: Tensor,
    lse_cmp: Tensor,
    lse_slc: Tensor,
    block_idx: Tensor,
    cu_seqlens: Tensor | None,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, the six K/V and the gates."""
    call = Call(q, k_slc, k_cmp, cu_seqlens, sizes)
    do, q, gates, *kv = (
        x.contiguous() for x in (do, q, gates, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win)
    )
    grads = [torch.empty_like(x) for x in (q, *kv)]
    delta, lse_win = q.new_empty(gates.shape, dtype=torch.float32), torch.empty_like(lse_cmp)
    with torch.cuda.device_of(q):
        for heads in call.head_groups():
            of_queries = slice(heads.start * call.M, heads.stop * call.M)
            q_g, do_g, cmp_g, slc_g, win_g, delta_g, gates_g, o_cmp_g, o_slc_g, dq_g = (
                of_heads(x, of_queries)
                for x in (q, do, lse_cmp, lse_slc, lse_win, delta, gates, o_cmp, o_slc, grads[0])
            )
            *kv_g, idx_g = (of_heads(x, heads) for x in (*kv, block_idx))
            grads_g = dq_g, *(of_heads(x, heads) for x in grads[1:])
            rows = Rows(q_g, do_g, (cmp_g, slc_g, win_g), delta_g, gates_g)
            group_backward(call, heads, rows, kv_g, o_cmp_g, o_slc_g, idx_g, grads_g)
    return *grads, delta.to(gates.dtype)


@nsa_triton_forward.register_fake
def _(q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, cu_seqlens, sizes):
    return empty_outputs(q, k_slc, Sizes(*sizes))


@nsa_triton_backward.register_fake
def _(
    do,
    q,
    k_slc,
    v_slc,
    k_cmp,
    v_cmp,
    k_win,
    v_win,
    gates,
    o_cmp,
    o_slc,
    lse_cmp,
    lse_slc,
    block_idx,
    cu_seqlens,
    sizes,
):
    return tuple(x.new_empty(x.shape) for x in (q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:9], *output[1:])
    ctx.sizes = inputs[9]


def _backward(ctx, do, *_):
    *inputs, cu_seqlens, o_cmp, o_slc, lse_cmp, lse_slc, block_idx = ctx.saved_tensors
    return (
        *nsa_triton_backward(
            do, *inputs, o_cmp, o_slc, lse_cmp, lse_slc, block_idx, cu_seqlens, ctx.sizes
        ),
        None,
        None,
    )


nsa_triton_forward.register_autograd(_backward, setup_context=_save)


# ---- the door


def nsa_attention(
    q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, cfg, cu_seqlens=None, return_parts=False
):
    """Native Sparse Attention: o = g_cmp o_cmp + g_slc o_slc + g_win o_win; shapes, results and
    errors of nsa.engine.nsa_attention.

    Needs at most 64 query heads per KV head, head dim 256, sel_block 128 and 32 KiB of keys per
    block. Keep cu_seqlens on the host. Raises ValueError where the kernels cannot run.
    """
    return attend(
        nsa_triton_forward,
        (q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win),
        gates,
        cfg,
        cu_seqlens,
        return_parts,
    )
