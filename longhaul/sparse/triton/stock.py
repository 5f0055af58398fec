"""The compressed branch and the window of sparse attention by the attention kernels of PyTorch.

**The compressed branch is square causal attention.** Let l and s be cmp_block and cmp_stride; s
divides l. Token t of a document sees block j if it has ended: j*s + l <= t + 1. With
t + 1 = l + s*i + r and 0 <= r < s, that is j <= i, whatever r is. So the tokens from l-1 on, cut
into lines of s, are s problems that share their keys, each of them causal attention of line i to
block i and all before it. A document has as many lines as blocks. Folding (nsa.py) turns the s
residues r into further heads of the group, so that keys and values are not copied.

**The window** is causal attention with a limit to the left: lines of one token.

**Kernels.** Each is an operator that PyTorch's public attention calls, since that returns no
log-sum-exp or has no backward of its own.

cuDNN        the compressed branch of whole rows on cards where PyTorch prefers it. It builds a plan
             for each new shape, so that it does not serve packed rows.
flash        all documents in one call, in bf16 and fp16 on CUDA
others       one document, or a part of a window, at a time: in fp32 on CUDA the memory-efficient
             kernel; on a CPU, where Triton's interpreter runs the other kernels for tests, the
             CPU's

dq adds up by atomics in the first two, so that it repeats bit for bit only under
torch.use_deterministic_algorithms, which excludes cuDNN.

Letters: G KV heads, K head dim, C lines of all documents, E heads after folding.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from base.machine import platform

PIECE = 512  # queries of a window in one call of a kernel that takes no limit, at least
LSE_STEP = 32  # the memory-efficient kernel pads log-sum-exps to a multiple of this


class Lines(NamedTuple):
    """The queries of one branch, cut into lines, and what each line sees."""

    counts: list[int]  # lines of each document that has any
    end_D1: Tensor  # int32: where each of these documents begins, and where the last one ends
    window: int | None  # keys that a line sees, its own included; None: all up to its own
    whole_rows: bool  # whether every row of the batch is one document


def attend(
    lines: Lines,
    q_CEK: Tensor,
    k_CGK: Tensor,
    v_CGK: Tensor,
) -> tuple[Tensor, Tensor]:
    """(o_CEK, lse_EC) of every line: natural log-sum-exp in fp32."""
    if len(q_CEK) == 0:
        return torch.empty_like(q_CEK), q_CEK.new_empty((q_CEK.shape[1], 0), dtype=torch.float32)
    if _takes_cudnn(lines, q_CEK):
        return _cudnn_forward(lines, q_CEK, k_CGK, v_CGK)
    if platform().takes_flash(q_CEK):
        return _flash_forward(lines, q_CEK, k_CGK, v_CGK)
    return _pieces_forward(lines, q_CEK, k_CGK, v_CGK)


def attend_backward(
    lines: Lines,
    do_CEK: Tensor,
    q_CEK: Tensor,
    k_CGK: Tensor,
    v_CGK: Tensor,
    o_CEK: Tensor,
    lse_EC: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_CEK, dk_CGK, dv_CGK) of `attend`."""
    if len(q_CEK) == 0:
        return torch.empty_like(q_CEK), torch.empty_like(k_CGK), torch.empty_like(v_CGK)
    if _takes_cudnn(lines, q_CEK):
        return _cudnn_backward(
            lines,
            do_CEK,
            q_CEK,
            k_CGK,
            v_CGK,
            o_CEK,
            lse_EC,
        )
    if platform().takes_flash(q_CEK):
        return _flash_backward(lines, do_CEK, q_CEK, k_CGK, v_CGK, o_CEK, lse_EC)
    return _pieces_backward(lines, do_CEK, q_CEK, k_CGK, v_CGK, o_CEK, lse_EC)


def _takes_cudnn(lines: Lines, q: Tensor) -> bool:
    if not lines.whole_rows or lines.window is not None:
        return False
    return platform().prefers_cudnn(q)


# ---- cuDNN: whole rows


def _by_row(x_CEK: Tensor, rows: int) -> Tensor:
    """[rows of the batch, heads, lines of a row, K], as a view."""
    return x_CEK.unflatten(0, (rows, -1)).transpose(1, 2)


