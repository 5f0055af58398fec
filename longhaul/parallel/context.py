"""Context parallelism: the ranks of a group share the tokens of each row, and meet in attention
alone.

ulysses    A rank holds a contiguous span. Before attention an all-to-all hands every rank whole rows of some heads, after it
           another one hands the tokens back (Jacobs et al. 2023). Heads are independent: any
           attention runs in between.
gather_kv  A rank holds two chunks, one from each end of the row (zig-zag: equal causal work for all). Keys and values are gathered,
           queries stay (Grattafiori et al. 2024, 3.3.2); the backward gathers again and
           reduce-scatters their gradients in fp32.

Imports torch alone; parallel.py puts it around a model. Letters: P ranks that share a row, B batch,
T tokens of whole rows,
t = T/P tokens of a rank, H query heads, G KV heads, K head dimension, n queries and S keys of one
piece.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model import ATTENTIONS, platform

MODES = ("auto", "ulysses", "gather_kv")


# ------------------------------------------------------------------------------- which way, and why


class Choice(NamedTuple):
    """A mode of MODES but auto, and the reason for the screen."""

    mode: str
    why: str


def bytes_moved(mode: str, heads: int, kv_heads: int, ranks: int, element: int) -> float:
    """Bytes that a rank receives for each of its tokens, per layer and head dimension, in a forward
    and a backward.

    ulysses: q, k, v there and o back, and their gradients the other way, of which 1/P stays.
    gather_kv: k and v of all others
    twice, and the fp32 sums of their gradients.
    """
    if mode == "ulysses":
        return 4 * (heads + kv_heads) * element * (ranks - 1) / ranks
    return (4 * element + 8) * kv_heads * (ranks - 1)


def choose(
    asked: str, attention: str, heads: int, kv_heads: int, tokens: int, ranks: int, element: int
) -> Choice:
    """How `ranks` ranks share a row of `tokens` tokens; ValueError where they cannot, naming what
    would work.
    """
    refusals = {mode: refusal(mode, attention, kv_heads, tokens, ranks) for mode in MODES[1:]}
    possible = [mode for mode in refusals if not refusals[mode] and asked in ("auto", mode)]
    if not possible:
        sizes = allowed_sizes(asked, attention, kv_heads, tokens, ranks)
        reasons = "; ".join(
            reason for mode, reason in refusals.items() if reason and asked in ("auto", mode)
        )
        raise ValueError(
            f"--context_parallel_size {ranks} with --context_parallel_mode {asked}: {reasons}: choose "
            f"--context_parallel_size from {sizes}"
            + (", or --context_parallel_mode auto" if asked != "auto" else "")
        )
    if asked != "auto":
        return Choice(asked, "as asked")
    if len(possible) == 1:
        other = next(mode for mode in refusals if mode not in possible)
        return Choice(possible[0], f"not {other}: {refusals[other]}")
    moved = {mode: bytes_moved(mode, heads, kv_heads, ranks, element) for mode in possible}
    best = min(moved, key=moved.get)
    other = next(mode for mode in moved if mode != best)
    return Choice(best, f"it moves {moved[best] / moved[other]:.2f} of the bytes of {other}")


def refusal(mode: str, attention: str, kv_heads: int, tokens: int, ranks: int) -> str:
    """Why `mode` cannot run, or an empty string."""
    reason = ATTENTIONS[attention].refused_exchanges.get(mode)
    if reason:
        return f"{mode} does not reach {attention} attention, {reason}"
    if mode == "ulysses" and kv_heads % ranks:
        return f"ulysses gives each rank whole KV heads, and {kv_heads} do not divide over {ranks} ranks"
    parts = ranks * (2 if mode == "gather_kv" else 1)
    return (
        f"{mode} cuts a row into {parts} equal parts, and --context_length {tokens} does not divide by {parts}"
        if tokens % parts
        else ""
    )


def allowed_sizes(asked: str, attention: str, kv_heads: int, tokens: int, most: int) -> list[int]:
    """Sizes of a group up to `most` that `choose` accepts."""
    modes = [mode for mode in MODES[1:] if asked in ("auto", mode)]
    return [1] + [
        ranks
        for ranks in range(2, most + 1)
        if any(not refusal(mode, attention, kv_heads, tokens, ranks) for mode in modes)
    ]


# ---------------------------------------------------------------------------------- a rank's tokens


@dataclass(frozen=True)
class Shard:
    """One rank's part of every row."""

    mode: str
    rank: int = 0
    ranks: int = 1
    group: object = None  # the process group of the ranks that share a row

    def spans(self, tokens: int) -> list[slice]:
        """The spans of a row of `tokens` tokens that this rank holds, in order."""
        if self.mode == "ulysses":
            size = tokens // self.ranks
            return [slice(self.rank * size, (self.rank + 1) * size)]
        size = tokens // (2 * self.ranks)
        return [
            slice(chunk * size, (chunk + 1) * size)
            for chunk in (self.rank, 2 * self.ranks - 1 - self.rank)
        ]

    def cut(self, x_BT: Tensor) -> Tensor:
        """This rank's tokens [B, t] of whole rows."""
        return torch.cat([x_BT[:, span] for span in self.spans(x_BT.shape[1])], dim=1)


