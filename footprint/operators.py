"""Operators whose imitation on fake tensors differs from what the kernel returns, and what it does
return.
"""

from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten


def grouped_mm(a: Tensor, b: Tensor, offs=None, bias=None, out_dtype=None) -> Tensor:
    """A product per group, as torch.nn.functional.grouped_mm has it; PyTorch's imitation knows
    only bfloat16.

    Groups lie in the rows of a [T, K], in the columns of b [K, T], in both, or along the first axis
    of both.
    """
    rows, columns = a.shape[-2], b.shape[-1]
    groups = ()
    if a.dim() == b.dim() == 2:
        groups = (offs.shape[0],)
    elif a.dim() == 3 and b.dim() == 3:
        groups = (a.shape[0],)
    return a.new_empty((*groups, rows, columns), dtype=out_dtype or a.dtype)


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """All gradients are contiguous; the imitation gives the first one the layout of `grad`."""
    like = (x, weight, bias)
    found = []
    for tensor, want in zip(like, wanted, strict=True):
        made = None
        if want and tensor is not None:
            made = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        found.append(made)
    return tuple(found)


CORRECTED: dict[object, Callable] = {
    aten._grouped_mm.default: grouped_mm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
}
