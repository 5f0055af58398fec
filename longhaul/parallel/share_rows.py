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
from model import IGNORE, Decoder, document_boundaries, document_positions, nsa_package


@dataclass(frozen=True, eq=False)
class WholeRows:
    """What attention must know of the rows of a micro-batch; made once, for all layers."""

    cu_seqlens: Tensor  # [documents + 1] over B*T, on the host
    pieces: list | None = None  # gather_kv: this rank's queries and the keys they see
    layout: object = None  # NSA: where documents and compressed blocks lie
    turns: tuple[Tensor, Tensor] | None = (
        None  # NSA: cos and sin [B or 1, N, 1, K/2] at the centres of the compressed blocks
    )


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
            attention, sparse = layer.attention, layer.attention.sparse
            attention.core = eager(functools.partial(self.attend, attention.core))
            if sparse is not None:
                sparse.packed = eager(
                    functools.partial(self.attend_sparsely, sparse.attend, sparse.packed)
                )
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
        if model.config.attention_type == "nsa":
            layout = nsa_package().layout(cu_seqlens, shape, model.config.nsa, positions_BT.device)
            rows_BT = positions_BT if layout.cu_seqlens is None else positions_BT.flatten()[None]
            turns = model.rotary.at(rows_BT[:, layout.centre])
            return WholeRows(
                cu_seqlens, layout=layout._replace(centre=slice(None)), turns=turns
            )  # `turns` holds the centres alone
        gathered = self.shard.mode == "gather_kv"
        return WholeRows(
            cu_seqlens, context.pieces(cu_seqlens, shape, self.shard) if gathered else None
        )

    # ---- attention

    def attend(self, core, q_BtHK, k_BtGK, v_BtGK, documents=None):
        """Standard attention: Attention.core."""
        if not isinstance(documents, WholeRows):
            return core(q_BtHK, k_BtGK, v_BtGK, documents)
        if self.shard.mode == "gather_kv":
            return context.gathered_attention(q_BtHK, k_BtGK, v_BtGK, self.shard, documents.pieces)
        whole = [context.to_heads(x, self.shard) for x in (q_BtHK, k_BtGK, v_BtGK)]
        return context.to_tokens(core(*whole, documents.cu_seqlens), self.shard)

    def attend_sparsely(self, attend, packed, *inputs):
        """NSA: a rank compresses, selects and mixes for its KV heads over whole rows. Gates travel
        with their heads.
        """
        *tensors, cos, sin, documents = inputs
        if not isinstance(documents, WholeRows):
            return packed(*inputs)
        sent = {
            id(x): x for x in tensors
        }  # with kv="shared" the branches have the same keys and values: each travels once
        whole = {key: context.to_heads(x, self.shard) for key, x in sent.items()}
        tensors, shape = [whole[id(x)] for x in tensors], whole[id(tensors[0])].shape
        if documents.layout.cu_seqlens is not None:
            tensors = [x.flatten(0, 1)[None] for x in tensors]
        return context.to_tokens(
            attend(*tensors, *documents.turns, documents.layout).view(shape), self.shard
        )
