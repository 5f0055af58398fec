"""Native Sparse Attention (arXiv 2502.11089) as custom operators: exact, linear in memory.

`nsa_attention` is the entry point. This file cuts a call into streams, and a stream into chunks of
queries; nsa/branches.py and nsa/selected.py hold the mathematics of a chunk. model.py has the plain
version and the checks of the inputs, nsa/triton/ the same algorithm as GPU kernels.

A stream is one document of one row of the batch under one KV head, with the M query heads that
share it. Streams write to disjoint memory, so that they can run at the same time, and results are
the same bits however many threads there are.

Letters: B rows of the batch, T tokens, H query heads, G KV heads, M = H/G, K head dim, N compressed
blocks, J selection blocks, C queries of a chunk, n selected blocks per query. l' of the paper is
sel_block. `cfg` is an NSAConfig, or its numbers as Sizes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.sparse.nsa.branches import (
    BranchKV,
    Sizes,
    Step,
    band_steps,
    choose,
    compressed_steps,
    fill_early,
    starts,
    steps_backward,
    steps_forward,
)
from longhaul.sparse.nsa.selected import selected_backward, selected_forward
from longhaul.sparse.streams import Stream, each_stream
from longhaul.sparse.tiles import BackwardInputs, Buffers
from model import check_sparse_inputs, sparse_documents

INT16_BLOCKS = 2**15  # indices of up to so many blocks fit int16


class Outputs(NamedTuple):
    """Results of the forward, of the whole call or of one stream."""

    o: Tensor
    o_slc: Tensor
    lse: Tensor  # of the selected branch, fp32; 0 before position n*l', where nothing needs it
    block_idx: Tensor

    def of(self, stream: Stream) -> "Outputs":
        return Outputs(
            o=self.o[stream.heads],
            o_slc=self.o_slc[stream.heads],
            lse=self.lse[stream.heads],
            block_idx=self.block_idx[stream.tokens],
        )


class Saved(NamedTuple):
    """What the backward reads of the forward's results, of the whole call or of one stream."""

    o_slc: Tensor
    lse: Tensor
    block_idx: Tensor

    def of(self, stream: Stream) -> "Saved":
        return Saved(
            o_slc=self.o_slc[stream.heads],
            lse=self.lse[stream.heads],
            block_idx=self.block_idx[stream.tokens],
        )


class Gradients(NamedTuple):
    """What the backward of a stream fills or adds to."""

    dq: Tensor
    dkv: BranchKV
    dgates: Tensor


# ---- streams


def _streams(
    q: Tensor,
    k_slc: Tensor,
    k_cmp: Tensor,
    cu_seqlens: Tensor | None,
    cfg: Sizes,
) -> list[Stream]:
    """All streams of a call."""
    B, T, H, _ = q.shape
    N, G = k_cmp.shape[1:3]
    M = H // G

    streams = []
    for b in range(B):
        for tokens, blocks in sparse_documents(cu_seqlens, T, N, cfg):
            for g in range(G):
                heads = slice(g * M, g * M + M)
                stream = Stream(
                    heads=(b, tokens, heads),
                    tokens=(b, tokens, g),
                    blocks=(b, blocks, g),
                )
                streams.append(stream)
    return streams


def _kv_of(kv: BranchKV, stream: Stream) -> BranchKV:
    """Keys and values of one stream, as contiguous copies, which every chunk reads."""
    stream_kv = BranchKV(
        k_slc=kv.k_slc[stream.tokens],
        v_slc=kv.v_slc[stream.tokens],
        k_cmp=kv.k_cmp[stream.blocks],
        v_cmp=kv.v_cmp[stream.blocks],
        k_win=kv.k_win[stream.tokens],
        v_win=kv.v_win[stream.tokens],
    )
    return stream_kv.contiguous()


