"""Exact attention over chosen blocks of keys, one engine for every way to choose them, as custom
operators: linear in memory, and its time is that of what is read.

A call is cut into streams, and a stream into chunks of queries. A stream is one document of one row
of the batch under one KV head, with the M query heads that share it. Streams write to disjoint
memory, so that they can run at the same time.

The queries come to the blocks, because gathering keys per query would move n blocks for each:
- the own block is one dense tile for all queries of a block, with the causal mask;
- all other chosen blocks end before their queries. They are (query, block) pairs, sorted by block
  and cut into tiles without a mask (nsa/selected.py).
The log-sum-exp of each part says which share of the whole softmax it holds, so that the parts merge
exactly. There are no atomics: sums run over sorted segments, in a fixed order.

On a CPU whose fp32 products are faster than its low-precision ones, keys, values and queries are
cast once per stream. Tensors on CUDA take Triton kernels (triton/), or these same operators.

Letters: B rows, T queries (the last T of S positions), H query heads, G KV heads, M = H/G, K head
dim, l tokens of a block, J blocks of a document, n chosen blocks of a query, C queries of a chunk,
N tiles, R matrix rows of a tile (query, head), or its pairs, S also the slots of all tiles.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from base.machine import platform
from longhaul.sparse.nsa.branches import Buffers, product_fp32, starts
from longhaul.sparse.nsa.selected import (
    TILE_ROWS,
    BackwardInputs,
    Tiles,
    cut_tiles,
    merge_parts,
    pad_queries,
    queries_of,
    slot_count,
    tile_backward,
    tile_forward,
    tile_groups,
    tiles_backward,
    tiles_forward,
)
from longhaul.sparse.nsa.streams import Stream, each_stream
from longhaul.sparse.plain import check_block_inputs, check_engine_dtype, documents
from longhaul.sparse.triton import kernels_for

# Pairs of a chunk, at least: their results take 32 MiB for 4 heads of 128 in bf16. A longer stream
# has chunks of as many pairs as it has tokens: l pairs per block, whose tiles are full, and results
# as large as the stream's queries.
CHUNK_PAIRS = 2**15
OWN_AT_ONCE = 8  # dense tiles whose logits exist at the same time


class KeysValues(NamedTuple):
    """Keys and values of one stream in blocks, or their gradients."""

    k_JlK: Tensor
    v_JlK: Tensor


# ---- streams and chunks


def _streams(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    cu_seqlens: Tensor | None,
) -> list[Stream]:
    """All streams of a call; `blocks` of a stream is where its keys are."""
    B, T, H, _ = q_BTHK.shape
    _, S, G, _ = k_BSGK.shape
    M = H // G
    streams = []
    for b in range(B):
        for queries, keys in documents(cu_seqlens, T, S):
            for g in range(G):
                heads = slice(g * M, g * M + M)
                streams.append(Stream((b, queries, heads), (b, queries, g), (b, keys, g)))
    return streams


def in_blocks(x_SK: Tensor, l: int, dtype: torch.dtype) -> Tensor:
    """[J,l,K], the last block padded with zeros; contiguous, because every chunk reads it."""
    S, K = x_SK.shape
    x_JlK = x_SK.new_empty(-(-S // l), l, K, dtype=dtype)
    flat = x_JlK.view(-1, K)
    flat[:S] = x_SK
    flat[S:] = 0
    return x_JlK


class Chunk(NamedTuple):
    """Some queries of a stream, and the own tiles whose rows they are."""

    queries: slice
    low: int  # position of the first query
    own: slice  # the blocks that they are in
    rows: int  # queries of an own tile
    before: int  # rows of the first own tile that are before the first query
    pairs: int  # at most so many with blocks before the own one


def cut_chunks(
    T: int,
    first: int,
    n: int,
    l: int,
) -> list[Chunk]:
    """The queries of a stream, of which the first has position `first`, in chunks that end where
    a block ends.
    """
    size = -(-max(CHUNK_PAIRS, T) // (n * l)) * l
    chunks = []
    for start in starts(-(first % l), T, size):
        queries = slice(max(0, start), min(start + size, T))
        chunks.append(_chunk(queries, first, n, l))
    return chunks


def _chunk(
    queries: slice,
    first: int,
    n: int,
    l: int,
) -> Chunk:
    low, high = first + queries.start, first + queries.stop
    own = slice(low // l, -(-high // l))
    pairs = 0
    for j in range(own.start, own.stop):
        in_block = min(high, (j + 1) * l) - max(low, j * l)
        pairs += in_block * min(n, j)
    if own.stop - own.start == 1:  # as in decoding: no more rows than queries
        return Chunk(queries, low, own, rows=high - low, before=0, pairs=pairs)
    return Chunk(queries, low, own, rows=l, before=low % l, pairs=pairs)


class Pairs(NamedTuple):
    """What the queries of a chunk read: their own blocks, and the tiles of all other pairs."""

    chunk: Chunk
    has_own_C: Tensor  # which queries have chosen their own block
    is_own_Cn: Tensor
    hidden_Rl: Tensor  # keys of an own tile that are after the query
    tiles: Tiles

    def own_rows(self, x_CM_: Tensor, value: float = 0.0) -> tuple[Tensor, ...]:
        """[N,R,...] of the own tiles, a few at a time, with the value in rows without a query."""
        M, *rest = x_CM_.shape[1:]
        before, rows = self.chunk.before, self.chunk.rows
        behind = -(before + len(x_CM_)) % rows
        if before or behind:
            other_dims = (0, 0) * (x_CM_.ndim - 1)
            x_CM_ = F.pad(x_CM_, (*other_dims, before, behind), value=value)
        return x_CM_.view(-1, rows * M, *rest).split(OWN_AT_ONCE)

    def own_blocks(self, x_JlK: Tensor) -> tuple[Tensor, ...]:
        """Keys or values of the own tiles, a few at a time."""
        return x_JlK[self.chunk.own].split(OWN_AT_ONCE)

    def own_queries(self, parts_NR_: list[Tensor], M: int) -> Tensor:
        """[C,M,...] of the results of the own tiles."""
        x_NR_ = torch.cat(parts_NR_)
        first, C = self.chunk.before, len(self.has_own_C)
        return x_NR_.view(-1, M, *x_NR_.shape[2:])[first : first + C]


def sort_pairs(
    chunk: Chunk,
    chosen_Cn: Tensor,
    J: int,
    M: int,
    l: int,
) -> Pairs:
    """Sorts the chosen blocks of a chunk."""
    C = len(chosen_Cn)
    device = chosen_Cn.device
    own_C1 = torch.arange(chunk.low, chunk.low + C, device=device)[:, None] // l
    is_own_Cn = chosen_Cn == own_C1
    no_pair_Cn = is_own_Cn | (chosen_Cn < 0)
    block_Cn = chosen_Cn.long().masked_fill_(no_pair_Cn, J)

    offset = (chunk.low - chunk.before) % l
    query_R = torch.arange(offset, offset + chunk.rows, device=device)
    hidden_Rl = torch.arange(l, device=device) > query_R[:, None]
    return Pairs(
        chunk,
        has_own_C=is_own_Cn.any(1),
        is_own_Cn=is_own_Cn,
        hidden_Rl=hidden_Rl.repeat_interleave(M, 0),
        tiles=cut_tiles(block_Cn, J, _tile_pairs(chunk, M), chunk.pairs),
    )


def _tile_pairs(chunk: Chunk, M: int) -> int:
    """Pairs of a tile: a block has at most one of each query."""
    queries = chunk.queries.stop - chunk.queries.start
    return max(1, min(TILE_ROWS // M, queries))


def _slot_results(
    q_TMK: Tensor,
    chunks: list[Chunk],
    J: int,
    dtype: torch.dtype,
) -> Tensor:
    """Memory for the results of the slots, which all chunks use one after another: new memory of
    this size is new pages, and writing these for the first time takes as long as a product.
    """
    _, M, K = q_TMK.shape
    slots = max(slot_count(chunk.pairs, J, _tile_pairs(chunk, M)) for chunk in chunks)
    return q_TMK.new_empty(slots, M, K, dtype=dtype)


# ---- forward


def _forward_stream(
    q_TMK: Tensor,
    kv: KeysValues,
    chosen_Tn: Tensor,
    first: int,
    o_TMK: Tensor,
    lse_TM: Tensor,
) -> None:
    """Fills o and lse of one stream, whose first query has the position `first`."""
    T, M, _ = q_TMK.shape
    J, l, _ = kv.k_JlK.shape
    buffers = Buffers(kv.k_JlK)
    chunks = cut_chunks(T, first, chosen_Tn.shape[1], l)
    results_SMK = _slot_results(q_TMK, chunks, J, buffers.like.dtype)
    for chunk in chunks:
        queries = chunk.queries
        q_CMK = q_TMK[queries].to(kv.k_JlK.dtype).contiguous()
        pairs = sort_pairs(chunk, chosen_Tn[queries], J, M, l)
        own = _own_forward(q_CMK, kv, pairs, buffers)
        o_SMK = results_SMK[: len(pairs.tiles.query_S)]
        lse_SM = tiles_forward(q_CMK, *kv, pairs.tiles, buffers, o_SMK)
        merged = merge_parts(*own, o_SMK, lse_SM, pairs.tiles.slot_CP)
        o_TMK[queries], lse_TM[queries] = merged


def _own_forward(
    q_CMK: Tensor,
    kv: KeysValues,
    pairs: Pairs,
    buffers: Buffers,
) -> tuple[Tensor, Tensor]:
    """(o_CMK, lse_CM) over the own blocks."""
    M = q_CMK.shape[1]
    groups = zip(pairs.own_rows(q_CMK), *map(pairs.own_blocks, kv), strict=True)
    outs = [tile_forward(*group, buffers, pairs.hidden_Rl) for group in groups]
    o_CMK = pairs.own_queries([o for o, _ in outs], M)
    lse_CM = pairs.own_queries([lse for _, lse in outs], M)
    return o_CMK, lse_CM.masked_fill(~pairs.has_own_C[:, None], -torch.inf)


def _few_queries(
    q_TMK: Tensor,
    k_SK: Tensor,
    v_SK: Tensor,
    chosen_Tn: Tensor,
    l: int,
    products: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(o_TMK, lse_TM) of the last T of S positions, whose chosen keys R = n*l are gathered: for
    fewer than one read per key, as in decoding, where all keys would be copied otherwise.
    """
    S, K = k_SK.shape
    T = len(q_TMK)
    device = q_TMK.device
    position_l = torch.arange(l, device=device)
    key_TR = (chosen_Tn.long().unsqueeze(-1) * l + position_l).flatten(1)
    t_T1 = torch.arange(S - T, S, device=device)[:, None]
    hidden_TR = (key_TR < 0) | (key_TR > t_T1)

    index = key_TR.clamp_(0, S - 1).flatten()
    k_TRK, v_TRK = (x.index_select(0, index).view(T, -1, K).to(products) for x in (k_SK, v_SK))
    q_TMK = q_TMK.to(products)
    o_TMK, lse_TM = tile_forward(q_TMK, k_TRK, v_TRK, Buffers(q_TMK), hidden_TR[:, None])
    blind_T1 = hidden_TR.all(-1, keepdim=True)
    o_TMK = o_TMK.masked_fill_(blind_T1.unsqueeze(-1), 0)
    return o_TMK, lse_TM.masked_fill_(blind_T1, -torch.inf)


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
) -> tuple[Tensor, Tensor]:
    """(o_BTHK, lse_BTH); `products` is the dtype in which products are computed."""
    o_BTHK, lse_BTH = _empty_outputs(q_BTHK)
    n = chosen_BTGn.shape[3]

    def forward(stream: Stream) -> None:
        k_SK, v_SK = k_BSGK[stream.blocks], v_BSGK[stream.blocks]
        if stream.length * n * block < len(k_SK):
            q_TMK, chosen_Tn = q_BTHK[stream.heads], chosen_BTGn[stream.tokens]
            found = _few_queries(q_TMK, k_SK, v_SK, chosen_Tn, block, products)
            o_BTHK[stream.heads], lse_BTH[stream.heads] = found
            return
        _forward_stream(
            q_BTHK[stream.heads],
            KeysValues(in_blocks(k_SK, block, products), in_blocks(v_SK, block, products)),
            chosen_BTGn[stream.tokens],
            len(k_SK) - stream.length,
            o_BTHK[stream.heads],
            lse_BTH[stream.heads],
        )

    each_stream(forward, _streams(q_BTHK, k_BSGK, cu_seqlens), q_BTHK.device)
    return o_BTHK, lse_BTH


