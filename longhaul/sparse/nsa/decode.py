"""Decoding with Native Sparse Attention (arXiv 2502.11089): a layer's state, one token's attention.

The results are those of nsa_attention over the whole sequence. `cfg` is an NSAConfig; compression
and rotation come from the layer. A state that took a prompt at once equals one that took it token
by token.

Letters: those of longhaul/sparse/decode.py, T new tokens, N compressed blocks, U strides of
cmp_stride tokens, w tokens of the window, and l those of a compressed block.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from longhaul.sparse.decode import (
    BlockCache,
    Rule,
    attend,
    each_product,
    logits,
    put,
)
from model import Layout, Rope, rotate

# The compressed keys are read in multiples of this number, because the first product of a CPU with
# a new shape costs 0.3 ms.
SHAPE_STEP = 256


class NSAState(BlockCache):
    """What one layer keeps while decoding, besides the keys and values of every token.

    cmp_2BGNK   keys and values of every compressed block
    raw_2BlGK   a ring of the last l tokens before RoPE, which later blocks compress
    turn_2Bl1K  a ring of their cos and sin, of K/2 numbers each
    win_2BwGK   a ring of the last w keys and values of the window; None with kv="shared"
    """

    by_position = False
    takes_clock = True

    def __init__(
        self,
        cfg,
        batch: int,
        max_tokens: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        rule = Rule(cfg.sel_block, cfg.sel_count, cfg.sel_init, cfg.sel_local)
        super().__init__((batch, max_tokens, kv_heads, head_dim), rule, device, dtype)

        def zeros(*shape: int, dtype: torch.dtype | None = dtype) -> Tensor:
            return torch.zeros(2, batch, *shape, device=device, dtype=dtype)

        self.cfg = cfg
        self.completes_block = False  # whether the clock's token is the last one of a block
        steps = -(-cfg.compressed_blocks(max_tokens) // SHAPE_STEP)
        self.cmp_2BGNK = zeros(kv_heads, steps * SHAPE_STEP, head_dim)
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

    def take_prompt(
        self,
        inputs: Sequence[Tensor],
        rope: Rope,
        compressor: Callable,
    ) -> tuple[Tensor, Tensor]:
        """Stores the first T tokens; returns the compressed keys and values [B,N,G,K]."""
        _, k, v, raw, v_raw, k_win, v_win, _ = inputs
        self.append(k, v)
        rings = [(self.raw_2BlGK, (raw, v_raw)), (self.turn_2Bl1K, rope)]
        if self.win_2BwGK is not None:
            rings.append((self.win_2BwGK, (k_win, v_win)))
        for ring, pair in rings:
            size = ring.shape[2]
            last = torch.arange(max(0, self.length - size), self.length, device=k.device)
            for index, x in enumerate(pair):
                ring.select(0, index)[:, last % size] = x[:, last]

        def turned(k_cmp: Tensor, centre: Tensor) -> Tensor:
            return rotate(k_cmp, *(x[:, centre] for x in rope))

        layout = Layout.of(None, k.shape[:2], self.cfg, k.device)
        blocks = compressor(raw, v_raw, turned, layout)
        for index, x in enumerate(blocks):
            self.cmp_2BGNK[index, :, :, : x.shape[1]] = x.transpose(1, 2)
        return blocks

    def decode(
        self,
        inputs: Sequence[Tensor],
        rope: Rope,
        compressor: Callable,
    ) -> Tensor:
        """o [B,1,H,K] of one token, which is stored: with a clock at its position."""
        if self.clock is None:
            self.length += 1
            self.variant(self.length - 1)
        self._store(inputs, rope)
        if self.completes_block:
            self._compress(compressor)
        q_B1HK, *_, gates_B1H3 = inputs
        return self._attend(q_B1HK, gates_B1H3)

    def _shared(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """What all layers need of the clock's position, made by the first one."""
        return make() if self.clock is None else self.clock.shared(name, make)

    def _slot(self, size: int) -> int | Tensor:
        """Where the token is in a ring of so many."""
        if self.clock is None:
            return self.position % size
        return self._shared(f"slot of {size}", lambda: self.position % size)

    def _store(self, inputs: Sequence[Tensor], rope: Rope) -> None:
        _, k, v, raw, v_raw, k_win, v_win, _ = inputs
        put(self.k_BSGK, 1, self.position, k)
        put(self.v_BSGK, 1, self.position, v)
        slot = self._slot(self.cfg.cmp_block)
        put(self.raw_2BlGK, 2, slot, torch.stack((raw, v_raw)))
        if self.clock is not None or self._is_centre(self.position):
            turn = self._shared("turn", lambda: torch.stack(rope))
            put(self.turn_2Bl1K, 2, slot, turn.expand(-1, len(k), -1, -1, -1))
        if self.win_2BwGK is not None:
            put(self.win_2BwGK, 2, self._slot(self.cfg.window), torch.stack((k_win, v_win)))

    def _is_centre(self, position: int) -> bool:
        """Whether a compressed block turns like the token at this position."""
        return (position - self.cfg.cmp_block // 2) % self.cfg.cmp_stride == 0

    def _compress(self, compressor: Callable) -> None:
        """Adds the block that ends with the token."""
        l = self.cfg.cmp_block
        place_l = torch.arange(l, device=self.k_BSGK.device)
        token_l = place_l + (self.position - (l - 1))

        def turned(k_cmp: Tensor, _) -> Tensor:
            centre_1 = token_l[l // 2][None] % l
            return rotate(k_cmp, *self.turn_2Bl1K.index_select(2, centre_1))

        only_1 = place_l[:1]
        layout = Layout(cu_seqlens=None, tokens=slice(0, l), first=only_1, centre=only_1)
        block = compressor(*self.raw_2BlGK.index_select(2, token_l % l), turned, layout)
        block_2BG1K = torch.stack(block).transpose(2, 3)
        self.cmp_2BGNK.index_copy_(3, token_l[:1] // self.cfg.cmp_stride, block_2BG1K)

    def _attend(self, q_B1HK: Tensor, gates_B1H3: Tensor) -> Tensor:
        """It reads all compressed keys, at most n*l' selected and w window keys."""
        q_BGMK = q_B1HK[:, 0].unflatten(1, (self.k_BSGK.shape[2], -1))
        o_cmp, p_XMN = self._compressed(q_BGMK)
        o_slc = self.attend_blocks(q_BGMK, self._importance(p_XMN))
        o_win = attend(q_BGMK, *self._window())

        gates_BGM31 = gates_B1H3.reshape(*q_BGMK.shape[:3], 3, 1)
        branches = torch.stack((o_cmp, o_slc, o_win), 3)
        o_BGMK = (branches.float() * gates_BGM31).sum(3)
        return o_BGMK.to(q_B1HK.dtype).view_as(q_B1HK)

    def _compressed(self, q_BGMK: Tensor) -> tuple[Tensor, Tensor]:
        """o_BGMK and its fp32 probabilities [X,M,N]; 0 as long as there is no block."""
        blocks = self.cfg.compressed_blocks(self.length)
        N = self.cmp_2BGNK.shape[3]
        if self.clock is None:
            N = -(-blocks // SHAPE_STEP) * SHAPE_STEP
        k_XNK, v_XNK = self.cmp_2BGNK[:, :, :, :N].flatten(1, 2)
        logits_XMN = logits(q_BGMK.flatten(0, 1), k_XNK).mul_(q_BGMK.shape[-1] ** -0.5)

        if self.clock is None:
            logits_XMN[..., blocks:] = -torch.inf
            p_XMN = logits_XMN.softmax(-1)
        else:
            is_missing_N = self._shared("missing blocks", self._missing)
            lowest = torch.finfo(torch.float32).min  # finite: without a block -inf would be NaN
            # Then o is 0, as what is not written is, and no choice depends on p.
            p_XMN = logits_XMN.masked_fill_(is_missing_N, lowest).softmax(-1)
        return each_product(p_XMN.to(v_XNK.dtype), v_XNK).view_as(q_BGMK), p_XMN

    def _importance(self, p_XMN: Tensor) -> Tensor | None:
        """Of the blocks that are chosen from, as bits: it is not negative, so that they order like
        it. None without a clock as long as every block is read.
        """
        blocks = range(len(self.block_J))
        if self.clock is None:
            blocks = self.free_blocks()
            if not blocks:
                return None
        return importance(p_XMN.sum(1), blocks, self.cfg).view(torch.int32)

    def _missing(self) -> Tensor:
        """Which compressed blocks do not end before the clock's position or at it."""
        index_N = torch.arange(self.cmp_2BGNK.shape[3], device=self.k_BSGK.device)
        last_N = index_N * self.cfg.cmp_stride + self.cfg.cmp_block - 1
        return last_N > self.position

    def _window(self) -> tuple[Tensor, ...]:
        """Keys and values [B,G,<=w,K] of the window, and by a clock which of them are read;
        attention does not depend on their order.
        """
        w = self.cfg.window
        k, v = self.stored() if self.win_2BwGK is None else self.win_2BwGK[:, :, : self.length]
        if self.clock is None:
            return k[:, -w:].transpose(1, 2), v[:, -w:].transpose(1, 2)

        back_w = self._shared("window", lambda: torch.arange(w, device=k.device))
        is_read = self._shared("filled", lambda: (back_w <= self.position)[None])
        if self.win_2BwGK is not None:
            k, v = self.win_2BwGK
            return k.transpose(1, 2), v.transpose(1, 2), is_read
        first_BG1 = self.row_BG1l[..., 0]
        G = first_BG1.shape[1]

        def rows() -> Tensor:
            return first_BG1 + (self.position - back_w).clamp(min=0) * G

        return *self.gathered(self._shared("rows", rows)), is_read


def importance(
    p_XN: Tensor,
    blocks: range,
    cfg,
) -> Tensor:
    """Importance [X,J] of these selection blocks.

    A stride's mass is the sum of the compressed blocks that cover it, and a selection block's
    importance the sum of its strides.
    """
    per = cfg.sel_block // cfg.cmp_stride  # strides of a selection block
    spread = cfg.cmp_block // cfg.cmp_stride  # strides of a compressed block
    first = blocks.start * per - (spread - 1)
    end = blocks.stop * per

    # Compressed blocks before the first one and after the last one have no mass.
    before = max(0, -first)
    after = max(0, end - p_XN.shape[1])
    if before or after:
        p_XN = F.pad(p_XN, (before, after))
    strides = len(blocks) * per
    start = first + before
    mass_XU = p_XN[:, start : start + strides]
    for i in range(start + 1, start + spread):
        mass_XU = mass_XU + p_XN[:, i : i + strides]
    return mass_XU.unflatten(1, (-1, per)).sum(-1)
