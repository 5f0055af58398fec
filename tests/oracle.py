"""The decoder written straight from its equations: dense, obvious, slow, without options. Imports
torch alone.

Truth is these functions on float64 weights; on bfloat16 weights they are the plain low-precision
path whose own error the error rule refers to. One document per call: packed documents are as many
calls. Rotary angles are fp32 by definition, whatever the weights. Letters as in model.py; weights
have the Decoder's names.
"""

import torch


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight"""
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def rotate(x_THK, theta):
    """Turn the pairs (x_k, x_{k+K/2}) of position t by the angle t * theta^(-2k/K)."""
    T, _, K = x_THK.shape
    frequency_k = theta ** -(torch.arange(0, K, 2, dtype=torch.float32) / K)
    angle_T1k = (torch.arange(T, dtype=torch.float32)[:, None] * frequency_k)[:, None, :]
    cos, sin = angle_T1k.cos().to(x_THK.dtype), angle_T1k.sin().to(x_THK.dtype)
    a, b = x_THK[..., : K // 2], x_THK[..., K // 2 :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def attend(q_BTHK, k_BSGK, v_BSGK, visible):
    """(o_BTHK, lse_BHT, p_BHTS) of softmax(q k^T / sqrt(K)) v over the visible keys, a mask that is
    broadcast to [B, H, T, S]; a query that sees nothing gets exactly 0. float64 alone.
    """
    group = q_BTHK.shape[2] // k_BSGK.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k_BSGK, v_BSGK))
    logits_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK, k) / q_BTHK.shape[-1] ** 0.5
    # finite, so that a blind query's softmax has gradients
    logits_BHTS = logits_BHTS.masked_fill(~visible, -1e300)
    p_BHTS = logits_BHTS.softmax(-1) * visible
    return torch.einsum("bhts,bshk->bthk", p_BHTS, v), logits_BHTS.logsumexp(-1), p_BHTS


def causal_attention(q_THK, k_TGK, v_TGK):
    """softmax(q k^T / sqrt(K), over the keys at or before the query) v; query head h reads key head
    h // (H/G).
    """
    T, H, K = q_THK.shape
    queries_per_key = H // k_TGK.shape[1]
    future_TT = torch.ones(T, T, dtype=torch.bool).triu(1)
    heads = []
    for h in range(H):
        k_TK, v_TK = k_TGK[:, h // queries_per_key], v_TGK[:, h // queries_per_key]
        scores_TT = (q_THK[:, h] @ k_TK.T / K**0.5).masked_fill(future_TT, -torch.inf)
        heads.append(scores_TT.softmax(dim=-1) @ v_TK)
    return torch.stack(heads, dim=1)


def decoder_logits(weights, config, tokens_T, attention=causal_attention):
    """Logits [T, V] of one document."""
    assert config.rope_scaling == "none", "the oracle knows plain rotary positions alone"
    T, K = len(tokens_T), config.head_dim
    x_TD = weights["embed.weight"][tokens_T]
    for i in range(config.num_layers):

        def w(name, layer=f"layers.{i}"):
            return weights[f"{layer}.{name}.weight"]

        n_TD = rms_norm(x_TD, w("attention_norm"), config.norm_eps)
        q_THK = (n_TD @ w("attention.q_proj").T).view(T, config.num_heads, K)
        k_TGK = (n_TD @ w("attention.k_proj").T).view(T, config.num_kv_heads, K)
        v_TGK = (n_TD @ w("attention.v_proj").T).view(T, config.num_kv_heads, K)
        q_THK = rotate(rms_norm(q_THK, w("attention.q_norm"), config.norm_eps), config.rope_theta)
        k_TGK = rotate(rms_norm(k_TGK, w("attention.k_norm"), config.norm_eps), config.rope_theta)
        o_THK = attention(q_THK, k_TGK, v_TGK)
        x_TD = x_TD + o_THK.reshape(T, -1) @ w("attention.o_proj").T

        n_TD = rms_norm(x_TD, w("mlp_norm"), config.norm_eps)
        gate_TF, up_TF = n_TD @ w("mlp.gate_proj").T, n_TD @ w("mlp.up_proj").T
        x_TD = x_TD + (gate_TF * gate_TF.sigmoid() * up_TF) @ w("mlp.down_proj").T
    x_TD = rms_norm(x_TD, weights["norm.weight"], config.norm_eps)
    return x_TD @ weights["embed.weight" if config.tie_embeddings else "lm_head.weight"].T


def cross_entropy(logits_NV, labels_N):
    """Mean over the positions with a label (not -100) of log(sum_v exp(z_v)) - z_label."""
    losses = []
    for z_V, label in zip(logits_NV, labels_N.tolist()):
        if label != -100:
            losses.append(z_V.exp().sum().log() - z_V[label])
    return torch.stack(losses).mean()