def _from_rows(x_BECK: Tensor) -> Tensor:
    """The reverse; no copy if the kernel kept the layout of its inputs."""
    return x_BECK.transpose(1, 2).flatten(0, 1).contiguous()


def _cudnn_forward(
    lines: Lines,
    q_CEK: Tensor,
    k_CGK: Tensor,
    v_CGK: Tensor,
) -> tuple[Tensor, Tensor]:
    rows = len(lines.counts)
    q, k, v = (_by_row(x, rows) for x in (q_CEK, k_CGK, v_CGK))
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q,
        k,
        v,
        attn_bias=None,
        compute_log_sumexp=True,
        is_causal=True,
    )
    lse_EBC = lse.view(lse.shape[:3]).transpose(0, 1)  # it is [B, E, lines of a row, 1]
    return _from_rows(o), lse_EBC.flatten(1)


def _cudnn_backward(
    lines: Lines,
    do_CEK: Tensor,
    q_CEK: Tensor,
    k_CGK: Tensor,
    v_CGK: Tensor,
    o_CEK: Tensor,
    lse_EC: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(lines.counts)
    do, q, k, v, o = (_by_row(x, rows) for x in (do_CEK, q_CEK, k_CGK, v_CGK, o_CEK))
    lse_BEC = lse_EC.unflatten(1, (rows, -1)).transpose(0, 1).contiguous()
    unread = q.new_empty((), dtype=torch.int64)  # the state of dropout
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do,
        q,
        k,
        v,
        o,
        lse_BEC[..., None],
        philox_seed=unread,
        philox_offset=unread,
        attn_bias=None,
        cum_seq_q=None,
        cum_seq_k=None,
        max_q=q.shape[2],
        max_k=k.shape[2],
        dropout_p=0.0,
        is_causal=True,
    )
    dq, dk, dv = (_from_rows(x) for x in grads)
    return dq, dk, dv


# ---- flash attention: all documents


def _flash_forward(
    lines: Lines,
    q_CEK: Tensor,
    k_CGK: Tensor,
    v_CGK: Tensor,
) -> tuple[Tensor, Tensor]:
    longest = max(lines.counts)
    o_CEK, lse_EC, *_ = torch.ops.aten._flash_attention_forward(
        q_CEK,
        k_CGK,
        v_CGK,
        lines.end_D1,
        lines.end_D1,
        longest,
        longest,
        0.0,
        is_causal=lines.window is None,
        return_debug_mask=False,
        window_size_left=-1 if lines.window is None else lines.window - 1,
        window_size_right=0,
    )
    return o_CEK, lse_EC


