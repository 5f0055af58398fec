"""Native Sparse Attention (arXiv 2502.11089): compressed branch and window.

nsa/engine.py drives this file. Everything works on one document, one row of the batch and one KV
head, over chunks of C queries.

Both branches take a few queries against all the keys that they see. One softmax then gives both the
output and the importance of the blocks, without a second pass, and the backward needs no saved
log-sum-exp. From the importance, nsa/selected.py chooses blocks.

PyTorch's attention kernel for CPUs could compute the compressed branch as square causal attention,
as sparse/triton/stock.py does on GPUs. It took as long or longer (ns a pair, 4 heads of 128 in
bf16, 16,384 tokens, forward and backward: 8.9 and 13.8 against 7.4 and 11.3 here), its forward
gives no probabilities, and its backward needs an output that would have to be saved.

Letters: T tokens, C queries of a chunk (c of a step), M query heads per KV head, K head dim, N
compressed blocks, J selection blocks, R = c*M matrix rows (query, head), S keys, E keys after the
edge. t is a position inside its document. l, s, l', n and w of the paper are cmp_block, cmp_stride,
sel_block, sel_count and window.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.sparse.streams import starts
from longhaul.sparse.tiles import Buffers, product_fp32

STEP_LOGITS = 2**20  # logits that exist at once in the compressed branch: 4 MiB in fp32
STEP_QUERIES = 256  # queries of a step of the compressed branch, at most
KEY_STEP = 128  # keys of a step are a multiple: few shapes, since each costs 0.3 ms once
WINDOW_QUERIES = 128  # queries of a step of the window, which see window + 127 keys


class Sizes(NamedTuple):
    """The numbers of an NSAConfig, as the custom operators receive them."""

    cmp_block: int
    cmp_stride: int
    sel_block: int
    sel_count: int
    sel_init: int
    sel_local: int
    window: int

    @property
    def free(self) -> int:
        """Selected blocks that are chosen by their importance."""
        return self.sel_count - self.sel_init - self.sel_local

    @property
    def per(self) -> int:
        """Strides of a selection block."""
        return self.sel_block // self.cmp_stride

    @property
    def spread(self) -> int:
        """Strides of a compressed block."""
        return self.cmp_block // self.cmp_stride

    # as a selector's settings say it
    @property
    def block(self) -> int:
        return self.sel_block

    @property
    def count(self) -> int:
        return self.sel_count

    @property
    def init(self) -> int:
        return self.sel_init

    @property
    def local(self) -> int:
        return self.sel_local

    def compressed_blocks(self, tokens: int) -> int:
        """Compressed blocks that end within the first `tokens` tokens of a document."""
        if tokens < self.cmp_block:
            return 0
        return (tokens - self.cmp_block) // self.cmp_stride + 1


@functools.cache
def stride_weights(sizes: Sizes) -> tuple[int, ...]:
    """Strides that compressed blocks share with the selection block j that they touch: 1, 2, 2, 2,
    1 with the default sizes, for the compressed blocks 4j-1 .. 4j+3.
    """
    per, spread = sizes.per, sizes.spread
    offsets = per + spread - 1
    return tuple(min(i + 1, spread, per, offsets - i) for i in range(offsets))


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


class Outputs(NamedTuple):
    """Results of the forward; the backward reads all but o. The two of the compressed branch are
    the Triton kernels', and empty otherwise.
    """

    o: Tensor  # [B, T, H, K]
    o_cmp: Tensor
    o_slc: Tensor
    lse_cmp: Tensor  # [H * cmp_stride, B * N] fp32, natural, of the folded heads
    lse_slc: Tensor  # [B, T, H] fp32, natural
    block_idx: Tensor  # [B, T, G, n] int16 or int32, -1 = unused


# ---- products and softmax


def _add_product(
    total: Tensor,
    a: Tensor,
    b: Tensor,
    buffers: Buffers,
) -> None:
    """total += a^T b, with the running sum in fp32."""
    if a.dtype == torch.float32:
        total.addmm_(a.mT, b)
    else:
        product = buffers.take("product", total.shape, a.dtype)
        total.add_(torch.mm(a.mT, b, out=product).float())


def _softmax_backward(
    p_RS: Tensor,
    q_RK: Tensor,
    do_RK: Tensor,
    gate_R1: Tensor,
    k_SK: Tensor,
    v_SK: Tensor,
    dk_SK: Tensor,
    dv_SK: Tensor,
    buffers: Buffers,
) -> tuple[Tensor, Tensor]:
    """(dq, dgate) of o = gate * softmax(q k) v from its probabilities; adds to dk and dv.

    dq and dk lack the factor 1 / sqrt(K). dgate = do . o follows from the probabilities, so that o
    need not be saved.
    """
    dp_RS = product_fp32(do_RK, v_SK, buffers, "logits").mul_(p_RS)
    dgate_R1 = dp_RS.sum(-1, keepdim=True)
    dp_RS.addcmul_(p_RS, dgate_R1, value=-1)
    dlogit_RS = buffers.rounded("low", dp_RS)

    gate = gate_R1.to(q_RK.dtype)
    _add_product(dv_SK, buffers.rounded("high", p_RS), do_RK * gate, buffers)
    _add_product(dk_SK, dlogit_RS, q_RK * gate, buffers)
    return (dlogit_RS @ k_SK) * gate_R1, dgate_R1


# ---- steps: a few queries and all the keys that they see


class Step(NamedTuple):
    """A few queries and all the keys that they see."""

    queries: slice  # counted from the chunk's first one
    keys: slice  # counted from the first key given
    edge: int  # all these queries see the keys before it
    hidden_cE: Tensor  # which of the other keys a query does not see


def compressed_steps(
    queries: slice,
    q_CMK: Tensor,
    N: int,
    cfg: Sizes,
) -> Iterator[Step]:
    """Those of the queries that see a compressed block, with all the blocks that they see.

    A step takes as many queries as STEP_LOGITS allows. The number of its keys is rounded up to
    KEY_STEP; steps of 64 keys took 35 MiB more.
    """
    fitting = STEP_LOGITS // (max(1, N) * q_CMK.shape[1])
    size = min(STEP_QUERIES, max(16, fitting // 16 * 16))
    first = max(queries.start, cfg.cmp_block - 1)
    for x in starts(first, queries.stop, size):
        y = min(x + size, queries.stop)
        edge = cfg.compressed_blocks(x + 1)
        seen = cfg.compressed_blocks(y)
        keys = min(N, -(-seen // KEY_STEP) * KEY_STEP)

        # a block is visible from its last token on
        block = torch.arange(edge, keys, device=q_CMK.device)
        last_token_E = block * cfg.cmp_stride + cfg.cmp_block - 1
        t_c1 = torch.arange(x, y, device=q_CMK.device)[:, None]
        few = slice(x - queries.start, y - queries.start)
        yield Step(few, slice(0, keys), edge, last_token_E > t_c1)


def window_steps(
    queries: slice,
    q_CMK: Tensor,
    first: int,
    cfg: Sizes,
) -> Iterator[Step]:
    """The queries, each with the keys t-w < u <= t; `first` is the position of the first key
    given.
    """
    for x in starts(queries.start, queries.stop, WINDOW_QUERIES):
        y = min(x + WINDOW_QUERIES, queries.stop)
        low = max(0, x - cfg.window + 1)
        t_c1 = torch.arange(x, y, device=q_CMK.device)[:, None]
        u_S = torch.arange(low, y, device=q_CMK.device)
        hidden_cS = (u_S > t_c1) | (u_S <= t_c1 - cfg.window)
        few = slice(x - queries.start, y - queries.start)
        yield Step(few, slice(low - first, y - first), 0, hidden_cS)


def _probabilities(
    q_CMK: Tensor,
    k_SK: Tensor,
    step: Step,
    buffers: Buffers,
) -> Tensor:
    """p [R,S] of a step in fp32. Hidden logits are -inf, so that exp makes exact zeros of them."""
    q_cMK = q_CMK[step.queries]
    scale = q_CMK.shape[-1] ** -0.5
    q_RK = q_cMK.flatten(0, 1)
    logits_RS = product_fp32(q_RK, k_SK[step.keys], buffers, "logits").mul_(scale)

    logits_cMS = logits_RS.view(*q_cMK.shape[:2], -1)
    after_edge_cME = logits_cMS[:, :, step.edge :]
    after_edge_cME.masked_fill_(step.hidden_cE[:, None], -torch.inf)
    p_RS = buffers.take("p", logits_RS.shape, torch.float32)
    return torch.softmax(logits_RS, -1, out=p_RS)


def steps_forward(
    q_CMK: Tensor,
    kv: Sequence[Tensor],
    steps: Iterator[Step],
    buffers: Buffers,
    on_probabilities: Callable[[slice, Tensor], None] | None = None,
) -> Tensor:
    """o_CMK over the steps, zero for queries without a step.

    on_probabilities(queries, p_RS) is called with the probabilities of each step.
    """
    o_CMK = torch.zeros_like(q_CMK)
    for step in steps:
        p_RS = _probabilities(q_CMK, kv[0], step, buffers)
        o_RK = buffers.rounded("high", p_RS) @ kv[1][step.keys]
        o_cMK = o_CMK[step.queries]
        o_cMK.copy_(o_RK.view_as(o_cMK))
        if on_probabilities is not None:
            on_probabilities(step.queries, p_RS)
        del p_RS  # a buffer that has to grow in the next step is freed first
    return o_CMK


def steps_backward(
    q_CMK: Tensor,
    do_CMK: Tensor,
    dq_CMK: Tensor,
    buffers: Buffers,
    gate_CM1: Tensor,
    dgate_CM1: Tensor,
    steps: Iterator[Step],
    kv: Sequence[Tensor],
    dkv: Sequence[Tensor],
) -> None:
    """Adds to dq, dgate, dk and dv; dq and dk lack the factor 1 / sqrt(K)."""
    for step in steps:
        p_RS = _probabilities(q_CMK, kv[0], step, buffers)
        rows = [x[step.queries].flatten(0, 1) for x in (q_CMK, do_CMK, gate_CM1)]
        keys = [x[step.keys] for x in (*kv, *dkv)]
        dq_RK, dgate_R1 = _softmax_backward(p_RS, *rows, *keys, buffers)
        for total_CM_, part_R_ in ((dq_CMK, dq_RK), (dgate_CM1, dgate_R1)):
            total_cM_ = total_CM_[step.queries]
            total_cM_ += part_R_.view_as(total_cM_)
        del p_RS
