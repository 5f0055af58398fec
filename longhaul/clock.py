"""Decoding at fixed shapes, which a CUDA graph can repeat: the position is a tensor on the device.

`ClockedCache` goes on where a KV cache is; `takes_clock` says for which caches it can.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from base import machine
from longhaul.kernels import sdpa
from model import (
    Attention,
    Device,
    KVCache,
    LayerCache,
    ModelConfig,
    Rope,
    RotaryCache,
    Standard,
)


class Clock:
    """Where decoding is, in tensors on the device: so a step of one token has the same shapes for
    all tokens, and a CUDA graph can repeat it.

    position      [1] int64, of the token that is decoded
    lengths       [B] int32, tokens of each row with it
    query_bounds  [B + 1] int32, 0, 1, ..., B
    key_bounds    [B + 1] int32, 0, S, ..., B * S, with S = `capacity`
    """

    def __init__(
        self,
        position: int,
        rows: int,
        capacity: int,
        device: Device,
    ):
        self.capacity = capacity
        self.position = torch.full((1,), position, device=device)
        self.lengths = torch.full((rows,), position + 1, device=device, dtype=torch.int32)
        self.query_bounds = torch.arange(rows + 1, device=device, dtype=torch.int32)
        self.key_bounds = self.query_bounds * capacity
        self._shared: dict[str, Tensor] = {}

    def set(self, position: int) -> None:
        """The next token is that of this position."""
        self.position.fill_(position)
        self.lengths.fill_(position + 1)
        self._shared.clear()

    def tick(self) -> None:
        """The token is decoded."""
        self.position.add_(1)
        self.lengths.add_(1)
        self._shared.clear()

    def shared(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """What all layers need of this position, made by the first one."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def visible(self) -> Tensor:
        """Whether each stored position [1, S] is at or before the token's."""
        index_S = torch.arange(self.capacity, device=self.position.device)
        return (index_S <= self.position)[None]


def attention_by_clock(q_B1HK: Tensor, cache: LayerCache, clock: Clock) -> Tensor:
    """Attention of one token over the cache, up to the clock's position, at fixed shapes.

    FlashAttention is told the lengths by a tensor and reads no further; other kernels read the
    whole cache under a mask.
    """
    if not machine.takes_flash(q_B1HK):
        visible_1S = clock.shared("visible", clock.visible)
        return sdpa(q_B1HK, cache.k_BSGK, cache.v_BSGK, causal=False, mask_TS=visible_1S)

    o_BHK, *_ = torch.ops.aten._flash_attention_forward(
        q_B1HK.flatten(0, 1),
        cache.k_BSGK.flatten(0, 1),
        cache.v_BSGK.flatten(0, 1),
        cum_seq_q=clock.query_bounds,
        cum_seq_k=clock.key_bounds,
        max_q=1,
        max_k=clock.capacity,
        dropout_p=0.0,
        is_causal=False,
        return_debug_mask=False,
        seqused_k=clock.lengths,
    )
    return o_BHK.view_as(q_B1HK)


class ClockedLayer:
    """Full attention of one layer: each token is put at the clock's position."""

    def __init__(self, cache: LayerCache, clock: Clock):
        self.cache = cache
        self.clock = clock
        # Masked keys are read, so they must be numbers.
        cache.k_BSGK[:, cache.length :] = 0
        cache.v_BSGK[:, cache.length :] = 0

    def attend(
        self,
        layer: Attention,
        inputs: Sequence[Tensor],
        rope: Rope,
    ) -> Tensor:
        """o [B, 1, H, K] of the token at the clock's position."""
        q_B1HK, k_B1GK, v_B1GK = inputs
        self.cache.k_BSGK.index_copy_(1, self.clock.position, k_B1GK)
        self.cache.v_BSGK.index_copy_(1, self.clock.position, v_B1GK)
        return attention_by_clock(q_B1HK, self.cache, self.clock)

    def variant(self, position: int) -> bool:
        """Steps with equal variants do the same work: here all."""
        return False


def takes_clock(cache: KVCache, config: ModelConfig) -> bool:
    """Whether a `ClockedCache` can go on where the cache of such a model is."""
    layer = cache.layers[0]
    if type(layer) is LayerCache:
        return config.attention.name == Standard.name  # others may read its keys otherwise
    return getattr(layer, "takes_clock", False)


class ClockedCache:
    """A cache whose next tokens are decoded one by one, by a clock on the device; call
    `clock.tick()` after each.
    """

    def __init__(
        self,
        cache: KVCache,
        rows: int,
        capacity: int,
        device: Device,
    ):
        self.first = cache.length  # the position of the first token
        self.clock = Clock(cache.length, rows, capacity, device)
        self.layers = [self._clocked(layer) for layer in cache.layers]

    def _clocked(self, layer):
        if type(layer) is LayerCache:
            return ClockedLayer(layer, self.clock)
        layer.start_clock(self.clock)
        return layer

    def rope(
        self,
        rotary: RotaryCache,
        tokens: int,
        device: torch.device,
    ) -> Rope:
        """cos and sin of the token at the clock's position."""
        if tokens > 1:
            raise ValueError(
                f"{tokens} tokens for a cache whose clock runs: give one token, or fill the cache "
                "before the clock starts"
            )
        tables = rotary(self.clock.capacity, device)
        cos, sin = (table.index_select(1, self.clock.position) for table in tables)
        return cos, sin
