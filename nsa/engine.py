"""Native Sparse Attention (arXiv 2502.11089) as custom ops: exact, linear in memory, deterministic;
the door is nsa_attention.

nsa/branches.py holds the mathematics, model.py the plain version and the checks of the inputs.
`cfg` is an NSAConfig. A stream is one document of one row of the batch under one KV head.

Letters: B batch, T tokens, H query heads, G KV heads, M = H/G, K head dim, N compressed blocks, n
selected blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model import check_sparse_inputs, sparse_documents
from nsa.branches import (
    Sizes,
    band_steps,
    choose,
    compressed_steps,
    fill_early,
    rows_backward,
    rows_forward,
    selected_backward,
    selected_forward,
)
from nsa.platform import platform


# --------------------------------------------------------------- one document, one row, one KV head
def _chunks(T, cfg):
    """Query ranges: the first n*l' tokens, then T/32 at a time, so that tiles stay full and memory
    stays linear.
    """
    early = min(T, cfg.dense_tokens)
    size = max(1024, T // 32) // cfg.sel_block * cfg.sel_block or cfg.sel_block
    later = platform().tiles(range(early, T, size))
    return [(0, early)] + [(x, min(x + size, T)) for x in later]


def _forward_stream(q_TMK, kv, gates_TM3, cfg, o_TMK, o_slc_TMK, lse_TM, block_idx_Tn):
    """Fills the outputs of one stream."""
    k_slc, v_slc, k_cmp, v_cmp, k_win, v_win = kv
    M, device = q_TMK.shape[1], q_TMK.device
    for x, y in _chunks(len(q_TMK), cfg):
        q, g_CM31, idx_Cn = (
            q_TMK[x:y].contiguous(),
            gates_TM3[x:y].float().unsqueeze(-1),
            block_idx_Tn[x:y],
        )
        early = x < cfg.dense_tokens

        def look(step, p_RN):
            idx_Cn[step.here] = choose(
                p_RN.view(-1, M, p_RN.shape[1]).sum(1), x + step.here.start, cfg
            )

        steps = compressed_steps(x, y, M, len(k_cmp), cfg, device)
        o = g_CM31[:, :, 0] * rows_forward(q, k_cmp, v_cmp, steps, None if early else look)
        o += g_CM31[:, :, 2] * rows_forward(
            q, k_win, v_win, band_steps(x, y, 0, cfg.window, device)
        )
        if early:
            fill_early(idx_Cn, cfg)
            o_slc = rows_forward(q, k_slc, v_slc, band_steps(x, y, 0, cfg.dense_tokens, device))
        else:
            o_slc, lse_TM[x:y] = selected_forward(q, k_slc, v_slc, x, idx_Cn, cfg)
        o_slc_TMK[x:y] = o_slc
        o_TMK[x:y] = o.add_(g_CM31[:, :, 1] * o_slc)


def _backward_stream(
    do_TMK, q_TMK, kv, gates_TM3, cfg, o_slc_TMK, lse_TM, block_idx_Tn, dq_TMK, dkv, dgates_TM3
):
    """Fills dq and dgates, adds to dkv: fp32 and unscaled, but for the window's; the selected ones
    in whole blocks.
    """
    k_slc, v_slc, k_cmp, v_cmp, k_win, v_win = kv
    dk_slc, dv_slc, dk_cmp, dv_cmp, dk_win, dv_win = dkv
    (T, M, K), device = q_TMK.shape, q_TMK.device
    for x, y in _chunks(T, cfg):
        q, do, g_CM3 = q_TMK[x:y].contiguous(), do_TMK[x:y].contiguous(), gates_TM3[x:y].float()
        g_cmp, g_slc, g_win = g_CM3.split(1, -1)
        dq, dg_CM3 = torch.zeros_like(q, dtype=torch.float32), torch.zeros_like(g_CM3)
        dg_cmp, dg_slc, dg_win = dg_CM3.split(1, -1)
        rows_backward(
            q,
            do,
            g_cmp,
            k_cmp,
            v_cmp,
            compressed_steps(x, y, M, len(k_cmp), cfg, device),
            dk_cmp,
            dv_cmp,
            dq,
            dg_cmp,
        )
        first = max(0, x - cfg.window + 1)  # fp32 sums for this chunk's keys only
        dk, dv = q.new_zeros(2, y - first, K, dtype=torch.float32)
        rows_backward(
            q,
            do,
            g_win,
            k_win[first:y],
            v_win[first:y],
            band_steps(x, y, first, cfg.window, device),
            dk,
            dv,
            dq,
            dg_win,
        )
        dk_win[first:y] += dk.mul_(K**-0.5)
        dv_win[first:y] += dv
        if x < cfg.dense_tokens:
            rows_backward(
                q,
                do,
                g_slc,
                k_slc,
                v_slc,
                band_steps(x, y, 0, cfg.dense_tokens, device),
                dk_slc.flatten(0, 1),
                dv_slc.flatten(0, 1),
                dq,
                dg_slc,
            )
        else:
            dg_slc.copy_((do.float() * o_slc_TMK[x:y]).sum(-1, keepdim=True))
            rows = q, do * g_slc.to(do.dtype), lse_TM[x:y], (dg_slc * g_slc).squeeze(-1)
            dq += selected_backward(rows, k_slc, v_slc, x, block_idx_Tn[x:y], cfg, dk_slc, dv_slc)
        dq_TMK[x:y], dgates_TM3[x:y] = dq.mul_(K**-0.5), dg_CM3


def _streams(q, k_slc, k_cmp, cu_seqlens, cfg):
    """Index of (query heads, tokens of a KV head, compressed blocks of a KV head), of every stream."""
    B, T, H, _ = q.shape
    M = H // k_slc.shape[2]
    return [
        ((b, tokens, slice(g * M, g * M + M)), (b, tokens, g), (b, blocks, g))
        for b in range(B)
        for tokens, blocks in sparse_documents(cu_seqlens, T, k_cmp.shape[1], cfg)
        for g in range(k_slc.shape[2])
    ]


def _stream_kv(kv, tokens, blocks):
    return [x[blocks if i in (2, 3) else tokens].contiguous() for i, x in enumerate(kv)]


def _empty_outputs(q, k_slc, cfg):
    """o, o_slc, lse and block_idx."""
    B, T, H, _ = q.shape
    dtype = torch.int16 if T <= 32768 * cfg.sel_block else torch.int32
    return (
        q.new_empty(q.shape),
        q.new_empty(q.shape),
        q.new_zeros((B, T, H), dtype=torch.float32),
        q.new_empty((B, T, k_slc.shape[2], cfg.sel_count), dtype=dtype),
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
    """(o, o_slc, lse of the selected branch, block_idx); only o has gradients."""
    cfg, kv = Sizes(*sizes), (k_slc, v_slc, k_cmp, v_cmp, k_win, v_win)
    o, o_slc, lse, block_idx = _empty_outputs(q, k_slc, cfg)

    def forward(stream):
        heads, tokens, blocks = stream
        _forward_stream(
            q[heads],
            _stream_kv(kv, tokens, blocks),
            gates[heads],
            cfg,
            o[heads],
            o_slc[heads],
            lse[heads],
            block_idx[tokens],
        )

    platform().each_stream(forward, _streams(q, k_slc, k_cmp, cu_seqlens, cfg), q.device)
    return o, o_slc, lse, block_idx


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
    cfg, kv = Sizes(*sizes), (k_slc, v_slc, k_cmp, v_cmp, k_win, v_win)
    # only the window's sums start from zero; the others' pages become resident when they are
    # written, after dslc is done
    grads = [
        x.new_zeros(x.shape) if x is k_win or x is v_win else x.new_empty(x.shape)
        for x in (q, *kv, gates)
    ]

    def backward(stream):
        heads, tokens, blocks = stream
        (T, K), N, l = q[heads].shape[::2], k_cmp[blocks].shape[0], cfg.sel_block
        dslc = q.new_zeros(
            (2, -(-T // l), l, K), dtype=torch.float32
        )  # fp32: many sums meet in each element
        dcmp = q.new_zeros((2, N, K), dtype=torch.float32)
        dkv = (*dslc, *dcmp, grads[5][tokens], grads[6][tokens])
        _backward_stream(
            do[heads],
            q[heads],
            _stream_kv(kv, tokens, blocks),
            gates[heads],
            cfg,
            o_slc[heads],
            lse[heads],
            block_idx[tokens],
            grads[0][heads],
            dkv,
            grads[7][heads],
        )
        dslc[0].mul_(K**-0.5), dcmp[0].mul_(K**-0.5)
        grads[1][tokens], grads[2][tokens] = dslc.flatten(1, 2)[:, :T]
        grads[3][blocks], grads[4][blocks] = dcmp

    platform().each_stream(backward, _streams(q, k_slc, k_cmp, cu_seqlens, cfg), q.device)
    return tuple(grads)


@nsa_forward.register_fake
def _(q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, cu_seqlens, sizes):
    return _empty_outputs(q, k_slc, Sizes(*sizes))


@nsa_backward.register_fake
def _(
    do, q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, o_slc, lse, block_idx, cu_seqlens, sizes
):
    return tuple(x.new_empty(x.shape) for x in (q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates))


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # zeros for o_slc's absent gradient would be as large as q
    ctx.save_for_backward(*inputs[:9], *output[1:])
    ctx.sizes = inputs[9]


def _backward(ctx, do, *_):
    *inputs, cu_seqlens, o_slc, lse, block_idx = ctx.saved_tensors
    return *nsa_backward(do, *inputs, o_slc, lse, block_idx, cu_seqlens, ctx.sizes), None, None


nsa_forward.register_autograd(_backward, setup_context=_save)


# ----------------------------------------------------------------------------------------- the door
def nsa_attention(
    q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, cfg, cu_seqlens=None, return_parts=False
):
    """Native Sparse Attention: o = g_cmp o_cmp + g_slc o_slc + g_win o_win (arXiv 2502.11089).

    q [B,T,H,K]; k/v [B,T,G,K]; k_cmp/v_cmp [B,N,G,K] (with cu_seqlens, each document's blocks one
    after another); all of
    one dtype (fp32, bf16, fp16); gates [B,T,H,3] after the sigmoid, in the order compressed,
    selected, window; cu_seqlens
    int32 or int64 [documents + 1], best on the host. Returns o [B,T,H,K]; with return_parts=True a
    dict o, o_cmp, o_slc, o_win, block_idx int64 [B,T,G,n] (-1 = unused), which costs four forwards. Raises ValueError for shapes that
    do not fit.
    """
    return attend(
        nsa_forward,
        (q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win),
        gates,
        cfg,
        cu_seqlens,
        return_parts,
    )


def attend(forward, qkv, gates, cfg, cu_seqlens, return_parts):
    """What nsa_attention returns, by a custom op whose first result is o and whose last is
    block_idx.
    """
    q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win = qkv
    check_sparse_inputs(q, (k_slc, v_slc, k_win, v_win), (k_cmp, v_cmp), gates, cfg, cu_seqlens)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.long()
    sizes = [getattr(cfg, name) for name in Sizes._fields]
    o, *_, block_idx = forward(*qkv, gates, cu_seqlens, sizes)
    if not return_parts:
        return o
    parts = {"o": o, "block_idx": block_idx.long()}
    for i, name in enumerate(
        ("o_cmp", "o_slc", "o_win")
    ):  # a branch alone is what a gate of 1 among zeros gives
        only = torch.zeros_like(gates).index_fill(-1, torch.tensor(i, device=gates.device), 1)
        parts[name] = forward(*qkv, only, cu_seqlens, sizes)[0]
    return parts