# ---- backward


class Saved(NamedTuple):
    """What the backward of a stream reads: gradients of the results, and the results."""

    do: Tensor
    dlse: Tensor | None
    o: Tensor
    lse: Tensor

    def inputs(self, queries: slice, q_CMK: Tensor) -> BackwardInputs:
        """Those of a chunk. d lse / d logit is p, so that the gradient of lse lowers delta."""
        do_CMK = self.do[queries]
        delta_CM = (do_CMK.float() * self.o[queries]).sum(-1)
        if self.dlse is not None:
            delta_CM -= self.dlse[queries]
        # without a key lse is -inf; with inf, p is 0
        lse_CM = self.lse[queries]
        lse_CM = lse_CM.masked_fill(lse_CM == -torch.inf, torch.inf)
        return BackwardInputs(q_CMK, do_CMK.to(q_CMK.dtype).contiguous(), lse_CM, delta_CM)


def _backward_stream(
    saved: Saved,
    q_TMK: Tensor,
    kv: KeysValues,
    chosen_Tn: Tensor,
    first: int,
    dq_TMK: Tensor,
    dkv: KeysValues,
) -> None:
    """Fills dq of one stream and adds to dk and dv, of which dk lacks the factor 1 / sqrt(K)."""
    T, M, K = q_TMK.shape
    J, l, _ = kv.k_JlK.shape
    buffers = Buffers(kv.k_JlK)
    chunks = cut_chunks(T, first, chosen_Tn.shape[1], l)
    results_SMK = _slot_results(q_TMK, chunks, J, buffers.like.dtype)
    for chunk in chunks:
        queries = chunk.queries
        pairs = sort_pairs(chunk, chosen_Tn[queries], J, M, l)
        q_CMK = q_TMK[queries].to(kv.k_JlK.dtype).contiguous()
        inputs = saved.inputs(queries, q_CMK)
        dq_CMK = _own_backward(inputs, kv, pairs, dkv, buffers).float()
        dq_SMK = results_SMK[: len(pairs.tiles.query_S)]
        dq_CMK += tiles_backward(inputs, *kv, pairs.tiles, *dkv, buffers, dq_SMK)
        dq_TMK[queries] = dq_CMK.mul_(K**-0.5)