# ------------------------------------------------------------------------------------------ ulysses


def to_heads(x_BtHK: Tensor, shard: Shard) -> Tensor:
    """[B, t, H, K] of this rank's tokens -> [B, T, H/P, K]: all tokens of this rank's heads."""
    return _Exchange.apply(x_BtHK, shard, _heads_from_tokens, _tokens_from_heads)


def to_tokens(x_BThK: Tensor, shard: Shard) -> Tensor:
    """The way back of `to_heads`."""
    return _Exchange.apply(x_BThK, shard, _tokens_from_heads, _heads_from_tokens)


class _Exchange(torch.autograd.Function):
    """there(x, shard), a permutation of elements over the ranks: its adjoint is its inverse,
    back(dy, shard).
    """

    @staticmethod
    def forward(ctx, x, shard, there, back):
        ctx.shard, ctx.back = shard, back
        return there(x, shard)

    @staticmethod
    def backward(ctx, dy):
        return ctx.back(dy, ctx.shard), None, None, None


def _heads_from_tokens(x_BtHK: Tensor, shard: Shard) -> Tensor:
    sent_PBthK = x_BtHK.unflatten(2, (shard.ranks, -1)).permute(2, 0, 1, 3, 4)
    return _all_to_all(sent_PBthK, shard).transpose(0, 1).flatten(1, 2)


def _tokens_from_heads(x_BThK: Tensor, shard: Shard) -> Tensor:
    sent_PBthK = x_BThK.unflatten(1, (shard.ranks, -1)).transpose(0, 1)
    return _all_to_all(sent_PBthK, shard).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _all_to_all(sent_P: Tensor, shard: Shard) -> Tensor:
    """Part p of every rank goes to rank p. Both ends contiguous: into strided memory gloo writes
    wrong values, silently.
    """
    sent_P = sent_P.contiguous()
    received_P = torch.empty_like(sent_P)
    torch.distributed.all_to_all_single(received_P, sent_P, group=shard.group)
    return received_P


# ---------------------------------------------------------------------------------------- gather_kv


class Piece(NamedTuple):
    """A run of one document's tokens among this rank's: they see the keys `past` whole, and of
    `own` those up to themselves.
    """

    rows: slice
    queries: slice  # among this rank's tokens
    past: slice  # in the whole row
    own: slice


