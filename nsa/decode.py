"""Native Sparse Attention (arXiv 2502.11089), decoding: what a layer keeps between tokens, and one
token's attention.

`cfg` is an NSAConfig, and the compression of keys and values is
handed in. The results are those of nsa_attention over the whole sequence: ranking in fp32, the
lower block on a tie.

Letters: B batch, T tokens, H query heads, G KV heads, M = H/G, K head dim, N compressed blocks, n
blocks that a query reads,
S keys, X = B*G streams. l, s, l', n, w of the paper: cmp_block, cmp_stride, sel_block, sel_count,
window.
"""

import torch
import torch.nn.functional as F

from model import Layout, rotate

# compressed keys are read in multiples of it: a CPU product's first call with a new shape costs 0.3
# ms
SHAPE_STEP = 256


class NSAState:
    """What one layer keeps while decoding; keys and values lie in one tensor.

    `slc`: every token, `cmp`: every compressed block, `win`: a ring of the last w tokens, None with
    kv="shared", where `slc`
    has them; all [2,B,G,S,K]. `tail` [2,B,l,G,K]: a ring of the last l tokens before RoPE."""

    def __init__(self, cfg, batch, max_tokens, kv_heads, head_dim, device=None, dtype=None):
        def cache(*shape):
            return torch.zeros(2, batch, *shape, head_dim, device=device, dtype=dtype)

        self.cfg, self.max_tokens, self.length, self.blocks = cfg, max_tokens, 0, 0
        whole = max(cfg.sel_count, -(-max_tokens // cfg.sel_block))  # decoding reads whole blocks
        self.slc, self.tail = cache(kv_heads, whole * cfg.sel_block), cache(cfg.cmp_block, kv_heads)
        self.cmp = cache(kv_heads, -(-cfg.compressed_blocks(max_tokens) // SHAPE_STEP) * SHAPE_STEP)
        self.win = None if cfg.kv == "shared" else cache(kv_heads, cfg.window)
        self.turns = None  # cos and sin of the centres of the blocks that are not compressed yet
        # where block j of head x = b*G + g lies among all blocks of slc
        self.index_XJ = torch.arange(batch * kv_heads * whole, device=device).view(-1, whole)

    def attend(self, inputs, rope, compressor, core):
        """o [B,T,H,K] of T tokens that follow what the state holds: a whole prompt at once by
        `core`, anything else token by token. `inputs` are those of NativeSparseAttention.
        """
        q, *_, gates = inputs
        self.require(*q.shape[:2])
        if self.length == 0:
            self._take(inputs, rope, compressor)
            q, k, v, _, _, k_win, v_win, gates = inputs
            return core(q, k, v, *self.compressed(), k_win, v_win, gates, self.cfg)

        outputs = []
        for token in zip(*(x.split(1, 1) for x in (*inputs, *rope)), strict=True):
            *one, cos, sin = token
            self._take(one, (cos, sin), compressor)
            outputs.append(nsa_decode(one[0], one[-1], self))
        return torch.cat(outputs, 1)

    def _take(self, inputs, rope, compressor):
        """Append the tokens of `inputs`."""
        _, k, v, raw, v_raw, k_win, v_win, _ = inputs
        window = (k_win, v_win) if self.cfg.kv == "separate" else (None, None)

        def turn(k_cmp, _):
            return rotate(k_cmp, *self.turns[:, :, : k_cmp.shape[1]])

        self.remember(*rope)
        self.append(raw, v_raw, k, v, *window, compressor, turn)

    def append(self, k_raw, v_raw, k_slc, v_slc, k_win, v_win, compressor, rope):
        """Adds T new tokens [B,T,G,K] (a prompt or one token alike); call before attending from
        them.

        k_raw, v_raw: before RoPE, for compressor(k, v, rope, index); k_win and v_win: None with
        kv="shared".
        """
        old, new = self.length, self.length + k_slc.shape[1]
        self.require(len(k_slc), k_slc.shape[1])
        if (k_win is None) != (self.win is None):
            raise ValueError(
                f"NSAState: given k_win={'None' if k_win is None else 'a tensor'} with kv={self.cfg.kv!r}; "
                "allowed: None with 'shared', a tensor with 'separate'; remedy: pass that, or change kv"
            )
        self.slc[:, :, :, old:new] = torch.stack((k_slc, v_slc)).transpose(2, 3)
        if self.win is not None:
            _write_ring(self.win.transpose(2, 3), torch.stack((k_win, v_win)), old)
        raw = torch.stack((k_raw, v_raw))
        if self.cfg.compressed_blocks(new) > self.blocks:
            self._compress(
                torch.cat((self._last(min(old, self.cfg.cmp_block)), raw), 2), new, compressor, rope
            )
        _write_ring(self.tail, raw, old)
        self.length = new

    def remember(self, cos, sin):
        """Keeps cos and sin [1 or B,T,1,K/2] of the new tokens at the centre of a block, whose key
        turns as they do; call before append.
        """
        s, half = self.cfg.cmp_stride, self.cfg.cmp_block // 2
        at = max(0, -(-(self.length - half) // s)) * s + half - self.length
        if self.turns is None or at < cos.shape[1]:
            new = torch.stack((cos[:, at::s], sin[:, at::s])).expand(
                -1, self.slc.shape[1], -1, -1, -1
            )
            self.turns = new if self.turns is None else torch.cat((self.turns, new), 2)

    def compressed(self):
        """(k_cmp, v_cmp) [B,N,G,K]."""
        return self.cmp[:, :, :, : self.blocks].transpose(2, 3)

    def require(self, rows, tokens):
        """ValueError where `tokens` more tokens of `rows` rows do not fit."""
        held, end = self.slc.shape[1], self.length + tokens
        if rows != held:
            raise ValueError(
                f"the KV cache holds {held} rows and {rows} are given: build it with batch_size={rows}"
            )
        if end > self.max_tokens:
            raise ValueError(
                f"the KV cache holds {self.max_tokens} positions and {end} are needed: build it with max_length >= {end}"
            )

    def _last(self, count):
        """The tail's `count` tokens in their order."""
        start = (self.length - count) % self.cfg.cmp_block
        return torch.cat((self.tail[:, :, start:], self.tail[:, :, :start]), 2)[:, :, :count]

    def _compress(self, raw, new, compressor, rope):
        """Emits the compressed blocks that end before position `new`, the last token of raw
        [2,B,S,G,K] being new - 1.
        """
        s, total, device = self.cfg.cmp_stride, self.cfg.compressed_blocks(new), raw.device
        first = self.blocks * s  # the first token of the first new block
        raw = raw[:, :, first - new + raw.shape[2] :]
        count, units = total - self.blocks, total - self.blocks - 1 + self.cfg.cmp_block // s
        centre = torch.arange(count, device=device) * s + (first + self.cfg.cmp_block // 2)
        index = Layout(None, slice(0, units * s), torch.arange(count, device=device), centre)
        self.cmp[:, :, :, self.blocks : total] = torch.stack(
            compressor(*raw, rope, index)
        ).transpose(2, 3)
        self.blocks, self.turns = total, None if self.turns is None else self.turns[:, :, count:]


def _write_ring(ring_2BSGK, x_2BTGK, old):
    """Token t goes to slot t % S; the first of x is token `old`."""
    size, tokens = ring_2BSGK.shape[2], x_2BTGK.shape[2]
    if tokens == 1:  # a copy: 2 us, where an index is 10
        ring_2BSGK[:, :, old % size] = x_2BTGK[:, :, 0]
        return
    kept = min(tokens, size)
    slots = torch.arange(old + tokens - kept, old + tokens, device=x_2BTGK.device) % size
    ring_2BSGK[:, :, slots] = x_2BTGK[:, :, tokens - kept :]


def nsa_decode(q_B1HK, gates_B1H3, state):
    """o [B,1,H,K] of the last token appended to the state: reads N compressed, n*l' selected and w
    window keys.
    """
    (B, _, H, K), G = q_B1HK.shape, state.slc.shape[2]
    q_BGMK = q_B1HK.reshape(B, G, H // G, K)  # the heads of a group are rows of one product
    o_cmp, p_XMN = _attend_compressed(q_BGMK, state)
    o_slc = F.scaled_dot_product_attention(q_BGMK, *_selected(p_XMN, state))
    o_win = F.scaled_dot_product_attention(q_BGMK, *_window(state))
    o_BGM3K = torch.stack((o_cmp, o_slc, o_win), 3).float() * gates_B1H3.reshape(B, G, -1, 3, 1)
    return o_BGM3K.sum(3).to(q_B1HK.dtype).view(B, 1, H, K)


def _window(state):
    """(k, v) [B,G,<=w,K] of the window; a full ring's order does not matter."""
    low = max(0, state.length - state.cfg.window)
    return (
        state.slc[:, :, :, low : state.length]
        if state.win is None
        else state.win[:, :, :, : state.length]
    )


def _attend_compressed(q_BGMK, state):
    """o_BGMK and its fp32 probabilities [X,M,N]; no block yet: zeros."""
    if state.blocks == 0:
        return torch.zeros_like(q_BGMK), None
    k, v = state.cmp[:, :, :, : -(-state.blocks // SHAPE_STEP) * SHAPE_STEP].flatten(1, 2)
    logits_XMN = _logits(q_BGMK.flatten(0, 1), k).mul_(q_BGMK.shape[-1] ** -0.5)
    logits_XMN[..., state.blocks :] = -torch.inf
    p_XMN = logits_XMN.softmax(-1)
    return _products(p_XMN.to(v.dtype), v).view_as(q_BGMK), p_XMN


def _products(a_XMK, b_XKS):
    """a b for each of the X = B*G heads: with few rows a CPU's batched bf16 product is 9x slower
    than a 2-D one.
    """
    return torch.stack([a @ b for a, b in zip(a_XMK, b_XKS)])


def _logits(q_XMK, k_XSK):
    """q k^T in fp32. A CPU bf16 product returns bf16; subtracting that inside a second product
    returns what it lost.
    """
    if q_XMK.is_cuda and q_XMK.dtype != torch.float32:
        return torch.bmm(q_XMK, k_XSK.mT, out_dtype=torch.float32)
    if q_XMK.dtype != torch.bfloat16:
        return _products(q_XMK.float(), k_XSK.float().mT)
    high = _products(q_XMK, k_XSK.mT)
    low = torch.stack([torch.addmm(h, q, k.T, beta=-1) for h, q, k in zip(high, q_XMK, k_XSK)])
    return high.float().add_(low)


def _selected(p_XMN, state):
    """(k, v) [B,G,S,K] of the blocks that the last token reads."""
    cfg, (_, B, G, _, K), t = state.cfg, state.slc.shape, state.length - 1
    if t < cfg.sel_count * cfg.sel_block:
        return state.slc[:, :, :, : t + 1]
    rows_Xn = _best_rows(p_XMN.sum(1), state.index_XJ, t // cfg.sel_block, cfg)
    gathered = (
        state.slc.view(2, -1, cfg.sel_block * K)
        .index_select(1, rows_Xn.flatten())
        .view(2, B, G, -1, K)
    )
    return gathered[:, :, :, : (cfg.sel_count - 1) * cfg.sel_block + t % cfg.sel_block + 1]


def _best_rows(p_XN, index_XJ, own, cfg):
    """The rows of the n blocks that a query of block `own` keeps, n or more being there; its own,
    unfinished, comes last.

    Ranks importance and index as one int64, the least being the best: non-negative floats order
    like their bits, a block's number fills the lower half, and so the lower index wins a tie.
    """
    low, high = cfg.sel_init, own - cfg.sel_local + 1  # the blocks that are not forced
    bits_XJ = _importance(p_XN, low, high, cfg).view(torch.int32)
    key_XJ = torch.sub(index_XJ[:, low:high], bits_XJ, alpha=2**32)
    best_XP = (
        key_XJ.topk(
            cfg.sel_count - cfg.sel_init - cfg.sel_local, largest=False, sorted=False
        ).values
        & 0xFFFFFFFF
    )
    return torch.cat((index_XJ[:, :low], best_XP, index_XJ[:, high : own + 1]), 1)


def _importance(p_XN, low, high, cfg):
    """imp_XJ of blocks low..high-1: the mass of every stride, which its compressed blocks share,
    summed over the block.
    """
    per, spread = cfg.sel_block // cfg.cmp_stride, cfg.cmp_block // cfg.cmp_stride
    before, width = max(0, spread - 1 - low * per), (high - low) * per
    start = low * per - (spread - 1) + before
    after = max(0, high * per - p_XN.shape[1])
    if before or after:
        p_XN = F.pad(p_XN, (before, after))
    mass_XU = p_XN[:, start : start + width]
    for i in range(start + 1, start + spread):
        mass_XU = mass_XU + p_XN[:, i : i + width]
    return mass_XU.unflatten(1, (-1, per)).sum(-1)
