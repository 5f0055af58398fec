"""Native Sparse Attention (arXiv 2502.11089) as custom operators: exact, linear in memory.

`nsa_attention` is the entry point. The selected branch is attention over chosen blocks by the
engine of all selectors (sparse/engine.py), which also cuts a call into streams and chunks of
queries. This file adds to each chunk what is NSA's: the compressed branch and the window
(branches.py), the choice of blocks (selected.py), and the gates. model.py has the plain version and
the checks of the inputs, sparse/triton/nsa.py the bodies of the operators as GPU kernels.

Letters: B rows of the batch, T tokens, H query heads, G KV heads, M = H/G, K head dim, N compressed
blocks, J selection blocks, C queries of a chunk, n selected blocks per query. l' of the paper is
sel_block. `cfg` is an NSAConfig, or its numbers as Sizes.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from base import machine
from longhaul.sparse.choose import NO_BLOCK
from longhaul.sparse.engine import StreamAttention, in_blocks
from longhaul.sparse.nsa.branches import (
    BranchKV,
    Outputs,
    Sizes,
    compressed_steps,
    steps_backward,
    steps_forward,
    window_steps,
)
from longhaul.sparse.nsa.selected import choose
from longhaul.sparse.streams import Stream, each_stream
from longhaul.sparse.tiles import BackwardInputs
from model import check_sparse_inputs, sparse_documents

INT16_BLOCKS = 2**15  # indices of up to so many blocks fit int16


class StreamKV(NamedTuple):
    """(k, v) of each branch of one stream, or their gradients; of the selected one in blocks."""

    slc: Sequence[Tensor]
    cmp: Sequence[Tensor]
    win: Sequence[Tensor]


def _stream_kv(
    kv: BranchKV,
    stream: Stream,
    cfg: Sizes,
) -> StreamKV:
    """As contiguous copies, which every chunk reads."""
    return StreamKV(
        slc=[in_blocks(x[stream.tokens], cfg.sel_block, x.dtype) for x in kv[:2]],
        cmp=[x[stream.keys].contiguous() for x in kv[2:4]],
        win=[x[stream.tokens].contiguous() for x in kv[4:]],
    )


# ---- forward


def _forward_stream(
    q_TMK: Tensor,
    kv: StreamKV,
    gates_TM3: Tensor,
    cfg: Sizes,
    outputs: Outputs,
) -> None:
    """Fills the outputs, of one stream."""
    selected = StreamAttention(kv.slc, q_TMK, cfg.sel_count)
    buffers = selected.buffers
    # these see no compressed block, and are in the first block
    outputs.block_idx[: cfg.cmp_block - 1] = NO_BLOCK
    outputs.block_idx[: cfg.cmp_block - 1, 0] = 0

    for few in selected.chunks:
        q = q_TMK[few].contiguous()
        g_cmp, g_slc, g_win = gates_TM3[few].float().unsqueeze(-1).unbind(2)
        choose_blocks = partial(choose, outputs.block_idx[few], few.start, cfg)

        # the branches add up in fp32: the gates are fp32
        steps = compressed_steps(few, q, len(kv.cmp[0]), cfg)
        o = g_cmp * steps_forward(q, kv.cmp, steps, buffers, choose_blocks)
        steps = window_steps(few, q, 0, cfg)
        o += g_win * steps_forward(q, kv.win, steps, buffers)
        o_slc, outputs.lse_slc[few] = selected.forward(few, q, outputs.block_idx[few])
        outputs.o_slc[few] = o_slc
        outputs.o[few] = o.add_(g_slc * o_slc)


def _empty_outputs(
    q: Tensor,
    k_cmp: Tensor,
    cfg: Sizes,
    fused: bool,
) -> Outputs:
    B, T, H, K = q.shape
    N, G = k_cmp.shape[1:3]
    of_compressed = B if fused else 0
    few_blocks = T <= INT16_BLOCKS * cfg.sel_block
    index_dtype = torch.int16 if few_blocks else torch.int32
    lse_shape = H * cfg.cmp_stride, of_compressed * N
    return Outputs(
        o=q.new_empty(q.shape),
        o_cmp=q.new_empty((of_compressed, T, H, K)),
        o_slc=q.new_empty(q.shape),
        lse_cmp=q.new_empty(lse_shape, dtype=torch.float32),
        lse_slc=q.new_empty((B, T, H), dtype=torch.float32),
        block_idx=q.new_empty((B, T, G, cfg.sel_count), dtype=index_dtype),
    )


@torch.library.custom_op("longhaul::nsa_forward", mutates_args=())
def nsa_forward(
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
    fused: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of Outputs; only o has gradients. `fused`: by the Triton kernels."""
    cfg = Sizes(*sizes)
    kv = BranchKV(k_slc, v_slc, k_cmp, v_cmp, k_win, v_win)
    outputs = _empty_outputs(q, k_cmp, cfg, fused)
    if fused:
        from longhaul.sparse.triton import nsa

        nsa.forward(q, kv, gates, cu_seqlens, cfg, outputs)
        return tuple(outputs)

    def forward(stream: Stream) -> None:
        parts = outputs._replace(
            o=outputs.o[stream.heads],
            o_slc=outputs.o_slc[stream.heads],
            lse_slc=outputs.lse_slc[stream.heads],
            block_idx=outputs.block_idx[stream.tokens],
        )
        stream_kv = _stream_kv(kv, stream, cfg)
        _forward_stream(q[stream.heads], stream_kv, gates[stream.heads], cfg, parts)

    spans = sparse_documents(cu_seqlens, q.shape[1], k_cmp.shape[1], cfg)
    each_stream(forward, q, k_cmp, spans)
    return tuple(outputs)


