"""Native Sparse Attention, dense and in float64, written straight from the equations: the truth
that every faster version is tested against.

One document, nothing chunked, every probability matrix whole: meant for at most a few thousand
tokens. Gradients come from autograd.

Letters: B batch, T tokens, H query heads, G KV heads, M = H/G query heads per KV head, K head dim,
N compressed blocks (block i covers tokens i*s .. i*s+l-1), J selection blocks (block j covers j*l'
.. (j+1)*l'-1).
"""

import torch

from tests.oracle import attend


def attend_double(q_BTHK, k_BSGK, v_BSGK, visible):
    """`attend` in float64."""
    return attend(q_BTHK.double(), k_BSGK.double(), v_BSGK.double(), visible)


def compressed(q_BTHK, k_cmp_BNGK, v_cmp_BNGK, cfg):
    """Equation 3: attention over compressed blocks that ended; returns o_BTHK and p_BHTN."""
    t, i = torch.arange(q_BTHK.shape[1]), torch.arange(k_cmp_BNGK.shape[1])
    visible_TN = i[None, :] * cfg.cmp_stride + cfg.cmp_block - 1 <= t[:, None]
    o_BTHK, _, p_BHTN = attend_double(q_BTHK, k_cmp_BNGK, v_cmp_BNGK, visible_TN)
    return o_BTHK, p_BHTN


def importance(p_BHTN, G, cfg):
    """Equation 4: imp[b, t, g, j] = sum over the group's heads and over i of p * |block i with
    block j| / s.
    """
    B, H, T, N = p_BHTN.shape
    J = -(-T // cfg.sel_block)
    i, j = torch.arange(N)[:, None] * cfg.cmp_stride, torch.arange(J)[None, :] * cfg.sel_block
    overlap_NJ = torch.minimum(i + cfg.cmp_block, j + cfg.sel_block) - torch.maximum(i, j)
    weight_NJ = overlap_NJ.clamp_min(0).double() / cfg.cmp_stride
    return (p_BHTN.detach().unflatten(1, (G, H // G)).sum(2) @ weight_NJ).transpose(1, 2)


def nsa(q_BTHK, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates_BTH3, cfg, chosen_BTGJ):
    """Equations 3 to 7 with the chosen blocks given; returns (o, o_cmp, o_slc, o_win)."""
    T, M = q_BTHK.shape[1], q_BTHK.shape[2] // k_slc.shape[2]
    t, u = torch.arange(T)[:, None], torch.arange(T)[None, :]
    chosen_BGTT = chosen_BTGJ.transpose(1, 2).repeat_interleave(cfg.sel_block, -1)[..., :T]
    o_cmp, _ = compressed(q_BTHK, k_cmp, v_cmp, cfg)
    visible = chosen_BGTT.repeat_interleave(M, 1) & (u <= t)
    o_slc, *_ = attend_double(q_BTHK, k_slc, v_slc, visible)
    o_win, *_ = attend_double(q_BTHK, k_win, v_win, (u <= t) & (u > t - cfg.window))
    g = gates_BTH3.double().unsqueeze(-2)
    return g[..., 0] * o_cmp + g[..., 1] * o_slc + g[..., 2] * o_win, o_cmp, o_slc, o_win


def phi(x_BTGK, w1, w2, pe, cfg):
    """Equation 2 before norm and rotation: mean(x) + W2 silu(W1 flatten(x + pe)) of every block,
    one after another.
    """
    x = x_BTGK.double()
    l = cfg.cmp_block
    blocks = [x[:, i : i + l] for i in range(0, x.shape[1] - l + 1, cfg.cmp_stride)]
    out = []
    for block_BlGK in blocks:
        flat = (
            (block_BlGK + pe.double()[:, None]).transpose(1, 2).flatten(2)
        )  # token-major, then features
        out.append(
            block_BlGK.mean(1) + torch.nn.functional.silu(flat @ w1.double().T) @ w2.double().T
        )
    return torch.stack(out, 1) if out else x[:, :0]
