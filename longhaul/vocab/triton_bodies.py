"""Triton twins of the two tile functions of model.py's tiled linear cross-entropy.

model.py cuts the logits [tokens, vocabulary] into tiles and lets only one tile exist at a time. In
the forward, `fold_logsumexp` folds a tile into running sums; in the backward, `logits_to_gradient`
overwrites a tile with its gradient. The functions here have the names, arguments and results of
model.py's.

Both are bound by memory bandwidth. On a tile of 8192 x 8192 in bf16, the forward must read 128 MiB,
and the backward must read and write them. The kernels move no more than that and hold fp32 only in
registers; eager PyTorch makes about ten passes, some of them in fp32. One program owns one token,
so that sums have a fixed order: no atomics, and results repeat bit for bit. The gradient is not
written in transposed form, since cuBLAS reads a transposed operand at full speed.

Letters: N tokens of a tile, V vocabulary columns of a tile, B columns that a program holds in
registers at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS_PER_WARP = 512  # 16 per thread: two 16-byte loads of bf16, about 40 registers


# ---- where the kernels run


def supported(z: Tensor) -> bool:
    """Whether the kernels run on tiles with the device and dtype of `z`.

    They need bf16 tensor cores, which came with compute capability 8.0, or the interpreter.
    """
    if z.dtype not in DTYPES:
        return False
    if INTERPRETED:
        return True
    if not z.is_cuda or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(z.device) >= (8, 0)


def require(z: Tensor) -> None:
    """ValueError if the kernels do not run on tiles with the device and dtype of `z`."""
    if not supported(z):
        raise ValueError(
            f"kernels='triton' was given {z.dtype} on {z.device}; it needs float32, bfloat16 or "
            "float16 on a CUDA device of compute capability >= 8.0 (or TRITON_INTERPRET=1, set "
            "before triton is imported, for tests): move the tensors there, or choose "
            "kernels='auto' or 'torch'"
        )


def launch(kernel, z_NV: Tensor, softcap: float | None, **vectors: Tensor) -> None:
    """Runs one program of `kernel` per token; `vectors` are its pointers to tensors [N].

    Raises ValueError if the columns of the tile are not adjacent in memory.
    """
    N, V = z_NV.shape
    if V > 1 and z_NV.stride(1) != 1:
        raise ValueError(
            f"the tile has strides {z_NV.stride()}; its columns must be adjacent (stride 1): "
            "pass z_NV.contiguous()"
        )
    if N == 0:
        return

    columns = min(max(triton.next_power_of_2(V), 128), 4096)
    warps = min(max(columns // COLUMNS_PER_WARP, 1), 8)
    contiguous = {name: vector_N.contiguous() for name, vector_N in vectors.items()}

    # Triton launches on the current device, which may differ from the tile's; no effect on a CPU.
    with torch.cuda.device_of(z_NV):
        kernel[(N,)](
            z_ptr=z_NV,
            **contiguous,
            V=V,
            stride=z_NV.stride(0),
            softcap=softcap,
            BLOCK=columns,
            num_warps=warps,
        )


# ---- kernels
#
# z_ptr      the tile, [N, V] with `stride` elements from one token to the next
# *_ptr      vectors [N], one number per token
# V, stride  int32 unless large; n is int64, because n * stride passes 2^31 at 262,144 tokens with
#            V = 8192
# softcap    logits become softcap * tanh(logit / softcap); None: they stay as they are
# BLOCK      columns in registers at once [B]


@triton.jit
def tanh_of_ratio(x_B, softcap):
    """tanh(x / softcap) with an absolute error of 2^-23.

    It is written with exp because the interpreter has no tanh. If exp overflows, inf gives exactly
    1.
    """
    return 1.0 - 2.0 / (tl.exp(x_B * (2.0 / softcap)) + 1.0)


@triton.jit
def below(x_B, top):
    """x - top, or 0 where x is larger; NaN stays NaN."""
    return tl.where(x_B > top, 0.0, x_B - top)


@triton.jit
def fold_kernel(
    z_ptr,
    target_ptr,
    max_ptr,
    sum_ptr,
    total_ptr,
    V,
    stride,
    softcap,
    BLOCK: tl.constexpr,
):
    """Folds the logits of one token into (max, sum of exp(logit - max), total)."""
    n = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + n)
    top = tl.load(max_ptr + n)
    mass = tl.load(sum_ptr + n)
    total = tl.load(total_ptr + n)

    for start in range(0, V, BLOCK):
        v_B = start + tl.arange(0, BLOCK)
        x_B = tl.load(z_ptr + n * stride + v_B, mask=v_B < V, other=0.0)
        x_B = x_B.to(tl.float32)  # exp and sums need fp32
        if softcap is not None:
            x_B = softcap * tanh_of_ratio(x_B, softcap)
        total += tl.sum(x_B, 0)  # columns past V are 0, with or without the softcap

        # Masked before exp: exp(-inf) is 0, while masking afterwards would make inf * 0 = NaN.
        x_B = tl.where((v_B < V) & (v_B != target), x_B, float("-inf"))
        new_top = tl.maximum(top, tl.max(x_B, 0))
        mass = mass * tl.exp(top - new_top) + tl.sum(tl.exp(x_B - new_top), 0)
        top = new_top

    tl.store(max_ptr + n, top)
    tl.store(sum_ptr + n, mass)
    tl.store(total_ptr + n, total)


@triton.jit
def gradient_kernel(
    z_ptr,
    target_ptr,
    max_ptr,
    slope_ptr,
    shift_ptr,
    V,
    stride,
    softcap,
    BLOCK: tl.constexpr,
):
    """Overwrites the logits of one token by their gradient."""
    n = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + n)
    top = tl.load(max_ptr + n)
    slope = tl.load(slope_ptr + n)
    shift = tl.load(shift_ptr + n)

    # An ignored token has slope = shift = 0. None of its logits is read: one that is NaN would
    # spoil the gradient of the whole weight.
    width = tl.where((slope != 0) | (shift != 0), V, 0)

    for start in range(0, V, BLOCK):
        v_B = start + tl.arange(0, BLOCK)
        x_B = tl.load(z_ptr + n * stride + v_B, mask=v_B < width, other=0.0)
        x_B = x_B.to(tl.float32)  # the gradient is rounded once, when it is stored
        if softcap is not None:
            t_B = tanh_of_ratio(x_B, softcap)
            below_B = below(softcap * t_B, top)
            d_B = (slope * tl.exp(below_B) + shift) * (1.0 - t_B * t_B)
        else:
            d_B = slope * tl.exp(below(x_B, top)) + shift
        d_B = tl.where((v_B < width) & (v_B != target), d_B, 0.0)
        tl.store(z_ptr + n * stride + v_B, d_B.to(z_ptr.dtype.element_ty), mask=v_B < V)


# The decorator decided when this file was imported, whatever the environment says by now.
INTERPRETED = not isinstance(fold_kernel, triton.JITFunction)


# ---- the twins


def fold_logsumexp(
    z_NV: Tensor,
    target_N: Tensor,
    max_N: Tensor,
    sum_N: Tensor,
    total_N: Tensor,
    softcap: float | None,
) -> None:
    """Folds a tile into the running sums of its tokens, and reads the tile once.

    z_NV      logits, fp32, bf16 or fp16, columns adjacent, any stride between tokens
    target_N  the target's column in this tile, an integer outside [0, V) if it is in another tile
    max_N     fp32, largest logit so far, the target's left out
    sum_N     fp32, sum of exp(logit - max) so far, the target's left out
    total_N   fp32, sum of all logits so far, the target's included

    max_N, sum_N and total_N are overwritten; their elements must be adjacent. Raises ValueError if
    the columns of the tile are not.
    """
    assert max_N.is_contiguous() and sum_N.is_contiguous() and total_N.is_contiguous()
    launch(
        fold_kernel,
        z_NV,
        softcap,
        target_ptr=target_N,
        max_ptr=max_N,
        sum_ptr=sum_N,
        total_ptr=total_N,
    )


def logits_to_gradient(
    z_NV: Tensor,
    target_N: Tensor,
    max_N: Tensor,
    slope_N: Tensor,
    shift_N: Tensor,
    softcap: float | None,
) -> None:
    """Overwrites z by (slope * exp(z - max) + shift) * d softcap / dz, and by 0 at the target.

    z_NV and target_N as in fold_logsumexp; max_N (the largest of all logits), slope_N and shift_N
    are fp32. No logit counts as larger than its `max`. A token with slope = shift = 0 is ignored:
    it gets zeros even if its logits are NaN.
    """
    launch(
        gradient_kernel,
        z_NV,
        softcap,
        target_ptr=target_N,
        max_ptr=max_N,
        slope_ptr=slope_N,
        shift_ptr=shift_N,
    )