# ---- backward


def _backward_stream(
    inputs: Sequence[Tensor],
    kv: StreamKV,
    block_idx_Tn: Tensor,
    cfg: Sizes,
    dkv: StreamKV,
) -> None:
    """Fills dq and dgates, and adds to the gradients of keys and values."""
    do_TMK, q_TMK, gates_TM3, o_slc_TMK, lse_TM, dq_TMK, dgates_TM3 = inputs
    K = q_TMK.shape[2]
    selected = StreamAttention(kv.slc, q_TMK, cfg.sel_count)
    for few in selected.chunks:
        q, do = q_TMK[few].contiguous(), do_TMK[few].contiguous()
        gates_CM3 = gates_TM3[few].float()
        g_cmp, g_slc, g_win = gates_CM3.split(1, -1)
        dq = torch.zeros_like(q, dtype=torch.float32)
        dgates_CM3 = torch.zeros_like(gates_CM3)
        dg_cmp, dg_slc, dg_win = dgates_CM3.split(1, -1)
        backward = partial(steps_backward, q, do, dq, selected.buffers)

        steps = compressed_steps(few, q, len(kv.cmp[0]), cfg)
        backward(g_cmp, dg_cmp, steps, kv.cmp, dkv.cmp)

        # fp32 sums of the window exist only for the keys of this chunk
        keys = slice(max(0, few.start - cfg.window + 1), few.stop)
        sums = q.new_zeros(2, keys.stop - keys.start, K, dtype=torch.float32)
        steps = window_steps(few, q, keys.start, cfg)
        backward(g_win, dg_win, steps, [x[keys] for x in kv.win], sums)
        sums[0].mul_(K**-0.5)
        for total, part in zip(dkv.win, sums, strict=True):
            total[keys] += part

        # delta = do . o of the branch is the gradient of its gate
        dg_slc.copy_((do.float() * o_slc_TMK[few]).sum(-1, keepdim=True))
        of_branch = BackwardInputs(
            q=q,
            do=do * g_slc.to(do.dtype),
            lse=lse_TM[few],
            delta=(dg_slc * g_slc).squeeze(-1),
        )
        dq += selected.backward(few, of_branch, block_idx_Tn[few], dkv.slc)
        dq_TMK[few] = dq.mul_(K**-0.5)
        dgates_TM3[few] = dgates_CM3
    dkv.slc[0].mul_(K**-0.5)
    dkv.cmp[0].mul_(K**-0.5)


