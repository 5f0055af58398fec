"""Attention over a part of the keys, and how parts are merged: what ranks that gather keys and
responses that share a prompt are made of.

PyTorch's public attention returns no log-sum-exp. These operators do; it runs on them itself.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from base import machine
from base.machine import (
    check_efficient,
    cudnn_attention,
    cudnn_attention_backward,
    for_each_query_head,
)
from model import wide


def attention_kernel(q_BTHK: Tensor) -> str:
    """The kernel of these queries whatever their number: "cpu", "flash" (FlashAttention-2) or
    "efficient" (PyTorch's memory-efficient one). ValueError for heads on CUDA that have none, as
    those in fp64.
    """
    if q_BTHK.device.type != "cuda":
        return "cpu"
    if machine.takes_flash(q_BTHK):
        return "flash"
    if q_BTHK.dtype == torch.float64:
        raise ValueError(
            "attention in parts has no float64 kernel on CUDA: choose float32, or a CPU"
        )
    check_efficient(q_BTHK)
    return "efficient"


def attention_part(
    kernel: str,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, K], log-sum-exp [B, H, T] in fp32) of the queries over these keys, with memory
    linear in T and S.
    """
    if kernel == "cudnn":
        return cudnn_attention(q_BTHK, k_BSGK, v_BSGK, causal)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    aten = torch.ops.aten
    if kernel == "flash":
        o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
    elif kernel == "efficient":
        k, v = (for_each_query_head(x, q.shape[1]) for x in (k, v))
        o, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=causal
        )
        lse = lse[:, :, : q.shape[2]]  # its length is a multiple of 32
    else:
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
    return o.transpose(1, 2), lse


def merge_parts(
    o_BTHK: Tensor,
    lse_BHT: Tensor,
    other_BTHK: Tensor,
    other_BHT: Tensor,
) -> tuple[Tensor, Tensor]:
    """(o, log-sum-exp) over all keys, from those over two parts of them.

    The outputs are averaged with their shares of the sum of exponentials.
    """
    total_BHT = torch.logaddexp(lse_BHT, other_BHT)
    share_BTH1 = (other_BHT - total_BHT).exp().transpose(1, 2)[..., None]
    dtype = wide(o_BTHK.dtype)
    merged_BTHK = torch.lerp(o_BTHK.to(dtype), other_BTHK.to(dtype), share_BTH1)
    return merged_BTHK.to(o_BTHK.dtype), total_BHT


def attention_part_backward(
    kernel: str,
    grad_BTHK: Tensor,
    q_BTHK: Tensor,
    o_BTHK: Tensor,
    lse_BHT: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from these keys, for queries whose output over all their keys is (o, lse).

    With these two, a probability exp(s - lse) and its gradient are those over all keys, so that the
    parts add up to the gradients.
    """
    if kernel == "cudnn":
        given = grad_BTHK, q_BTHK, k_BSGK, v_BSGK, o_BTHK, lse_BHT
        return cudnn_attention_backward(*given, causal)
    saved = [x.transpose(1, 2) for x in (grad_BTHK, q_BTHK, k_BSGK, v_BSGK, o_BTHK)]
    aten = torch.ops.aten
    options = dict(dropout_p=0.0, is_causal=causal)
    if kernel == "flash":
        grads = aten._scaled_dot_product_flash_attention_backward(
            *saved,
            lse_BHT.contiguous(),
            philox_seed=torch.zeros(2, dtype=torch.uint64, device=q_BTHK.device),
            philox_offset=torch.zeros((), dtype=torch.uint64, device=q_BTHK.device),
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q_BTHK.shape[1],
            max_k=k_BSGK.shape[1],
            **options,
        )
    elif kernel == "efficient":
        grads = _backward_efficient(*saved, lse_BHT, causal)
    else:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *saved, lse_BHT, **options
        )
    return tuple(x.transpose(1, 2) for x in grads)


def _backward_efficient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    H, T = q.shape[1:3]
    G = k.shape[1]
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad,
        q,
        for_each_query_head(k, H),
        for_each_query_head(v, H),
        attn_bias=None,
        out=o,
        logsumexp=F.pad(lse, (0, -T % 32), value=math.inf).contiguous(),
        philox_seed=state,
        philox_offset=state,
        dropout_p=0.0,
        grad_input_mask=[True, True, True, False],
        is_causal=causal,
    )
    dk, dv = (x.unflatten(1, (G, H // G)).sum(dim=2) for x in (dk, dv))
    return dq, dk, dv
