"""Native Sparse Attention in plain PyTorch: masks instead of tiles. Imports torch; `cfg` is an NSAConfig.

`nsa_attention` has the block-major engine's signature and results; it masks instead of skipping, so that its time stays
quadratic, but queries go by in checkpointed chunks and memory stays linear: nothing of size [T, T] exists.

Letters: B batch, T tokens, H query heads, G KV heads, M = H/G, K head dim, N compressed blocks, J selection blocks,
U units of s tokens, C queries of a chunk, S keys. l, s, l', n, w of the paper: cmp_block, cmp_stride, sel_block,
sel_count, window.
"""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 2 ** 24  # logits that exist at once: 64 MiB in fp32, of which a few copies live


def nsa_attention(q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, cfg, cu_seqlens=None, return_parts=False):
    """o = g_cmp o_cmp + g_slc o_slc + g_win o_win (arXiv 2502.11089); shapes and results as in nsa.engine.nsa_attention."""
    tokens, block, parts = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist(), 0, []
    for a, b in zip(tokens, tokens[1:]):  # every document by itself: its own positions, blocks and softmax
        n = cfg.compressed_blocks(b - a)
        here, cmp = slice(a, b), slice(block, block + n)
        parts += _document(q[:, here], k_slc[:, here], v_slc[:, here], k_cmp[:, cmp], v_cmp[:, cmp],
                           k_win[:, here], v_win[:, here], gates[:, here], cfg)
        block += n
    whole = dict(zip(("o", "o_cmp", "o_slc", "o_win", "block_idx"), (torch.cat(x, 1) for x in zip(*parts))))
    return whole if return_parts else whole["o"]


def _document(q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, cfg):
    T, parts = q.shape[1], []
    size = min(256, max(16, CHUNK_LOGITS // (q.shape[0] * q.shape[2] * T)))
    for x in range(0, T, size):
        y, low = min(x + size, T), max(0, x - cfg.window + 1)
        n = cfg.compressed_blocks(y)
        parts.append(checkpoint(_chunk, q[:, x:y], k_slc[:, :y], v_slc[:, :y], k_cmp[:, :n], v_cmp[:, :n], k_win[:, low:y],
                                v_win[:, low:y], gates[:, x:y], x, low, cfg, use_reentrant=False, preserve_rng_state=False))
    return parts


def _chunk(q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, x, low, cfg):
    """(o, o_cmp, o_slc, o_win, block_idx) of queries x, x+1, ...; k_win starts at token `low`."""
    device, B, C, G = q.device, *q.shape[:2], k_slc.shape[2]
    t_C1, u, w = (torch.arange(a, b, device=device) for a, b in ((x, x + C), (0, x + C), (low, x + C)))
    t_C1 = t_C1[:, None]
    ends = torch.arange(k_cmp.shape[1], device=device) * cfg.cmp_stride + cfg.cmp_block - 1
    o_cmp, p_BGMCN = _attend(q, k_cmp, v_cmp, ends <= t_C1)
    idx_BGCn = select_blocks(p_BGMCN.detach().sum(2), t_C1, cfg)
    J = -(-(x + C) // cfg.sel_block)
    chosen = torch.zeros(B, G, C, J + 1, dtype=torch.bool, device=device)
    chosen = chosen.scatter_(-1, torch.where(idx_BGCn < 0, J, idx_BGCn), True)[..., :J]
    visible = chosen.repeat_interleave(cfg.sel_block, -1)[..., :x + C] & (u <= t_C1)
    o_slc, _ = _attend(q, k_slc, v_slc, visible[:, :, None])
    o_win, _ = _attend(q, k_win, v_win, (w <= t_C1) & (w > t_C1 - cfg.window))
    g = gates.float().unsqueeze(-2)
    o = g[..., 0] * o_cmp + g[..., 1] * o_slc + g[..., 2] * o_win
    return *(y.to(q.dtype) for y in (o, o_cmp, o_slc, o_win)), idx_BGCn.transpose(1, 2).int()


def _attend(q_BCHK, k_BSGK, v_BSGK, visible):
    """fp32 attention over the visible keys and its probabilities [B,G,M,C,S]; a row that sees nothing is exactly 0."""
    q = q_BCHK.float().unflatten(2, (k_BSGK.shape[2], -1))
    logits = torch.einsum("bcgmk,bsgk->bgmcs", q, k_BSGK.float()) * q.shape[-1] ** -0.5
    lowest = torch.finfo(torch.float32).min  # finite: a row of -inf would be NaN
    p = logits.masked_fill(~visible, lowest).softmax(-1).masked_fill(~visible, 0.0)
    return torch.einsum("bgmcs,bsgk->bcgmk", p, v_BSGK.float()).flatten(2, 3), p


def select_blocks(p_N, t, cfg):
    """Indices [..., n] of the blocks kept for position t, -1 = unused, from the compressed probabilities [..., N].

    Rank, importance and index become one int64: forced blocks first, then fp32 importance (non-negative floats order like
    their bits), then the lower index; so ties do not depend on the device. Future blocks rank -1."""
    per, spread = cfg.sel_block // cfg.cmp_stride, cfg.cmp_block // cfg.cmp_stride
    own = t // cfg.sel_block
    J = max(cfg.sel_count, p_N.shape[-1] // per + 2)
    j = torch.arange(J, device=p_N.device)
    padded = F.pad(p_N, (spread - 1, J * per - p_N.shape[-1]))
    imp = sum(padded[..., i::per][..., :J] * min(i + 1, spread, per, per + spread - 1 - i) for i in range(per + spread - 1))
    forced = (j < cfg.sel_init) | (j > own - cfg.sel_local)
    key = (imp.float().contiguous().view(torch.int32).long() + (forced.long() << 31) << 31) + (J - 1 - j)
    best = torch.where(j <= own, key, -1).topk(cfg.sel_count).values
    return torch.where(best < 0, -1, J - 1 - (best & 0x7FFFFFFF))


# ---- decoding -------------------------------------------------------------------------------------------------------
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
        self.max_tokens = max_tokens

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
            rows, first, centre = compression_index(raw.shape[2], self.cfg, device=raw.device)
            shift = self.blocks * self.cfg.cmp_stride
            k_cmp, v_cmp = compressor(raw[0], raw[1], rope, (rows, first, centre + shift))
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
