"""Native Sparse Attention (arXiv 2502.11089): compressed branch, window, and choice of blocks.

nsa/engine.py drives this file and nsa/selected.py. Everything works on one document, one row of the
batch and one KV head, over chunks of C queries.

The compressed branch, the window, and the selected branch as long as it is plain causal attention
(the first n*l' tokens) take a few queries against all the keys that they see. One softmax then
gives both the output and the importance of the blocks, without a second pass, and the backward
needs no saved log-sum-exp. From the importance, `choose` selects the blocks that nsa/selected.py
attends to.

PyTorch's attention kernel for CPUs could compute the compressed branch as square causal attention,
as nsa/triton/dense.py does on GPUs. It took as long or longer per pair (ns, 4 heads of 128 in bf16,
16,384 tokens, forward and backward: 8.9 and 13.8 against 7.4 and 11.3 here), its forward gives no
probabilities, and its backward needs an output that would have to be saved.

Letters: T tokens, C queries of a chunk (c of a step), M query heads per KV head, K head dim, N
compressed blocks, J selection blocks, R = c*M matrix rows (query, head), S keys, E keys after the
edge. t is a position inside its document. l, s, l', n and w of the paper are cmp_block, cmp_stride,
sel_block, sel_count and window.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from base.machine import platform
from longhaul.sparse.tiles import Buffers, product_fp32

STEP_LOGITS = 2**20  # logits that exist at once in the compressed branch: 4 MiB in fp32
STEP_QUERIES = 256  # queries of a step of the compressed branch, at most
KEY_STEP = 128  # keys of a step are a multiple: few shapes, since each costs 0.3 ms once
BAND_QUERIES = 128  # queries of a step of the window, which see window + 127 keys


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
    def forced(self) -> int:
        """Selected blocks that do not depend on their importance."""
        return self.sel_init + self.sel_local

    @property
    def free(self) -> int:
        """Selected blocks that are chosen by their importance."""
        return self.sel_count - self.forced

    @property
    def dense_tokens(self) -> int:
        """Before this position, a query selects every block."""
        return self.sel_count * self.sel_block

    def compressed_blocks(self, tokens: int) -> int:
        """Compressed blocks that end within the first `tokens` tokens of a document."""
        if tokens < self.cmp_block:
            return 0
        return (tokens - self.cmp_block) // self.cmp_stride + 1


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


def starts(first: int, stop: int, size: int) -> list[int]:
    """Where parts of `size` of the queries first..stop-1 begin.

    A planner visits a few of the whole parts, of which the last one has the most keys, and what is
    left behind it, which may have fewer logits.
    """
    found = range(first, stop, size)
    whole = max(0, stop - first) // size
    return [*platform().tiles(found[:whole]), *found[whole:]]


def compressed_steps(
    start: int,
    stop: int,
    heads: int,
    N: int,
    cfg: Sizes,
    device: torch.device,
) -> Iterator[Step]:
    """The queries start..stop-1 that see a compressed block, with all the blocks that they see.

    A step takes as many queries as STEP_LOGITS allows. The number of its keys is rounded up to
    KEY_STEP; steps of 64 keys took 35 MiB more.
    """
    fitting = STEP_LOGITS // (max(1, N) * heads)
    size = min(STEP_QUERIES, max(16, fitting // 16 * 16))
    first = max(start, cfg.cmp_block - 1)

    for x in starts(first, stop, size):
        y = min(x + size, stop)
        edge = cfg.compressed_blocks(x + 1)
        seen = cfg.compressed_blocks(y)
        keys = min(N, -(-seen // KEY_STEP) * KEY_STEP)

        # A block is visible from its last token on.
        block = torch.arange(edge, keys, device=device)
        last_token_E = block * cfg.cmp_stride + cfg.cmp_block - 1
        yield Step(
            queries=slice(x - start, y - start),
            keys=slice(0, keys),
            edge=edge,
            hidden_cE=last_token_E > torch.arange(x, y, device=device)[:, None],
        )


def band_steps(
    start: int,
    stop: int,
    first: int,
    width: int,
    device: torch.device,
) -> Iterator[Step]:
    """The queries start..stop-1, each with the keys t-width < u <= t.

    `first` is the position of the first key given.
    """
    for x in starts(start, stop, BAND_QUERIES):
        y = min(x + BAND_QUERIES, stop)
        low = max(0, x - width + 1)
        t_c1 = torch.arange(x, y, device=device)[:, None]
        u_S = torch.arange(low, y, device=device)
        yield Step(
            queries=slice(x - start, y - start),
            keys=slice(low - first, y - first),
            edge=0,
            hidden_cE=(u_S > t_c1) | (u_S <= t_c1 - width),
        )


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
    k_SK: Tensor,
    v_SK: Tensor,
    steps: Iterator[Step],
    buffers: Buffers,
    on_probabilities: Callable[[Step, Tensor], None] | None = None,
) -> Tensor:
    """o_CMK over the steps, zero for queries without a step.

    on_probabilities(step, p_RS) is called with the probabilities of each step.
    """
    o_CMK = torch.zeros_like(q_CMK)
    for step in steps:
        _step_forward(q_CMK, k_SK, v_SK, step, buffers, on_probabilities, out_CMK=o_CMK)
    return o_CMK


def _step_forward(
    q_CMK: Tensor,
    k_SK: Tensor,
    v_SK: Tensor,
    step: Step,
    buffers: Buffers,
    on_probabilities: Callable[[Step, Tensor], None] | None,
    out_CMK: Tensor,
) -> None:
    """One step of `steps_forward`. When it ends, nothing holds its buffers: one that has to grow in
    the next step is freed first.
    """
    p_RS = _probabilities(q_CMK, k_SK, step, buffers)
    o_RK = buffers.rounded("high", p_RS) @ v_SK[step.keys]
    o_cMK = out_CMK[step.queries]
    o_cMK.copy_(o_RK.view_as(o_cMK))
    if on_probabilities is not None:
        on_probabilities(step, p_RS)


def steps_backward(
    q_CMK: Tensor,
    do_CMK: Tensor,
    gate_CM1: Tensor,
    k_SK: Tensor,
    v_SK: Tensor,
    steps: Iterator[Step],
    dk_SK: Tensor,
    dv_SK: Tensor,
    dq_CMK: Tensor,
    dgate_CM1: Tensor,
    buffers: Buffers,
) -> None:
    """Adds to dk, dv and dq, and fills dgate; dk and dq lack the factor 1 / sqrt(K)."""
    for step in steps:
        dq, dgate = _softmax_backward(
            _probabilities(q_CMK, k_SK, step, buffers),
            q_CMK[step.queries].flatten(0, 1),
            do_CMK[step.queries].flatten(0, 1),
            gate_CM1[step.queries].flatten(0, 1),
            k_SK[step.keys],
            v_SK[step.keys],
            dk_SK[step.keys],
            dv_SK[step.keys],
            buffers,
        )
        dq_cMK = dq_CMK[step.queries]
        dq_cMK += dq.view_as(dq_cMK)
        dgate_cM1 = dgate_CM1[step.queries]
        dgate_cM1.copy_(dgate.view_as(dgate_cM1))


# ---- choice of blocks


def fill_early(block_idx_Cn: Tensor, cfg: Sizes) -> None:
    """Positions before n*l' select every block up to their own one; -1 = unused."""
    device = block_idx_Cn.device
    j = torch.arange(cfg.sel_count, device=device, dtype=block_idx_Cn.dtype)
    t = torch.arange(len(block_idx_Cn), device=device)
    own_C1 = t[:, None] // cfg.sel_block
    block_idx_Cn.copy_(torch.where(j <= own_C1, j, -1))


