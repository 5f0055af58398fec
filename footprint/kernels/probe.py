"""What an operator of this machine's CPU holds inside, found by running it once.

oneDNN chooses layouts and scratch memory of convolutions and of products in half precision for the
processor, which no declaration can know.
"""

import contextlib
import gc
import re
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from footprint.kernels.copies import HALF
from footprint.kernels.measure import recorded_peak

LARGEST = 2**28  # bytes of the inputs of a convolution that is run
MOST_PRODUCTS = 2**31  # multiplications of a product that is run
MEASURED = {
    "aten::convolution",
    "aten::convolution_backward",
    "aten::native_batch_norm",
    "aten::native_batch_norm_backward",
    "aten::binary_cross_entropy_with_logits",
    "aten::scatter_reduce",
    "aten::scatter_reduce_",
    "aten::index_reduce",
    "aten::index_reduce_",
    "aten::median",
    "aten::nanmedian",
    "aten::kthvalue",
    "aten::argmax",
    "aten::argmin",
    "aten::count_nonzero",
    "aten::_trilinear",
    "aten::dist",
    "aten::_safe_softmax",
    "aten::floor_divide",
    "aten::ldexp",
}
# Kernels of images that copy a gradient which is not dense, or turn channels to the end.
OF_IMAGES = re.compile(
    "upsample_|(reflection|replication)_pad|_pool[123]d.*_backward|grid_sampler_"
)
# Of rows alone they hold nothing.
TRANSFORMS = ("aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c")
LINEAR_ALGEBRA = re.compile(
    "linalg_(?!vector_norm|cross|check|solve_tri|lu_solve)|matrix_exp|cholesky|geqrf|householder"
)
# Of half precision, sums are made in fp32, and what is gathered is copied.
SCATTERS = (
    "aten::gather",
    "aten::scatter_add",
    "aten::scatter_add_",
    "aten::scatter",
    "aten::scatter_",
)
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation")


def is_probed(func, args) -> bool:
    """Whether the operator has to be run to be measured."""
    name = func._schema.name
    if name == "aten::gelu_backward":
        return not all(value.is_contiguous() for value in args)
    if name in ("aten::abs", "aten::angle"):
        return args[0].is_complex()
    if name in TRANSFORMS:
        x, dims = args[:2]
        return not x.is_contiguous() or list(dims) != [x.dim() - 1]
    if name in MEASURED or LINEAR_ALGEBRA.search(name) or OF_IMAGES.search(name):
        return True
    if name in SCATTERS:
        return args[0].dtype in HALF
    return name in PRODUCTS and (args[-1].dtype in HALF or args[-1].is_complex())


def is_small(func, args) -> bool:
    """Whether the operator's inputs are small enough for that."""
    if func._schema.name in PRODUCTS:
        a, b = args[-2:]
        return a.numel() * b.shape[-1] <= MOST_PRODUCTS
    given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return sum(leaf.nbytes for leaf in given) <= LARGEST


def inside_bytes(func, args) -> int:
    """Most bytes that the operator holds beyond what it returns."""
    if func._overloadname == "out":  # into a tensor that it is given
        func = func.overloadpacket.default
    with unset_fake_temporarily(), torch._C.DisableTorchFunction():
        real = tree_map(_real, tuple(args))
        func(*real)  # oneDNN prepares itself on the first call
        with uncollected():
            peak = recorded_peak(lambda: None, lambda _: func(*real))
        results = [leaf for leaf in tree_leaves(func(*real)) if isinstance(leaf, Tensor)]
        made = {result.data_ptr(): result.untyped_storage().nbytes() for result in results}
        for leaf in tree_leaves(real):  # what is changed in place
            if isinstance(leaf, Tensor):
                made.pop(leaf.data_ptr(), None)
    return peak - sum(made.values())


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Python collects no garbage: that takes longer than the operator, and would be recorded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _real(value):
    if not isinstance(value, Tensor):
        return value
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    memory = torch.zeros(1 + max(last, 0), dtype=value.dtype)
    return memory.as_strided(value.shape, value.stride())