def _own_backward(
    inputs: BackwardInputs,
    kv: KeysValues,
    pairs: Pairs,
    dkv: KeysValues,
    buffers: Buffers,
) -> Tensor:
    """dq_CMK over the own blocks; adds to dk and dv. dq and dk lack the factor 1 / sqrt(K)."""
    M = inputs.q.shape[1]
    lse_CM = inputs.lse.masked_fill(~pairs.has_own_C[:, None], torch.inf)
    rows = BackwardInputs(
        q=pairs.own_rows(inputs.q),
        do=pairs.own_rows(inputs.do),
        lse=pairs.own_rows(lse_CM, torch.inf),
        delta=pairs.own_rows(inputs.delta),
    )
    groups = [map(pairs.own_blocks, part) for part in (kv, dkv)]
    dq_parts = []
    for *parts, k, v, dk, dv in zip(*rows, *groups[0], *groups[1], strict=True):
        dq, dk_NlK, dv_NlK = tile_backward(
            BackwardInputs(*parts),
            k,
            v,
            buffers,
            pairs.hidden_Rl,
        )
        dq_parts.append(dq)
        dk += dk_NlK
        dv += dv_NlK
    return pairs.own_queries(dq_parts, M)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the gradients of o and of lse."""
    dq_BTHK = q_BTHK.new_empty(q_BTHK.shape)
    dk_BSGK = k_BSGK.new_empty(k_BSGK.shape)
    dv_BSGK = v_BSGK.new_empty(v_BSGK.shape)

    def backward(stream: Stream) -> None:
        k_SK, v_SK = k_BSGK[stream.blocks], v_BSGK[stream.blocks]
        S, K = k_SK.shape
        kv = KeysValues(in_blocks(k_SK, block, products), in_blocks(v_SK, block, products))
        # fp32, because each element is a sum of many
        dkv = KeysValues(*k_SK.new_zeros((2, *kv.k_JlK.shape), dtype=torch.float32))
        heads = stream.heads
        _backward_stream(
            Saved(
                do_BTHK[heads],
                None if dlse_BTH is None else dlse_BTH[heads],
                o_BTHK[heads],
                lse_BTH[heads],
            ),
            q_BTHK[heads],
            kv,
            chosen_BTGn[stream.tokens],
            S - stream.length,
            dq_BTHK[heads],
            dkv,
        )
        dk_BSGK[stream.blocks] = dkv.k_JlK.mul_(K**-0.5).flatten(0, 1)[:S]
        dv_BSGK[stream.blocks] = dkv.v_JlK.flatten(0, 1)[:S]

    each_stream(backward, _streams(q_BTHK, k_BSGK, cu_seqlens), q_BTHK.device)
    return dq_BTHK, dk_BSGK, dv_BSGK


# ---- the mass of each chosen block


@torch.library.custom_op("longhaul::block_mass", mutates_args=())
def block_mass_forward(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    chosen_BTGn: Tensor,
    lse_BTH: Tensor,
    cu_seqlens: Tensor | None,
    block: int,
    products: torch.dtype,
) -> Tensor:
    """mass_BTGn in fp32."""
    mass_BTGn = q_BTHK.new_empty(chosen_BTGn.shape, dtype=torch.float32)

    def measure(stream: Stream) -> None:
        k_SK = k_BSGK[stream.blocks]
        fill_masses(
            q_BTHK[stream.heads],
            in_blocks(k_SK, block, products),
            chosen_BTGn[stream.tokens],
            lse_BTH[stream.heads],
            len(k_SK) - stream.length,
            mass_BTGn[stream.tokens],
        )

    each_stream(measure, _streams(q_BTHK, k_BSGK, cu_seqlens), q_BTHK.device)
    return mass_BTGn


def fill_masses(
    q_TMK: Tensor,
    k_JlK: Tensor,
    chosen_Tn: Tensor,
    lse_TM: Tensor,
    first: int,
    mass_Tn: Tensor,
) -> None:
    """Fills the masses of one stream, whose first query has the position `first`."""
    T, M, _ = q_TMK.shape
    J, l, _ = k_JlK.shape
    buffers = Buffers(k_JlK)
    for chunk in cut_chunks(T, first, chosen_Tn.shape[1], l):
        queries = chunk.queries
        q_CMK = q_TMK[queries].to(k_JlK.dtype).contiguous()
        pairs = sort_pairs(chunk, chosen_Tn[queries], J, M, l)
        groups = zip(pairs.own_rows(q_CMK), pairs.own_blocks(k_JlK), strict=True)
        own = [_tile_lse(*group, buffers, pairs.hidden_Rl) for group in groups]
        own_CM = pairs.own_queries(own, M)
        lse_CnM = _tiles_lse(q_CMK, k_JlK, pairs.tiles, buffers)[pairs.tiles.slot_CP]
        lse_CnM = torch.where(pairs.is_own_Cn.unsqueeze(-1), own_CM[:, None], lse_CnM)

        finite_CM = lse_TM[queries].clamp_min(torch.finfo(torch.float32).min)
        mass_Tn[queries] = lse_CnM.sub_(finite_CM[:, None]).exp_().mean(-1)


def _tiles_lse(
    q_CMK: Tensor,
    k_JlK: Tensor,
    tiles: Tiles,
    buffers: Buffers,
) -> Tensor:
    """lse_SM of the slots of all tiles, with any content behind the last one."""
    M = q_CMK.shape[1]
    lse_SM = q_CMK.new_empty(len(tiles.query_S), M, dtype=torch.float32)
    lse_SM[-1] = -torch.inf
    q_CMK = pad_queries(q_CMK, 1, 0.0)
    for block_N, part, query_S in tile_groups(tiles):
        q_NRK = queries_of(q_CMK, query_S, tiles)
        lse_SM[part] = _tile_lse(q_NRK, k_JlK.index_select(0, block_N), buffers).view(-1, M)
    return lse_SM


def _tile_lse(
    q_NRK: Tensor,
    k_NlK: Tensor,
    buffers: Buffers,
    hidden_Rl: Tensor | None = None,
) -> Tensor:
    logits_NRl = product_fp32(q_NRK, k_NlK, buffers, "logits").mul_(q_NRK.shape[-1] ** -0.5)
    if hidden_Rl is not None:
        logits_NRl.masked_fill_(hidden_Rl, -torch.inf)
    # logsumexp would hold a copy that the planner does not see
    most_NR1 = logits_NRl.amax(-1, keepdim=True)
    sum_NR = logits_NRl.sub_(most_NR1).exp_().sum(-1)
    return sum_NR.log_().add_(most_NR1.squeeze(-1))


# ---- the operators of PyTorch


@block_sparse_forward.register_fake
def _(q_BTHK, *_):
    return _empty_outputs(q_BTHK)


@block_sparse_backward.register_fake
def _(do_BTHK, q_BTHK, k_BSGK, v_BSGK, *_):
    return tuple(x.new_empty(x.shape) for x in (q_BTHK, k_BSGK, v_BSGK))


@block_mass_forward.register_fake
def _(q_BTHK, k_BSGK, chosen_BTGn, *_):
    return q_BTHK.new_empty(chosen_BTGn.shape, dtype=torch.float32)


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    *tensors, ctx.block, ctx.products = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, do_BTHK, dlse_BTH):
    q, k, v, chosen, cu_seqlens, o, lse = ctx.saved_tensors
    if do_BTHK is None:
        do_BTHK = torch.zeros_like(o)
    grads = block_sparse_backward(
        do_BTHK,
        *(q, k, v, chosen, o, lse),
        dlse_BTH,
        cu_seqlens,
        ctx.block,
        ctx.products,
    )
    return *grads, None, None, None, None


block_sparse_forward.register_autograd(_backward, setup_context=_save)


# ---- the entry points


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

    kernels: "auto" takes Triton for tensors on CUDA that it serves; "triton", "torch" ask for one.

    Returns o [B,T,H,K] and the natural lse [B,T,H] in fp32, both with gradients; 0 and -inf for a
    query that reads no key. Raises ValueError for shapes and dtypes that do not fit.
    """
    check_block_inputs(q_BTHK, k_BSGK, v_BSGK, chosen_BTGn, block, cu_seqlens)
    check_engine_dtype(q_BTHK)
    products = platform().product_dtype(q_BTHK)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.long()
    triton = kernels_for(q_BTHK, k_BSGK, block, kernels)
    if triton is not None:
        return triton.block_triton_forward(
            *(q_BTHK, k_BSGK, v_BSGK, chosen_BTGn),
            cu_seqlens,
            block,
        )
    return block_sparse_forward(q_BTHK, k_BSGK, v_BSGK, chosen_BTGn, cu_seqlens, block, products)


@torch.no_grad()
def block_mass(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    chosen_BTGn: Tensor,
    lse_BTH: Tensor,
    block: int = 64,
    cu_seqlens: Tensor | None = None,
    kernels: str = "auto",
) -> Tensor:
    """mass_BTGn in fp32: the probability of each chosen block, a mean over the group's heads; 0 for
    unused slots. lse: over whatever keys the probabilities are of, such as that of
    `block_sparse_attention`, with which the masses of a query add up to 1. No gradients.
    """
    check_block_inputs(q_BTHK, k_BSGK, k_BSGK, chosen_BTGn, block, cu_seqlens)
    check_engine_dtype(q_BTHK)
    products = platform().product_dtype(q_BTHK)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.long()
    triton = kernels_for(q_BTHK, k_BSGK, block, kernels)
    if triton is not None:
        return triton.block_triton_mass(q_BTHK, k_BSGK, chosen_BTGn, lse_BTH, cu_seqlens, block)
    return block_mass_forward(q_BTHK, k_BSGK, chosen_BTGn, lse_BTH, cu_seqlens, block, products)
