"""Context parallelism: ranks share the tokens of each row and exchange data only in attention.

ulysses    A rank holds one contiguous span of each row. Before attention an all-to-all gives every
           rank whole rows of some heads, and after it another gives the tokens back (Jacobs et al.
           2023). Heads are independent, so any attention can run in between.
gather_kv  A rank holds two chunks of each row, one from each end, so that all have equal causal
           work. Keys and values are gathered, queries stay (Grattafiori et al. 2024, 3.3.2). The
           backward gathers again and reduce-scatters their gradients in fp32.

share_rows.py wraps a model in it. Letters: P ranks that share a row, B batch, T tokens of whole
rows, t = T/P tokens of a rank, H query heads, G KV heads, K head dimension, n queries and S keys of
one span.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from base import machine
from longhaul.parallel.parts import (
    attention_kernel,
    attention_part,
    attention_part_backward,
    merge_parts,
)

MODES = ("auto", "ulysses", "gather_kv")


# ---- which mode, and why


class Choice(NamedTuple):
    """One of MODES other than auto, and the reason as it is printed."""

    mode: str
    why: str


def bytes_moved(
    mode: str,
    heads: int,
    kv_heads: int,
    ranks: int,
    element: int,
) -> float:
    """Bytes that a rank receives in a forward and a backward, per token, layer and head dimension.

    ulysses: q, k and v on the way there, o on the way back, and their gradients the other way, all
    but the 1/P that stays. gather_kv: twice the k and v of all other ranks, and the fp32 sums of
    their gradients.
    """
    if mode == "ulysses":
        return 4 * (heads + kv_heads) * element * (ranks - 1) / ranks
    return (4 * element + 8) * kv_heads * (ranks - 1)


def choose(
    asked: str,
    unfit: Mapping[str, str],
    heads: int,
    kv_heads: int,
    tokens: int,
    ranks: int,
    element: int,
) -> Choice:
    """How `ranks` ranks share a row of `tokens` tokens. `unfit`: mode -> why it is refused.

    ValueError if they cannot, with the numbers of ranks that can.
    """
    refused = refusals(asked, unfit, kv_heads, tokens, ranks)
    possible = [mode for mode, reason in refused.items() if not reason]
    if not possible:
        sizes = allowed_sizes(asked, unfit, kv_heads, tokens, ranks)
        otherwise = ", or --context_parallel_mode auto" if asked != "auto" else ""
        raise ValueError(
            f"--context_parallel_size {ranks} with --context_parallel_mode {asked}: "
            f"{'; '.join(refused.values())}: choose --context_parallel_size from "
            f"{sizes}{otherwise}"
        )

    if asked != "auto":
        return Choice(asked, "as asked")
    if len(possible) == 1:
        (other,) = refused.keys() - possible
        return Choice(possible[0], f"not {other}: {refused[other]}")

    moved = {mode: bytes_moved(mode, heads, kv_heads, ranks, element) for mode in possible}
    best, other = sorted(moved, key=moved.get)
    return Choice(best, f"it moves {moved[best] / moved[other]:.2f} of the bytes of {other}")


def refusals(
    asked: str,
    unfit: Mapping[str, str],
    kv_heads: int,
    tokens: int,
    ranks: int,
) -> dict[str, str]:
    """{mode: why it cannot run, or an empty string} of the modes that are open to choice."""
    modes = MODES[1:] if asked == "auto" else (asked,)
    return {mode: _refusal(mode, unfit, kv_heads, tokens, ranks) for mode in modes}


def _refusal(
    mode: str,
    unfit: Mapping[str, str],
    kv_heads: int,
    tokens: int,
    ranks: int,
) -> str:
    if mode in unfit:
        return unfit[mode]
    if mode == "ulysses" and kv_heads % ranks:
        return (
            f"ulysses gives each rank whole KV heads, and {kv_heads} do not divide over {ranks} "
            "ranks"
        )

    parts = 2 * ranks if mode == "gather_kv" else ranks
    if tokens % parts:
        return (
            f"{mode} cuts a row into {parts} equal parts, and --context_length {tokens} does not "
            f"divide by {parts}"
        )
    return ""


def allowed_sizes(
    asked: str,
    unfit: Mapping[str, str],
    kv_heads: int,
    tokens: int,
    most: int,
) -> list[int]:
    """Numbers of ranks up to `most` that `choose` accepts."""
    possible = [
        ranks
        for ranks in range(2, most + 1)
        if "" in refusals(asked, unfit, kv_heads, tokens, ranks).values()
    ]
    return [1, *possible]


# ---- a rank's tokens


@dataclass(frozen=True)
class Shard:
    """One rank's part of every row."""

    mode: str
    rank: int = 0
    ranks: int = 1
    group: Any = None  # the process group of the ranks that share a row

    def spans(self, tokens: int) -> list[slice]:
        """The spans of a row of `tokens` tokens that this rank holds, in order."""
        if self.mode == "ulysses":
            size = tokens // self.ranks
            return [slice(self.rank * size, (self.rank + 1) * size)]

        size = tokens // (2 * self.ranks)
        chunks = (self.rank, 2 * self.ranks - 1 - self.rank)
        return [slice(chunk * size, (chunk + 1) * size) for chunk in chunks]

    def cut(self, x_BT: Tensor) -> Tensor:
        """This rank's tokens [B, t] of whole rows."""
        return torch.cat([x_BT[:, span] for span in self.spans(x_BT.shape[1])], dim=1)

    def join(self, x_SBt: Tensor, tokens: int) -> Tensor:
        """The inverse of `cut` for figures [S, B, t] of every rank's tokens: [S, B, T] on all."""
        whole_SBT = x_SBt.new_zeros(*x_SBt.shape[:2], tokens)
        spans = self.spans(tokens)
        parts = x_SBt.split([span.stop - span.start for span in spans], dim=2)
        for span, part in zip(spans, parts, strict=True):
            whole_SBT[:, :, span] = part
        torch.distributed.all_reduce(whole_SBT, group=self.group)
        return whole_SBT