def _chunks(T: int, cfg: Sizes) -> list[tuple[int, int]]:
    """Ranges [start, stop) of queries, in whole selection blocks but for the end.

    The first n*l' queries select every block, so that they are a chunk of plain causal attention.
    The other chunks take T/32 queries: enough to keep tiles full, few enough that memory stays
    linear.
    """
    dense = min(T, cfg.dense_tokens)
    blocks = max(1024, T // 32) // cfg.sel_block
    size = max(1, blocks) * cfg.sel_block

    chunks = [(0, dense)]
    for start in starts(dense, T, size):
        chunks.append((start, min(start + size, T)))
    return chunks


# ---- forward


def _block_chooser(
    block_idx_Cn: Tensor,
    start: int,
    heads: int,
    cfg: Sizes,
) -> Callable[[Step, Tensor], None]:
    """A callback for steps_forward that fills block_idx_Cn from the compressed probabilities."""

    def choose_blocks(step: Step, p_RN: Tensor) -> None:
        N = p_RN.shape[1]
        p_CN = p_RN.view(-1, heads, N).sum(1)
        first = start + step.queries.start
        block_idx_Cn[step.queries] = choose(p_CN, first, cfg)

    return choose_blocks


def _forward_stream(
    q_TMK: Tensor,
    kv: BranchKV,
    gates_TM3: Tensor,
    cfg: Sizes,
    outputs: Outputs,
) -> None:
    """Fills the outputs of one stream."""
    T, M, _ = q_TMK.shape
    N = len(kv.k_cmp)
    device = q_TMK.device
    buffers = Buffers(q_TMK)

    for start, stop in _chunks(T, cfg):
        q = q_TMK[start:stop].contiguous()
        gates_CM31 = gates_TM3[start:stop].float().unsqueeze(-1)
        g_cmp, g_slc, g_win = gates_CM31.unbind(2)
        block_idx_Cn = outputs.block_idx[start:stop]
        dense = start < cfg.dense_tokens

        # The branches add up in fp32: the gates are fp32.
        choose_blocks = None if dense else _block_chooser(block_idx_Cn, start, M, cfg)
        steps = compressed_steps(start, stop, M, N, cfg, device)
        o = g_cmp * steps_forward(q, kv.k_cmp, kv.v_cmp, steps, buffers, choose_blocks)

        steps = band_steps(start, stop, 0, cfg.window, device)
        o += g_win * steps_forward(q, kv.k_win, kv.v_win, steps, buffers)

        if dense:
            fill_early(block_idx_Cn, cfg)
            steps = band_steps(start, stop, 0, cfg.dense_tokens, device)
            o_slc = steps_forward(q, kv.k_slc, kv.v_slc, steps, buffers)
        else:
            o_slc, outputs.lse[start:stop] = selected_forward(
                q,
                kv.k_slc,
                kv.v_slc,
                start,
                block_idx_Cn,
                cfg,
                buffers,
            )
        outputs.o_slc[start:stop] = o_slc
        outputs.o[start:stop] = o.add_(g_slc * o_slc)


def _empty_outputs(q: Tensor, k_slc: Tensor, cfg: Sizes) -> Outputs:
    B, T, H, _ = q.shape
    G = k_slc.shape[2]
    few_blocks = T <= INT16_BLOCKS * cfg.sel_block
    return Outputs(
        o=q.new_empty(q.shape),
        o_slc=q.new_empty(q.shape),
        lse=q.new_zeros((B, T, H), dtype=torch.float32),
        block_idx=q.new_empty(
            (B, T, G, cfg.sel_count),
            dtype=torch.int16 if few_blocks else torch.int32,
        ),
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of Outputs; only o has gradients."""
    cfg = Sizes(*sizes)
    kv = BranchKV(k_slc, v_slc, k_cmp, v_cmp, k_win, v_win)
    outputs = _empty_outputs(q, k_slc, cfg)

    def forward(stream: Stream) -> None:
        _forward_stream(
            q[stream.heads],
            _kv_of(kv, stream),
            gates[stream.heads],
            cfg,
            outputs.of(stream),
        )

    streams = _streams(q, k_slc, k_cmp, cu_seqlens, cfg)
    each_stream(forward, streams, q.device)
    return tuple(outputs)


# ---- backward


def _backward_stream(
    do_TMK: Tensor,
    q_TMK: Tensor,
    kv: BranchKV,
    gates_TM3: Tensor,
    cfg: Sizes,
    saved: Saved,
    grads: Gradients,
) -> None:
    """Fills dq and dgates, and adds to the gradients of keys and values.

    Those of the compressed and the selected branch are fp32 and lack the factor 1 / sqrt(K); those
    of the selected branch are in whole blocks, [J,l',K]. Those of the window are final.
    """
    T, M, K = q_TMK.shape
    N = len(kv.k_cmp)
    device = q_TMK.device
    scale = K**-0.5
    buffers = Buffers(q_TMK)

    for start, stop in _chunks(T, cfg):
        q = q_TMK[start:stop].contiguous()
        do = do_TMK[start:stop].contiguous()
        gates_CM3 = gates_TM3[start:stop].float()
        g_cmp, g_slc, g_win = gates_CM3.split(1, -1)
        dq = torch.zeros_like(q, dtype=torch.float32)
        dgates_CM3 = torch.zeros_like(gates_CM3)
        dg_cmp, dg_slc, dg_win = dgates_CM3.split(1, -1)

        steps_backward(
            q,
            do,
            g_cmp,
            kv.k_cmp,
            kv.v_cmp,
            compressed_steps(start, stop, M, N, cfg, device),
            dk_SK=grads.dkv.k_cmp,
            dv_SK=grads.dkv.v_cmp,
            dq_CMK=dq,
            dgate_CM1=dg_cmp,
            buffers=buffers,
        )

        # fp32 sums of the window exist only for the keys of this chunk.
        first = max(0, start - cfg.window + 1)
        dk, dv = q.new_zeros(2, stop - first, K, dtype=torch.float32)
        steps_backward(
            q,
            do,
            g_win,
            kv.k_win[first:stop],
            kv.v_win[first:stop],
            band_steps(start, stop, first, cfg.window, device),
            dk_SK=dk,
            dv_SK=dv,
            dq_CMK=dq,
            dgate_CM1=dg_win,
            buffers=buffers,
        )
        grads.dkv.k_win[first:stop] += dk.mul_(scale)
        grads.dkv.v_win[first:stop] += dv

        if start < cfg.dense_tokens:
            steps_backward(
                q,
                do,
                g_slc,
                kv.k_slc,
                kv.v_slc,
                band_steps(start, stop, 0, cfg.dense_tokens, device),
                dk_SK=grads.dkv.k_slc.flatten(0, 1),
                dv_SK=grads.dkv.v_slc.flatten(0, 1),
                dq_CMK=dq,
                dgate_CM1=dg_slc,
                buffers=buffers,
            )
        else:
            # delta = do . o of the branch is the gradient of its gate.
            dg_slc.copy_((do.float() * saved.o_slc[start:stop]).sum(-1, keepdim=True))
            inputs = BackwardInputs(
                q=q,
                do=do * g_slc.to(do.dtype),
                lse=saved.lse[start:stop],
                delta=(dg_slc * g_slc).squeeze(-1),
            )
            dq += selected_backward(
                inputs,
                kv.k_slc,
                kv.v_slc,
                start,
                saved.block_idx[start:stop],
                cfg,
                grads.dkv.k_slc,
                grads.dkv.v_slc,
                buffers,
            )

        grads.dq[start:stop] = dq.mul_(scale)
        grads.dgates[start:stop] = dgates_CM3


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
    o_slc: Tensor,
    lse: Tensor,
    block_idx: Tensor,
    cu_seqlens: Tensor | None,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, the six K/V and the gates."""
    cfg = Sizes(*sizes)
    kv = BranchKV(k_slc, v_slc, k_cmp, v_cmp, k_win, v_win)
    saved = Saved(o_slc, lse, block_idx)

    # Only the window's gradients are sums that start from zero. The pages of the others become
    # resident when a stream writes them, after its fp32 sums are complete.
    dq = q.new_empty(q.shape)
    dkv = BranchKV(
        k_slc=k_slc.new_empty(k_slc.shape),
        v_slc=v_slc.new_empty(v_slc.shape),
        k_cmp=k_cmp.new_empty(k_cmp.shape),
        v_cmp=v_cmp.new_empty(v_cmp.shape),
        k_win=k_win.new_zeros(k_win.shape),
        v_win=v_win.new_zeros(v_win.shape),
    )
    dgates = gates.new_empty(gates.shape)

    def backward(stream: Stream) -> None:
        T, _, K = q[stream.heads].shape
        N, _ = k_cmp[stream.blocks].shape
        J = -(-T // cfg.sel_block)
        scale = K**-0.5

        # fp32, because each element is a sum of many
        dslc_2JSK = q.new_zeros((2, J, cfg.sel_block, K), dtype=torch.float32)
        dcmp_2NK = q.new_zeros((2, N, K), dtype=torch.float32)
        stream_dkv = BranchKV(
            *dslc_2JSK,
            *dcmp_2NK,
            dkv.k_win[stream.tokens],
            dkv.v_win[stream.tokens],
        )
        _backward_stream(
            do[stream.heads],
            q[stream.heads],
            _kv_of(kv, stream),
            gates[stream.heads],
            cfg,
            saved.of(stream),
            Gradients(dq[stream.heads], stream_dkv, dgates[stream.heads]),
        )

        stream_dkv.k_slc.mul_(scale)
        stream_dkv.k_cmp.mul_(scale)
        dkv.k_slc[stream.tokens] = stream_dkv.k_slc.flatten(0, 1)[:T]
        dkv.v_slc[stream.tokens] = stream_dkv.v_slc.flatten(0, 1)[:T]
        dkv.k_cmp[stream.blocks] = stream_dkv.k_cmp
        dkv.v_cmp[stream.blocks] = stream_dkv.v_cmp

    streams = _streams(q, k_slc, k_cmp, cu_seqlens, cfg)
    each_stream(backward, streams, q.device)
    return dq, *dkv, dgates


# ---- the operators of PyTorch


@nsa_forward.register_fake
def _(q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, cu_seqlens, sizes):
    return tuple(_empty_outputs(q, k_slc, Sizes(*sizes)))


@nsa_backward.register_fake
def _(do, *inputs_and_saved):
    inputs = inputs_and_saved[:8]  # q, the six K/V and the gates
    return tuple(x.new_empty(x.shape) for x in inputs)


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # zeros for o_slc's absent gradient would be as large as q
    *tensors, sizes = inputs
    _, *saved = output
    ctx.save_for_backward(*tensors, *saved)
    ctx.sizes = sizes


def _backward(ctx, do, *_):
    *inputs, cu_seqlens, o_slc, lse, block_idx = ctx.saved_tensors
    saved = Saved(o_slc, lse, block_idx)
    grads = nsa_backward(do, *inputs, *saved, cu_seqlens, ctx.sizes)
    return *grads, None, None


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
    """
    kv = BranchKV(k_slc, v_slc, k_cmp, v_cmp, k_win, v_win)
    return attend(nsa_forward, (q, *kv), gates, cfg, cu_seqlens, return_parts)


def attend(
    forward: Callable,
    qkv: tuple[Tensor, ...],
    gates: Tensor,
    cfg,
    cu_seqlens: Tensor | None,
    return_parts: bool,
) -> Tensor | dict[str, Tensor]:
    """nsa_attention by a custom operator whose first result is o and whose last is block_idx."""
    q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win = qkv
    token_kv = k_slc, v_slc, k_win, v_win
    check_sparse_inputs(q, token_kv, (k_cmp, v_cmp), gates, cfg, cu_seqlens)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.long()

    sizes = [getattr(cfg, name) for name in Sizes._fields]
    o, *_, block_idx = forward(*qkv, gates, cu_seqlens, sizes)
    if not return_parts:
        return o

    # A branch is what a gate of 1 among zeros gives.
    parts = {"o": o, "block_idx": block_idx.long()}
    for i, name in enumerate(("o_cmp", "o_slc", "o_win")):
        branch = torch.tensor(i, device=gates.device)
        one_gate = torch.zeros_like(gates).index_fill(-1, branch, 1)
        o_branch, *_ = forward(*qkv, one_gate, cu_seqlens, sizes)
        parts[name] = o_branch
    return parts
