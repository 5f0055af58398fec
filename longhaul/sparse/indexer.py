"""Attention over blocks of keys that a small trained indexer chooses: settings, indexer, layer,
what it keeps while decoding, and how its loss reaches the step (arXiv 2606.13392, with the loss and
the warm-up of 2512.02556).

    I_g[t, s] = q_g[t] . k[s] / sqrt(E)
    S[t, b]   = max over the keys s of b of I_g[t, s]

with one index query per KV group g and one index key for all of them, normed as the model's. Only a
part of a head turns with the position, half by default: what the rest compares does not depend on
the distance, so an indexer also finds keys that are farther away than any that it was taught by.
The choice is that of all selectors (choose.py), with these in place of q and k.

Letters: those of layer.py, E the indexer's head dimension, n blocks that a query reads.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from longhaul.sparse.choose import best_blocks, choose_blocks, hide_others, write_forced
from longhaul.sparse.engine import in_blocks
from longhaul.sparse.index_loss import block_masses, block_scores, index_loss
from longhaul.sparse.layer import SelectedAttention, SelectedCache, attend_chosen
from longhaul.sparse.selectors.exact import Exact
from longhaul.sparse.tiles import Buffers
from model import (
    Attention,
    Decoder,
    Device,
    Documents,
    Linear,
    ModelConfig,
    Ops,
    RMSNorm,
    Rope,
    rotate,
)

LEARNER = "indexer"  # the submodule that learns from a loss of its own
SAMPLED_QUERIES = 16  # of a document, over whose keys the recall is measured


@dataclass(frozen=True)
class Indexed(Exact):
    """Attention over the blocks that hold the largest logits of an indexer."""

    name = "indexed"
    init: int = 0
    local: int = 1
    head_dim: int = 128  # of the indexer's heads
    partial_rotary_factor: float = 0.5  # the part of a head that turns with the position

    def __post_init__(self):
        super().__post_init__()
        if self.head_dim % 2:
            raise self.refusal(["head_dim"], "an even head_dim", "change head_dim")
        if not 0 <= self.partial_rotary_factor <= 1:
            name = "partial_rotary_factor"
            raise self.refusal([name], f"0 <= {name} <= 1", f"change {name}")

    def rotary_dim(self, of_model: int) -> int:
        """The first elements of a head that turn, of a model whose heads have `of_model`."""
        return 2 * int(min(self.head_dim, of_model) * self.partial_rotary_factor / 2)

    def layer(self, config: ModelConfig, ops: Ops) -> Attention:
        return IndexedAttention(config, ops)


def check(config: ModelConfig) -> None:
    """ValueError for a head dimension that cannot turn like the model's."""
    sizes, K = config.attention, config.head_dim
    if sizes.head_dim < K and K % sizes.head_dim:
        raise sizes.refusal(
            ["head_dim"],
            f"a divisor of the model's {K}, whose rotary positions it shares, or more",
            "change head_dim",
        )
    turning = sizes.rotary_dim(K)
    if turning and K % turning:
        raise sizes.refusal(
            ["partial_rotary_factor"],
            f"0, 0.25, 0.5 or 1: {turning} elements cannot share the positions of the model's {K}",
            "change partial_rotary_factor",
        )


# ---- how the loss of the layers reaches a step


class LayerLosses:
    """The losses that layers have of their own, such as an indexer's, in one micro-batch.

    A term counts while they are collected. Otherwise it is dropped: a checkpoint that runs a layer
    again adds nothing.

    warming  whether only these losses teach the model, as in the indexer's dense warm-up
    """

    def __init__(self, warming: bool = False, collects: bool = False):
        self.warming = warming
        self._terms: list[Tensor] | None = [] if collects else None

    @property
    def collects(self) -> bool:
        return self._terms is not None

    def add(self, term: Tensor) -> None:
        """A layer's sum over its tokens, 0-d."""
        if self._terms is not None:
            self._terms.append(term)

    def added_to(self, loss: Tensor, divisor: Tensor | float) -> Tensor:
        """The value of `loss`, with the gradient of loss + mean over the layers of term / divisor.

        Nothing is collected from here on: the backward may run layers again.
        """
        terms, self._terms = self._terms, None
        if not terms:
            return loss
        own = torch.stack(terms).mean() / divisor
        return loss + (own - own.detach())


