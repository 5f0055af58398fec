"""Decoding with Native Sparse Attention (arXiv 2502.11089): a layer's state, one token's attention.

The results are those of nsa_attention over the whole sequence. `cfg` is an NSAConfig; compression
and rotation come from the layer. A state that took a prompt at once equals one that took it token
by token.

Letters: those of longhaul/sparse/decode.py, T new tokens, N compressed blocks, U strides of
cmp_stride tokens, w tokens of the window, and l those of a compressed block.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longhaul.sparse.decode import BlockCache, attend, each_product, logits
from longhaul.sparse.nsa.branches import Sizes
from longhaul.sparse.nsa.selected import importance
from model import Layout, Rope, rotate

# The compressed keys are read in multiples of this number, because the first product of a CPU with
# a new shape costs 0.3 ms.
SHAPE_STEP = 256


class NSAState(BlockCache):
    """What one layer keeps while decoding, besides the keys and values of every token.

    cmp_2BNGK   keys and values of every compressed block
    raw_2BlGK   a ring of the last l tokens before RoPE, which later blocks compress
    turn_2Bl1K  a ring of their cos and sin, of K/2 numbers each
    win_2BwGK   a ring of the last w keys and values of the window; None with kv="shared"
    """

    clock = None

    def __init__(
        self,
        cfg,
        batch: int,
        max_tokens: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kernels: str = "auto",
    ):
        shape = batch, max_tokens, kv_heads, head_dim
        sizes = Sizes(*(getattr(cfg, name) for name in Sizes._fields))
        super().__init__(shape, sizes, device, dtype, kernels)

        def zeros(*shape: int, dtype: torch.dtype | None = dtype) -> Tensor:
            return torch.zeros(2, batch, *shape, device=device, dtype=dtype)

        self.cfg = cfg
        self.takes_clock = self.fused
        self.completes_block = False  # whether the clock's token is the last one of a block
        steps = -(-cfg.compressed_blocks(max_tokens) // SHAPE_STEP)
        self.cmp_2BNGK = zeros(steps * SHAPE_STEP, kv_heads, head_dim)
        self.raw_2BlGK = zeros(cfg.cmp_block, kv_heads, head_dim)
        # fp32, as the rotary tables
        self.turn_2Bl1K = zeros(cfg.cmp_block, 1, head_dim // 2, dtype=torch.float32)
        self.win_2BwGK = None
        if cfg.kv == "separate":
            self.win_2BwGK = zeros(cfg.window, kv_heads, head_dim)

    def start_clock(self, clock) -> None:
        """Decode by this clock from now on."""
        self.clock = clock

    def variant(self, position: int) -> bool:
        """Whether the token at this position completes a compressed block; such steps do more.

        The next step is of this token.
        """
        before = self.cfg.compressed_blocks(position)
        self.completes_block = self.cfg.compressed_blocks(position + 1) > before
        return self.completes_block

    def attend(
        self,
        layer,
        inputs: Sequence[Tensor],
        rope: Rope,
    ) -> Tensor:
        """o [B,T,H,K] of T tokens that follow what the state holds.

        The first tokens are a prompt, which `Ops.sparse` computes at once; later ones are decoded
        one by one. `layer` and `inputs` are those of model.NativeSparseAttention.
        """
        compressor = layer.sparse.compressor
        if self.clock is None and self.length == 0:
            k_cmp, v_cmp = self.take_prompt(inputs, rope, compressor)
            q, k, v, _, _, k_win, v_win, gates = inputs
            return layer.ops.sparse(q, k, v, k_cmp, v_cmp, k_win, v_win, gates, self.cfg)

        if self.clock is None:
            self.check_room(*inputs[0].shape[:2])
        outputs = []
        tokens = [x.split(1, 1) for x in (*inputs, *rope)]
        for *one, cos, sin in zip(*tokens, strict=True):
            outputs.append(self.decode(one, (cos, sin), compressor))
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]

    def _rings(
        self,
        inputs: Sequence[Tensor],
        rope: Rope,
    ) -> list[tuple[Tensor, Sequence[Tensor]]]:
        """Each ring, and what it takes of new tokens, at their positions modulo its size."""
        _, _, _, raw, v_raw, k_win, v_win, _ = inputs
        rings = [(self.raw_2BlGK, (raw, v_raw)), (self.turn_2Bl1K, rope)]
        if self.win_2BwGK is not None:
            rings.append((self.win_2BwGK, (k_win, v_win)))
        return rings

    def take_prompt(
        self,
        inputs: Sequence[Tensor],
        rope: Rope,
        compressor: Callable,
    ) -> tuple[Tensor, Tensor]:
        """Stores the first T tokens; returns the compressed keys and values [B,N,G,K]."""
        _, k, v, raw, v_raw, *_ = inputs
        self.append(k, v)
        for ring, pair in self._rings(inputs, rope):
            size = ring.shape[2]
            last = torch.arange(max(0, self.length - size), self.length, device=k.device)
            for buffer, x in zip(ring, pair, strict=True):
                buffer[:, last % size] = x[:, last]

        def turned(k_cmp: Tensor, centre: Tensor) -> Tensor:
            return rotate(k_cmp, *(x[:, centre] for x in rope))

        layout = Layout.of(None, k.shape[:2], self.cfg, k.device)
        blocks = compressor(raw, v_raw, turned, layout)
        for buffer, x in zip(self.cmp_2BNGK, blocks, strict=True):
            buffer[:, : x.shape[1]] = x
        return blocks

    def decode(
        self,
        inputs: Sequence[Tensor],
        rope: Rope,
        compressor: Callable,
    ) -> Tensor:
        """o [B,1,H,K] of one token, which is stored: with a clock at its position."""
        q_B1HK, k, v, *_, gates_B1H3 = inputs
        if self.clock is None:
            self.length += 1
            self.variant(self.position)
        stored = [(self.whole_kv, (k, v)), *self._rings(inputs, rope)]
        q_BGMK = q_B1HK[:, 0].unflatten(1, (k.shape[2], -1))
        if self.clock is not None or self._is_fused(q_B1HK):
            attended = self._attend_fused(q_BGMK, gates_B1H3, stored, compressor)
        else:
            for ring, pair in stored:
                for buffer, x in zip(ring, pair, strict=True):
                    slot = self.position % buffer.shape[1]
                    buffer.narrow(1, slot, 1).copy_(x)
            self._compress(compressor, self.position)
            attended = self._attend(q_BGMK, gates_B1H3)
        return attended.view_as(q_B1HK)

    def _compress(self, compressor: Callable, position: int | Tensor) -> None:
        """Adds the block that ends with the token, if one does."""
        if not self.completes_block:
            return
        l = self.cfg.cmp_block
        place_l = torch.arange(l, device=self.k_BSGK.device)
        token_l = place_l + (position - (l - 1))

        def turned(k_cmp: Tensor, _) -> Tensor:
            centre_1 = token_l[l // 2][None] % l
            return rotate(k_cmp, *self.turn_2Bl1K.index_select(2, centre_1))

        only_1 = place_l[:1]
        layout = Layout(cu_seqlens=None, tokens=slice(0, l), first=only_1, centre=only_1)
        block = compressor(*self.raw_2BlGK.index_select(2, token_l % l), turned, layout)
        self.cmp_2BNGK.index_copy_(2, token_l[:1] // self.cfg.cmp_stride, torch.stack(block))

    def _attend_fused(
        self,
        q_BGMK: Tensor,
        gates_B1H3: Tensor,
        stored: list[tuple[Sequence[Tensor], Sequence[Tensor]]],
        compressor: Callable,
    ) -> Tensor:
        """The same by Triton kernels, which read the position on the device."""
        from longhaul.sparse.triton import decode

        position_1 = self.position_tensor()
        for ring, pair in stored:
            decode.put(ring, pair, position_1)
        self._compress(compressor, position_1)
        kv = self.whole_kv, self.cmp_2BNGK, self.win_2BwGK
        return decode.attend_nsa(q_BGMK, gates_B1H3, position_1, kv, self.sizes)

    def position_tensor(self) -> Tensor:
        """The position [1] on the device."""
        return super().position_tensor() if self.clock is None else self.clock.position

    def _attend(self, q_BGMK: Tensor, gates_B1H3: Tensor) -> Tensor:
        """It reads all compressed keys, at most n*l' selected and w window keys."""
        o_cmp, p_XMN = self._compressed(q_BGMK)
        mass_XJ = None
        free = self.free_blocks()
        if free:
            mass_XJ = importance(p_XMN.sum(1), free.stop, self.sizes)
        o_slc = self.attend_blocks(q_BGMK, mass_XJ)
        o_win = attend(q_BGMK, *self._window())

        gates_BGM31 = gates_B1H3.reshape(*q_BGMK.shape[:3], 3, 1)
        branches = torch.stack((o_cmp, o_slc, o_win), 3)
        o_BGMK = (branches.float() * gates_BGM31).sum(3)
        return o_BGMK.to(q_BGMK.dtype)

    def ordered_bits(self, scores_XN: Tensor) -> Tensor:
        """Importance is not negative, so that its bits order like it."""
        return scores_XN.view(torch.int32)

    def _compressed(self, q_BGMK: Tensor) -> tuple[Tensor, Tensor]:
        """o_BGMK and its fp32 probabilities [X,M,N]; 0 as long as there is no block."""
        blocks = self.cfg.compressed_blocks(self.length)
        N = -(-blocks // SHAPE_STEP) * SHAPE_STEP
        k_XNK, v_XNK = self.cmp_2BNGK[:, :, :N].transpose(2, 3).flatten(1, 2)
        logits_XMN = logits(q_BGMK.flatten(0, 1), k_XNK).mul_(q_BGMK.shape[-1] ** -0.5)
        logits_XMN[..., blocks:] = -torch.inf
        p_XMN = logits_XMN.softmax(-1)
        return each_product(p_XMN.to(v_XNK.dtype), v_XNK).view_as(q_BGMK), p_XMN

    def _window(self) -> list[Tensor]:
        """Keys and values [B,G,<=w,K] of the window; attention does not depend on their order."""
        w = self.cfg.window
        kv = self.stored() if self.win_2BwGK is None else self.win_2BwGK[:, :, : self.length]
        return [x[:, -w:].transpose(1, 2) for x in kv]
