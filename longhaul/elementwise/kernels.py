"""The Triton kernels of elementwise.py, and their launches.

All are bound by memory: bytes per element, bf16 and K = 128, next to those of PyTorch's operators
(counted: each operator reads its inputs and writes its results):

    rotation          4.1 instead of 48
    norm, rotation    4.1 instead of 52; backward 6.2 instead of 58
    SwiGLU            6 instead of 10; backward 10 instead of 22

The fractions are cos and sin, once per token, at 32 heads.

Letters: R rows of a program (a row is a head of a token), k = K/2, padded to a power of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhaul.elementwise.sizes import ROWS, programs

ELEMENTS = 4096  # of a program of SwiGLU: 32 per thread


def launch(kernel, programs: int, like: Tensor, **arguments) -> None:
    """Runs so many programs of the kernel on the device of `like`."""
    if programs == 0:
        return
    with torch.cuda.device_of(like):  # Triton launches on the current device
        kernel[(programs,)](**arguments, num_warps=4)


# ---- rotation, with or without a norm before it
#
# x, y, ...  [rows, 2 half], contiguous; row r belongs to token r // heads
# cos, sin   [table, half] in fp32; with fewer rows than tokens, all batch rows share them
# rstd       [rows] in fp32


@triton.jit
def angles(cos_ptr, sin_ptr, r_R, k_B, inside_RB, heads, table, half):
    """cos and sin [R, B] of these rows."""
    token_R = (r_R // heads) % table
    at_RB = token_R[:, None] * half + k_B[None, :]
    cos_RB = tl.load(cos_ptr + at_RB, mask=inside_RB, other=0.0)
    sin_RB = tl.load(sin_ptr + at_RB, mask=inside_RB, other=0.0)
    return cos_RB, sin_RB


@triton.jit
def rotate_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    rstd_ptr,
    rows,
    heads,
    table,
    eps,
    half: tl.constexpr,
    NORM: tl.constexpr,
    INVERSE: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """y = rotation of x, or of x * rstd * weight; INVERSE turns back."""
    r_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    k_B = tl.arange(0, B)
    inside_RB = (r_R < rows)[:, None] & (k_B < half)[None, :]
    at_RB = r_R[:, None] * (2 * half) + k_B[None, :]
    x1_RB = tl.load(x_ptr + at_RB, mask=inside_RB, other=0.0).to(tl.float32)
    x2_RB = tl.load(x_ptr + at_RB + half, mask=inside_RB, other=0.0).to(tl.float32)

    if NORM:
        squares_R = tl.sum(x1_RB * x1_RB, 1) + tl.sum(x2_RB * x2_RB, 1)
        rstd_R = 1.0 / tl.sqrt(squares_R / (2 * half) + eps)
        tl.store(rstd_ptr + r_R, rstd_R, mask=r_R < rows)
        w1_B = tl.load(weight_ptr + k_B, mask=k_B < half, other=0.0).to(tl.float32)
        w2_B = tl.load(weight_ptr + k_B + half, mask=k_B < half, other=0.0).to(tl.float32)
        x1_RB = x1_RB * rstd_R[:, None] * w1_B[None, :]
        x2_RB = x2_RB * rstd_R[:, None] * w2_B[None, :]

    cos_RB, sin_RB = angles(cos_ptr, sin_ptr, r_R, k_B, inside_RB, heads, table, half)
    if INVERSE:
        sin_RB = -sin_RB
    y1_RB = x1_RB * cos_RB - x2_RB * sin_RB
    y2_RB = x2_RB * cos_RB + x1_RB * sin_RB
    tl.store(y_ptr + at_RB, y1_RB.to(y_ptr.dtype.element_ty), mask=inside_RB)
    tl.store(y_ptr + at_RB + half, y2_RB.to(y_ptr.dtype.element_ty), mask=inside_RB)


@triton.jit
def norm_rotate_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    rows,
    heads,
    table,
    half: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """With n = x * rstd and g the gradient turned back: dx = rstd (g w - n mean(g w n)), and this
    program's sum of g n for the weight.
    """
    program = tl.program_id(0)
    k_B = tl.arange(0, B)
    w1_B = tl.load(weight_ptr + k_B, mask=k_B < half, other=0.0).to(tl.float32)
    w2_B = tl.load(weight_ptr + k_B + half, mask=k_B < half, other=0.0).to(tl.float32)
    dw1_RB = tl.zeros([R, B], tl.float32)
    dw2_RB = tl.zeros([R, B], tl.float32)

    for start in range(program, tl.cdiv(rows, R), tl.num_programs(0)):
        r_R = (start * R + tl.arange(0, R)).to(tl.int64)
        inside_RB = (r_R < rows)[:, None] & (k_B < half)[None, :]
        at_RB = r_R[:, None] * (2 * half) + k_B[None, :]
        dy1_RB = tl.load(dy_ptr + at_RB, mask=inside_RB, other=0.0).to(tl.float32)
        dy2_RB = tl.load(dy_ptr + at_RB + half, mask=inside_RB, other=0.0).to(tl.float32)
        cos_RB, sin_RB = angles(cos_ptr, sin_ptr, r_R, k_B, inside_RB, heads, table, half)
        g1_RB = dy1_RB * cos_RB + dy2_RB * sin_RB
        g2_RB = dy2_RB * cos_RB - dy1_RB * sin_RB

        rstd_R = tl.load(rstd_ptr + r_R, mask=r_R < rows, other=0.0)
        n1_RB = tl.load(x_ptr + at_RB, mask=inside_RB, other=0.0).to(tl.float32)
        n2_RB = tl.load(x_ptr + at_RB + half, mask=inside_RB, other=0.0).to(tl.float32)
        n1_RB = n1_RB * rstd_R[:, None]
        n2_RB = n2_RB * rstd_R[:, None]
        dw1_RB += g1_RB * n1_RB
        dw2_RB += g2_RB * n2_RB

        g1_RB = g1_RB * w1_B[None, :]
        g2_RB = g2_RB * w2_B[None, :]
        mean_R = (tl.sum(g1_RB * n1_RB, 1) + tl.sum(g2_RB * n2_RB, 1)) / (2 * half)
        dx1_RB = (g1_RB - n1_RB * mean_R[:, None]) * rstd_R[:, None]
        dx2_RB = (g2_RB - n2_RB * mean_R[:, None]) * rstd_R[:, None]
        tl.store(dx_ptr + at_RB, dx1_RB.to(dx_ptr.dtype.element_ty), mask=inside_RB)
        tl.store(dx_ptr + at_RB + half, dx2_RB.to(dx_ptr.dtype.element_ty), mask=inside_RB)

    own_ptr = dw_ptr + program * (2 * half) + k_B
    tl.store(own_ptr, tl.sum(dw1_RB, 0), mask=k_B < half)
    tl.store(own_ptr + half, tl.sum(dw2_RB, 0), mask=k_B < half)


def _shape(x_BTHK: Tensor, cos_BT1k: Tensor) -> dict[str, int]:
    """Sizes that both kernels take."""
    _, _, heads, K = x_BTHK.shape
    half = K // 2
    return dict(
        rows=x_BTHK.numel() // K,
        heads=heads,
        table=cos_BT1k.numel() // half,
        half=half,
        R=ROWS,
        B=triton.next_power_of_2(half),
    )


def rotate(x_BTHK: Tensor, cos_BT1k: Tensor, sin_BT1k: Tensor, y_BTHK: Tensor, inverse: bool):
    """Writes the rotation of x into y, which is contiguous."""
    sizes = _shape(x_BTHK, cos_BT1k)
    launch(
        rotate_kernel,
        triton.cdiv(sizes["rows"], ROWS),
        like=x_BTHK,
        x_ptr=x_BTHK.contiguous(),
        weight_ptr=cos_BT1k,  # neither is read
        cos_ptr=cos_BT1k.contiguous(),
        sin_ptr=sin_BT1k.contiguous(),
        y_ptr=y_BTHK,
        rstd_ptr=cos_BT1k,
        eps=0.0,
        NORM=False,
        INVERSE=inverse,
        **sizes,
    )


def norm_rotate(
    x_BTHK: Tensor,
    weight_K: Tensor,
    cos_BT1k: Tensor,
    sin_BT1k: Tensor,
    eps: float,
    y_BTHK: Tensor,
    rstd_BTH: Tensor,
):
    """Writes the rotation of the normed x into y, and 1 / its root mean square into rstd."""
    sizes = _shape(x_BTHK, cos_BT1k)
    launch(
        rotate_kernel,
        triton.cdiv(sizes["rows"], ROWS),
        like=x_BTHK,
        x_ptr=x_BTHK.contiguous(),
        weight_ptr=weight_K.contiguous(),
        cos_ptr=cos_BT1k.contiguous(),
        sin_ptr=sin_BT1k.contiguous(),
        y_ptr=y_BTHK,
        rstd_ptr=rstd_BTH,
        eps=eps,
        NORM=True,
        INVERSE=False,
        **sizes,
    )


def norm_rotate_backward(
    dy_BTHK: Tensor,
    x_BTHK: Tensor,
    weight_K: Tensor,
    cos_BT1k: Tensor,
    sin_BT1k: Tensor,
    rstd_BTH: Tensor,
    dx_BTHK: Tensor,
    dw_PK: Tensor,
):
    """Writes the gradient of x into dx, and the sums for the weight into dw, one per program."""
    sizes = _shape(x_BTHK, cos_BT1k)
    launch(
        norm_rotate_backward_kernel,
        programs(sizes["rows"]),
        like=x_BTHK,
        dy_ptr=dy_BTHK.contiguous(),
        x_ptr=x_BTHK.contiguous(),
        weight_ptr=weight_K.contiguous(),
        cos_ptr=cos_BT1k.contiguous(),
        sin_ptr=sin_BT1k.contiguous(),
        rstd_ptr=rstd_BTH,
        dx_ptr=dx_BTHK,
        dw_ptr=dw_PK,
        **sizes,
    )


# ---- SwiGLU, over all elements


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, count, B: tl.constexpr):
    """y = silu(gate) * up."""
    i_B = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside_B = i_B < count
    gate_B = tl.load(gate_ptr + i_B, mask=inside_B, other=0.0).to(tl.float32)
    up_B = tl.load(up_ptr + i_B, mask=inside_B, other=0.0).to(tl.float32)
    y_B = gate_B / (1.0 + tl.exp(-gate_B)) * up_B
    tl.store(y_ptr + i_B, y_B.to(y_ptr.dtype.element_ty), mask=inside_B)


@triton.jit
def swiglu_backward_kernel(dy_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, count, B: tl.constexpr):
    """d_up = dy silu(gate) and d_gate = dy up s (1 + gate (1 - s)), with s = sigmoid(gate)."""
    i_B = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside_B = i_B < count
    dy_B = tl.load(dy_ptr + i_B, mask=inside_B, other=0.0).to(tl.float32)
    gate_B = tl.load(gate_ptr + i_B, mask=inside_B, other=0.0).to(tl.float32)
    up_B = tl.load(up_ptr + i_B, mask=inside_B, other=0.0).to(tl.float32)

    s_B = 1.0 / (1.0 + tl.exp(-gate_B))
    d_up_B = dy_B * gate_B * s_B
    d_gate_B = dy_B * up_B * s_B * (1.0 + gate_B * (1.0 - s_B))
    tl.store(d_up_ptr + i_B, d_up_B.to(d_up_ptr.dtype.element_ty), mask=inside_B)
    tl.store(d_gate_ptr + i_B, d_gate_B.to(d_gate_ptr.dtype.element_ty), mask=inside_B)


def swiglu(gate: Tensor, up: Tensor, y: Tensor):
    """Writes silu(gate) * up into y, which is contiguous."""
    launch(
        swiglu_kernel,
        triton.cdiv(gate.numel(), ELEMENTS),
        like=gate,
        gate_ptr=gate.contiguous(),
        up_ptr=up.contiguous(),
        y_ptr=y,
        count=gate.numel(),
        B=ELEMENTS,
    )


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor):
    """Writes the gradients of gate and up."""
    launch(
        swiglu_backward_kernel,
        triton.cdiv(gate.numel(), ELEMENTS),
        like=gate,
        dy_ptr=dy.contiguous(),
        gate_ptr=gate.contiguous(),
        up_ptr=up.contiguous(),
        d_gate_ptr=d_gate,
        d_up_ptr=d_up,
        count=gate.numel(),
        B=ELEMENTS,
    )