# ---- ulysses


def to_heads(x_BtHK: Tensor, shard: Shard) -> Tensor:
    """[B, t, H, K] of this rank's tokens -> [B, T, H/P, K]: all tokens of this rank's heads."""
    return _Exchange.apply(x_BtHK, shard, _heads_from_tokens, _tokens_from_heads)


def to_tokens(x_BThK: Tensor, shard: Shard) -> Tensor:
    """The inverse of `to_heads`."""
    return _Exchange.apply(x_BThK, shard, _tokens_from_heads, _heads_from_tokens)


class _Exchange(torch.autograd.Function):
    """y = exchange(x, shard), which permutes elements over the ranks.

    The gradient of a permutation is its inverse.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        shard: Shard,
        exchange: Callable,
        inverse: Callable,
    ):
        ctx.shard = shard
        ctx.inverse = inverse
        return exchange(x, shard)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return ctx.inverse(dy, ctx.shard), None, None, None


def _heads_from_tokens(x_BtHK: Tensor, shard: Shard) -> Tensor:
    sent_PBthK = x_BtHK.unflatten(2, (shard.ranks, -1)).permute(2, 0, 1, 3, 4)
    return _all_to_all(sent_PBthK, shard).transpose(0, 1).flatten(1, 2)


def _tokens_from_heads(x_BThK: Tensor, shard: Shard) -> Tensor:
    sent_PBthK = x_BThK.unflatten(1, (shard.ranks, -1)).transpose(0, 1)
    return _all_to_all(sent_PBthK, shard).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _all_to_all(sent_P: Tensor, shard: Shard) -> Tensor:
    """Part p of every rank goes to rank p."""
    # Both ends are contiguous: into strided memory gloo writes wrong values without an error.
    sent_P = sent_P.contiguous()
    received_P = torch.empty_like(sent_P)
    torch.distributed.all_to_all_single(received_P, sent_P, group=shard.group)
    return received_P


# ---- gather_kv


class Piece(NamedTuple):
    """A run of one document's tokens within one chunk of this rank.

    Its queries see all of the keys in `past`, and those in `own` up to themselves.
    """

    rows: slice
    queries: slice  # among this rank's tokens
    past: slice  # in the whole row
    own: slice  # in the whole row


def pieces(
    cu_seqlens: Tensor,
    shape: tuple[int, int],
    shard: Shard,
) -> list[Piece]:
    """This rank's pieces of rows of `shape` = (B, T) tokens.

    cu_seqlens: boundaries of documents over the B*T tokens; each row begins a document.
    """
    B, T = shape
    ends = cu_seqlens.tolist()
    is_whole = len(ends) == B + 1  # every row is one document
    documents = [(0, T)] if is_whole else zip(ends[:-1], ends[1:], strict=True)

    found = []
    for start, end in documents:
        row, start = divmod(start, T)
        end -= row * T
        rows = slice(None) if is_whole else slice(row, row + 1)
        before = 0  # this rank's tokens in earlier spans
        for span in shard.spans(T):
            first = max(start, span.start)
            last = min(end, span.stop)
            if first < last:
                queries = slice(before + first - span.start, before + last - span.start)
                found.append(Piece(rows, queries, slice(start, first), slice(first, last)))
            before += span.stop - span.start
    return found


def choose_kernel(q_BtHK: Tensor, parts: list[Piece]) -> str:
    """The kernel of the queries of these pieces: "cudnn", or one of `attention_kernel`.

    cuDNN is 1.7 to 2.3 times as fast as FlashAttention-2 on Hopper, by published measurements, but
    builds a plan for each new shape. So it serves rows of one document only, whose pieces have the
    same shapes in every step.
    """
    if parts[0].rows == slice(None) and machine.prefers_cudnn(q_BtHK):
        return "cudnn"
    return attention_kernel(q_BtHK)


def gathered_attention(
    q_BtHK: Tensor,
    k_BtGK: Tensor,
    v_BtGK: Tensor,
    shard: Shard,
    parts: list[Piece],
) -> Tensor:
    """Causal attention of this rank's queries over the keys of all ranks.

    It saves nothing of the size of a whole row.
    """
    return _GatheredAttention.apply(q_BtHK, k_BtGK, v_BtGK, shard, parts)


class _GatheredAttention(torch.autograd.Function):
    """o and its log-sum-exp, piece by piece.

    Given the log-sum-exp over all keys of a query, the backward over some of the keys gives exactly
    their share of the gradients.
    """

    @staticmethod
    def forward(
        ctx,
        q_BtHK: Tensor,
        k_BtGK: Tensor,
        v_BtGK: Tensor,
        shard: Shard,
        parts,
    ):
        q_BtHK = q_BtHK.contiguous()  # the kernels expect a head's elements next to each other
        k_BTGK, v_BTGK = gather_rows(torch.stack((k_BtGK, v_BtGK)), shard)

        B, t, H, _ = q_BtHK.shape
        kernel = choose_kernel(q_BtHK, parts)
        o_BtHK = torch.empty_like(q_BtHK)
        lse_BHt = q_BtHK.new_empty((B, H, t), dtype=torch.float32)
        for rows, queries, past, own in parts:
            o_BnHK, lse_BHn = _over_past_and_own(
                kernel, q_BtHK[rows, queries], k_BTGK[rows], v_BTGK[rows], past, own
            )
            o_BtHK[rows, queries] = o_BnHK
            lse_BHt[rows, :, queries] = lse_BHn

        ctx.save_for_backward(q_BtHK, k_BtGK, v_BtGK, o_BtHK, lse_BHt)
        ctx.shard = shard
        ctx.parts = parts
        ctx.kernel = kernel
        return o_BtHK

    @staticmethod
    def backward(ctx, grad_BtHK: Tensor):
        q_BtHK, k_BtGK, v_BtGK, o_BtHK, lse_BHt = ctx.saved_tensors
        grad_BtHK = grad_BtHK.contiguous()
        kv_2BTGK = gather_rows(torch.stack((k_BtGK, v_BtGK)), ctx.shard)
        dq_BtHK = torch.empty_like(q_BtHK)
        # fp32, because every rank adds to these sums.
        dkv_2BTGK = torch.zeros_like(kv_2BTGK, dtype=torch.float32)

        for rows, queries, past, own in ctx.parts:
            saved = (
                grad_BtHK[rows, queries],
                q_BtHK[rows, queries],
                o_BtHK[rows, queries],
                lse_BHt[rows, :, queries],
            )
            dq_BnHK = 0
            for keys, causal in ((past, False), (own, True)):
                if keys.start < keys.stop:
                    kv_2BSGK = kv_2BTGK[:, rows, keys]
                    part_BnHK, *dkv = attention_part_backward(ctx.kernel, *saved, *kv_2BSGK, causal)
                    dq_BnHK = dq_BnHK + part_BnHK.float()
                    for total_BTGK, share_BSGK in zip(dkv_2BTGK, dkv, strict=True):
                        total_BTGK[rows, keys] += share_BSGK
            dq_BtHK[rows, queries] = dq_BnHK.to(q_BtHK.dtype)

        del kv_2BTGK
        dk_BtGK, dv_BtGK = scatter_sums(dkv_2BTGK, ctx.shard).to(k_BtGK.dtype)
        return dq_BtHK, dk_BtGK, dv_BtGK, None, None


def _over_past_and_own(
    kernel: str,
    q_BnHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    past: slice,
    own: slice,
) -> tuple[Tensor, Tensor]:
    """(o [B, n, H, K], log-sum-exp [B, H, n]) of a piece's queries.

    Causal attention over the keys in `own`, merged with full attention over those in `past`.
    """
    o_BnHK, lse_BHn = attention_part(kernel, q_BnHK, k_BTGK[:, own], v_BTGK[:, own], causal=True)
    if past.start == past.stop:
        return o_BnHK, lse_BHn

    past_BnHK, lse_past = attention_part(
        kernel, q_BnHK, k_BTGK[:, past], v_BTGK[:, past], causal=False
    )
    return merge_parts(o_BnHK, lse_BHn, past_BnHK, lse_past)


def gather_rows(x_nBtGK: Tensor, shard: Shard) -> Tensor:
    """n tensors [n, B, T, G, K] in the order of the row, from every rank's two chunks."""
    all_PnBtGK = x_nBtGK.new_empty((shard.ranks, *x_nBtGK.shape))
    all_gather = _collective("all_gather_single", "all_gather_into_tensor")
    all_gather(all_PnBtGK.flatten(0, 1), x_nBtGK.contiguous(), group=shard.group)

    # Chunk p of the row is rank p's first; from the end of the row, it is rank p's last.
    first_P, last_P = all_PnBtGK.chunk(2, dim=3)
    return torch.cat([*first_P, *reversed(last_P.unbind(0))], dim=2)


def scatter_sums(x_nBTGK: Tensor, shard: Shard) -> Tensor:
    """[n, B, t, G, K]: the sum over ranks of this rank's two chunks."""
    n, B, T, G, K = x_nBTGK.shape
    sum_nBtGK = x_nBTGK.new_empty((n, B, T // shard.ranks, G, K))
    sent_PnBtGK = sum_nBtGK.new_empty((shard.ranks, *sum_nBtGK.shape))
    for rank, part_nBtGK in enumerate(sent_PnBtGK):
        spans = dataclasses.replace(shard, rank=rank).spans(T)
        torch.cat([x_nBTGK[:, :, span] for span in spans], dim=2, out=part_nBtGK)

    reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
    reduce_scatter(sum_nBtGK, sent_PnBtGK.flatten(0, 1), group=shard.group)
    return sum_nBtGK


def _collective(name: str, before: str) -> Callable:
    """torch.distributed.<name>, or the name that it had before torch 2.13."""
    return getattr(torch.distributed, name, None) or getattr(torch.distributed, before)
