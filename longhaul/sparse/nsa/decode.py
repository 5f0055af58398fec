"""Decoding with Native Sparse Attention (arXiv 2502.11089): a layer's state, one token's attention.

`NSAState` keeps what later tokens read, and `nsa_decode` computes the attention of the last token
appended to it. The results are those of nsa_attention over the whole sequence: blocks are ranked in
fp32, and the lower block wins a tie. `cfg` is an NSAConfig; compression and rotation come from the
layer. A state that took a prompt at once equals one that took it token by token.

Letters: B rows of the batch, T new tokens, H query heads, G KV heads, M = H/G, X = B*G KV heads of
all rows, K head dim, S keys, N compressed blocks, J selection blocks, U strides of cmp_stride
tokens. n, l, l', s and w of the paper are sel_count, cmp_block, sel_block, cmp_stride and window.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from base.machine import platform
from model import Layout, Rope, rotate

# The compressed keys are read in multiples of this number, because the first product of a CPU with
# a new shape costs 0.3 ms.
SHAPE_STEP = 256


def ceil_div(count: int, size: int) -> int:
    """How many groups of `size` hold `count` items."""
    return -(-count // size)


def round_up(count: int, step: int) -> int:
    """The least multiple of `step` that is at least `count`."""
    return ceil_div(count, step) * step


class NSAState:
    """What one layer keeps while decoding; the first dimension is (keys, values).

    slc     [2,B,G,S,K]  every token
    cmp     [2,B,G,N,K]  every compressed block
    win     [2,B,G,w,K]  a ring of the last w tokens; None with kv="shared", since slc has them
    tail    [2,B,l,G,K]  a ring of the last l tokens before RoPE, which later blocks compress
    turns   [2,B,N,1,K/2]  cos and sin at the centres of the blocks that are not compressed yet

    With a clock (longhaul/clock.py), one token at a time is decoded at its position, and `length`
    and `blocks` stay. Then turns is a ring of the last l tokens' cos and sin, [2,B,l,1,K/2].
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
        def cache(*shape: int) -> Tensor:
            return torch.zeros(2, batch, *shape, head_dim, device=device, dtype=dtype)

        self.cfg = cfg
        self.max_tokens = max_tokens
        self.length = 0  # tokens
        self.blocks = 0  # compressed blocks
        self.clock = None
        self.completes_block = False  # whether the clock's token is the last one of a block

        # Decoding reads whole blocks, always n of them.
        J = max(cfg.sel_count, ceil_div(max_tokens, cfg.sel_block))
        N = round_up(cfg.compressed_blocks(max_tokens), SHAPE_STEP)
        self.slc = cache(kv_heads, J * cfg.sel_block)
        self.tail = cache(cfg.cmp_block, kv_heads)
        self.cmp = cache(kv_heads, N)
        self.win = None
        if cfg.kv == "separate":
            self.win = cache(kv_heads, cfg.window)
        self.turns = None

        # where block j of KV head x = b*G + g is among all blocks of slc
        places = torch.arange(batch * kv_heads * J, device=device)
        self.place_XJ = places.view(-1, J)

    def attend(self, layer, inputs: Sequence[Tensor], rope: Rope) -> Tensor:
        """o [B,T,H,K] of T tokens that follow what the state holds.

        The first tokens are a prompt, which `Ops.sparse` computes at once; later ones are decoded
        one by one. `layer` and `inputs` are those of model.NativeSparseAttention.
        """
        compressor = layer.sparse.compressor
        if self.clock is not None:
            return self._attend_by_clock(inputs, rope, compressor)

        q, *_, gates = inputs
        self.require(*q.shape[:2])
        if self.length == 0:
            self._take(inputs, rope, compressor)
            q, k, v, _, _, k_win, v_win, gates = inputs
            k_cmp, v_cmp = self.compressed()
            return layer.ops.sparse(q, k, v, k_cmp, v_cmp, k_win, v_win, gates, self.cfg)

        outputs = []
        tokens = [x.split(1, 1) for x in (*inputs, *rope)]
        for *one, cos, sin in zip(*tokens, strict=True):
            self._take(one, (cos, sin), compressor)
            q, *_, gates = one
            outputs.append(nsa_decode(q, gates, self))
        return torch.cat(outputs, 1)

    def _take(self, inputs, rope, compressor) -> None:
        """Appends the tokens of `inputs` and their rotation."""
        _, k, v, raw, v_raw, k_win, v_win, _ = inputs
        if self.cfg.kv == "shared":
            k_win = None
            v_win = None

        def turn(k_cmp: Tensor, _) -> Tensor:
            return rotate(k_cmp, *self.turns[:, :, : k_cmp.shape[1]])

        self.remember(*rope)
        self.append(raw, v_raw, k, v, k_win, v_win, compressor, turn)

    def start_clock(self, clock) -> None:
        """Decode by this clock from now on."""
        self.clock = clock
        l = self.cfg.cmp_block
        ring = self.tail.new_zeros(
            (2, self.tail.shape[1], l, 1, self.tail.shape[-1] // 2),
            dtype=torch.float32,  # as the rotary tables
        )
        if self.turns is not None:
            first = self.blocks * self.cfg.cmp_stride + l // 2
            for index in range(self.turns.shape[2]):
                slot = (first + index * self.cfg.cmp_stride) % l
                ring[:, :, slot] = self.turns[:, :, index]
        self.turns = ring

    def variant(self, position: int) -> bool:
        """Whether the token at this position completes a compressed block; such steps do more.

        The next step is of this token.
        """
        blocks = self.cfg.compressed_blocks(position)
        self.completes_block = self.cfg.compressed_blocks(position + 1) > blocks
        return self.completes_block

    def _attend_by_clock(
        self,
        inputs: tuple[Tensor, ...],
        rope: tuple[Tensor, Tensor],
        compressor: Callable,
    ) -> Tensor:
        """o [B,1,H,K] of the token at the clock's position."""
        q, k, v, raw, v_raw, k_win, v_win, gates = inputs
        selected = torch.stack((k, v)).transpose(2, 3)
        self.slc.index_copy_(3, self.clock.position, selected)
        if self.win is not None:
            window = torch.stack((k_win, v_win)).transpose(2, 3)
            self.win.index_copy_(3, self._slot(self.cfg.window), window)

        slot = self._slot(self.cfg.cmp_block)
        self.tail.index_copy_(2, slot, torch.stack((raw, v_raw)))
        turn = self.clock.shared("turn", lambda: torch.stack(rope))
        self.turns.index_copy_(2, slot, turn.expand(-1, len(k), -1, -1, -1))
        if self.completes_block:
            self._compress_by_clock(compressor)
        return decode_by_clock(q, gates, self)

    def _slot(self, size: int) -> Tensor:
        """Where the clock's token is in a ring of so many tokens [1]."""
        return self.clock.shared(f"slot of {size}", lambda: self.clock.position % size)

    def _compress_by_clock(self, compressor: Callable) -> None:
        """Adds the block that ends with the clock's token."""
        cfg = self.cfg
        l = cfg.cmp_block
        position = self.clock.position
        first = position - (l - 1)
        order = (first + torch.arange(l, device=position.device)) % l
        k_raw, v_raw = self.tail.index_select(2, order)

        def turn(k_cmp: Tensor, _) -> Tensor:
            return rotate(k_cmp, *self.turns.index_select(2, (first + l // 2) % l))

        only = torch.zeros_like(position)
        layout = Layout(cu_seqlens=None, tokens=slice(0, l), first=only, centre=only)
        block = torch.stack(compressor(k_raw, v_raw, turn, layout))
        self.cmp.index_copy_(3, first // cfg.cmp_stride, block.transpose(2, 3))

    def append(
        self,
        k_raw: Tensor,
        v_raw: Tensor,
        k_slc: Tensor,
        v_slc: Tensor,
        k_win: Tensor | None,
        v_win: Tensor | None,
        compressor: Callable,
        rope: Callable,
    ) -> None:
        """Adds T new tokens, all tensors [B,T,G,K]; call it before they attend.

        k_raw and v_raw are those before RoPE, for compressor(k, v, rope, index). k_win and v_win
        are None with kv="shared". Raises ValueError if they are not, or if the tokens do not fit.
        """
        B, T, _, _ = k_slc.shape
        old = self.length
        new = old + T
        self.require(B, T)
        if (k_win is None) != (self.win is None):
            given = "None" if k_win is None else "a tensor"
            raise ValueError(
                f"NSAState: given k_win={given} with kv={self.cfg.kv!r}; allowed: None with "
                "'shared', a tensor with 'separate'; remedy: pass that, or change kv"
            )

        selected = torch.stack((k_slc, v_slc))
        self.slc[:, :, :, old:new] = selected.transpose(2, 3)
        if self.win is not None:
            window = torch.stack((k_win, v_win))
            _write_ring(self.win.transpose(2, 3), window, old)

        raw = torch.stack((k_raw, v_raw))
        if self.cfg.compressed_blocks(new) > self.blocks:
            before = self._last_raw(min(old, self.cfg.cmp_block))
            self._compress(torch.cat((before, raw), 2), new, compressor, rope)
        _write_ring(self.tail, raw, old)
        self.length = new

    def remember(
        self,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        """Keeps the rotation of the new tokens at the centres of blocks; call it before append.

        A compressed key is rotated as the token at its block's centre, and the block ends later.
        cos and sin are [1 or B,T,1,K/2].
        """
        stride = self.cfg.cmp_stride
        half = self.cfg.cmp_block // 2
        centres_before = max(0, ceil_div(self.length - half, stride))
        first = centres_before * stride + half - self.length  # among the new tokens

        if self.turns is not None and first >= cos.shape[1]:
            return
        cos = cos[:, first::stride]
        sin = sin[:, first::stride]
        turns = torch.stack((cos, sin))
        turns = turns.expand(-1, self.slc.shape[1], -1, -1, -1)
        if self.turns is not None:
            turns = torch.cat((self.turns, turns), 2)
        self.turns = turns

    def compressed(self) -> Tensor:
        """(k_cmp, v_cmp) [2,B,N,G,K]."""
        return self.cmp[:, :, :, : self.blocks].transpose(2, 3)

    def require(
        self,
        rows: int,
        tokens: int,
    ) -> None:
        """ValueError if `tokens` more tokens of `rows` rows do not fit."""
        held = self.slc.shape[1]
        if rows != held:
            raise ValueError(
                f"the KV cache holds {held} rows and {rows} are given: "
                f"build it with batch_size={rows}"
            )
        end = self.length + tokens
        if end > self.max_tokens:
            raise ValueError(
                f"the KV cache holds {self.max_tokens} positions and {end} are needed: "
                f"build it with max_length >= {end}"
            )

    def _last_raw(self, count: int) -> Tensor:
        """The last `count` tokens of the tail, in their order."""
        start = (self.length - count) % self.cfg.cmp_block
        older = self.tail[:, :, start:]
        newer = self.tail[:, :, :start]
        return torch.cat((older, newer), 2)[:, :, :count]

    def _compress(
        self,
        raw: Tensor,
        new: int,
        compressor: Callable,
        rope: Callable,
    ) -> None:
        """Adds the compressed blocks that end before position `new`.

        The last token of raw [2,B,S,G,K] is new - 1.
        """
        stride = self.cfg.cmp_stride
        total = self.cfg.compressed_blocks(new)
        count = total - self.blocks
        units = count - 1 + self.cfg.cmp_block // stride

        first_token = self.blocks * stride
        first_centre = first_token + self.cfg.cmp_block // 2
        start = first_token - new + raw.shape[2]
        raw = raw[:, :, start:]
        first = torch.arange(count, device=raw.device)
        index = Layout(
            cu_seqlens=None,
            tokens=slice(0, units * stride),
            first=first,
            centre=first * stride + first_centre,
        )
        k_raw, v_raw = raw
        blocks = torch.stack(compressor(k_raw, v_raw, rope, index))
        self.cmp[:, :, :, self.blocks : total] = blocks.transpose(2, 3)

        self.blocks = total
        if self.turns is not None:
            self.turns = self.turns[:, :, count:]


def _write_ring(
    ring_2BSGK: Tensor,
    x_2BTGK: Tensor,
    old: int,
) -> None:
    """Writes token t to slot t % S; the first token of x is token `old`."""
    S = ring_2BSGK.shape[2]
    T = x_2BTGK.shape[2]
    if T == 1:  # a copy takes 2 us, an index 10
        ring_2BSGK[:, :, old % S] = x_2BTGK[:, :, 0]
        return

    kept = min(T, S)
    tokens = torch.arange(old + T - kept, old + T, device=x_2BTGK.device)
    ring_2BSGK[:, :, tokens % S] = x_2BTGK[:, :, T - kept :]


# ---- the attention of one token


def nsa_decode(
    q_B1HK: Tensor,
    gates_B1H3: Tensor,
    state: NSAState,
) -> Tensor:
    """o [B,1,H,K] of the last token appended to the state.

    It reads N compressed, at most n*l' selected and at most w window keys.
    """
    B, _, H, K = q_B1HK.shape
    G = state.slc.shape[2]
    q_BGMK = q_B1HK.reshape(B, G, H // G, K)  # the heads of a group are rows of one product

    o_cmp, p_XMN = _attend_compressed(q_BGMK, state)
    k_slc, v_slc = _selected(p_XMN, state)
    k_win, v_win = _window(state)
    with platform().lengths_vary(q_BGMK):
        o_slc = F.scaled_dot_product_attention(q_BGMK, k_slc, v_slc)
        o_win = F.scaled_dot_product_attention(q_BGMK, k_win, v_win)

    gates_BGM31 = gates_B1H3.reshape(B, G, -1, 3, 1)
    branches = torch.stack((o_cmp, o_slc, o_win), 3)
    o_BGM3K = branches.float() * gates_BGM31
    o_BGMK = o_BGM3K.sum(3)
    return o_BGMK.to(q_B1HK.dtype).view(B, 1, H, K)


def _window(state: NSAState) -> Tensor:
    """(k, v) [2,B,G,<=w,K] of the window; attention does not depend on the order of a full ring."""
    if state.win is not None:
        return state.win[:, :, :, : state.length]
    low = max(0, state.length - state.cfg.window)
    return state.slc[:, :, :, low : state.length]


def _attend_compressed(
    q_BGMK: Tensor,
    state: NSAState,
) -> tuple[Tensor, Tensor | None]:
    """o_BGMK and its fp32 probabilities [X,M,N]; zeros and None as long as there is no block."""
    if state.blocks == 0:
        return torch.zeros_like(q_BGMK), None

    read = round_up(state.blocks, SHAPE_STEP)
    cmp = state.cmp[:, :, :, :read]
    k_XSK, v_XSK = cmp.flatten(1, 2)
    q_XMK = q_BGMK.flatten(0, 1)
    scale = q_XMK.shape[-1] ** -0.5

    logits_XMN = _logits(q_XMK, k_XSK)
    logits_XMN.mul_(scale)
    logits_XMN[..., state.blocks :] = -torch.inf
    p_XMN = logits_XMN.softmax(-1)
    o_XMK = _products(p_XMN.to(v_XSK.dtype), v_XSK)
    return o_XMK.view_as(q_BGMK), p_XMN


def _products(a_XMK: Tensor, b_XKS: Tensor) -> Tensor:
    """a b for each of the X KV heads.

    With few rows, a batched bf16 product of a CPU is 9 times slower than 2-D products.
    """
    if a_XMK.is_cuda:
        return torch.bmm(a_XMK, b_XKS)
    return torch.stack([a @ b for a, b in zip(a_XMK, b_XKS, strict=True)])


def _logits(q_XMK: Tensor, k_XSK: Tensor) -> Tensor:
    """q k^T in fp32.

    A bf16 product of a CPU returns bf16, too coarse for logits. Subtracting it inside a second
    product, whose sums are fp32, returns what rounding lost.
    """
    if q_XMK.is_cuda and q_XMK.dtype != torch.float32:
        return torch.bmm(q_XMK, k_XSK.mT, out_dtype=torch.float32)
    if q_XMK.dtype != torch.bfloat16:
        return _products(q_XMK.float(), k_XSK.float().mT)

    high = _products(q_XMK, k_XSK.mT)
    low = [
        torch.addmm(high_MS, q_MK, k_SK.T, beta=-1)
        for high_MS, q_MK, k_SK in zip(high, q_XMK, k_XSK, strict=True)
    ]
    return high.float().add_(torch.stack(low))


def _selected(
    p_XMN: Tensor | None,
    state: NSAState,
) -> Tensor:
    """(k, v) [2,B,G,S,K] of the blocks that the last token reads."""
    cfg = state.cfg
    _, B, G, _, K = state.slc.shape
    t = state.length - 1
    if t < cfg.sel_count * cfg.sel_block:
        return state.slc[:, :, :, : t + 1]

    own = t // cfg.sel_block
    p_XN = p_XMN.sum(1)
    places_Xn = _chosen_places(p_XN, state.place_XJ, own, cfg)
    blocks = state.slc.view(2, -1, cfg.sel_block * K)
    gathered = blocks.index_select(1, places_Xn.flatten())
    gathered = gathered.view(2, B, G, -1, K)

    # The own block comes last and is unfinished.
    end = (cfg.sel_count - 1) * cfg.sel_block + t % cfg.sel_block + 1
    return gathered[:, :, :, :end]


def _chosen_places(
    p_XN: Tensor,
    place_XJ: Tensor,
    own: int,
    cfg,
) -> Tensor:
    """Places [X,n] of the blocks that a query of block `own` reads, its own one last.

    There must be at least n blocks. Importance and place rank as one int64, of which the least is
    the best: non-negative floats order like their bits, and the place in the lower half lets the
    lower block win a tie.
    """
    # the blocks that are not forced
    low = cfg.sel_init
    high = own - cfg.sel_local + 1

    importance_XJ = _importance(p_XN, low, high, cfg)
    bits_XJ = importance_XJ.view(torch.int32)
    key_XJ = torch.sub(place_XJ[:, low:high], bits_XJ, alpha=2**32)

    free = cfg.sel_count - cfg.sel_init - cfg.sel_local
    best_XP = key_XJ.topk(free, largest=False, sorted=False).values
    places = [
        place_XJ[:, :low],
        best_XP & 0xFFFFFFFF,
        place_XJ[:, high : own + 1],
    ]
    return torch.cat(places, 1)


def _importance(
    p_XN: Tensor,
    low: int,
    high: int,
    cfg,
) -> Tensor:
    """Importance [X,J] of the selection blocks low..high-1.

    A stride's mass is that of the compressed blocks that cover it, and a selection block's
    importance is the mass of its strides.
    """
    per = cfg.sel_block // cfg.cmp_stride  # strides of a selection block
    spread = cfg.cmp_block // cfg.cmp_stride  # strides of a compressed block

    # Compressed blocks before the first one and after the last one have no mass.
    before = max(0, spread - 1 - low * per)
    after = max(0, high * per - p_XN.shape[1])
    if before or after:
        p_XN = F.pad(p_XN, (before, after))

    strides = (high - low) * per
    start = low * per - (spread - 1) + before
    mass_XU = p_XN[:, start : start + strides]
    for i in range(start + 1, start + spread):
        mass_XU = mass_XU + p_XN[:, i : i + strides]
    return mass_XU.unflatten(1, (-1, per)).sum(-1)


# ---- the same by a clock, at fixed shapes


def decode_by_clock(
    q_B1HK: Tensor,
    gates_B1H3: Tensor,
    state: NSAState,
) -> Tensor:
    """o [B,1,H,K] of the token at the clock's position.

    It reads all places for compressed keys, n blocks, and w window keys, each under a mask.
    """
    B, _, H, K = q_B1HK.shape
    G = state.slc.shape[2]
    q_BGMK = q_B1HK.reshape(B, G, H // G, K)

    o_cmp, p_XMN = _compressed_by_clock(q_BGMK, state)
    kv_slc, visible_slc = _selected_by_clock(p_XMN.sum(1), state)
    kv_win, visible_win = _window_by_clock(state)
    with platform().lengths_vary(q_BGMK):
        o_slc = F.scaled_dot_product_attention(q_BGMK, *kv_slc, attn_mask=visible_slc)
        o_win = F.scaled_dot_product_attention(q_BGMK, *kv_win, attn_mask=visible_win)

    gates_BGM31 = gates_B1H3.reshape(B, G, -1, 3, 1)
    branches = torch.stack((o_cmp, o_slc, o_win), 3)
    o_BGMK = (branches.float() * gates_BGM31).sum(3)
    return o_BGMK.to(q_B1HK.dtype).view(B, 1, H, K)


def _compressed_by_clock(
    q_BGMK: Tensor,
    state: NSAState,
) -> tuple[Tensor, Tensor]:
    """o_BGMK and its fp32 probabilities [X,M,N]; 0 as long as there is no block."""
    k_XNK, v_XNK = state.cmp.flatten(1, 2)
    N = k_XNK.shape[1]
    q_XMK = q_BGMK.flatten(0, 1)

    def missing() -> Tensor:
        index_N = torch.arange(N, device=q_XMK.device)
        last_N = index_N * state.cfg.cmp_stride + state.cfg.cmp_block - 1
        return last_N > state.clock.position

    missing_N = state.clock.shared("missing blocks", missing)
    logits_XMN = _logits(q_XMK, k_XNK).mul_(q_XMK.shape[-1] ** -0.5)
    lowest = torch.finfo(torch.float32).min  # finite: without a block -inf would be NaN
    p_XMN = logits_XMN.masked_fill_(missing_N, lowest).softmax(-1)
    p_XMN = p_XMN.masked_fill_(missing_N, 0.0)
    o_XMK = _products(p_XMN.to(v_XNK.dtype), v_XNK)
    return o_XMK.view_as(q_BGMK), p_XMN


def _selected_by_clock(
    p_XN: Tensor,
    state: NSAState,
) -> tuple[Tensor, Tensor]:
    """(k, v) [2,B,G,n*l',K] of the blocks that the token reads, and which keys [B,G,1,n*l'] are not
    after it.
    """
    cfg = state.cfg
    clock = state.clock
    _, B, G, _, K = state.slc.shape
    J = state.place_XJ.shape[1]

    def rank() -> Tensor:
        """-2^63 for forced blocks, 2^62 for later ones, 0 for those that compete."""
        block_J = torch.arange(J, device=p_XN.device)
        own = clock.position // cfg.sel_block
        forced_J = (block_J < cfg.sel_init) | (block_J > own - cfg.sel_local)
        rank_J = torch.where(forced_J, -(2**63), 0)
        return torch.where(block_J > own, 2**62, rank_J)

    # The least key is the best, as in `_chosen_places`. Only competitors have an importance.
    rank_J = clock.shared("rank", rank)
    settled_J = clock.shared("settled", lambda: rank_J != 0)
    start_XJ = clock.shared("rank and place", lambda: state.place_XJ + rank_J)
    bits_XJ = _importance(p_XN, 0, J, cfg).view(torch.int32)
    bits_XJ = bits_XJ.masked_fill_(settled_J, 0)
    key_XJ = torch.sub(start_XJ, bits_XJ, alpha=2**32)
    best_Xn = key_XJ.topk(cfg.sel_count, largest=False, sorted=False).values
    places_Xn = best_Xn & 0xFFFFFFFF

    blocks = state.slc.view(2, -1, cfg.sel_block * K)
    gathered = blocks.index_select(1, places_Xn.flatten()).view(2, B, G, -1, K)

    def latest() -> Tensor:
        """Where a block may start if its l-th key is not after the token."""
        return clock.position - torch.arange(cfg.sel_block, device=p_XN.device)

    first_Xn = places_Xn % J * cfg.sel_block
    visible_Xnl = first_Xn[..., None] <= clock.shared("latest start", latest)
    return gathered, visible_Xnl.view(B, G, 1, -1)


def _window_by_clock(state: NSAState) -> tuple[Tensor, Tensor]:
    """(k, v) [2,B,G,w,K] of the window and which of its places [1,w] hold a token; attention does
    not depend on their order.
    """
    w = state.cfg.window
    clock = state.clock
    index_w = clock.shared("window", lambda: torch.arange(w, device=clock.position.device))
    if state.win is not None:
        filled = clock.shared("filled", lambda: (index_w <= clock.position)[None])
        return state.win, filled

    token_w = clock.shared("tokens of the window", lambda: clock.position - (w - 1) + index_w)
    filled = clock.shared("filled", lambda: (token_w >= 0)[None])
    near = clock.shared("near", lambda: token_w.clamp(min=0))
    return state.slc.index_select(3, near), filled
