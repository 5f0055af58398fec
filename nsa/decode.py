"""Decoding with Native Sparse Attention: what a layer keeps, and the attention of one new token. Imports torch and nsa.compress."""
import torch
import torch.nn.functional as F

from nsa.compress import Layout, row_layout


class NSAState:
    """What one layer keeps while decoding: selected and compressed K/V, the last l tokens before RoPE, the window's ring."""
    def __init__(self, cfg, batch, max_tokens, kv_heads, head_dim, device=None, dtype=None):
        def cache(n):  # heads before tokens: a head's keys are one contiguous matrix
            return torch.zeros(2, batch, kv_heads, n, head_dim, device=device, dtype=dtype)
        whole = max(cfg.sel_count, -(-max_tokens // cfg.sel_block)) * cfg.sel_block  # decoding reads whole blocks
        self.cfg, self.length, self.blocks = cfg, 0, 0
        blocks = -(-cfg.compressed_blocks(max_tokens) // 256) * 256
        self.slc, self.cmp, self.win = cache(whole), cache(blocks), cache(cfg.window)
        self.tail = torch.zeros(2, batch, 0, kv_heads, head_dim, device=device, dtype=dtype)
        self.max_tokens, self.rope = max_tokens, None

    def remember(self, cos, sin):
        """cos and sin of the last l tokens and of the new ones: a block's key turns as the token at its centre does."""
        new = torch.stack((cos, sin))
        self.rope = new if self.rope is None else torch.cat((self.rope[:, :, -self.cfg.cmp_block:], new), 2)
        return self.rope

    def compressed(self):
        """(k_cmp, v_cmp) [B,N,G,K]."""
        return self.cmp[:, :, :, :self.blocks].transpose(2, 3)

    def append(self, k_raw, v_raw, k_slc, v_slc, k_win, v_win, compressor, rope):
        """Adds T new tokens [B,T,G,K] (a prompt or one token alike); call before attending from them."""
        cfg, old, new = self.cfg, self.length, self.length + k_slc.shape[1]
        if new > self.max_tokens:
            raise ValueError(f"NSAState: given {new} tokens; allowed: max_tokens={self.max_tokens}; remedy: a larger state")
        self.slc[:, :, :, old:new] = torch.stack((k_slc, v_slc)).transpose(2, 3)
        last = slice(max(0, new - old - cfg.window), None)
        ring = torch.arange(old, new, device=self.win.device)[last] % cfg.window
        self.win[:, :, :, ring] = torch.stack((k_win, v_win))[:, :, last].transpose(2, 3)
        raw, start = torch.cat((self.tail, torch.stack((k_raw, v_raw))), 2), old - self.tail.shape[2]
        self._compress(raw, start, new, compressor, rope)
        self.tail, self.length = raw[:, :, -cfg.cmp_block:].clone(), new

    def _compress(self, raw, start, new, compressor, rope):
        """Emits the compressed blocks that end before position `new`; raw begins at position `start`."""
        total = self.cfg.compressed_blocks(new)
        if total > self.blocks:
            raw = raw[:, :, self.blocks * self.cfg.cmp_stride - start:]
            rows, first, centre = row_layout(raw.shape[2], self.cfg, raw.device)
            k_cmp, v_cmp = compressor(raw[0], raw[1], rope, Layout(None, rows, first, centre + self.blocks * self.cfg.cmp_stride))
            self.cmp[:, :, :, self.blocks:total] = torch.stack((k_cmp, v_cmp)).transpose(2, 3)
            self.blocks = total


def nsa_decode(q_B1HK, gates_B1H3, state):
    """o [B,1,H,K] of the last token appended to the state: reads N compressed, n*l' selected and w window keys."""
    cfg, t, (B, _, H, K), G = state.cfg, state.length - 1, q_B1HK.shape, state.slc.shape[2]
    q_BGMK = q_B1HK.view(B, G, H // G, K)
    o_cmp, p_BGMN = _attend_compressed(q_BGMK, state)
    o_slc = F.scaled_dot_product_attention(q_BGMK, *_selected_keys(p_BGMN, t, state))  # the heads of a group are its rows
    o_win = F.scaled_dot_product_attention(q_BGMK, *state.win[:, :, :, :min(t + 1, cfg.window)])
    o_BGM3K = torch.stack((o_cmp, o_slc, o_win), 3).float() * gates_B1H3.view(B, G, -1, 3, 1)
    return o_BGM3K.sum(3).to(q_B1HK.dtype).view(B, 1, H, K)


def _attend_compressed(q_BGMK, state):
    """o_BGMK and its fp32 probabilities; no block yet: zeros.

    Key counts are rounded up and the rest hidden: a CPU product's first call with a new shape costs 0.3 ms."""
    if state.blocks == 0:
        return torch.zeros_like(q_BGMK), None
    q, (k, v) = q_BGMK.flatten(0, 1), state.cmp[:, :, :, :-(-state.blocks // 256) * 256].flatten(1, 2)
    logits = torch.stack([_logits(*x) for x in zip(q, k)]).mul_(q.shape[-1] ** -0.5)
    logits[..., state.blocks:] = -torch.inf
    p = logits.softmax(-1)
    o = torch.stack([x.to(q.dtype) @ y for x, y in zip(p, v)])  # 2-D: with few rows a CPU's batched product is 9x slower
    return o.view_as(q_BGMK), p.view(*q_BGMK.shape[:3], -1)


def _logits(a_MK, b_SK):
    """a b^T in fp32. A CPU bf16 product returns bf16; subtracting that inside a second product returns what it lost."""
    if a_MK.is_cuda and a_MK.dtype != torch.float32:
        return torch.mm(a_MK, b_SK.T, out_dtype=torch.float32)
    if a_MK.dtype != torch.bfloat16:
        return a_MK.float() @ b_SK.float().T
    high = a_MK @ b_SK.T
    return high.float().add_(torch.addmm(high, a_MK, b_SK.T, beta=-1))


def _selected_keys(p_BGMN, t, state):
    """(k, v) [B,G,S,K] of the blocks that token t reads."""
    cfg, (_, B, G, T, K) = state.cfg, state.slc.shape
    if t < cfg.sel_count * cfg.sel_block:
        return state.slc[:, :, :, :t + 1]
    best_BGn = _best_blocks(p_BGMN.sum(2), t, cfg)
    base = torch.arange(0, B * G * T // cfg.sel_block, T // cfg.sel_block, device=best_BGn.device)
    rows = (best_BGn.view(B * G, -1) + base[:, None]).flatten()
    gathered = state.slc.view(2, -1, cfg.sel_block * K).index_select(1, rows).view(2, B, G, -1, K)
    return gathered[:, :, :, :(cfg.sel_count - 1) * cfg.sel_block + t % cfg.sel_block + 1]


def _best_blocks(p_BGN, t, cfg):
    """select_blocks for one position with n blocks or more behind it; the own block, which is unfinished, comes last."""
    per, spread, own = cfg.sel_block // cfg.cmp_stride, cfg.cmp_block // cfg.cmp_stride, t // cfg.sel_block
    low, high, device = cfg.sel_init, own - cfg.sel_local + 1, p_BGN.device  # the blocks that are not forced
    padded = F.pad(p_BGN, (spread - 1, max(0, high * per - p_BGN.shape[-1])))[..., low * per:high * per + spread - 1]
    mass = sum(padded[..., i:i + (high - low) * per] for i in range(spread))  # of each stride, in the blocks that cover it
    imp = mass.unflatten(-1, (-1, per)).sum(-1)
    key = (imp.view(torch.int32).long() << 32) + torch.arange(high - low, 0, -1, device=device)  # on a tie: lower index
    best = high - (key.topk(cfg.sel_count - cfg.sel_init - cfg.sel_local).values & 0xFFFFFFFF)
    first, local = torch.arange(low, device=device), torch.arange(high, own + 1, device=device)
    return torch.cat((first.expand(*best.shape[:2], -1), best, local.expand(*best.shape[:2], -1)), -1)


def layer_cache(cfg):
    """What makes a layer's state from (shape [B, max_tokens, G, K], device, dtype)."""
    def make(shape, device, dtype):
        return NSAState(cfg, *shape, device, dtype)
    return make
