"""Context parallelism around a model that does not know it: every rank of a group gets the same
whole rows and works on its own tokens of them.

One method is wrapped from outside: the decoder's forward cuts tokens, labels and positions, and
gives the layers `SharedRows`, in which attention exchanges data between the ranks (context.py,
which explains the letters). Without labels, as in sampling, every rank works on all tokens.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longhaul.parallel import context
from model import (
    IGNORE,
    Attention,
    Decoder,
    OnHost,
    Rope,
    document_boundaries,
    document_positions,
)


class SharedRows:
    """Which tokens of a micro-batch see each other, if ranks share its rows; made once, for all
    layers.

    whole   the same of whole rows, as the kind of attention makes it
    pieces  gather_kv: this rank's, with the keys that they see
    """

    def __init__(
        self,
        shard: context.Shard,
        whole: Any,
        pieces: list[context.Piece] | None,
    ):
        self.shard = shard
        self.whole = whole
        self.pieces = pieces

    def attend(
        self,
        layer: Attention,
        inputs: Sequence[Tensor],
        rope: Rope,
    ) -> Tensor:
        """o [B, t, H, K] of this rank's tokens. Everything that a head reads travels with it."""
        if self.shard.mode == "gather_kv":
            return context.gathered_attention(*inputs, self.shard, self.pieces)

        # The branches of NSA may share their keys and values: each tensor travels once.
        sent = {id(x): x for x in inputs}
        arrived = {key: context.to_heads(x, self.shard) for key, x in sent.items()}
        o_BThK = self._of_whole_rows(layer, [arrived[id(x)] for x in inputs], rope)
        return context.to_tokens(o_BThK, self.shard)

    def _of_whole_rows(
        self,
        layer: Attention,
        inputs: Sequence[Tensor],
        rope: Rope,
    ) -> Tensor:
        if self.whole is None:  # every row is one document
            return layer.attend_document(*inputs)
        return self.whole.attend(layer, inputs, rope)


class RowSharing:
    """Context parallelism of one model."""

    def __init__(self, shard: context.Shard):
        self.shard = shard
        self.rows = SharedRows

    def wrap(self, model: Decoder, compiled: bool) -> None:
        """Replace the model's forward. `compiled`: whether its layers are compiled.

        The exchange stays out of a compiled layer, because it breaks the graph as attention over
        packed documents does.
        """
        if compiled:  # not otherwise: the import of dynamo takes 1.2 s
            uncompiled = torch.compiler.disable(SharedRows.attend)
            self.rows = type("UncompiledRows", (SharedRows,), {"attend": uncompiled})
        model.forward = functools.partial(self.forward, model, model.forward)

    def forward(
        self,
        model: Decoder,
        forward: Callable[..., Tensor],
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        positions: Tensor | None = None,
        doc_ids: Tensor | OnHost | None = None,
        cache: Any = None,
        num_valid: Tensor | float | None = None,
        head: Callable[..., Tensor] | None = None,
        rows: Any = None,
    ) -> Tensor:
        """This rank's share of the loss of whole rows: the shares of the group add up to it. With a
        `head`, its figures of all tokens, on every rank. ValueError for shared prompts.
        """
        if rows is not None:
            raise ValueError(
                "ranks that share rows cannot share prompts as well: leave out "
                "--context_parallel_size"
            )
        if labels_BT is None:
            return forward(tokens_BT, positions=positions, doc_ids=doc_ids, cache=cache)

        shape = tokens_BT.shape
        if num_valid is None:
            num_valid = (labels_BT != IGNORE).sum().clamp(min=1)
        cu_seqlens = _boundaries(doc_ids, shape)
        if positions is None:
            positions = document_positions(cu_seqlens, shape)
        positions_BT = positions.expand(shape).to(tokens_BT.device, non_blocking=True)

        shared = self.describe(model, cu_seqlens, shape, positions_BT)
        own = [self.shard.cut(x_BT) for x_BT in (tokens_BT, labels_BT, positions_BT)]
        if head is None:
            return forward(*own, num_valid=num_valid, rows=shared)
        figures = forward(*own, head=head, rows=shared)
        figures_SBt = figures.unflatten(-1, own[0].shape)
        return self.shard.join(figures_SBt, shape[1]).flatten(1)

    def describe(
        self,
        model: Decoder,
        cu_seqlens: Tensor,
        shape: tuple[int, int],
        positions_BT: Tensor,
    ) -> SharedRows:
        """The rows of documents cu_seqlens over B*T tokens."""
        whole = model.layers[0].attention.rows(cu_seqlens, shape, positions_BT.device)
        if hasattr(whole, "spread"):
            whole = whole.spread(positions_BT, model.rotary)
        pieces = None
        if self.shard.mode == "gather_kv":
            pieces = context.pieces(cu_seqlens, shape, self.shard)
        return self.rows(self.shard, whole, pieces)


def _boundaries(doc_ids: Tensor | OnHost | None, shape: tuple[int, int]) -> Tensor:
    """Boundaries of the documents over B*T tokens; without ids every row is one document."""
    if doc_ids is not None:
        return document_boundaries(doc_ids)
    B, T = shape
    return torch.arange(B + 1) * T