IDLE = LayerLosses()  # outside of training steps: nothing is collected


@contextlib.contextmanager
def own_losses(model: Decoder, warming: bool) -> Iterator[LayerLosses]:
    """Inside, the layers' own losses are collected. It must contain the backward as well, in which
    a layer that is run again asks whether it is warming up.
    """
    layers = [x.attention for x in model.layers if isinstance(x.attention, IndexedAttention)]
    losses = LayerLosses(warming, collects=True)
    for layer in layers:
        layer.losses = losses
    try:
        yield losses
    finally:
        for layer in layers:
            layer.losses = IDLE


class IndexerObjective:
    """Around the objective `inner` of a step (longhaul/step.py), whose `state` is given: layers
    learn by losses of their own next to it and, in the dense warm-up, by nothing else.
    """

    measures = ("indexer_kl", "indexer_recall", "indexer_recall_limit")

    def __init__(self, inner, state):
        self.inner = inner
        self.state = state
        self.weight = inner.weight
        self.tokens = inner.tokens
        self.around = contextlib.ExitStack()

    @property
    def warming(self) -> bool:
        """Whether the step is of the dense warm-up."""
        return self.state.step < self.state.cfg.dense_steps

    def loss(self, model: Decoder, micro: dict, divisor: Tensor) -> Tensor:
        """The inner loss, with the gradients of the layers' own."""
        own = self.around.enter_context(own_losses(model, self.warming))
        return own.added_to(self.inner.loss(model, micro, divisor), divisor)

    def after_backward(self, model: Decoder) -> Tensor:
        """What the layers measured in the forward that was learned from."""
        self.around.close()
        if self.warming:
            keep_learners(model)
        return torch.stack([layer.attention.measured for layer in model.layers]).sum(0)


def keep_learners(model: Decoder):
    """Drop the gradients of all parameters but the indexers', so that only these change."""
    for name, parameter in model.named_parameters():
        if LEARNER not in name.split("."):
            parameter.grad = None


# ---- the layer


