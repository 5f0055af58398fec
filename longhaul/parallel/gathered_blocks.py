"""Indexed attention of ranks that share rows: each chooses and reads for its own queries, over keys
gathered from all.

Blocks are those of one rank, wherever a rank's tokens begin: the indexer's keys travel token by
token, and are pooled where they arrive. As for full attention (context.py, which explains the
letters), nothing of the size of a whole row is saved: the backward gathers again, and sums the
gradients of all keys over ranks in fp32. E is the head dimension of the indexer, h its query heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from longhaul.parallel.context import Piece, Shard, gather_rows, scatter_sums
from longhaul.sparse.indexed.operators import indexed_backward, indexed_forward
from longhaul.sparse.indexed.plain import IndexedOutputs, pooled_keys
from longhaul.sparse.indexed.recall import Reading
from model import wide


class Keys(NamedTuple):
    """What queries read; of whole rows, of a rank's tokens, or of one piece. Or gradients of them,
    None for those that nothing needs.
    """

    k_BTGK: Tensor
    v_BTGK: Tensor
    k_BT1E: Tensor  # of the indexer, of tokens

    def gathered(self, shard: Shard) -> "Keys":
        """Whole rows, from a rank's tokens."""
        return Keys(*(gather_rows(x[None], shard)[0] for x in self))

    def of(self, piece: Piece) -> "Keys":
        """Those of the piece's document that its queries may see."""
        at = piece.rows, slice(piece.past.start, piece.own.stop)
        return Keys(*(None if x is None else x[at] for x in self))


def gathered_blocks(
    q_BtHK: Tensor,
    k_BtGK: Tensor,
    v_BtGK: Tensor,
    q_BthE: Tensor,
    k_Bt1E: Tensor,
    reading: Reading,
    shard: Shard,
    parts: list[Piece],
) -> tuple[Tensor, Tensor, Tensor]:
    """For a rank's tokens o [B, t, H, K], the indexer's loss [B, t] and its recall as
    `Reading.recall` gives it. The indexer's keys are rotated.
    """
    return _GatheredBlocks.apply(q_BtHK, k_BtGK, v_BtGK, q_BthE, k_Bt1E, reading, shard, parts)


class _GatheredBlocks(torch.autograd.Function):
    """The operators of indexed attention, piece by piece."""

    @staticmethod
    def forward(ctx, q_BtHK, k_BtGK, v_BtGK, q_BthE, k_Bt1E, reading: Reading, shard, parts):
        whole = Keys(k_BtGK, v_BtGK, k_Bt1E).gathered(shard)
        outputs = IndexedOutputs.empty(q_BtHK)
        recall_3 = q_BtHK.new_zeros(3, dtype=wide(q_BtHK.dtype))
        for piece in parts:
            at = piece.rows, piece.queries
            queries, keys = (q_BtHK[at], q_BthE[at]), whole.of(piece)
            found, recall_of_piece = _over_piece(*queries, keys, reading, piece)
            recall_3 += recall_of_piece
            for output, part in zip(outputs, found, strict=True):
                output[at] = part

        o_BtHK, kl_Bt, *statistics = outputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(recall_3)
        ctx.save_for_backward(q_BtHK, k_BtGK, v_BtGK, q_BthE, k_Bt1E, o_BtHK, *statistics)
        ctx.reading = reading
        ctx.shard = shard
        ctx.parts = parts
        return o_BtHK, kl_Bt, recall_3

    @staticmethod
    def backward(ctx, do_BtHK: Tensor | None, dkl_Bt: Tensor | None, _):
        q_BtHK, k_BtGK, v_BtGK, q_BthE, k_Bt1E, *saved = ctx.saved_tensors
        if not any(ctx.needs_input_grad[:3]):
            do_BtHK = None
        if not ctx.reading.learns or not any(ctx.needs_input_grad[3:5]):
            dkl_Bt = None

        own = Keys(k_BtGK, v_BtGK, k_Bt1E)
        whole = own.gathered(ctx.shard)
        dq_BtHK, dq_BthE = torch.empty_like(q_BtHK), torch.empty_like(q_BthE)
        upstream = do_BtHK, do_BtHK, dkl_Bt
        sums = Keys(*(_zeros(x, given) for x, given in zip(whole, upstream, strict=True)))
        for piece in ctx.parts:
            at = piece.rows, piece.queries
            given = [None if x is None else x[at] for x in (do_BtHK, dkl_Bt)]
            queries, of_piece = (q_BtHK[at], q_BthE[at]), [x[at] for x in saved]
            dq, dq_idx = _backward_of_piece(
                given, queries, whole.of(piece), of_piece, ctx.reading, sums.of(piece)
            )
            if do_BtHK is not None:
                dq_BtHK[at] = dq
            if dkl_Bt is not None:
                dq_BthE[at] = dq_idx
            del dq, dq_idx  # before the next piece makes its own

        del whole
        dk, dv, dk_idx = (
            None if total is None else scatter_sums(total[None], ctx.shard)[0].to(x.dtype)
            for total, x in zip(sums, own, strict=True)
        )
        dq = None if do_BtHK is None else dq_BtHK
        dq_idx = None if dkl_Bt is None else dq_BthE
        return dq, dk, dv, dq_idx, dk_idx, None, None, None


def _zeros(x: Tensor, upstream: Tensor | None) -> Tensor | None:
    """In fp32, because every rank adds to them; None if nothing needs the sum, as in a warm-up."""
    return None if upstream is None else torch.zeros_like(x, dtype=wide(x.dtype))


def _over_piece(
    q_BnHK: Tensor, q_BnhE: Tensor, keys: Keys, reading: Reading, piece: Piece
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What `indexed_forward` returns for a piece's queries, and their recall."""
    k_BSGK, v_BSGK, k_BS1E = keys
    k_BNE = pooled_keys(k_BS1E, reading.r)
    length = piece.end - piece.past.start
    recall_3 = reading.recall(q_BnHK, k_BSGK, q_BnhE, k_BNE, length)

    most = reading.most_of(k_BNE.shape[1])
    inputs = (q_BnHK, k_BSGK, v_BSGK, q_BnhE, k_BNE)
    numbers = reading.r, most, reading.learns, reading.kernels
    return indexed_forward(*inputs, *numbers), recall_3


def _backward_of_piece(
    given: list[Tensor | None],
    queries: tuple[Tensor, Tensor],
    keys: Keys,
    saved: list[Tensor],
    reading: Reading,
    sums: Keys,
) -> tuple[Tensor, Tensor]:
    """Gradients of the piece's queries and of the indexer's; adds those of the keys to `sums`."""
    q_BnHK, q_BnhE = queries
    k_BSGK, v_BSGK, k_BS1E = keys
    r = reading.r
    k_BNE = pooled_keys(k_BS1E, r)
    most = reading.most_of(k_BNE.shape[1])
    inputs = (q_BnHK, k_BSGK, v_BSGK, q_BnhE, k_BNE)
    numbers = r, most, reading.kernels
    dq, dk, dv, dq_idx, dk_BNE = indexed_backward(*given, *inputs, *saved, *numbers)

    do_BnHK, dkl_Bn = given
    if do_BnHK is not None:
        sums.k_BTGK.add_(dk)
        sums.v_BTGK.add_(dv)
    if dkl_Bn is None:
        return dq, dq_idx
    # each key of a block has the same share of its mean
    whole_blocks = sums.k_BT1E[:, : k_BNE.shape[1] * r, 0].unflatten(1, (-1, r))
    whole_blocks.add_(dk_BNE[:, :, None], alpha=1 / r)
    return dq, dq_idx
