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
neither      fp32, wide heads, and a CPU, where Triton's interpreter runs the other kernels for
             tests: the tiles of longhaul/sparse/tiles.py, a few lines at a time

dq adds up by atomics in the first two, so that it repeats bit for bit only under
torch.use_deterministic_algorithms, which excludes cuDNN.

Letters: G KV heads, K head dim, C lines of all documents, E heads after folding.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from base import machine
from base.machine import cudnn_attention, cudnn_attention_backward
from longhaul.sparse.tiles import BackwardInputs, Buffers, tile_backward, tile_forward

PIECE_LOGITS = 2**24  # logits that exist at once where neither kernel runs: 64 MiB in fp32


class Lines(NamedTuple):
    """The queries of one branch, cut into lines, and what each line sees."""

    counts: list[int]  # lines of each document that has any
    end_D1: Tensor  # int32: where each of these documents begins, and where the last one ends
    window: int | None  # keys that a line sees, its own included; None: all up to its own
    whole_rows: bool  # whether every row of the batch is one document

    def take_cudnn(self, q: Tensor) -> bool:
        if not self.whole_rows or self.window is not None:
            return False
        return machine.prefers_cudnn(q)

    def by_row(self, x_CE: Tensor) -> Tensor:
        """[rows of the batch, lines of a row, heads, ...], a view."""
        return x_CE.unflatten(0, (len(self.counts), -1))

    def as_flash_says(self) -> dict:
        """What both operators of flash attention are told of the lines."""
        longest = max(self.counts)
        return {
            "cum_seq_q": self.end_D1,
            "cum_seq_k": self.end_D1,
            "max_q": longest,
            "max_k": longest,
            "dropout_p": 0.0,
            "is_causal": self.window is None,
            "window_size_left": -1 if self.window is None else self.window - 1,
            "window_size_right": 0,
        }


def attend(
    lines: Lines,
    q_CEK: Tensor,
    k_CGK: Tensor,
    v_CGK: Tensor,
) -> tuple[Tensor, Tensor]:
    """(o_CEK, lse_EC) of every line: natural log-sum-exp in fp32."""
    qkv = q_CEK, k_CGK, v_CGK
    if len(q_CEK) == 0:
        return torch.empty_like(q_CEK), q_CEK.new_empty((q_CEK.shape[1], 0), dtype=torch.float32)
    if lines.take_cudnn(q_CEK):
        o_BCEK, lse_BEC = cudnn_attention(*map(lines.by_row, qkv), causal=True)
        return o_BCEK.flatten(0, 1).contiguous(), lse_BEC.transpose(0, 1).flatten(1)
    if machine.takes_flash(q_CEK):
        forward = torch.ops.aten._flash_attention_forward
        o_CEK, lse_EC, *_ = forward(*qkv, return_debug_mask=False, **lines.as_flash_says())
        return o_CEK, lse_EC
    return _pieces_forward(lines, *qkv)


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
    given = do_CEK, q_CEK, k_CGK, v_CGK, o_CEK
    if len(q_CEK) == 0:
        return torch.empty_like(q_CEK), torch.empty_like(k_CGK), torch.empty_like(v_CGK)
    if lines.take_cudnn(q_CEK):
        lse_BEC = lines.by_row(lse_EC.T).transpose(1, 2)
        grads = cudnn_attention_backward(*map(lines.by_row, given), lse_BEC, causal=True)
        dq, dk, dv = (x.flatten(0, 1).contiguous() for x in grads)
        return dq, dk, dv
    if machine.takes_flash(q_CEK):
        unread = q_CEK.new_empty(2, dtype=torch.uint64)  # the state of dropout
        backward = torch.ops.aten._flash_attention_backward
        options = lines.as_flash_says()
        return backward(*given, lse_EC, rng_state=unread, unused=unread, **options)
    return _pieces_backward(lines, *given, lse_EC)


# ---- a few lines at a time


def _pieces(
    lines: Lines,
    q_CEK: Tensor,
    k_CGK: Tensor,
    v_CGK: Tensor,
) -> Iterator[tuple[slice, slice, list[Tensor], Tensor]]:
    """(queries, keys, (k, v) [G, S, K], which keys a row does not see) of each step."""
    E, G = q_CEK.shape[1], k_CGK.shape[1]
    first = 0
    for count in lines.counts:
        window = count if lines.window is None else min(lines.window, count)
        size = max(1, PIECE_LOGITS // (E * window))
        for x in range(0, count, size):
            y = min(x + size, count)
            low = max(0, x - window + 1)
            query = torch.arange(x, y, device=q_CEK.device)[:, None]
            key = torch.arange(low, y, device=q_CEK.device)
            hidden = (key > query) | (key <= query - window)
            keys = slice(first + low, first + y)
            kv = [x_CGK[keys].transpose(0, 1) for x_CGK in (k_CGK, v_CGK)]
            yield slice(first + x, first + y), keys, kv, hidden.repeat_interleave(E // G, 0)
        first += count


def _rows(x_CE_: Tensor, G: int) -> Tensor:
    """[G, rows (line, head), ...]."""
    return x_CE_.unflatten(1, (G, -1)).transpose(0, 1).flatten(1, 2)


def _lines(x_GR_: Tensor, heads: int) -> Tensor:
    """The reverse [lines, heads, ...], of so many heads of each KV head."""
    return x_GR_.unflatten(1, (-1, heads)).transpose(0, 1).flatten(1, 2)


def _pieces_forward(
    lines: Lines,
    q_CEK: Tensor,
    k_CGK: Tensor,
    v_CGK: Tensor,
) -> tuple[Tensor, Tensor]:
    C, E, _ = q_CEK.shape
    G = k_CGK.shape[1]
    o_CEK = torch.empty_like(q_CEK)
    lse_EC = q_CEK.new_empty((E, C), dtype=torch.float32)
    buffers = Buffers(q_CEK)
    for queries, _, kv, hidden_RS in _pieces(lines, q_CEK, k_CGK, v_CGK):
        o_GRK, lse_GR = tile_forward(_rows(q_CEK[queries], G), *kv, buffers, hidden_RS)
        o_CEK[queries] = _lines(o_GRK, E // G)
        lse_EC[:, queries] = _lines(lse_GR, E // G).T
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
    E, K = q_CEK.shape[1:]
    G = k_CGK.shape[1]
    dq_CEK = torch.empty_like(q_CEK)
    dk_CGK = torch.zeros_like(k_CGK, dtype=torch.float32)
    dv_CGK = torch.zeros_like(v_CGK, dtype=torch.float32)
    buffers = Buffers(q_CEK)
    for queries, keys, kv, hidden_RS in _pieces(lines, q_CEK, k_CGK, v_CGK):
        do = do_CEK[queries]
        delta = (do.float() * o_CEK[queries]).sum(-1)
        inputs = q_CEK[queries], do, lse_EC.T[queries], delta
        inputs = BackwardInputs(*(_rows(x, G) for x in inputs))
        dq_GRK, dk_GSK, dv_GSK = tile_backward(inputs, *kv, buffers, hidden_RS)
        dq_CEK[queries] = _lines(dq_GRK, E // G) * K**-0.5
        dk_CGK[keys] += dk_GSK.transpose(0, 1) * K**-0.5
        dv_CGK[keys] += dv_GSK.transpose(0, 1)
    return dq_CEK, dk_CGK.to(k_CGK.dtype), dv_CGK.to(v_CGK.dtype)
