"""Attention of tiles: many queries against a few blocks of keys, block-major.

Every query has blocks of its own, so that gathering keys per query would move n blocks of keys for
each of them. Instead, the queries come to the blocks: (query, block) pairs are sorted by block and
cut into tiles of R pairs, which are R*M matrix rows.

Each part is a softmax over some of a query's keys. Its log-sum-exp says which share of the whole
softmax it holds, so that the parts merge exactly: o = sum of exp(lse_part - lse) o_part. There are
no atomics: sums run over sorted segments, in a fixed order.

Letters: C queries of a chunk, M query heads per KV head, K head dim, J blocks of a document, P
pairs of a query, R pairs of a tile, or its matrix rows (query, head), N tiles, S keys of a tile, or
slots of all tiles.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from base.machine import platform

LOG2E = 1.4426950408889634
TILE_ROWS = 64  # pairs x heads of a tile: fewer waste the matrix unit, more are padding
TILES_AT_ONCE = 64  # tiles whose logits exist at the same time: 64*64*64 fp32 = 1 MiB
# The number of tiles is a multiple of this: a library keeps every shape that it saw, the heap every
# size. At 32k tokens in bf16, forward and backward add 266 MiB; any number of tiles added 365.
TILES_STEP = 16


# ---- buffers and products


class Buffers:
    """Memory that the steps of a stream use one after another.

    If each step allocated and freed it, the allocator could return it to the system every time;
    with heads of 32 the page faults then took as long as the step.
    """

    def __init__(self, like: Tensor):
        self.like = like
        self.by_name = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The buffer of this name, with any content, in this shape; a name has one dtype.

        Sizes are powers of two, so that a buffer seldom grows; what is not written is not resident.
        """
        count = math.prod(shape)
        if name not in self.by_name or len(self.by_name[name]) < count:
            self.by_name.pop(name, None)  # before the larger one exists
            self.by_name[name] = self.like.new_empty(2 ** (count - 1).bit_length(), dtype=dtype)
        return self.by_name[name][:count].view(shape)

    def rounded(self, name: str, x_fp32: Tensor) -> Tensor:
        """x in the dtype of the inputs."""
        if self.like.dtype == torch.float32:
            return x_fp32
        return self.take(name, x_fp32.shape, self.like.dtype).copy_(x_fp32)


def product_fp32(a: Tensor, b: Tensor, buffers: Buffers, name: str) -> Tensor:
    """a b^T in fp32, of two matrices or two batches of matrices, in the buffer of this name.

    A bf16 product of a CPU returns bf16, too coarse for logits and ranks. Subtracting the rounded
    result inside a second product, whose sums are fp32, returns what rounding lost: relative error
    2^-17 at 0.6 times the time of an fp32 product (K = 128). Below K = 64, reading and writing the
    result costs more than the product, and an fp32 product takes 0.85 times as long.
    """
    product = torch.mm if a.ndim == 2 else torch.bmm
    if platform().device(a).type == "cuda" and a.dtype != torch.float32:
        return product(a, b.mT, out_dtype=torch.float32)

    shape = (*a.shape[:-1], b.shape[-2])
    out = buffers.take(name, shape, torch.float32)
    if a.dtype != torch.bfloat16 or a.shape[-1] < 64:
        return product(a.float(), b.float().mT, out=out)  # fp16 would overflow at 65504

    add_product = torch.addmm if a.ndim == 2 else torch.baddbmm
    high = buffers.take("high", shape, a.dtype)
    low = buffers.take("low", shape, a.dtype)
    product(a, b.mT, out=high)
    add_product(high, a, b.mT, beta=-1, out=low)
    return out.copy_(high).add_(low.float())  # a sum of two dtypes would make this copy inside


# ---- attention inside tiles


class BackwardInputs(NamedTuple):
    """What the backward reads of each query and head; do carries the gate."""

    q: Tensor
    do: Tensor
    lse: Tensor
    delta: Tensor  # do . o


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


# ---- tiles of pairs of one block


def pad_queries(
    x_CM_: Tensor,
    count: int,
    value: float,
) -> Tensor:
    """[C+count,M,...] with the value in the new queries."""
    other_dims = (0, 0) * (x_CM_.ndim - 1)
    return F.pad(x_CM_, (*other_dims, 0, count), value=value)


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
