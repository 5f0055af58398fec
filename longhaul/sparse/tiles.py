"""Attention inside tiles, many queries against a few keys, and sums over tiles.

Each tile is a softmax over some of a query's keys. Its log-sum-exp says which share of the whole
softmax it holds, so that they merge exactly: o = sum of exp(lse_tile - lse) o_tile. There are no
atomics: sums have a fixed order.

Letters: C queries of a chunk, M query heads per KV head, K head dim, J blocks of a document, P
tiles that a query is in, R matrix rows of a tile (query, head), N tiles, S keys of a tile, or slots
(query, tile) of all tiles.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LOG2E = 1.4426950408889634


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
    if a.device.type == "cuda" and a.dtype != torch.float32:
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


# ---- sums over tiles


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
    head_M1 = torch.arange(M, device=x_SMK.device)[:, None]
    row_CMP = slot_CP[:, None] * M + head_M1
    if weight_CMP is not None:
        weight_CMP = weight_CMP.reshape(C * M, P).to(x_SMK.dtype)
    bag = F.embedding_bag(
        row_CMP.view(C * M, P),
        x_SMK.view(-1, K),
        mode="sum",
        per_sample_weights=weight_CMP,
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
    if total_JSK.device.type == "cuda":
        total_JSK.index_put_((block_N,), part_NSK.float(), accumulate=True)
    else:
        total_JSK.index_add_(0, block_N, part_NSK.float())


def merge_slots(
    o_SMK: Tensor,
    lse_SM: Tensor,
    slot_CP: Tensor,
) -> tuple[Tensor, Tensor]:
    """(o_CMK, lse_CM) of one softmax over the keys of all slots of a query.

    A query without any key has o = 0 and lse = -inf.
    """
    lse_CPM = lse_SM[slot_CP]
    total_CM = lse_CPM.logsumexp(1)
    finite_CM = total_CM.clamp_min(torch.finfo(torch.float32).min)
    weight_CPM = lse_CPM.sub_(finite_CM[:, None]).exp_()
    return gather_sum(o_SMK, slot_CP, weight_CPM.transpose(1, 2)), total_CM