class Indexer(nn.Module):
    """Makes the queries and keys by which blocks are scored. Their first elements turn at all or
    some of the frequencies of the model's heads. The input is detached, so the model does not learn
    from the indexer's loss.
    """

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.width = config.attention.head_dim
        self.turning = config.attention.rotary_dim(config.head_dim)
        self.q_proj = Linear(config.hidden_size, config.num_kv_heads * self.width, ops.linear)
        self.k_proj = Linear(config.hidden_size, self.width, ops.linear)
        self.q_norm = RMSNorm(self.width, config.norm_eps, ops.norm)
        self.k_norm = RMSNorm(self.width, config.norm_eps, ops.norm)

    def forward(self, x_BTD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Queries [B, T, G, E] and keys [B, T, 1, E]."""
        x_BTD = x_BTD.detach()
        heads = (-1, self.width)
        q_BTGE = self.q_norm(self.q_proj(x_BTD).unflatten(-1, heads))
        k_BT1E = self.k_norm(self.k_proj(x_BTD).unflatten(-1, heads))
        return self._rotated(q_BTGE, rope), self._rotated(k_BT1E, rope)

    def _rotated(self, x_BThE: Tensor, rope: Rope) -> Tensor:
        """Fewer elements than a head of the model's take every so many-th of its frequencies."""
        if not self.turning:
            return x_BThE
        K = 2 * rope[0].shape[-1]
        rope = [x[..., :: K // self.turning] for x in rope]
        turned = rotate(x_BThE[..., : self.turning], *rope)
        return torch.cat((turned, x_BThE[..., self.turning :]), dim=-1)


class IndexedCache(SelectedCache):
    """Keys and values of one layer, and the indexer's keys [B, max_length, 1, E]."""

    def __init__(
        self,
        sizes: Indexed,
        shape: tuple[int, int, int, int],
        device: Device,
        dtype: torch.dtype,
        kernels: str,
    ):
        super().__init__(sizes, shape, device, dtype, kernels)
        rows, length = shape[:2]
        self.k_BS1E = torch.empty((rows, length, 1, sizes.head_dim), device=device, dtype=dtype)

    def remember(
        self,
        before: int,
        q_BTGE: Tensor,
        k_BT1E: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The indexer's queries, and its keys of all that is stored."""
        self.k_BS1E[:, before : self.length] = k_BT1E
        return q_BTGE, self.k_BS1E[:, : self.length]

    def attend_several(self, layer: "IndexedAttention", *inputs: Tensor) -> Tensor:
        return layer.attend_indexed(*inputs)[0]

    def scores(
        self,
        q_BGMK: Tensor,
        q_B1GE: Tensor,
        k_BS1E: Tensor,
    ) -> Tensor:
        """The groups are rows of one product with the key that they share."""
        return self.scores_of_rows(q_B1GE[:, :, :, None], k_BS1E.transpose(1, 2))


class IndexedAttention(SelectedAttention):
    """Attention of each query over the blocks that an indexer chose for its KV group; before
    `dense_tokens`, and in the dense warm-up, over all keys.

    In a forward that learns, the indexer is taught by what attention reads: by the chosen blocks,
    or by all of them where attention is dense.
    """

    cache_kind = IndexedCache

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__(config, ops)
        check(config)
        self.indexer = Indexer(config, ops)
        self.losses = IDLE
        # what the newest forward that learned measured, [2, measures]
        self.measured: Tensor | None = None

    def inputs(
        self,
        x_BTD: Tensor,
        rope: Rope,
        projected: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """q, k and v; the indexer's queries and keys."""
        return *super().inputs(x_BTD, rope, projected), *self.indexer(x_BTD, rope)

    def attend_document(self, *inputs: Tensor) -> Tensor:
        return self._attend_documents([inputs])

    def packed(
        self,
        inputs: Sequence[Tensor],
        rope: Rope,
        documents: Documents,
    ) -> Tensor:
        flat = [x.flatten(0, 1)[None].split(documents.lengths, dim=1) for x in inputs]
        with self.ops.varying(inputs[0]):
            return self._attend_documents(list(zip(*flat, strict=True))).view_as(inputs[0])

    def _attend_documents(self, documents: list[Sequence[Tensor]]) -> Tensor:
        """o of one document after the other; the indexer learns from them."""
        learns = torch.is_grad_enabled()
        found = [self.attend_indexed(*inputs, learns=learns) for inputs in documents]
        outputs, terms = zip(*found, strict=True)
        if learns:
            self._learn(torch.stack(terms).sum(), documents)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def attend_indexed(
        self,
        q_BTHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        q_BTGE: Tensor,
        k_BS1E: Tensor,
        learns: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """o [B, T, H, K] of the last T of the S positions of one document, and the loss."""
        T, S = q_BTHK.shape[1], k_BSGK.shape[1]
        dense = max(0, min(T, self.sizes.dense_queries - (S - T)))
        if S <= self.sizes.dense_tokens or self.losses.warming:
            dense = T
        if self.losses.warming:
            q_BTHK, k_BSGK, v_BSGK = (x.detach() for x in (q_BTHK, k_BSGK, v_BSGK))

        of_queries = [x.split((dense, T - dense), dim=1) for x in (q_BTHK, q_BTGE)]
        early, late = zip(*of_queries, strict=True)
        parts = []
        if dense:
            seen = [x[:, : S - T + dense] for x in (k_BSGK, v_BSGK, k_BS1E)]
            parts.append(self._attend_part(*early, *seen, learns, every_key=True))
        if dense < T:
            keys = k_BSGK, v_BSGK, k_BS1E
            parts.append(self._attend_part(*late, *keys, learns, every_key=False))
        outputs, terms = zip(*parts, strict=True)
        o_BTHK = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return o_BTHK, sum(terms) if learns else None

    def _attend_part(
        self,
        q_BTHK: Tensor,
        q_BTGE: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        k_BS1E: Tensor,
        learns: bool,
        every_key: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """(o, loss) over every key, or over the blocks that are chosen."""
        qkv = q_BTHK, k_BSGK, v_BSGK
        block = self.sizes.block
        if every_key:
            o_BTHK = self.ops.attention(*qkv)
            read = ()
        else:
            k_BSGE = k_BS1E.expand(-1, -1, q_BTGE.shape[2], -1)
            chosen_BTGn = choose_blocks(self.sizes, q_BTGE, k_BSGE)
            o_BTHK, lse_BTH = attend_chosen(*qkv, chosen_BTGn, block, self.kernels)
            read = chosen_BTGn, lse_BTH
        if not learns:
            return o_BTHK, None
        return o_BTHK, index_loss(q_BTGE, k_BS1E[:, :, 0], q_BTHK, k_BSGK, block, *read)

    def _learn(self, term: Tensor, documents: list[Sequence[Tensor]]) -> None:
        """Add this layer's loss to those of the model, and keep what the log shows of it."""
        if not self.losses.collects:
            return
        self.losses.add(term)
        shares = [recall(self.sizes, *inputs) for inputs in documents]
        read, readable, queries = torch.stack(shares).sum(0).unbind()
        tokens = sum(q_BTHK.shape[0] * q_BTHK.shape[1] for q_BTHK, *_ in documents)
        sums = torch.stack((term.detach(), read, readable))
        self.measured = torch.stack(
            (sums, torch.stack((sums.new_full((), tokens), *[queries] * 2)))
        )


# ---- the recall of the choice


@torch.no_grad()
def recall(
    sizes: Indexed,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    q_BTGE: Tensor,
    k_BT1E: Tensor,
) -> Tensor:
    """The share of full attention's mass on the blocks that queries choose, the same if they chose
    by that mass, and the number of queries, [3]; the shares are means over heads, summed over rows
    and sampled queries.

    They are 16 of the queries that have a choice, at equal distances from the end of the document
    on.
    """
    B, T, G, _ = q_BTGE.shape
    choosing = T - sizes.dense_tokens
    count = max(0, min(SAMPLED_QUERIES, choosing))
    total_3 = torch.zeros(3, device=q_BTHK.device)
    if not count:
        return total_3

    steps = torch.arange(count, device=q_BTHK.device) * choosing
    position_C = T - 1 - steps // count
    buffers = Buffers(q_BTHK)
    for b in range(B):
        k_JlE = in_blocks(k_BT1E[b, :, 0], sizes.block, q_BTHK.dtype)
        for g in range(G):
            q_CE = q_BTGE[b, position_C, g]
            scores_CJ, _ = block_scores(q_CE, k_JlE, position_C, buffers)
            k_JlK = in_blocks(k_BTGK[b, :, g], sizes.block, q_BTHK.dtype)
            q_CMK = q_BTHK[b].unflatten(1, (G, -1))[position_C, g]
            mass_CJ = block_masses(q_CMK, k_JlK, position_C, buffers)
            for index, ranked_CJ in enumerate((scores_CJ, mass_CJ)):
                read_Cn = _choice(sizes, ranked_CJ, position_C)
                total_3[index] += mass_CJ.gather(1, read_Cn.long()).sum() / G
    total_3[2].fill_(B * count)  # assigned, the number would be copied from the host
    return total_3


def _choice(sizes: Indexed, scores_CJ: Tensor, position_C: Tensor) -> Tensor:
    """[C, n]: the blocks that queries with a choice read."""
    own_C = position_C // sizes.block
    chosen_1Cn = own_C.new_empty((1, len(own_C), sizes.count), dtype=torch.int32)
    write_forced(chosen_1Cn, own_C, sizes)
    forced = sizes.init + sizes.local
    if sizes.count > forced:
        others_1CJ = hide_others(scores_CJ[None], own_C, sizes)
        chosen_1Cn[..., forced:] = best_blocks(others_1CJ, sizes.count - forced)
    return chosen_1Cn[0]
