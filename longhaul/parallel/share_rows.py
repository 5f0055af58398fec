"""Context parallelism around a model that knows of none: whole rows come in, each rank works on its
tokens.

Three seams are wrapped from outside. The decoder's forward cuts tokens, labels and positions; the
layers are told of the whole rows in the place where they expect documents; attention's core
exchanges (longhaul.parallel.context). Without labels, as in sampling, every rank works on all
tokens. Imports model.py and longhaul.parallel.context of ours. Letters as in
longhaul.parallel.context.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from longhaul.parallel import context
from model import IGNORE, Decoder, attention_kind, document_boundaries, document_positions


@dataclass(frozen=True, eq=False)
class WholeRows:
    """What attention must know of the rows of a micro-batch; made once, for all layers."""

    documents: object  # the documents of the whole rows, as the attention kind wants them
    pieces: list | None = None  # gather_kv: this rank's queries and the keys they see


class RowSharing:
    """The wrapping of one model; `rows` is set while its forward runs on shared rows."""

    def __init__(self, shard: context.Shard):
        self.shard, self.rows = shard, None

    def around(self, model: Decoder, compiled: bool):
        """Wrap the model in place. The exchange is no part of a compiled layer: it breaks the graph
        as packed attention does.
        """
        eager = (
            torch.compiler.disable if compiled else lambda function: function
        )  # without a reason dynamo's import takes 1.2 s
        for layer in model.layers:
            attention = layer.attention
            attention.attend = eager(functools.partial(self.attend, attention.attend))
            layer.register_forward_pre_hook(self.tell)
        model.forward = functools.partial(self.forward, model, model.forward)

    def tell(self, _layer, args):
        """Whole rows instead of the documents of the tokens here; as an argument, so that a
        recomputation sees the same.
        """
        x_BTD, rope, documents, *cache = args
        return x_BTD, rope, documents if self.rows is None else self.rows, *cache

    # ---- the decoder

    def forward(
        self,
        model,
        forward,
        tokens_BT,
        labels_BT=None,
        positions=None,
        doc_ids=None,
        cache=None,
        num_valid=None,
    ):
        """This rank's share of the loss of whole rows: the shares of the group add up to it."""
        if labels_BT is None:
            return forward(tokens_BT, positions=positions, doc_ids=doc_ids, cache=cache)
        shape, device = tokens_BT.shape, tokens_BT.device
        if num_valid is None:
            num_valid = (labels_BT != IGNORE).sum().clamp(min=1)
        ends = (
            torch.arange(shape[0] + 1) * shape[1]
            if doc_ids is None
            else document_boundaries(doc_ids)
        )
        if positions is None:
            positions = document_positions(ends, shape)
        positions = positions.expand(shape).to(device, non_blocking=True)
        self.rows = self.describe(model, ends, shape, positions)
        try:
            return forward(
                *map(self.shard.cut, (tokens_BT, labels_BT, positions)), num_valid=num_valid
            )
        finally:
            self.rows = None

    def describe(
        self, model: Decoder, cu_seqlens: Tensor, shape: tuple[int, int], positions_BT: Tensor
    ) -> WholeRows:
        """WholeRows of documents cu_seqlens over B*T tokens."""
        kind = attention_kind(model.config)
        documents = kind.whole_rows(model.config, cu_seqlens, positions_BT, model.rotary)
        gathered = self.shard.mode == "gather_kv"
        return WholeRows(
            documents, context.pieces(cu_seqlens, shape, self.shard) if gathered else None
        )

    # ---- attention

    def attend(self, attend, inputs, rope, documents):
        """Attention.attend over whole rows. All that a head reads travels with it."""
        if not isinstance(documents, WholeRows):
            return attend(inputs, rope, documents)
        if self.shard.mode == "gather_kv":
            return context.gathered_attention(*inputs, self.shard, documents.pieces)

        # the branches of NSA may share their keys and values: each tensor travels once
        sent = {id(x): x for x in inputs}
        whole = {key: context.to_heads(x, self.shard) for key, x in sent.items()}
        o_BThK = attend([whole[id(x)] for x in inputs], rope, documents.documents)
        return context.to_tokens(o_BThK, self.shard)
