"""Attention over blocks of keys that a selector chooses without weights of its own: the settings,
the layer, and what it keeps while decoding. selectors/ has the equations, one file for each.

Letters: B rows, T tokens, S stored positions, H query heads, G KV heads, K head dimension, C
queries of a chunk, M = H/G, Z = B*G, N blocks, J entries of a summary, W their width.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from longhaul.sparse.choose import SELECTORS, Chunk, choose_blocks
from longhaul.sparse.decode import BlockCache, TokenProducts
from longhaul.sparse.engine import block_sparse_attention
from longhaul.sparse.plain import plain_block_sparse_attention
from model import Attention, Device, Documents, ModelConfig, Ops, Rope

# the smallest value of these settings; 1 of all others
LEAST = {
    "init": 0,
    "dense_below": 0,
    "head_dim": 2,
}


@dataclass(frozen=True)
class BlockConfig:
    """Sizes of attention over chosen blocks, and how blocks are scored: a selector is a subclass,
    a frozen dataclass with a `name`.
    """

    name: ClassVar[str] = ""

    count: int = 16  # blocks that a query reads, the forced ones included
    block: int = 64  # tokens of a block
    init: int = 1  # of the blocks, the first ones of the document
    local: int = 2  # of the blocks, the query's own one and those before it
    dense_below: int = 0  # queries before this position read every key before them

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        SELECTORS[cls.name] = cls

    def __post_init__(self):
        # as the operator takes them; made here because a compiler cannot
        object.__setattr__(self, "text", json.dumps(asdict(self)))
        for field in fields(self):
            value = getattr(self, field.name)
            least = LEAST.get(field.name, 1)
            if field.type is int and (type(value) is not int or value < least):
                allowed = f"{field.name} an integer >= {least}"
                raise self.refusal([field.name], allowed, f"change {field.name}")
        if self.count < self.init + self.local:
            raise self.refusal(
                ["count", "init", "local"],
                "count >= init + local",
                "give a larger count or force fewer blocks",
            )

    def refusal(
        self,
        names: list[str],
        allowed: str,
        remedy: str,
    ) -> ValueError:
        """The error of settings that do not fit, in one line."""
        given = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return ValueError(f"--blocks: given {given}; allowed: {allowed}; remedy: {remedy}")

    def layer(self, config: ModelConfig, ops: Ops) -> Attention:
        return SelectedAttention(config, ops)

    @property
    def dense_tokens(self) -> int:
        """Queries before this position of a document read every key before them."""
        return max(self.dense_below, self.count * self.block)

    @property
    def dense_queries(self) -> int:
        """Queries of a longer document that full attention serves: those for which `count` blocks
        would not be every block.
        """
        return self.dense_below if self.dense_below > self.count * self.block else 0

    # ---- what a selector says

    def span(self) -> tuple[int, int]:
        """Tokens of which an entry of the summary is made, and tokens to the next one's; (0, 0)
        for keys that are scored as they are.
        """
        return 0, 0

    def summarise(self, k_BSGK: Tensor) -> Tensor:
        """What is scored [B, J, G, W]: every whole entry, from the first key on."""
        return k_BSGK

    def scores(self, chunk: Chunk, summary_ZJW: Tensor) -> Tensor:
        """Scores [Z, C, N] in fp32 of the first N blocks, for the queries of the chunk."""
        raise NotImplementedError(f"{type(self).__name__} defines no scores")

    def vectors_scored(self, tokens: Tensor) -> Tensor:
        """Vectors of K numbers with which a query head is multiplied, over so many tokens."""
        return tokens // max(1, self.span()[1])

    # ---- what follows from it

    def columns(self, tokens: int) -> int:
        """Scores of a query head over so many tokens that exist at once."""
        return tokens // (self.span()[1] or self.block)

    def entries(self, tokens: int) -> int:
        """Whole entries of the summary of so many tokens."""
        span, step = self.span()
        if not span or tokens < span:
            return 0
        return (tokens - span) // step + 1


def attend_chosen(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    chosen_BTGn: Tensor,
    block: int,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(o, lse) over the chosen blocks, by the engine with these `kernels`; float64 by the plain
    version, which alone takes it.
    """
    inputs = (q_BTHK, k_BSGK, v_BSGK, chosen_BTGn, block)
    if q_BTHK.dtype == torch.float64:
        return plain_block_sparse_attention(*inputs)
    return block_sparse_attention(*inputs, kernels=kernels)


