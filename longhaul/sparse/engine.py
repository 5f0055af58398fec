"""Exact attention over chosen blocks of keys, one engine for every way to choose them, as custom
operators: linear in memory, and its time is that of what is read.

A call is cut into streams, and a stream into chunks of queries. A stream is one document of one row
of the batch under one KV head, with the M query heads that share it. Streams write to disjoint
memory, so that they can run at the same time.

The queries come to the blocks, because gathering keys per query would move n blocks for each:
(query, block) pairs are sorted by block and cut into tiles of R pairs. Only a query's own block has
keys after it; all others need no mask. Each pair has a slot in a tile for its result, and the slots
of a query merge exactly (tiles.py).

On a CPU whose fp32 products are faster than its low-precision ones, keys, values and queries are
cast once per stream. Tensors on CUDA take Triton kernels (triton/), or these same operators.

Letters: B rows, T queries (the last T of S positions), H query heads, G KV heads, M = H/G, K head
dim, l tokens of a block, J blocks of a document, n chosen blocks of a query, C queries of a chunk,
N tiles, R queries of a tile, or its matrix rows (query, head), S also the slots of all tiles.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from base import machine
from base.machine import rounds
from longhaul.sparse.plain import check_block_inputs, check_engine_dtype, documents
from longhaul.sparse.streams import Stream, each_stream, starts
from longhaul.sparse.tiles import (
    BackwardInputs,
    Buffers,
    add_tiles,
    gather_sum,
    merge_slots,
    tile_backward,
    tile_forward,
)
from longhaul.sparse.triton import runs_triton

# Pairs of a chunk, at least: their results take 16 MiB for 4 heads of 128 in bf16. A longer stream
# has chunks of as many pairs as it has tokens: l pairs per block, whose tiles are full, and results
# as large as the stream's queries.
CHUNK_PAIRS = 2**14
TILES_AT_ONCE = 64  # tiles whose logits exist at the same time: 64*64*64 fp32 = 1 MiB
TILE_ROWS = 64  # pairs x heads of a tile: fewer waste the matrix unit, more are padding
# The number of tiles is a multiple of this: a library keeps every shape that it saw, the heap every
# size. At 32k tokens in bf16, forward and backward add 266 MiB; any number of tiles added 365.
TILES_STEP = 16


def in_blocks(
    x_SK: Tensor,
    l: int,
    dtype: torch.dtype,
) -> Tensor:
    """[J,l,K], the last block padded with zeros; contiguous, because every chunk reads it, and x
    itself if it is that already.
    """
    S, K = x_SK.shape
    if S % l == 0 and x_SK.dtype == dtype and x_SK.is_contiguous():
        return x_SK.view(-1, l, K)
    x_JlK = x_SK.new_empty(-(-S // l), l, K, dtype=dtype)
    flat = x_JlK.view(-1, K)
    flat[:S] = x_SK
    flat[S:] = 0
    return x_JlK


# ---- chunks of queries, and their tiles


class Group(NamedTuple):
    """A few tiles, whose logits exist at the same time."""

    block_N: Tensor
    slots: slice
    query_S: Tensor  # the query of each slot, C for padding
    hidden_NRS: Tensor | None  # keys that are after the query, if a block is its own one

    def rows(self, x_CM_: Tensor) -> Tensor:
        """[N,R*M,...] of the queries and heads of the tiles."""
        rows_SM_ = x_CM_.index_select(0, self.query_S)
        return rows_SM_.view(len(self.block_N), -1, *x_CM_.shape[2:])

    def keys(self, kv: Sequence[Tensor]) -> list[Tensor]:
        """[N,l,K] of each tensor in blocks."""
        return [x_JlK.index_select(0, self.block_N) for x_JlK in kv]


class Tiles(NamedTuple):
    """The tiles of a chunk. The last slot is that of no block, and in no tile."""

    slot_Cn: Tensor  # the slot of each chosen block of a query
    slots: int
    groups: list[Group]


class Tiling(NamedTuple):
    """How the T queries of a stream are cut, of which the first has the position `first`."""

    T: int
    M: int
    n: int
    l: int
    first: int

    @property
    def pairs(self) -> int:
        """(query, block) pairs of a tile."""
        return max(1, TILE_ROWS // self.M)

    def chunks(self) -> list[slice]:
        """Chunks of queries that end where a block ends."""
        size = -(-max(CHUNK_PAIRS, self.T) // (self.n * self.l)) * self.l
        found = starts(-(self.first % self.l), self.T, size)
        return [slice(max(0, start), min(start + size, self.T)) for start in found]

    def own_blocks(self, queries: slice) -> range:
        """The blocks that the queries are in."""
        low, high = self.first + queries.start, self.first + queries.stop
        return range(low // self.l, -(-high // self.l))

    def most_tiles(self, queries: slice) -> int:
        """Tiles that the queries can need."""
        own = self.own_blocks(queries)
        pairs = (queries.stop - queries.start) * min(self.n, own.stop)
        return pairs // self.pairs + min(pairs, len(own) + own.stop)

    def slots(self, queries: slice) -> int:
        """Slots of all tiles, and the one of no block."""
        return self.most_tiles(queries) * self.pairs + 1

    def tiles(
        self,
        queries: slice,
        chosen_Cn: Tensor,
    ) -> Tiles:
        """Sorts the chosen blocks of a chunk and cuts them into tiles. The number of slots does not
        depend on the values, nor does the number of tiles whose logits exist at the same time.
        """
        C, device = len(chosen_Cn), chosen_Cn.device
        own = self.own_blocks(queries)
        J, low = own.stop, self.first + queries.start
        position_C = torch.arange(low, low + C, device=device)

        # own blocks are sorted before the others, as the only ones that have a mask
        is_own_Cn = chosen_Cn == position_C[:, None] // self.l
        place_Cn = torch.where(is_own_Cn, chosen_Cn.long(), chosen_Cn.long() + J)
        place_Cn.masked_fill_(chosen_Cn < 0, 2 * J)
        slot_Cn, query_S, end_J = self._sorted_slots(place_Cn, 2 * J, self.slots(queries))
        block_N = _tile_places(end_J, self.most_tiles(queries)) % J

        masked = len(own) * -(-self.l // self.pairs)
        groups = []
        for x in rounds(range(0, len(block_N), TILES_AT_ONCE)):
            few_N = block_N[x : x + TILES_AT_ONCE]
            slots = slice(x * self.pairs, (x + len(few_N)) * self.pairs)
            hidden_NRl = None
            if x < masked:
                hidden_NRl = self._later_keys(few_N, query_S[slots] + low)
            groups.append(Group(few_N, slots, query_S[slots], hidden_NRl))
        return Tiles(slot_Cn, len(query_S), groups)

    def _sorted_slots(
        self,
        place_Cn: Tensor,
        places: int,
        slots: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The slot of each pair, sorted by place, and the last one for pairs behind all places; the
        query of each slot; the tile behind the last one of each place.
        """
        C, n = place_Cn.shape
        device = place_Cn.device
        # stable: sums over a block's pairs have the same order every time
        sorted_P, order_P = place_Cn.flatten().sort(stable=True)
        start_J = torch.searchsorted(sorted_P, torch.arange(places + 1, device=device))
        end_J = ((start_J.diff() + self.pairs - 1) // self.pairs).cumsum(0)
        shift_J = F.pad(end_J, (1, 0)) * self.pairs - start_J
        slot_P = torch.arange(C * n, device=device) + shift_J[sorted_P]
        slot_P.masked_fill_(sorted_P == places, slots - 1)

        query_S = torch.full((slots,), C, device=device)
        query_S.index_copy_(0, slot_P, order_P // n)
        query_S[-1] = C
        slot_Cn = torch.empty_like(order_P).index_copy_(0, order_P, slot_P).view(C, n)
        return slot_Cn, query_S, end_J

    def _later_keys(
        self,
        block_N: Tensor,
        position_S: Tensor,
    ) -> Tensor:
        """[N,R*M,l]: which keys of tiles are after the query."""
        after_N1 = position_S.view(len(block_N), -1) - block_N[:, None] * self.l
        key_l = torch.arange(self.l, device=block_N.device)
        return (key_l > after_N1.unsqueeze(-1)).repeat_interleave(self.M, 1)


def _tile_places(end_J: Tensor, most: int) -> Tensor:
    """The place of each tile."""
    tile_N = torch.arange(tile_count(end_J, most), device=end_J.device)
    return torch.searchsorted(end_J, tile_N, right=True).clamp_max_(len(end_J) - 1)


def tile_count(end_J: Tensor, most: int) -> int:
    """How many tiles there are: on CUDA as many as there may be, so that the host never waits for
    the device.
    """
    if end_J.is_cuda:
        return most
    rounded = -(-int(end_J[-1]) // TILES_STEP) * TILES_STEP
    return min(most, max(rounded, TILES_AT_ONCE))


def with_no_query(x_CM_: Tensor, value: float = 0.0) -> Tensor:
    """[C+1,M,...] with the value in query C, which padding slots have."""
    other_dims = (0, 0) * (x_CM_.ndim - 1)
    return F.pad(x_CM_, (*other_dims, 0, 1), value=value)


# ---- one stream


class StreamAttention:
    """Attention of one stream, chunk by chunk, in memory that all chunks use one after another: new
    memory of this size is new pages, and writing these for the first time takes as long as a
    product.
    """

    def __init__(
        self,
        kv: Sequence[Tensor],
        q_TMK: Tensor,
        n: int,
        first: int = 0,
    ):
        """kv: in blocks [J,l,K], in the dtype of products."""
        T, M, K = q_TMK.shape
        self.kv = kv
        self.tiling = Tiling(T, M, n, kv[0].shape[1], first)
        self.chunks = self.tiling.chunks()
        self.buffers = Buffers(kv[0])
        slots = max(map(self.tiling.slots, self.chunks))
        self.results_SMK = kv[0].new_empty(slots, M, K)

    def forward(
        self,
        queries: slice,
        q_CMK: Tensor,
        chosen_Cn: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(o_CMK, lse_CM) of a chunk."""
        M = q_CMK.shape[1]
        tiles = self.tiling.tiles(queries, chosen_Cn)
        o_SMK = self.results_SMK[: tiles.slots]
        lse_SM = q_CMK.new_empty(tiles.slots, M, dtype=torch.float32)
        o_SMK[-1] = 0
        lse_SM[-1] = -torch.inf

        q_CMK = with_no_query(q_CMK)
        for group in tiles.groups:
            q_NRK = group.rows(q_CMK)
            out_NRK = o_SMK[group.slots].view(q_NRK.shape)
            inputs = q_NRK, *group.keys(self.kv), self.buffers, group.hidden_NRS
            _, lse_NR = tile_forward(*inputs, out_NRK)
            lse_SM[group.slots] = lse_NR.view(-1, M)
        return merge_slots(o_SMK, lse_SM, tiles.slot_Cn)

    def backward(
        self,
        queries: slice,
        inputs: BackwardInputs,
        chosen_Cn: Tensor,
        dkv: Sequence[Tensor],
    ) -> Tensor:
        """dq_CMK of a chunk; adds to dk and dv. dq and dk lack the factor 1 / sqrt(K)."""
        tiles = self.tiling.tiles(queries, chosen_Cn)
        dq_SMK = self.results_SMK[: tiles.slots]
        dq_SMK[-1] = 0
        # with lse = inf, exp(-inf) = 0, and padding adds nothing
        padding = 0.0, 0.0, torch.inf, 0.0
        inputs = BackwardInputs(*map(with_no_query, inputs, padding))
        for group in tiles.groups:
            rows = BackwardInputs(*map(group.rows, inputs))
            out_NRK = dq_SMK[group.slots].view(rows.q.shape)
            others = *group.keys(self.kv), self.buffers, group.hidden_NRS
            _, *grads = tile_backward(rows, *others, out_NRK)
            for total_JlK, part_NlK in zip(dkv, grads, strict=True):
                add_tiles(total_JlK, group.block_N, part_NlK)
            del rows, others, grads, part_NlK  # before those of the next group exist
        return gather_sum(dq_SMK, tiles.slot_Cn)


def _few_queries(
    q_TMK: Tensor,
    kv: Sequence[Tensor],
    chosen_Tn: Tensor,
    l: int,
    products: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(o_TMK, lse_TM) of the last T of S positions, whose chosen keys R = n*l are gathered: for
    fewer than one read per key, as in decoding, where all keys would be copied otherwise.
    """
    S, T = len(kv[0]), len(q_TMK)
    device = q_TMK.device
    position_l = torch.arange(l, device=device)
    key_TR = (chosen_Tn.long().unsqueeze(-1) * l + position_l).flatten(1)
    t_T1 = torch.arange(S - T, S, device=device)[:, None]
    hidden_TR = (key_TR < 0) | (key_TR > t_T1)

    index_TR = key_TR.clamp_(0, S - 1)
    kv = [x_SK[index_TR].to(products) for x_SK in kv]
    q_TMK = q_TMK.to(products)
    o_TMK, lse_TM = tile_forward(q_TMK, *kv, Buffers(q_TMK), hidden_TR[:, None])
    blind_T1 = hidden_TR.all(-1, keepdim=True)
    o_TMK = o_TMK.masked_fill_(blind_T1.unsqueeze(-1), 0)
    return o_TMK, lse_TM.masked_fill_(blind_T1, -torch.inf)


# ---- forward and backward of a call


def _stream_attention(
    q_TMK: Tensor,
    kv: Sequence[Tensor],
    chosen_Tn: Tensor,
    block: int,
    products: torch.dtype,
) -> StreamAttention:
    """Attention of the last T of S positions."""
    first = len(kv[0]) - len(q_TMK)
    kv = [in_blocks(x_SK, block, products) for x_SK in kv]
    return StreamAttention(kv, q_TMK, chosen_Tn.shape[1], first)


def _empty_outputs(q_BTHK: Tensor) -> tuple[Tensor, Tensor]:
    o_BTHK = q_BTHK.new_empty(q_BTHK.shape)
    return o_BTHK, q_BTHK.new_empty(q_BTHK.shape[:3], dtype=torch.float32)


@torch.library.custom_op("longhaul::block_sparse_forward", mutates_args=())
def block_sparse_forward(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    chosen_BTGn: Tensor,
    cu_seqlens: Tensor | None,
    block: int,
    products: torch.dtype,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """(o_BTHK, lse_BTH); `products` is the dtype in which products are computed; `fused`: by the
    Triton kernels.
    """
    if fused:
        from longhaul.sparse.triton import blocks

        # Triton launches on the current device, which may differ from the tensors'
        with torch.cuda.device_of(q_BTHK):
            return blocks.forward(q_BTHK, k_BSGK, v_BSGK, chosen_BTGn, cu_seqlens, block)
    outputs = _empty_outputs(q_BTHK)
    n = chosen_BTGn.shape[3]

    def forward(stream: Stream) -> None:
        q_TMK, o_TMK, lse_TM = (x[stream.heads] for x in (q_BTHK, *outputs))
        kv = k_BSGK[stream.keys], v_BSGK[stream.keys]
        chosen_Tn = chosen_BTGn[stream.tokens]
        inputs = q_TMK, kv, chosen_Tn, block, products
        if len(q_TMK) * n * block < len(kv[0]):
            o_TMK[:], lse_TM[:] = _few_queries(*inputs)
            return
        attention = _stream_attention(*inputs)
        for few in attention.chunks:
            q_CMK = q_TMK[few].to(products).contiguous()
            o_TMK[few], lse_TM[few] = attention.forward(few, q_CMK, chosen_Tn[few])

    spans = documents(cu_seqlens, q_BTHK.shape[1], k_BSGK.shape[1])
    each_stream(forward, q_BTHK, k_BSGK, spans)
    return outputs


@torch.library.custom_op("longhaul::block_sparse_backward", mutates_args=())
def block_sparse_backward(
    do_BTHK: Tensor,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    chosen_BTGn: Tensor,
    o_BTHK: Tensor,
    lse_BTH: Tensor,
    dlse_BTH: Tensor | None,
    cu_seqlens: Tensor | None,
    block: int,
    products: torch.dtype,
    fused: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the gradients of o and of lse."""
    if fused:
        from longhaul.sparse.triton import blocks

        with torch.cuda.device_of(q_BTHK):
            delta_BTH = blocks.row_products(do_BTHK.contiguous(), o_BTHK)
            if dlse_BTH is not None:
                delta_BTH -= dlse_BTH
            inputs = do_BTHK, q_BTHK, k_BSGK, v_BSGK, chosen_BTGn, lse_BTH, delta_BTH
            return blocks.backward(*inputs, cu_seqlens, block)
    grads = tuple(x.new_empty(x.shape) for x in (q_BTHK, k_BSGK, v_BSGK))
    scale = q_BTHK.shape[3] ** -0.5
    if dlse_BTH is None:
        dlse_BTH = lse_BTH.new_zeros(()).expand_as(lse_BTH)

    def backward(stream: Stream) -> None:
        given = do_BTHK, q_BTHK, o_BTHK, lse_BTH, dlse_BTH, grads[0]
        do_TMK, q_TMK, o_TMK, lse_TM, dlse_TM, dq_TMK = (x[stream.heads] for x in given)
        chosen_Tn = chosen_BTGn[stream.tokens]
        kv = k_BSGK[stream.keys], v_BSGK[stream.keys]
        attention = _stream_attention(q_TMK, kv, chosen_Tn, block, products)
        # fp32, because each element is a sum of many
        dkv = [torch.zeros_like(x, dtype=torch.float32) for x in attention.kv]
        for few in attention.chunks:
            do_CMK, lse_CM = do_TMK[few], lse_TM[few]
            inputs = BackwardInputs(
                q=q_TMK[few].to(products).contiguous(),
                do=do_CMK.to(products).contiguous(),
                # without a key lse is -inf; with inf, p is 0
                lse=lse_CM.masked_fill(lse_CM == -torch.inf, torch.inf),
                # d lse / d logit is p, so that the gradient of lse lowers delta
                delta=(do_CMK.float() * o_TMK[few]).sum(-1) - dlse_TM[few],
            )
            dq_CMK = attention.backward(few, inputs, chosen_Tn[few], dkv)
            dq_TMK[few] = dq_CMK.float().mul_(scale)
        dkv[0].mul_(scale)
        for grad_BSGK, sum_JlK in zip(grads[1:], dkv, strict=True):
            grad_BSGK[stream.keys] = sum_JlK.flatten(0, 1)[: len(kv[0])]

    spans = documents(cu_seqlens, q_BTHK.shape[1], k_BSGK.shape[1])
    each_stream(backward, q_BTHK, k_BSGK, spans)
    return grads


# ---- the operators of PyTorch


@block_sparse_forward.register_fake
def _(q_BTHK, *_):
    return _empty_outputs(q_BTHK)


@block_sparse_backward.register_fake
def _(
    do_BTHK,
    q_BTHK,
    k_BSGK,
    v_BSGK,
    *_,
):
    return tuple(x.new_empty(x.shape) for x in (q_BTHK, k_BSGK, v_BSGK))


def _save(
    ctx,
    inputs,
    output,
):
    ctx.set_materialize_grads(False)
    *tensors, block, products, fused = inputs
    ctx.numbers = block, products, fused
    ctx.save_for_backward(*tensors, *output)


def _backward(
    ctx,
    do_BTHK,
    dlse_BTH,
):
    q, k, v, chosen, cu_seqlens, *results = ctx.saved_tensors
    if do_BTHK is None:
        do_BTHK = torch.zeros_like(results[0])
    saved = do_BTHK, q, k, v, chosen, *results
    grads = block_sparse_backward(*saved, dlse_BTH, cu_seqlens, *ctx.numbers)
    return *grads, None, None, None, None, None


block_sparse_forward.register_autograd(_backward, setup_context=_save)


# ---- the entry point


def block_sparse_attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    chosen_BTGn: Tensor,
    block: int = 64,
    cu_seqlens: Tensor | None = None,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(o, lse): exact attention of each query over the chosen blocks of its KV group.

        lse = log sum_s exp(q k_s / sqrt(K)),  o = sum_s exp(q k_s / sqrt(K) - lse) v_s

    over the keys s of the chosen blocks that are not after the query.

    q [B,T,H,K], the last T of S positions; k and v [B,S,G,K], all of one dtype: fp32, bf16 or fp16.
    chosen, int32 [B,T,G,n]: indices of blocks of `block` keys of the query's document, each at most
    once, in any order; -1 = unused. The own block is read if it is chosen; a later one must not be.
    cu_seqlens: int32 or int64 [documents + 1], the boundaries of a row's documents, best on the
    host, with T = S; None if each row is one document. The blocks of a document begin with it.

    kernels: "auto" takes Triton for tensors on CUDA that it serves, "triton" asks for it, and
    "torch" does without.

    Returns o [B,T,H,K] and the natural lse [B,T,H] in fp32, both with gradients; 0 and -inf for a
    query that reads no key. Raises ValueError for shapes and dtypes that do not fit.
    """
    check_block_inputs(q_BTHK, k_BSGK, v_BSGK, chosen_BTGn, block, cu_seqlens)
    check_engine_dtype(q_BTHK)
    products = machine.product_dtype(q_BTHK)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.long()
    fused = runs_triton(q_BTHK, q_BTHK.shape[2] // k_BSGK.shape[2], block, kernels)
    inputs = q_BTHK, k_BSGK, v_BSGK, chosen_BTGn, cu_seqlens, block, products
    return block_sparse_forward(*inputs, fused)
