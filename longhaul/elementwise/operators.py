"""Fused elementwise operators of a layer for CUDA: rotation, norm with rotation, SwiGLU.

model.py has them as PyTorch operators, each of which reads and writes memory. Here each is one
Triton kernel (elementwise_kernels.py), which reads its inputs once, computes in fp32 and writes its
results once. The operators are known to PyTorch, so that the planner runs them on fake tensors and
a machine without Triton can import this file.

Letters: B rows, T tokens, H heads, K head dimension, P programs of a kernel.
"""

import torch
from torch import Tensor

from longhaul.elementwise.sizes import programs

# ---- (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)


@torch.library.custom_op("longhaul::rotate", mutates_args=())
def _rotate(
    x_BTHK: Tensor,
    cos_BT1k: Tensor,
    sin_BT1k: Tensor,
    inverse: bool,
) -> Tensor:
    from longhaul.elementwise import kernels as elementwise_kernels

    y_BTHK = torch.empty(x_BTHK.shape, device=x_BTHK.device, dtype=x_BTHK.dtype)
    elementwise_kernels.rotate(x_BTHK, cos_BT1k, sin_BT1k, y_BTHK, inverse)
    return y_BTHK


@_rotate.register_fake
def _(
    x_BTHK,
    cos_BT1k,
    sin_BT1k,
    inverse,
):
    return x_BTHK.new_empty(x_BTHK.shape)


def _save_angles(
    ctx,
    inputs,
    output,
):
    _, *angles, ctx.inverse = inputs
    ctx.save_for_backward(*angles)


def _rotate_back(ctx, dy_BTHK):
    return _rotate(dy_BTHK, *ctx.saved_tensors, not ctx.inverse), None, None, None


_rotate.register_autograd(_rotate_back, setup_context=_save_angles)


def rotate(
    x_BTHK: Tensor,
    cos_BT1k: Tensor,
    sin_BT1k: Tensor,
) -> Tensor:
    """The twin of model.rotate: cos and sin [B or 1, T, 1, K/2] in fp32."""
    return _rotate(x_BTHK, cos_BT1k, sin_BT1k, False)


# ---- RMSNorm, then the rotation


@torch.library.custom_op("longhaul::norm_rotate", mutates_args=())
def _norm_rotate(
    x_BTHK: Tensor,
    weight_K: Tensor,
    cos_BT1k: Tensor,
    sin_BT1k: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    from longhaul.elementwise import kernels as elementwise_kernels

    y_BTHK = torch.empty(x_BTHK.shape, device=x_BTHK.device, dtype=x_BTHK.dtype)
    rstd_BTH = torch.empty(x_BTHK.shape[:-1], device=x_BTHK.device, dtype=torch.float32)
    elementwise_kernels.norm_rotate(x_BTHK, weight_K, cos_BT1k, sin_BT1k, eps, y_BTHK, rstd_BTH)
    return y_BTHK, rstd_BTH


@_norm_rotate.register_fake
def _(
    x_BTHK,
    weight_K,
    cos_BT1k,
    sin_BT1k,
    eps,
):
    rstd_BTH = x_BTHK.new_empty(x_BTHK.shape[:-1], dtype=torch.float32)
    return x_BTHK.new_empty(x_BTHK.shape), rstd_BTH


@torch.library.custom_op("longhaul::norm_rotate_backward", mutates_args=())
def _norm_rotate_backward(
    dy_BTHK: Tensor,
    x_BTHK: Tensor,
    weight_K: Tensor,
    cos_BT1k: Tensor,
    sin_BT1k: Tensor,
    rstd_BTH: Tensor,
) -> tuple[Tensor, Tensor]:
    """dx, and for each program its sum of the weight's gradient: no atomics, so results repeat."""
    from longhaul.elementwise import kernels as elementwise_kernels

    dx_BTHK = torch.empty(x_BTHK.shape, device=x_BTHK.device, dtype=x_BTHK.dtype)
    shape = programs(rstd_BTH.numel()), len(weight_K)
    dw_PK = torch.empty(shape, device=x_BTHK.device, dtype=torch.float32)
    elementwise_kernels.norm_rotate_backward(
        dy_BTHK, x_BTHK, weight_K, cos_BT1k, sin_BT1k, rstd_BTH, dx_BTHK, dw_PK
    )
    return dx_BTHK, dw_PK


@_norm_rotate_backward.register_fake
def _(
    dy_BTHK,
    x_BTHK,
    weight_K,
    cos_BT1k,
    sin_BT1k,
    rstd_BTH,
):
    shape = programs(rstd_BTH.numel()), len(weight_K)
    return x_BTHK.new_empty(x_BTHK.shape), x_BTHK.new_empty(shape, dtype=torch.float32)


def _save_norm(
    ctx,
    inputs,
    output,
):
    *tensors, _eps = inputs
    _, rstd_BTH = output
    ctx.save_for_backward(*tensors, rstd_BTH)
    ctx.mark_non_differentiable(rstd_BTH)
    ctx.set_materialize_grads(False)


def _norm_rotate_gradients(
    ctx,
    dy_BTHK,
    _,
):
    saved = ctx.saved_tensors  # a checkpoint allows to read them once
    dx_BTHK, dw_PK = _norm_rotate_backward(dy_BTHK, *saved)
    _, weight_K, *_ = saved
    return dx_BTHK, dw_PK.sum(0).to(weight_K.dtype), None, None, None


_norm_rotate.register_autograd(_norm_rotate_gradients, setup_context=_save_norm)


def norm_rotate(
    x_BTHK: Tensor,
    weight_K: Tensor,
    cos_BT1k: Tensor,
    sin_BT1k: Tensor,
    eps: float,
) -> Tensor:
    """The twin of model.rotate(norm(x)): RMSNorm over K with `weight_K`, then the rotation.

    The normed values stay in fp32 between the two.
    """
    return _norm_rotate(x_BTHK, weight_K, cos_BT1k, sin_BT1k, eps)[0]


# ---- silu(gate) * up


@torch.library.custom_op("longhaul::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from longhaul.elementwise import kernels as elementwise_kernels

    y = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    elementwise_kernels.swiglu(gate, up, y)
    return y


@_swiglu.register_fake
def _(gate, up):
    return gate.new_empty(gate.shape)


@torch.library.custom_op("longhaul::swiglu_backward", mutates_args=())
def _swiglu_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
) -> tuple[Tensor, Tensor]:
    from longhaul.elementwise import kernels as elementwise_kernels

    d_gate = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    d_up = torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)
    elementwise_kernels.swiglu_backward(dy, gate, up, d_gate, d_up)
    return d_gate, d_up


@_swiglu_backward.register_fake
def _(
    dy,
    gate,
    up,
):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _save_inputs(
    ctx,
    inputs,
    output,
):
    ctx.save_for_backward(*inputs)


def _swiglu_gradients(ctx, dy):
    return _swiglu_backward(dy, *ctx.saved_tensors)


_swiglu.register_autograd(_swiglu_gradients, setup_context=_save_inputs)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The twin of model._SwiGLU: silu(gate) * up. Only the two inputs are saved."""
    return _swiglu(gate, up)
