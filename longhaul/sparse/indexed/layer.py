"""Indexed attention: its settings, the indexer, the layer, what it keeps while decoding, and the
loss that the indexer learns from.

A small indexer scores the past in blocks of r tokens. Each query reads the best blocks, and the
unfinished block that it is in; all heads of a layer share the choice. The indexer learns to
predict where attention looks, from a loss of its own that the rest of the model does not see.

Letters: M = H/G query heads per KV head, h query heads of the indexer, E its head dimension, N
whole blocks of a document, C queries of a chunk; the others are those of model.py.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
from torch import Tensor

from base.machine import pinned_copy
from longhaul.sparse.indexed.operators import indexed_forward, triton_indexed_core
from longhaul.sparse.indexed.plain import pooled_keys, rotate_first
from longhaul.sparse.indexed.recall import Reading
from model import (
    Attention,
    Decoder,
    Device,
    LayerCache,
    Linear,
    ModelConfig,
    Ops,
    RMSNorm,
    Rope,
    RotaryCache,
)

FIGURES = ("indexer_kl", "indexer_recall", "indexer_recall_limit")


@dataclass(frozen=True)
class IndexerConfig:
    """Sizes of indexed attention: what its indexer is, and how much a query reads."""

    name = "indexed"

    budget: int = 2048  # tokens of the blocks that a query reads, besides its own unfinished block
    r: int = 4  # tokens of a block, which are read together
    heads: int = 4  # query heads of the indexer, which has one key head
    head_dim: int = 128  # of the indexer's heads

    def __post_init__(self):
        for name, value in asdict(self).items():
            if type(value) is not int or value < 1:
                raise self._refusal([name], f"{name} an integer >= 1", f"change {name}")
        if self.budget < self.r:
            raise self._refusal(
                ["budget", "r"], "budget >= r, which is one block", "raise budget or lower r"
            )
        if self.budget % self.r:
            raise self._refusal(["budget", "r"], "budget a multiple of r", "change one of them")
        if self.head_dim % 2:
            raise self._refusal(["head_dim"], "an even head_dim", "change head_dim")

    def _refusal(
        self,
        names: list[str],
        allowed: str,
        remedy: str,
    ) -> ValueError:
        given = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return ValueError(f"IndexerConfig: given {given}; allowed: {allowed}; remedy: {remedy}")

    def layer(self, config: ModelConfig, ops: Ops) -> Attention:
        return IndexedAttention(config, ops)

    @property
    def most_blocks(self) -> int:
        """Blocks that a query reads at most, besides its own."""
        return self.budget // self.r


class LayerLosses:
    """The losses that layers have of their own, such as an indexer's, in one micro-batch.

    A term counts while they are collected. Otherwise it is dropped: a checkpoint that runs a layer
    again adds nothing.

    warming  whether only these losses teach the model, as in the indexer's dense warm-up
    """

    def __init__(self, warming: bool = False, collects: bool = False):
        self.warming = warming
        self._terms: list[Tensor] | None = [] if collects else None

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


def figures(model: Decoder) -> Tensor:
    """What the layers measured in the newest forward that learned, [2, figures]: sums, and by what
    they are to be divided, in the order of FIGURES; no figures for another attention.
    """
    layers = [layer.attention for layer in model.layers]
    if not isinstance(layers[0], IndexedAttention):
        return torch.empty((2, 0), device=model.norm.weight.device)
    return torch.stack([layer.measured for layer in layers]).sum(0)


class Indexer(nn.Module):
    """Makes the queries and keys by which blocks are scored.

    Both are normed. Their first elements turn like the model's heads, a key like the first token of
    its block. The input is detached, so the model does not learn from the indexer's loss.
    """

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.cfg = config.attention
        self.q_proj = Linear(config.hidden_size, self.cfg.heads * self.cfg.head_dim)
        self.k_proj = Linear(config.hidden_size, self.cfg.head_dim)
        self.q_norm = RMSNorm(self.cfg.head_dim, config.norm_eps, ops.norm)
        self.k_norm = RMSNorm(self.cfg.head_dim, config.norm_eps, ops.norm)

    def forward(self, x_BTD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Queries [B, T, h, E], and keys [B, T, 1, E] before rotation."""
        x_BTD = x_BTD.detach()
        heads = (-1, self.cfg.head_dim)
        q_BThE = self.q_norm(self.q_proj(x_BTD).unflatten(-1, heads))
        k_BT1E = self.k_norm(self.k_proj(x_BTD).unflatten(-1, heads))
        return rotate_first(q_BThE, rope), k_BT1E