def _flash_backward(
    lines: Lines,
    do_CEK: Tensor,
    q_CEK: Tensor,
    k_CGK: Tensor,
    v_CGK: Tensor,
    o_CEK: Tensor,
    lse_EC: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(lines.counts)
    unread = q_CEK.new_empty(2, dtype=torch.uint64)  # the state of dropout
    return torch.ops.aten._flash_attention_backward(
        do_CEK,
        q_CEK,
        k_CGK,
        v_CGK,
        o_CEK,
        lse_EC,
        lines.end_D1,
        lines.end_D1,
        longest,
        longest,
        0.0,
        is_causal=lines.window is None,
        rng_state=unread,
        unused=unread,
        window_size_left=-1 if lines.window is None else lines.window - 1,
        window_size_right=0,
    )


# ---- one document, or a part of a window, at a time


def _pieces(lines: Lines, q: Tensor) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(queries, keys, bias) of each call; without a bias it is square and causal.

    A window is cut, so that the bias stays small.
    """
    first = 0
    for count in lines.counts:
        if lines.window is None or lines.window >= count:
            whole = slice(first, first + count)
            yield whole, whole, None
        else:
            size = max(PIECE, lines.window)
            for x in range(0, count, size):
                yield _piece_of_window(first, x, min(x + size, count), lines.window, q)
        first += count


def _piece_of_window(
    first: int,
    start: int,
    stop: int,
    window: int,
    like: Tensor,
) -> tuple[slice, slice, Tensor]:
    low = max(0, start - window + 1)
    query = torch.arange(start, stop, device=like.device)[:, None]
    key = torch.arange(low, stop, device=like.device)
    hidden = (key > query) | (key <= query - window)

    # The memory-efficient kernel wants rows of a bias to begin at multiples of 16 bytes.
    padded = -(-len(key) // 16) * 16
    bias = like.new_zeros(len(query), padded)[:, : len(key)]
    bias.masked_fill_(hidden, -torch.inf)
    queries = slice(first + start, first + stop)
    keys = slice(first + low, first + stop)
    return queries, keys, bias


def _pieces_forward(
    lines: Lines,
    q_CEK: Tensor,
    k_CGK: Tensor,
    v_CGK: Tensor,
) -> tuple[Tensor, Tensor]:
    C, E, _ = q_CEK.shape
    o_CEK = torch.empty_like(q_CEK)
    lse_EC = q_CEK.new_empty((E, C), dtype=torch.float32)
    for queries, keys, bias in _pieces(lines, q_CEK):
        k_1ESK = _repeat(k_CGK[keys], E)
        v_1ESK = _repeat(v_CGK[keys], E)
        o, lse = _forward(
            _heads_first(q_CEK[queries]),
            k_1ESK,
            v_1ESK,
            bias,
        )
        o_CEK[queries] = o[0].transpose(0, 1)
        lse_EC[:, queries] = lse[0]
    return o_CEK, lse_EC


def _pieces_backward(
    lines: Lines,
    do_CEK: Tensor,
    q_CEK: Tensor,
    k_CGK: Tensor,
    v_CGK: Tensor,
    o_CEK: Tensor,
    lse_EC: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    E = q_CEK.shape[1]
    G = k_CGK.shape[1]
    dq_CEK = torch.empty_like(q_CEK)
    dk_CGK = torch.zeros_like(k_CGK, dtype=torch.float32)
    dv_CGK = torch.zeros_like(v_CGK, dtype=torch.float32)
    for queries, keys, bias in _pieces(lines, q_CEK):
        dq, dk, dv = _backward(
            _heads_first(do_CEK[queries]),
            _heads_first(q_CEK[queries]),
            _repeat(k_CGK[keys], E),
            _repeat(v_CGK[keys], E),
            _heads_first(o_CEK[queries]),
            lse_EC[None, :, queries],
            bias,
        )
        dq_CEK[queries] = dq[0].transpose(0, 1)
        dk_CGK[keys] += _sum_of_groups(dk, G)
        dv_CGK[keys] += _sum_of_groups(dv, G)
    return dq_CEK, dk_CGK.to(k_CGK.dtype), dv_CGK.to(v_CGK.dtype)


def _heads_first(x_CEK: Tensor) -> Tensor:
    """[1, E, C, K]."""
    return x_CEK.transpose(0, 1)[None]


def _repeat(x_SGK: Tensor, heads: int) -> Tensor:
    """[1, heads, S, K]: the KV head of each query head."""
    x_SEK = x_SGK.repeat_interleave(heads // x_SGK.shape[1], 1)
    return _heads_first(x_SEK)


def _sum_of_groups(dx_1ESK: Tensor, G: int) -> Tensor:
    """[S, G, K] in fp32."""
    dx_GMSK = dx_1ESK[0].unflatten(0, (G, -1))
    return dx_GMSK.float().sum(1).transpose(0, 1)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    causal = bias is None
    if platform().device(q).type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, causal, attn_mask=bias)

    heads, count = q.shape[1:3]
    if bias is not None:
        bias = bias.expand(1, heads, -1, -1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    o, lse, *_ = efficient(q, k, v, bias, True, 0.0, causal)
    return o, lse[:, :, :count]


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    causal = bias is None
    if platform().device(q).type == "cpu":
        flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash_backward(
            do,
            q,
            k,
            v,
            o,
            lse,
            0.0,
            causal,
            attn_mask=bias,
        )

    heads, count = q.shape[1:3]
    if bias is not None:
        bias = bias.expand(1, heads, -1, -1)
    lse = torch.nn.functional.pad(lse, (0, -count % LSE_STEP), value=torch.inf)
    unread = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of dropout
    efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    dq, dk, dv, _ = efficient_backward(
        do,
        q,
        k,
        v,
        bias,
        o,
        lse,
        unread,
        unread,
        0.0,
        [True, True, True, False],
        causal,
    )
    return dq, dk, dv