def _importance(
    p_CN: Tensor,
    J: int,
    cfg: Sizes,
) -> Tensor:
    """[C,J]: the mass of every compressed block, once per stride that it shares with block j.

    With the default sizes, the weights are 1, 2, 2, 2, 1 on the compressed blocks 4j-1 .. 4j+3.
    """
    per = cfg.sel_block // cfg.cmp_stride  # strides of a selection block
    spread = cfg.cmp_block // cfg.cmp_stride  # strides of a compressed block
    offsets = per + spread - 1

    before = spread - 1
    after = J * per - p_CN.shape[1]
    padded = F.pad(p_CN, (before, after))
    imp_CJ = p_CN.new_zeros(len(p_CN), J)
    for offset in range(offsets):
        weight = min(offset + 1, spread, per, offsets - offset)
        mass_CJ = padded[:, offset::per][:, :J]
        imp_CJ.add_(mass_CJ, alpha=weight)
    return imp_CJ


def choose(
    p_CN: Tensor,
    start: int,
    cfg: Sizes,
) -> Tensor:
    """block_idx_Cn of the queries from position `start` on: forced blocks, then dynamic ones.

    p_CN: probabilities of the compressed branch, summed over the heads of the group. The forced
    blocks are the first and the local ones; the dynamic ones are the most important others. fp32
    importance and index rank as one int64: non-negative floats order like their bits, the lower
    index wins a tie, and no two keys are equal, so that the answer does not depend on how a device
    breaks ties.
    """
    C = len(p_CN)
    device = p_CN.device
    t = torch.arange(start, start + C, device=device)
    own_C1 = t[:, None] // cfg.sel_block
    J = (start + C - 1) // cfg.sel_block + 1

    bits_CJ = _importance(p_CN, J, cfg).view(torch.int32)
    key_CJ = bits_CJ.to(torch.int64) << 32
    key_CJ += J - 1 - torch.arange(J, device=device)

    # From `tail` on, a block may be local or in the future of some query.
    tail = start // cfg.sel_block - cfg.sel_local + 1
    tail_J = torch.arange(tail, J, device=device)
    not_free = tail_J > own_C1 - cfg.sel_local
    key_CJ[:, tail:].masked_fill_(not_free, -1)

    best = key_CJ[:, cfg.sel_init :].topk(cfg.free, sorted=False).values
    # The limits keep NaN inputs from reading out of bounds.
    dynamic = (J - 1 - (best & 0xFFFFFFFF)).clamp_(0, J - 1)

    first = torch.arange(cfg.sel_init, device=device)
    before_own = torch.arange(1 - cfg.sel_local, 1, device=device)
    columns = [first.expand(C, -1), own_C1 + before_own, dynamic]
    return torch.cat(columns, 1)