@dataclass(eq=False)  # not frozen, as Documents
class BlockLayout:
    """The documents of a batch, and the blocks of tokens in them; made once for all layers.

    lengths  tokens of each document of the B*T flattened tokens; None if every row is one document
    first    for each token of a row, or of the flattened tokens, the first one of its block
    """

    lengths: list[int] | None
    first: Tensor
    _angles: Rope | None = None

    @classmethod
    def of(
        cls,
        cu_seqlens: Tensor | None,
        shape: tuple[int, int],
        r: int,
        device: Device,
    ) -> "BlockLayout":
        """The layout of (B, T) = `shape` tokens; cu_seqlens as in `Attention.rows`."""
        B, T = shape
        if cu_seqlens is None or len(cu_seqlens) == B + 1:
            return cls(None, torch.arange(T, device=device) // r * r)

        lengths = cu_seqlens.diff().tolist()
        starts = cu_seqlens[:-1].tolist()
        first = [
            start + torch.arange(length) // r * r
            for start, length in zip(starts, lengths, strict=True)
        ]
        return cls(lengths, pinned_copy(torch.cat(first), device))

    def attend(
        self,
        layer: "IndexedAttention",
        inputs: Sequence[Tensor],
        rope: Rope,
    ) -> Tensor:
        """o [B, T, H, K] of the layer."""
        return layer.attend_blocks(inputs, rope, self)

    def spread(self, positions_BT: Tensor, rotary: RotaryCache) -> "SharedBlocks":
        """The blocks of whole rows whose tokens several ranks share."""
        if self.lengths is None:
            return SharedBlocks(positions_BT[:, self.first], rotary)
        first_BT = positions_BT.flatten()[self.first].view_as(positions_BT)
        return SharedBlocks(first_BT, rotary)

    def angles(self, rope: Rope, rows: int) -> Rope:
        """cos and sin of each token's block, whose first token's they are."""
        if self._angles is None:
            if self.lengths is not None:
                rope = [x.expand(rows, *x.shape[1:]).flatten(0, 1)[None] for x in rope]
            cos, sin = (x[:, self.first] for x in rope)
            self._angles = (cos, sin)
        return self._angles


@dataclass(eq=False)
class SharedBlocks:
    """The blocks of whole rows whose tokens several ranks share; made once for all layers.

    positions_BT  for each token the position of the first one of its block
    """

    positions_BT: Tensor
    rotary: RotaryCache
    _angles: Rope | None = None

    def angles(self, cut: Callable[[Tensor], Tensor]) -> Rope:
        """As those of BlockLayout, for the tokens of a rank: `cut` takes them from whole rows."""
        if self._angles is None:
            self._angles = self.rotary.at(cut(self.positions_BT))
        return self._angles


class IndexedAttention(Attention):
    """Attention of each query over the blocks that an indexer chose, and its own unfinished one.

        I[t, b] = sum over heads of relu(q_I[t] . k_I[b]) / sqrt(E)

    Of the blocks that end before t in the document, the budget / r best ones are read, the lower
    index first on a tie. A budget of at least the document's length is standard attention.

    The indexer's loss is KL(p || softmax(I)) over the chosen blocks, where p is the probability
    that attention gives each block, summed over heads and normalised. In the dense warm-up all
    blocks count as chosen, and only the indexer learns.
    """

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__(config, ops)
        check(config)
        self.indexer = Indexer(config, ops)
        self.kernels = config.kernels
        self.losses = IDLE
        # what the newest forward that learned measured, as `figures`
        self.measured: Tensor | None = None

    def inputs(
        self,
        x_BTD: Tensor,
        rope: Rope,
        projected: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """q, k and v; the indexer's queries, and its keys before rotation."""
        return *super().inputs(x_BTD, rope, projected), *self.indexer(x_BTD, rope)

    def attend_blocks(
        self,
        inputs: Sequence[Tensor],
        rope: Rope,
        documents: BlockLayout,
    ) -> Tensor:
        """o [B, T, H, K] of whole rows; the indexer learns from them."""
        shape = inputs[0].shape
        lengths = [shape[1]]
        if documents.lengths is not None:
            lengths = documents.lengths
            inputs = [x.flatten(0, 1)[None] for x in inputs]

        *others, raw_BT1E = inputs
        k_BT1E = rotate_first(raw_BT1E, documents.angles(rope, shape[0]))
        parts = [x.split(lengths, dim=1) for x in (*others, k_BT1E)]
        found = [self._attend_document(*part) for part in zip(*parts, strict=True)]

        outputs, divergences, recalls = zip(*found, strict=True)
        if torch.is_grad_enabled():
            self._learn(torch.cat(divergences, dim=1), torch.stack(recalls).sum(0))
        # of one document the output is not copied
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1).view(shape)

    def attend_gathered(
        self,
        inputs: Sequence[Tensor],
        blocks: SharedBlocks,
        cut: Callable[[Tensor], Tensor],
        attend: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> Tensor:
        """The same for a rank's tokens [B, t, H, K] of rows that ranks share: `cut` takes them from
        whole rows, and `attend` reads the keys of all ranks.
        """
        *others, raw_BT1E = inputs
        k_BT1E = rotate_first(raw_BT1E, blocks.angles(cut))
        o_BTHK, kl_BT, recall_3 = attend(*self._seen(*others), k_BT1E, self._reading())
        if torch.is_grad_enabled():
            self._learn(kl_BT, recall_3)
        return o_BTHK

    def _attend_document(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        q_BThE: Tensor,
        k_BT1E: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """o, the indexer's loss [B, T], and what `Reading.recall` gives."""
        reading = self._reading()
        k_BNE = pooled_keys(k_BT1E, reading.r)
        recall_3 = reading.recall(q_BTHK, k_BTGK, q_BThE, k_BNE, q_BTHK.shape[1])
        most = reading.most_of(k_BNE.shape[1])
        seen = self._seen(q_BTHK, k_BTGK, v_BTGK, q_BThE)
        numbers = reading.r, most, reading.learns, reading.kernels
        o_BTHK, kl_BT, *_ = indexed_forward(*seen, k_BNE, *numbers)
        return o_BTHK, kl_BT, recall_3

    def _reading(self) -> "Reading":
        cfg, warming = self.indexer.cfg, self.losses.warming
        return Reading(cfg.r, cfg.most_blocks, warming, torch.is_grad_enabled(), self.kernels)

    def _seen(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """q, k, v and the indexer's queries; in the warm-up the first three learn nothing."""
        *of_model, q_BThE = inputs
        if self.losses.warming:
            of_model = [x.detach() for x in of_model]
        return *of_model, q_BThE

    def _learn(self, kl_BT: Tensor, recall_3: Tensor) -> None:
        """Add this layer's loss to those of the model, and keep what the log shows of it."""
        self.losses.add(kl_BT.sum())
        read, readable, queries = recall_3.unbind()
        tokens = kl_BT.new_full((), kl_BT.numel())
        sums = torch.stack((kl_BT.detach().sum(), read, readable))
        self.measured = torch.stack((sums, torch.stack((tokens, queries, queries))))

    def rows(
        self,
        cu_seqlens: Tensor | None,
        shape: tuple[int, int],
        device: Device,
    ) -> BlockLayout:
        return BlockLayout.of(cu_seqlens, shape, self.indexer.cfg.r, device)

    def cache(
        self,
        shape: tuple[int, int, int, int],
        device: Device,
        dtype: torch.dtype,
    ) -> "IndexedCache":
        return IndexedCache(self.indexer.cfg, shape, device, dtype)


def check(config: ModelConfig, device: Device | None = None) -> None:
    """ValueError for sizes that do not fit the model's, or kernels that cannot serve them."""
    if config.attention.head_dim < config.head_dim:
        raise ValueError(
            f"--indexer: given head_dim={config.attention.head_dim}; allowed: at least the "
            f"model's {config.head_dim}, whose rotary positions it shares; remedy: raise it"
        )
    if config.kernels == "triton":
        triton_indexed_core(*kernel_sizes(config), device)


def kernel_sizes(config: ModelConfig) -> tuple:
    """What `triton_indexed_core` asks for."""
    indexer = config.attention
    heads = config.num_heads // config.num_kv_heads, indexer.heads
    return heads, (config.head_dim, indexer.head_dim), config.dtype


class IndexedCache(LayerCache):
    """Keys and values of one layer, the indexer's keys of whole blocks [B, max_length // r, 1, E],
    and what the unfinished block needs.
    """

    by_position = False

    def __init__(
        self,
        cfg: IndexerConfig,
        shape: tuple[int, int, int, int],
        device: Device,
        dtype: torch.dtype,
    ):
        super().__init__(shape, device, dtype)
        rows, max_length = shape[:2]
        self.r = cfg.r
        self.k_BNE = torch.empty(
            (rows, max_length // cfg.r, cfg.head_dim), device=device, dtype=dtype
        )
        self.blocks = 0
        # of the unfinished block: keys before rotation, and the angles of its tokens
        self.open: list[Tensor] = []

    def attend(
        self,
        layer: IndexedAttention,
        inputs: Sequence[Tensor],
        rope: Rope,
    ) -> Tensor:
        """o [B, T, H, K] of T tokens that continue what is stored."""
        q_BTHK, k_BTGK, v_BTGK, q_BThE, raw_BT1E = inputs
        k_BNE = self.append_blocks(raw_BT1E, rope)
        keys_and_values = self.append(k_BTGK, v_BTGK)
        cfg = layer.indexer.cfg
        numbers = cfg.r, cfg.most_blocks, False, layer.kernels
        o_BTHK, *_ = indexed_forward(q_BTHK, *keys_and_values, q_BThE, k_BNE, *numbers)
        return o_BTHK

    def append_blocks(self, raw_BT1E: Tensor, rope: Rope) -> Tensor:
        """Store the blocks that end with these tokens, whose keys are given before rotation;
        returns the keys [B, N, E] of all. To be called before `append`.
        """
        rows, T = raw_BT1E.shape[:2]
        self.check_room(rows, T)
        new = [raw_BT1E, *(x.expand(rows, *x.shape[1:]) for x in rope)]
        if self.open:
            new = [torch.cat(pair, dim=1) for pair in zip(self.open, new, strict=True)]

        whole = new[0].shape[1] // self.r * self.r
        raw_BT1E, *angles = (x[:, :whole] for x in new)
        angles = [x[:, :: self.r].repeat_interleave(self.r, dim=1) for x in angles]
        count = self.blocks + whole // self.r
        self.k_BNE[:, self.blocks : count] = pooled_keys(rotate_first(raw_BT1E, angles), self.r)
        self.blocks = count
        self.open = [x[:, whole:] for x in new]
        return self.k_BNE[:, :count]