@torch.library.custom_op("longhaul::nsa_backward", mutates_args=())
def nsa_backward(
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
    fused: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, the six K/V and the gates."""
    cfg = Sizes(*sizes)
    kv = BranchKV(k_slc, v_slc, k_cmp, v_cmp, k_win, v_win)
    if fused:
        from longhaul.sparse.triton import nsa

        saved = Outputs(do, o_cmp, o_slc, lse_cmp, lse_slc, block_idx)
        return nsa.backward(do, q, kv, gates, saved, cu_seqlens, cfg)

    # Only the window's gradients are sums that start from zero. The pages of the others become
    # resident when a stream writes them, after its fp32 sums are complete.
    dq, dgates, *dkv = (x.new_empty(x.shape) for x in (q, gates, *kv[:4]))
    dkv += [x.new_zeros(x.shape) for x in kv[4:]]

    def backward(stream: Stream) -> None:
        stream_kv = _stream_kv(kv, stream, cfg)
        # fp32, because each element is a sum of many
        slc, cmp = (
            [torch.zeros_like(x, dtype=torch.float32) for x in pair] for pair in stream_kv[:2]
        )
        sums = StreamKV(slc, cmp, [x[stream.tokens] for x in dkv[4:]])
        inputs = [x[stream.heads] for x in (do, q, gates, o_slc, lse_slc, dq, dgates)]
        _backward_stream(inputs, stream_kv, block_idx[stream.tokens], cfg, sums)
        for grad, total in zip(dkv[:2], slc, strict=True):
            grad[stream.tokens] = total.flatten(0, 1)[: stream.length]
        for grad, total in zip(dkv[2:4], cmp, strict=True):
            grad[stream.keys] = total

    spans = sparse_documents(cu_seqlens, q.shape[1], k_cmp.shape[1], cfg)
    each_stream(backward, q, k_cmp, spans)
    return dq, *dkv, dgates


# ---- the operators of PyTorch


@nsa_forward.register_fake
def _(
    q,
    k_slc,
    v_slc,
    k_cmp,
    v_cmp,
    k_win,
    v_win,
    gates,
    cu_seqlens,
    sizes,
    fused=False,
):
    return tuple(_empty_outputs(q, k_cmp, Sizes(*sizes), fused))


@nsa_backward.register_fake
def _(do, *inputs_and_saved):
    return tuple(x.new_empty(x.shape) for x in inputs_and_saved[:8])


def _save(
    ctx,
    inputs,
    output,
):
    ctx.set_materialize_grads(False)  # zeros for absent gradients of outputs would be as large as q
    *tensors, sizes, fused = inputs
    _, *saved = output
    ctx.save_for_backward(*tensors, *saved)
    ctx.numbers = sizes, fused


def _backward(
    ctx,
    do,
    *_,
):
    *inputs, cu_seqlens, o_cmp, o_slc, lse_cmp, lse_slc, block_idx = ctx.saved_tensors
    saved = o_cmp, o_slc, lse_cmp, lse_slc, block_idx
    grads = nsa_backward(do, *inputs, *saved, cu_seqlens, *ctx.numbers)
    return *grads, None, None, None


nsa_forward.register_autograd(_backward, setup_context=_save)


# ---- the entry point


def nsa_attention(
    q: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    cfg,
    cu_seqlens: Tensor | None = None,
    return_parts: bool = False,
    fused: bool = False,
) -> Tensor | dict[str, Tensor]:
    """Native Sparse Attention: o = g_cmp o_cmp + g_slc o_slc + g_win o_win (arXiv 2502.11089).

    q [B,T,H,K]; k and v of the selected branch and the window [B,T,G,K]; k_cmp and v_cmp [B,N,G,K],
    with cu_seqlens the blocks of each document one after another; all of one dtype: fp32, bf16 or
    fp16. gates [B,T,H,3] after the sigmoid, in the order compressed, selected, window. cu_seqlens:
    int32 or int64 [documents + 1], the boundaries of a row's documents, best on the host; None if
    each row is one document.

    Returns o [B,T,H,K]. With return_parts=True, which costs four forwards: a dict of o, o_cmp,
    o_slc, o_win and block_idx, int64 [B,T,G,n], -1 = unused. Raises ValueError for shapes and
    dtypes that do not fit.

    fused: by the Triton kernels, for at most 64 query heads per KV head, head dim 256, sel_block
    128 and 32 KiB of keys per block. Raises ValueError if they do not run on the tensors' device
    and dtype.
    """
    qkv = q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win
    check_sparse_inputs(q, (k_slc, v_slc, k_win, v_win), (k_cmp, v_cmp), gates, cfg, cu_seqlens)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.long()

    products = q.dtype if fused else machine.product_dtype(q)
    qkv = [x.to(products) for x in qkv]

    sizes = [getattr(cfg, name) for name in Sizes._fields]
    o, *_, block_idx = nsa_forward(*qkv, gates, cu_seqlens, sizes, fused)
    if not return_parts:
        return o.to(q.dtype)

    # a branch is what a gate of 1 among zeros gives
    parts = {"o": o.to(q.dtype), "block_idx": block_idx.long()}
    one_gates_33 = torch.eye(3, dtype=gates.dtype, device=gates.device)
    for name, gates_3 in zip(("o_cmp", "o_slc", "o_win"), one_gates_33, strict=True):
        of_branch = gates_3.repeat(*gates.shape[:3], 1)
        o, *_ = nsa_forward(*qkv, of_branch, cu_seqlens, sizes, fused)
        parts[name] = o.to(q.dtype)
    return parts
