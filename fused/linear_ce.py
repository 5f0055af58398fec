"""Triton twins of the two elementwise bodies of the tiled linear cross-entropy. Imports torch and
triton only.

Letters: N tokens of a tile, V its vocabulary columns, B columns that a program holds in registers
at once.

Both bodies are bound by memory: at 8192 x 8192 in bf16 the forward must read 128 MiB, the backward
read and write them, and a twin
moves no more than that, with fp32 in registers only. PyTorch eager makes about ten passes, some of
them in fp32. One program owns
one row, so sums have a fixed order: no atomics, results repeat bit for bit. No transposed copy of
the gradient is
written: cuBLAS takes a transposed operand at full speed, so on CUDA that would only cost bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = torch.float32, torch.bfloat16, torch.float16


# ---- where the twins run


def supported(z: Tensor) -> bool:
    """Whether the twins run on tiles of this tensor's device and dtype: a CUDA device of the
    tensor-core bf16 era, or the interpreter.
    """
    on_gpu = (
        z.is_cuda
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(z.device) >= (8, 0)
    )
    return z.dtype in DTYPES and (INTERPRETED or on_gpu)


def require(z: Tensor):
    """ValueError where the twins cannot serve tiles like `z`."""
    if not supported(z):
        raise ValueError(
            f"kernels='triton' was given {z.dtype} on {z.device}; it needs float32, bfloat16 or float16 on a CUDA device of "
            "compute capability >= 8.0 (or TRITON_INTERPRET=1, set before triton is imported, for tests): "
            "move the tensors there, or choose kernels='auto' or 'torch'"
        )


def launch(kernel, z_NV: Tensor, *vectors: Tensor, softcap: float | None) -> None:
    """One program per row; a row's addresses are int64, because N * V passes 2^31 from 262,144
    tokens at V = 8192 on.
    """
    N, V = z_NV.shape
    if V > 1 and z_NV.stride(1) != 1:
        raise ValueError(
            f"the tile has strides {z_NV.stride()}; its columns must be adjacent (stride 1): pass z_NV.contiguous()"
        )
    block = min(max(triton.next_power_of_2(V), 128), 4096)
    warps = min(
        max(block // 512, 1), 8
    )  # 16 elements per thread: two 16-byte loads of bf16 in flight, about 40 registers
    if N:
        with torch.cuda.device_of(
            z_NV
        ):  # triton launches on the current device, which need not be the tile's; no effect on CPU
            kernel[(N,)](
                z_NV,
                *(x_N.contiguous() for x_N in vectors),
                V,
                z_NV.stride(0),
                softcap,
                BLOCK=block,
                num_warps=warps,
            )


# ---- the bodies


@triton.jit
def bounded(x_B, softcap):
    """tanh(x / softcap) through exp, since the interpreter has no tanh; absolute error 2^-23. exp
    may overflow: inf gives exactly 1.
    """
    return 1.0 - 2.0 / (tl.exp(x_B * (2.0 / softcap)) + 1.0)


@triton.jit
def fold_kernel(
    z_ptr,
    target_ptr,
    max_ptr,
    sum_ptr,
    total_ptr,
    new_max_ptr,
    new_sum_ptr,
    new_total_ptr,
    V,
    stride,
    softcap,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    target, top = tl.load(target_ptr + n), tl.load(max_ptr + n)
    mass, total = tl.load(sum_ptr + n), tl.load(total_ptr + n)
    for start in range(0, V, BLOCK):
        v_B = start + tl.arange(0, BLOCK)
        x_B = tl.load(z_ptr + n * stride + v_B, mask=v_B < V, other=0.0).to(
            tl.float32
        )  # exp and sums in fp32
        if softcap is not None:
            x_B = softcap * bounded(x_B, softcap)
        total += tl.sum(x_B, 0)  # columns past V are 0, capped or not
        x_B = tl.where((v_B < V) & (v_B != target), x_B, float("-inf"))
        new_top = tl.maximum(top, tl.max(x_B, 0))
        mass = mass * tl.exp(top - new_top) + tl.sum(tl.exp(x_B - new_top), 0)
        top = new_top
    tl.store(new_max_ptr + n, top)
    tl.store(new_sum_ptr + n, mass)
    tl.store(new_total_ptr + n, total)


@triton.jit
def gradient_kernel(
    z_ptr, target_ptr, lse_ptr, slope_ptr, shift_ptr, V, stride, softcap, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    target, lse = tl.load(target_ptr + n), tl.load(lse_ptr + n)
    slope, shift = tl.load(slope_ptr + n), tl.load(shift_ptr + n)
    # nothing of an ignored token is read, and its 0 * exp(overflow) is no NaN in the weight's
    # gradient
    width = tl.where((slope != 0) | (shift != 0), V, 0)
    for start in range(0, V, BLOCK):
        v_B = start + tl.arange(0, BLOCK)
        x_B = tl.load(z_ptr + n * stride + v_B, mask=v_B < width, other=0.0).to(
            tl.float32
        )  # rounded once, at the store
        if softcap is not None:
            t_B = bounded(x_B, softcap)
            d_B = (slope * tl.exp(softcap * t_B - lse) + shift) * (1.0 - t_B * t_B)
        else:
            d_B = slope * tl.exp(x_B - lse) + shift
        d_B = tl.where((v_B < width) & (v_B != target), d_B, 0.0)
        tl.store(z_ptr + n * stride + v_B, d_B.to(z_ptr.dtype.element_ty), mask=v_B < V)


INTERPRETED = not isinstance(
    fold_kernel, triton.JITFunction
)  # what the decorator made of it, whatever the environment says by now


def fold_logsumexp(
    z_NV: Tensor,
    target_N: Tensor,
    max_N: Tensor,
    sum_N: Tensor,
    total_N: Tensor,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fold a tile into (max, sum exp(z - max)) of all logits but the target's, and into the sum of
    all logits.

    z_NV: fp32, bf16 or fp16, any row stride; target_N: integers relative to the tile's first
    column, outside [0, V) for rows whose
    target lies elsewhere; max, sum, total: fp32 [N], returned as new tensors. The tile is read
    once.
    """
    new = torch.empty_like(max_N), torch.empty_like(max_N), torch.empty_like(max_N)
    launch(fold_kernel, z_NV, target_N, max_N, sum_N, total_N, *new, softcap=softcap)
    return new


def logits_to_gradient(
    z_NV: Tensor,
    target_N: Tensor,
    lse_N: Tensor,
    slope_N: Tensor,
    shift_N: Tensor,
    softcap: float | None,
) -> None:
    """Overwrite z by (slope * exp(z - lse) + shift) * d softcap, and by 0 at the target. Shapes and
    dtypes as in fold_logsumexp.
    """
    launch(gradient_kernel, z_NV, target_N, lse_N, slope_N, shift_N, softcap=softcap)