class SelectedCache(BlockCache):
    """Keys and values of one layer, and the summary of all whole entries, which grows with them."""

    def __init__(
        self,
        sizes: BlockConfig,
        shape: tuple[int, int, int, int],
        device: Device,
        dtype: torch.dtype,
        kernels: str,
    ):
        super().__init__(shape, sizes, device, dtype, kernels)
        self.summary_BJGW = None
        span, _ = sizes.span()
        if span:
            B, length, G, K = shape
            entry = sizes.summarise(torch.empty((B, span, G, K), dtype=dtype, device=device))
            room = B, sizes.entries(length), *entry.shape[2:]
            self.summary_BJGW = torch.empty(room, dtype=entry.dtype, device=device)

    def attend(
        self,
        layer: "SelectedAttention",
        inputs: Sequence[Tensor],
        rope: Rope,
    ) -> Tensor:
        """o [B, T, H, K] of T tokens that continue what is stored: of a single one by its scores,
        of several, or while every block is read, as in a forward without a cache.
        """
        q_BTHK, k_BTGK, v_BTGK, *others = inputs
        before = self.length
        keys_and_values = self.append(k_BTGK, v_BTGK)
        scored = self.remember(before, *others)
        with layer.ops.varying(q_BTHK):
            if q_BTHK.shape[1] > 1 or self.length <= self.sizes.dense_tokens:
                return self.attend_several(layer, q_BTHK, *keys_and_values, *scored)
        q_BGMK = q_BTHK[:, 0].unflatten(1, (k_BTGK.shape[2], -1))
        return self.attend_blocks(q_BGMK, self.scores(q_BGMK, *scored)).view_as(q_BTHK)

    def remember(self, before: int) -> tuple[Tensor | None]:
        """What is scored of all that is stored: the summary, if there is one. It is brought up to
        date from the first `before` tokens on.
        """
        if self.summary_BJGW is None:
            return (None,)
        first, now = self.sizes.entries(before), self.sizes.entries(self.length)
        if now > first:
            span, step = self.sizes.span()
            tokens = slice(first * step, (now - 1) * step + span)
            self.summary_BJGW[:, first:now] = self.sizes.summarise(self.k_BSGK[:, tokens])
        return (self.summary_BJGW[:, :now],)

    def attend_several(self, layer: "SelectedAttention", *inputs: Tensor | None) -> Tensor:
        """o [B, T, H, K] of the last T of the S positions."""
        return layer.attend_document(*inputs)

    def scores(self, q_BGMK: Tensor, summary_BJGW: Tensor | None) -> Tensor:
        """Scores [X, N] of the blocks before the local ones, for the token stored last."""
        if summary_BJGW is None:
            summary_BJGW = self.stored()[0]
        return self.scores_of_rows(q_BGMK[:, :, None], summary_BJGW.transpose(1, 2))

    def scores_of_rows(self, q_BZCMK: Tensor, summary_BZJW: Tensor) -> Tensor:
        """Scores [B * Z * C, N]. Rows are scored one by one, whose summaries are not copied."""
        products = TokenProducts(q_BZCMK)
        scores = []
        for q_ZCMK, summary_ZJW in zip(q_BZCMK, summary_BZJW, strict=True):
            chunk = Chunk(q_ZCMK, self.position, self.free_blocks().stop, products)
            scores.append(self.sizes.scores(chunk, summary_ZJW).flatten(0, 1))
        return torch.cat(scores)


class SelectedAttention(Attention):
    """Attention of each query over the blocks that the settings choose, and full causal attention
    of the first `dense_tokens` queries of a document, which read every block.
    """

    cache_kind = SelectedCache

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__(config, ops)
        self.sizes = config.attention
        self.kernels = config.kernels

    def attend_document(
        self,
        q_BTHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        summary_BJGW: Tensor | None = None,
    ) -> Tensor:
        """o [B, T, H, K] of the last T of the S positions; the summary of all, if it is kept."""
        T = q_BTHK.shape[1]
        S = k_BSGK.shape[1]
        if S <= self.sizes.dense_tokens:
            return self.ops.attention(q_BTHK, k_BSGK, v_BSGK)
        dense = min(T, self.sizes.dense_queries - (S - T))
        if dense <= 0:
            return self._attend_chosen(q_BTHK, k_BSGK, v_BSGK, summary_BJGW)

        early_BTHK, late_BTHK = q_BTHK.split((dense, T - dense), dim=1)
        late_BTHK = self._attend_chosen(late_BTHK, k_BSGK, v_BSGK, summary_BJGW)
        seen = slice(0, S - T + dense)
        early_BTHK = self.ops.attention(early_BTHK, k_BSGK[:, seen], v_BSGK[:, seen])
        return torch.cat((early_BTHK, late_BTHK), dim=1)

    def _attend_chosen(
        self,
        q_BTHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        summary_BJGW: Tensor | None,
    ) -> Tensor:
        """o [B, T, H, K] over the blocks that are chosen."""
        chosen_BTGn = choose_blocks(self.sizes, q_BTHK, k_BSGK, summary_BJGW)
        inputs = (q_BTHK, k_BSGK, v_BSGK, chosen_BTGn)
        return attend_chosen(*inputs, self.sizes.block, self.kernels)[0]

    def packed(
        self,
        inputs: Sequence[Tensor],
        rope: Rope,
        documents: Documents,
    ) -> Tensor:
        if max(documents.lengths) <= self.sizes.dense_tokens:
            return self.ops.packed(*inputs, documents)
        return super().packed(inputs, rope, documents)

    def cache(
        self,
        shape: tuple[int, int, int, int],
        device: Device,
        dtype: torch.dtype,
    ) -> SelectedCache:
        return self.cache_kind(self.sizes, shape, device, dtype, self.kernels)
