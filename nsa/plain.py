"""Native Sparse Attention in plain PyTorch: masks instead of tiles. Imports torch; `cfg` is an
NSAConfig.

`nsa_attention` has the block-major engine's signature and results; it masks instead of skipping, so
that its time stays quadratic, but queries go by in checkpointed chunks and memory stays linear:
nothing of size [T, T] exists.

Letters: B batch, T tokens, H query heads, G KV heads, M = H/G, K head dim, N compressed blocks, J
selection blocks,
U units of s tokens, C queries of a chunk, S keys. l, s, l', n, w of the paper: cmp_block,
cmp_stride, sel_block,
sel_count, window.
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 2**24  # logits that exist at once: 64 MiB in fp32, of which a few copies live


def nsa_attention(
    q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, cfg, cu_seqlens=None, return_parts=False
):
    """o = g_cmp o_cmp + g_slc o_slc + g_win o_win (arXiv 2502.11089); shapes and results as in
    nsa.engine.nsa_attention.
    """
    tokens, block, parts = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist(), 0, []
    for a, b in zip(
        tokens, tokens[1:]
    ):  # every document by itself: its own positions, blocks and softmax
        n = cfg.compressed_blocks(b - a)
        here, cmp = slice(a, b), slice(block, block + n)
        parts += _document(
            q[:, here],
            k_slc[:, here],
            v_slc[:, here],
            k_cmp[:, cmp],
            v_cmp[:, cmp],
            k_win[:, here],
            v_win[:, here],
            gates[:, here],
            cfg,
        )
        block += n
    whole = dict(
        zip(("o", "o_cmp", "o_slc", "o_win", "block_idx"), (torch.cat(x, 1) for x in zip(*parts)))
    )
    return whole if return_parts else whole["o"]


def _document(q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, cfg):
    T, parts = q.shape[1], []
    size = min(256, max(16, CHUNK_LOGITS // (q.shape[0] * q.shape[2] * T)))
    for x in range(0, T, size):
        y, low = min(x + size, T), max(0, x - cfg.window + 1)
        n = cfg.compressed_blocks(y)
        parts.append(
            checkpoint(
                _chunk,
                q[:, x:y],
                k_slc[:, :y],
                v_slc[:, :y],
                k_cmp[:, :n],
                v_cmp[:, :n],
                k_win[:, low:y],
                v_win[:, low:y],
                gates[:, x:y],
                x,
                low,
                cfg,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return parts


def _chunk(q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, x, low, cfg):
    """(o, o_cmp, o_slc, o_win, block_idx) of queries x, x+1, ...; k_win starts at token `low`."""
    device, B, C, G = q.device, *q.shape[:2], k_slc.shape[2]
    t_C1, u, w = (
        torch.arange(a, b, device=device) for a, b in ((x, x + C), (0, x + C), (low, x + C))
    )
    t_C1 = t_C1[:, None]
    ends = torch.arange(k_cmp.shape[1], device=device) * cfg.cmp_stride + cfg.cmp_block - 1
    o_cmp, p_BGMCN = _attend(q, k_cmp, v_cmp, ends <= t_C1)
    idx_BGCn = select_blocks(p_BGMCN.detach().sum(2), t_C1, cfg)
    J = -(-(x + C) // cfg.sel_block)
    chosen = torch.zeros(B, G, C, J + 1, dtype=torch.bool, device=device)
    chosen = chosen.scatter_(-1, torch.where(idx_BGCn < 0, J, idx_BGCn), True)[..., :J]
    visible = chosen.repeat_interleave(cfg.sel_block, -1)[..., : x + C] & (u <= t_C1)
    o_slc, _ = _attend(q, k_slc, v_slc, visible[:, :, None])
    o_win, _ = _attend(q, k_win, v_win, (w <= t_C1) & (w > t_C1 - cfg.window))
    g = gates.float().unsqueeze(-2)
    o = g[..., 0] * o_cmp + g[..., 1] * o_slc + g[..., 2] * o_win
    return *(y.to(q.dtype) for y in (o, o_cmp, o_slc, o_win)), idx_BGCn.transpose(1, 2).int()


def _attend(q_BCHK, k_BSGK, v_BSGK, visible):
    """fp32 attention over the visible keys and its probabilities [B,G,M,C,S]; a row that sees
    nothing is exactly 0.
    """
    q = q_BCHK.float().unflatten(2, (k_BSGK.shape[2], -1))
    logits = torch.einsum("bcgmk,bsgk->bgmcs", q, k_BSGK.float()) * q.shape[-1] ** -0.5
    lowest = torch.finfo(torch.float32).min  # finite: a row of -inf would be NaN
    p = logits.masked_fill(~visible, lowest).softmax(-1).masked_fill(~visible, 0.0)
    return torch.einsum("bgmcs,bsgk->bcgmk", p, v_BSGK.float()).flatten(2, 3), p


def select_blocks(p_N, t, cfg):
    """Indices [..., n] of the blocks kept for position t, -1 = unused, from the compressed
    probabilities [..., N].

    Rank, importance and index become one int64: forced blocks first, then fp32 importance
    (non-negative floats order like their bits), then the lower index; so ties do not depend on the
    device. Future blocks rank -1.
    """
    per, spread = cfg.sel_block // cfg.cmp_stride, cfg.cmp_block // cfg.cmp_stride
    own = t // cfg.sel_block
    J = max(cfg.sel_count, p_N.shape[-1] // per + 2)
    j = torch.arange(J, device=p_N.device)
    padded = F.pad(p_N, (spread - 1, J * per - p_N.shape[-1]))
    imp = sum(
        padded[..., i::per][..., :J] * min(i + 1, spread, per, per + spread - 1 - i)
        for i in range(per + spread - 1)
    )
    forced = (j < cfg.sel_init) | (j > own - cfg.sel_local)
    key = (imp.float().contiguous().view(torch.int32).long() + (forced.long() << 31) << 31) + (
        J - 1 - j
    )
    best = torch.where(j <= own, key, -1).topk(cfg.sel_count).values
    return torch.where(best < 0, -1, J - 1 - (best & 0x7FFFFFFF))
