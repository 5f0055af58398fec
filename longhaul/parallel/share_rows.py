"""Context parallelism around a model that does not know it: every rank of a group gets the same
whole rows and works on its own tokens of them.

Three methods are wrapped from outside. The decoder's forward cuts tokens, labels and positions; the
layers get a description of the whole rows as their documents; attention exchanges data between the
ranks (context.py, which explains the letters). Without labels, as in sampling, every rank works on
all tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from indexed.recall import Reading
from longhaul.kinds import attention_kind
from longhaul.parallel import context
from longhaul.parallel.gathered_blocks import gathered_blocks
from longhaul.posttrain.prompts import SharedPrompts
from model import IGNORE, Attention, Decoder, OnHost, document_boundaries, document_positions


@dataclass(eq=False)  # not frozen, as model.Documents
class WholeRows:
    """What attention must know of the rows of a micro-batch; made once, for all layers."""

    documents: Any  # the documents of the whole rows, as the attention kind wants them
    pieces: list[context.Piece] | None = None  # gather_kv: this rank's, with the keys they see


class GatheredKeys:
    """What `Attention.attend_gathered` may ask of the ranks that share rows, in one micro-batch."""

    def __init__(self, shard: context.Shard, pieces: list[context.Piece]):
        self.cut = shard.cut
        self._where = (shard, pieces)

    def attention(self, *inputs: Tensor) -> Tensor:
        """Full causal attention."""
        return context.gathered_attention(*inputs, *self._where)

    def indexed(self, *inputs: Tensor | Reading) -> tuple[Tensor, Tensor, Tensor]:
        """Attention over the blocks that an indexer chooses; as `gathered_blocks`."""
        return gathered_blocks(*inputs, *self._where)


class RowSharing:
    """Context parallelism of one model; `rows` is set while its forward runs on shared rows."""

    def __init__(self, shard: context.Shard):
        self.shard = shard
        self.rows: WholeRows | None = None

    def wrap(self, model: Decoder, compiled: bool) -> None:
        """Replace methods of the model. `compiled`: whether its layers are compiled.

        The exchange stays out of a compiled layer, because it breaks the graph as attention over
        packed documents does.
        """
        for layer in model.layers:
            attend = functools.partial(self.attend, layer.attention, layer.attention.attend)
            if compiled:  # not otherwise: the import of dynamo takes 1.2 s
                attend = torch.compiler.disable(attend)
            layer.attention.attend = attend
            layer.register_forward_pre_hook(self.pass_rows)
        model.forward = functools.partial(self.forward, model, model.forward)

    def pass_rows(self, _layer: torch.nn.Module, args: tuple) -> tuple:
        """Give the layer the whole rows instead of the documents of this rank's tokens.

        They are an argument, so that a recomputation in the backward sees the same.
        """
        if self.rows is None:
            return args
        x_BTD, rope, _documents, *cache = args
        return x_BTD, rope, self.rows, *cache

    # ---- the decoder

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
        prompts: SharedPrompts | None = None,
    ) -> Tensor:
        """This rank's share of the loss of whole rows: the shares of the group add up to it. With a
        `head`, its figures of all tokens, on every rank. ValueError for shared prompts.
        """
        if prompts is not None:
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

        self.rows = self.describe(model, cu_seqlens, shape, positions_BT)
        try:
            own = [self.shard.cut(x_BT) for x_BT in (tokens_BT, labels_BT, positions_BT)]
            if head is None:
                return forward(*own, num_valid=num_valid)
            figures = forward(*own, head=head)
        finally:
            self.rows = None
        figures_SBt = figures.unflatten(-1, own[0].shape)
        return self.shard.join(figures_SBt, shape[1]).flatten(1)

    def describe(
        self, model: Decoder, cu_seqlens: Tensor, shape: tuple[int, int], positions_BT: Tensor
    ) -> WholeRows:
        """The rows of documents cu_seqlens over B*T tokens."""
        kind = attention_kind(model.config)
        documents = kind.whole_rows(model.config, cu_seqlens, positions_BT, model.rotary)
        if self.shard.mode != "gather_kv":
            return WholeRows(documents)
        return WholeRows(documents, context.pieces(cu_seqlens, shape, self.shard))

    # ---- attention

    def attend(
        self,
        attention: Attention,
        attend: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        rope,
        documents,
    ) -> Tensor:
        """Attention.attend over whole rows. Everything that a head reads travels with it."""
        if not isinstance(documents, WholeRows):
            return attend(inputs, rope, documents)
        if self.shard.mode == "gather_kv":
            exchange = GatheredKeys(self.shard, documents.pieces)
            return attention.attend_gathered(inputs, documents.documents, exchange)

        # The branches of NSA may share their keys and values: each tensor travels once.
        sent = {id(x): x for x in inputs}
        whole = {key: context.to_heads(x, self.shard) for key, x in sent.items()}
        o_BThK = attend([whole[id(x)] for x in inputs], rope, documents.documents)
        return context.to_tokens(o_BThK, self.shard)


def _boundaries(doc_ids: Tensor | OnHost | None, shape: tuple[int, int]) -> Tensor:
    """Boundaries of the documents over B*T tokens; without ids every row is one document."""
    if doc_ids is not None:
        return document_boundaries(doc_ids)
    B, T = shape
    return torch.arange(B + 1) * T