def pieces(cu_seqlens: Tensor, shape: tuple[int, int], shard: Shard) -> list[Piece]:
    """The pieces of this rank in rows of `shape` = (B, T) tokens with documents cu_seqlens over
    B*T; each row starts one.
    """
    B, T = shape
    if len(cu_seqlens) == B + 1:  # every row is one document
        return list(_pieces_of_row(slice(None), [(0, T)], shard.spans(T)))
    rows, ends = [[] for _ in range(B)], cu_seqlens.tolist()
    for start, end in zip(ends, ends[1:]):
        rows[start // T].append((start % T, end - start // T * T))
    return [
        piece
        for row, documents in enumerate(rows)
        for piece in _pieces_of_row(slice(row, row + 1), documents, shard.spans(T))
    ]


def _pieces_of_row(
    rows: slice, documents: list[tuple[int, int]], spans: list[slice]
) -> Iterator[Piece]:
    here = 0
    for span in spans:
        for start, end in documents:
            first, last = max(start, span.start), min(end, span.stop)
            if first < last:
                queries = slice(here + first - span.start, here + last - span.start)
                yield Piece(rows, queries, slice(start, first), slice(first, last))
        here += span.stop - span.start


def gathered_attention(
    q_BtHK: Tensor, k_BtGK: Tensor, v_BtGK: Tensor, shard: Shard, parts: list[Piece]
) -> Tensor:
    """Causal attention of this rank's queries over the keys of all ranks; saves nothing of a whole
    row.
    """
    return _GatheredAttention.apply(q_BtHK, k_BtGK, v_BtGK, shard, parts)


class _GatheredAttention(torch.autograd.Function):
    """o and its log-sum-exp, piece by piece. With the merged log-sum-exp each part's backward gives
    its exact share.
    """

    @staticmethod
    def forward(ctx, q_BtHK, k_BtGK, v_BtGK, shard, parts):
        q_BtHK = (
            q_BtHK.contiguous()
        )  # the operators below take heads of consecutive elements for granted
        k_BTGK, v_BTGK = _gather_rows(torch.stack((k_BtGK, v_BtGK)), shard)
        o_BtHK, lse_BHt = (
            torch.empty_like(q_BtHK),
            q_BtHK.new_empty((len(q_BtHK), *q_BtHK.shape[2:0:-1]), dtype=torch.float32),
        )
        for rows, queries, past, own in parts:
            o, lse = _over_past_and_own(
                q_BtHK[rows, queries], k_BTGK[rows], v_BTGK[rows], past, own
            )
            o_BtHK[rows, queries], lse_BHt[rows, :, queries] = o, lse
        ctx.save_for_backward(q_BtHK, k_BtGK, v_BtGK, o_BtHK, lse_BHt)
        ctx.shard, ctx.parts = shard, parts
        return o_BtHK

    @staticmethod
    def backward(ctx, grad_BtHK):
        q_BtHK, k_BtGK, v_BtGK, o_BtHK, lse_BHt = ctx.saved_tensors
        grad_BtHK = grad_BtHK.contiguous()
        kv_2BTGK = _gather_rows(torch.stack((k_BtGK, v_BtGK)), ctx.shard)
        dq_BtHK, dkv_2BTGK = (
            torch.empty_like(q_BtHK),
            torch.zeros_like(kv_2BTGK, dtype=torch.float32),
        )  # fp32: sums over ranks
        for rows, queries, past, own in ctx.parts:
            saved = (
                grad_BtHK[rows, queries],
                q_BtHK[rows, queries],
                o_BtHK[rows, queries],
                lse_BHt[rows, :, queries],
            )
            dq = 0
            for keys, causal in ((past, False), (own, True)):
                if keys.start < keys.stop:
                    part, *dkv = _flash_backward(*saved, *kv_2BTGK[:, rows, keys], causal)
                    dq = dq + part.float()
                    for total, own_share in zip(dkv_2BTGK, dkv):
                        total[rows, keys] += own_share
            dq_BtHK[rows, queries] = dq.to(q_BtHK.dtype)
        del kv_2BTGK
        dk_BtGK, dv_BtGK = _scatter_sums(dkv_2BTGK, ctx.shard).to(k_BtGK.dtype)
        return dq_BtHK, dk_BtGK, dv_BtGK, None, None


def _over_past_and_own(q_BnHK, k_BTGK, v_BTGK, past: slice, own: slice) -> tuple[Tensor, Tensor]:
    """(o [B, n, H, K], log-sum-exp [B, H, n]) of causal attention over `own` keys merged with plain
    attention over `past` ones.
    """
    o, lse = _flash(q_BnHK, k_BTGK[:, own], v_BTGK[:, own], causal=True)
    if past.start == past.stop:
        return o, lse
    o_past, lse_past = _flash(q_BnHK, k_BTGK[:, past], v_BTGK[:, past], causal=False)
    total = torch.logaddexp(lse, lse_past)
    share = (lse_past - total).exp().transpose(1, 2)[..., None]
    return torch.lerp(o.float(), o_past.float(), share).to(o.dtype), total


def _gather_rows(x_2BtGK: Tensor, shard: Shard) -> Tensor:
    """[2, B, T, G, K] in the order of the row, from every rank's two chunks."""
    all_P2BtGK = x_2BtGK.new_empty((shard.ranks, *x_2BtGK.shape))
    _collective("all_gather_single", "all_gather_into_tensor")(
        all_P2BtGK.flatten(0, 1), x_2BtGK.contiguous(), group=shard.group
    )
    first_P, last_P = all_P2BtGK.chunk(2, dim=3)
    return torch.cat([*first_P, *reversed(last_P.unbind(0))], dim=2)


def _scatter_sums(x_2BTGK: Tensor, shard: Shard) -> Tensor:
    """[2, B, t, G, K]: the sum over ranks of this rank's two chunks."""
    _, B, T, G, K = x_2BTGK.shape
    sum_2BtGK = x_2BTGK.new_empty((2, B, T // shard.ranks, G, K))
    sent_P2BtGK = sum_2BtGK.new_empty((shard.ranks, *sum_2BtGK.shape))
    for rank, part_2BtGK in enumerate(sent_P2BtGK):
        torch.cat(
            [x_2BTGK[:, :, span] for span in dataclasses.replace(shard, rank=rank).spans(T)],
            dim=2,
            out=part_2BtGK,
        )
    _collective("reduce_scatter_single", "reduce_scatter_tensor")(
        sum_2BtGK, sent_P2BtGK.flatten(0, 1), group=shard.group
    )
    return sum_2BtGK


def _collective(name: str, before: str):
    """torch.distributed.<name>, under the name that it had before torch 2.13."""
    return getattr(torch.distributed, name, None) or getattr(torch.distributed, before)


# The public attention returns no log-sum-exp. These operators do, and are what it runs on each
# device.


def _flash(q_BnHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(o [B, n, H, K], log-sum-exp [B, H, n] in fp32), memory-linear."""
    q, k, v = (x.transpose(1, 2) for x in (q_BnHK, k_BSGK, v_BSGK))
    if platform().device(q).type == "cuda":
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return o.transpose(1, 2), lse


def _flash_backward(
    grad_BnHK, q_BnHK, o_BnHK, lse_BHn, k_BSGK, v_BSGK, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) that these keys contribute to queries whose output over all their keys is (o,
    log-sum-exp).
    """
    grad, q, k, v, o = (x.transpose(1, 2) for x in (grad_BnHK, q_BnHK, k_BSGK, v_BSGK, o_BnHK))
    if platform().device(q).type == "cuda":
        seed, offset = (
            torch.zeros(shape, dtype=torch.uint64, device=q.device) for shape in (2, ())
        )  # of dropout, which is 0
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            k,
            v,
            o,
            lse_BHn.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            seed,
            offset,
        )
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, o, lse_BHn, 0.0, causal
        )
    return tuple(x.transpose(1, 2) for x in grads)
