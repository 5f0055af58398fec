"""What an operator of this machine's CPU holds inside, found by running it once.

oneDNN chooses layouts and scratch memory of convolutions and of products in half precision for the
processor, which no declaration can know.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from footprint.measure import peak_bytes

LARGEST = 2**28  # bytes of the inputs of a convolution that is run
MOST_PRODUCTS = 2**31  # multiplications of a product that is run
CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
HALF = (torch.float16, torch.bfloat16)


def is_probed(func, args) -> bool:
    """Whether the operator has to be run to be measured."""
    name = func._schema.name
    return name in CONVOLUTIONS or (name in PRODUCTS and args[-1].dtype in HALF)


def is_small(func, args) -> bool:
    """Whether the operator's inputs are small enough for that."""
    if func._schema.name in PRODUCTS:
        a, b = args[-2:]
        return a.numel() * b.shape[-1] <= MOST_PRODUCTS
    given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return sum(leaf.nbytes for leaf in given) <= LARGEST


def inside_bytes(func, args) -> int:
    """Most bytes that the operator holds beyond what it returns."""
    with unset_fake_temporarily(), torch._C.DisableTorchFunction(), torch.no_grad():
        real = tree_map(_real, tuple(args))
        func(*real)  # oneDNN prepares itself on the first call
        peak = peak_bytes(lambda: func(*real), torch.device("cpu"))
        results = [leaf for leaf in tree_leaves(func(*real)) if isinstance(leaf, Tensor)]
    return peak - sum(result.nbytes for result in results)


def _real(value):
    if not isinstance(value, Tensor):
        return value
    return torch.zeros(value.shape, dtype=value.dtype).as_strided(value.shape, _dense(value))


def _dense(value: Tensor) -> tuple[int, ...]:
    """The strides, if the tensor is dense: else those of a contiguous one."""
    if torch.ops.aten.is_non_overlapping_and_dense(value):
        return value.stride()
    return torch.empty(value.shape, device="meta").stride()
