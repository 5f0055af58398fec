"""What kernels copy before they compute, by classes of operators: memory that a tracker of tensors
cannot see. Sizes are bytes.

- Kernels that want dense rows copy what is not (aten/native: SoftMax.cpp, layer_norm.cpp,
  Embedding.cpp and their CUDA files; LinearAlgebra.cpp and cuda/Blas.cpp for products), and so do
  those of images on a CPU, such as PixelShuffle.cpp and AveragePool2d.cpp.
- On a CPU, elementwise operators compute in one dtype: operands of another are copied to it, and so
  is a result (TensorIterator.cpp). On CUDA they convert as they read.
- Sums in another dtype than their input's copy it (ReduceOpsUtils.h); CUDA reads half precision as
  it is.
- Losses with a reduction hold the loss of each element (Loss.cpp).
"""

import functools
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_leaves

HALF = (torch.float16, torch.bfloat16)
# operator -> which of its arguments are copied unless they are contiguous
CONTIGUOUS = {
    "aten::_softmax": (0,),
    "aten::_log_softmax": (0,),
    "aten::_softmax_backward_data": (0, 1),
    "aten::_log_softmax_backward_data": (0, 1),
    "aten::native_layer_norm": (0, 2, 3),
    "aten::native_layer_norm_backward": (0, 1, 5, 6),
    "aten::nll_loss_forward": (0,),
    "aten::nll_loss2d_forward": (0,),
    "aten::log_sigmoid_forward": (0,),
    "aten::multi_margin_loss": (0,),
    "aten::multi_margin_loss_backward": (1,),
    "aten::multilabel_margin_loss_forward": (0,),
    "aten::multilabel_margin_loss_backward": (1,),
    "aten::embedding": (1,),
    "aten::embedding_dense_backward": (0, 1),
    "aten::avg_pool3d": (0,),
    "aten::_cdist_forward": (0, 1),
    "aten::_cdist_backward": (1, 2),
}
# The same of a CPU's kernels of images, which also take channels that lie last.
DENSE_IMAGES = {
    "aten::pixel_shuffle",
    "aten::pixel_unshuffle",
    "aten::channel_shuffle",
    "aten::native_channel_shuffle",
    "aten::avg_pool2d",
    "aten::_adaptive_avg_pool2d",
    "aten::adaptive_max_pool2d",
    "aten::max_pool2d_with_indices",
    "aten::max_pool3d_with_indices",
}
COPIED_FIRST = ("aten::native_layer_norm", "aten::native_layer_norm_backward")  # before any result
PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::_addmm_activation": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::mv": (0,),
    "aten::addmv": (1,),
}
# operator -> which of its arguments it copies
COPIES = {"aten::clone": 0, "aten::_to_copy": 0, "aten::copy_": 1, "aten::masked_fill": 0}
BLOCK = 60  # rows and columns of a block
SUMS = [
    "sum",
    "nansum",
    "prod",
    "cumsum",
    "cumprod",
    "mean",
    "any",
    "all",
    "linalg_vector_norm",
]
# Columns of images, and back: made like what is given, and resized (Im2Col.cpp, Col2Im.cpp).
RESIZED = ("aten::im2col", "aten::col2im")
MASKS = ("condition", "mask")  # arguments of elementwise operators that have no part in the dtype
# losses -> how often they hold the loss of each element, beyond their result
LOSSES = {
    "aten::mse_loss": 1,
    "aten::smooth_l1_loss": 1,
    "aten::huber_loss": 1,
    "aten::soft_margin_loss": 0,
    "aten::binary_cross_entropy": 0,
}
NEGATIVE_LOGS = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")
UNREDUCED, MEAN = 0, 1  # reductions of a loss, as its operator has them
# losses of operands of two dtypes, and their gradients, which are computed in the wider one
OF_TWO_DTYPES = {
    "aten::mse_loss",
    "aten::mse_loss_backward",
    "aten::smooth_l1_loss",
    "aten::smooth_l1_loss_backward",
}
# Their result is what is left of all elements' losses, and keeps that memory.
LEFT_OVER = LOSSES.keys() - {"aten::huber_loss"}


def copied_bytes(target: str, func, args, outputs) -> int:
    """What the operator copies on the target, "cpu" or "cuda"."""
    name = func._schema.name
    if name in NEGATIVE_LOGS and args[3] == UNREDUCED:
        return 0
    if name in CONTIGUOUS:
        return contiguous_bytes(target, name, args, outputs)
    if name in DENSE_IMAGES and target == "cpu":
        return 0 if is_image(args[0]) else args[0].nbytes
    if name == "aten::native_group_norm_backward":
        layout = suggest_memory_format(args[1]) if target == "cpu" else torch.contiguous_format
        turned = [value for value in args[:2] if not value.is_contiguous(memory_format=layout)]
        return sum(value.nbytes for value in turned)
    if name in PRODUCTS:
        given = [args[position] for position in PRODUCTS[name]]
        copied = sum(value.nbytes for value in given if not is_matrix(value))
        is_batch = target == "cpu" and given[0].dim() == 3  # one matrix after another
        return copied // max(1, len(given[0])) if is_batch else copied
    if name in LOSSES:
        return loss_bytes(target, name, args, outputs)
    if target == "cpu" and name in OF_TWO_DTYPES:  # gradients
        given = [value for value in args[:3] if value.dim()]
        common = functools.reduce(torch.promote_types, [value.dtype for value in given])
        return other_bytes([*given, outputs], common)
    if name == "aten::soft_margin_loss_backward":
        return 2 * each_bytes(args[1:])
    if name.removeprefix("aten::") in SUMS:
        if target == "cpu" and name == "aten::sum" and args[0].dtype == outputs.dtype:
            return half_sum_bytes(outputs, *args)
        return sum_bytes(target, name, args[0], outputs)
    if name in RESIZED:
        copied = 0 if args[0].is_contiguous() else args[0].nbytes
        return copied + (args[0].nbytes if outputs.numel() > args[0].numel() else 0)
    if target == "cpu" and name in COPIES:
        source = args[COPIES[name]]
        is_turned = isinstance(outputs, Tensor) and outputs.is_contiguous()
        return turning_bytes(source) if is_turned and source.dtype == outputs.dtype else 0
    if target == "cpu" and torch.Tag.pointwise in func.tags:
        return converted_bytes(func, args, outputs)
    return 0


def contiguous_bytes(target: str, name: str, args, outputs) -> int:
    """Copies of the arguments that are not contiguous."""
    given = [args[position] for position in CONTIGUOUS[name]]
    turned = [value for value in given if value is not None and not value.is_contiguous()]
    copied = sum(value.nbytes for value in turned)

    if target == "cuda":
        # softmax's backward holds grad * output (cuda/SoftMax.cu)
        return copied + (given[0].nbytes if name == "aten::_softmax_backward_data" else 0)

    turning = max(map(turning_bytes, turned), default=0)
    if name in COPIED_FIRST:
        made = [value.nbytes for value in tree_leaves(outputs) if isinstance(value, Tensor)]
        turning = max(0, turning - sum(made))
    return copied + turning


def turning_bytes(value: Tensor) -> int:
    """A CPU copies a transposed matrix in blocks (aten/src/ATen/native/Copy.cpp)."""
    if value.dim() != 2 or value.numel() < BLOCK * BLOCK or value.stride() != (1, len(value)):
        return 0
    return BLOCK * BLOCK * value.element_size()


def is_image(value: Tensor) -> bool:
    """Whether the numbers lie without gaps, by channels or with channels last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
    return value.is_contiguous() or (last is not None and value.is_contiguous(memory_format=last))


def is_matrix(value: Tensor) -> bool:
    """Whether a product takes the matrix as it lies: rows or columns without gaps inside."""
    rows, columns = value.shape[-2:]
    down, across = value.stride()[-2:]
    by_rows = across == 1 and down >= max(1, columns)
    return by_rows or (down == 1 and across >= max(1, rows))


def each_bytes(args) -> int:
    """The loss of each element."""
    given = args[:2]
    dtype = torch.promote_types(*[value.dtype for value in given])
    return torch.broadcast_shapes(*[value.shape for value in given]).numel() * dtype.itemsize


def loss_bytes(target: str, name: str, args, result: Tensor) -> int:
    """What a loss holds beyond its result. A CPU takes means of half precision in fp32, and
    converts operands of another dtype twice if the loss is reduced: for the losses of all elements,
    which no one uses then, and for those that are reduced.
    """
    is_mixed = target == "cpu" and name in OF_TWO_DTYPES
    converted = other_bytes(args[:2], result.dtype) if is_mixed else 0
    if not _reduces(result, args):
        return converted
    each = each_bytes(args)
    reduction = next((value for value in args[2:] if isinstance(value, int)), MEAN)
    is_half = target == "cpu" and result.dtype in HALF
    means = 2 * each if is_half and reduction == MEAN else 0
    return LOSSES[name] * each + means + 2 * converted


def other_bytes(values: Iterable[Tensor], dtype: torch.dtype) -> int:
    """Copies in `dtype` of those that have another one."""
    return sum(value.numel() * dtype.itemsize for value in values if value.dtype != dtype)


def _reduces(result: object, args) -> bool:
    return isinstance(result, Tensor) and result.dim() == 0 and args[0].dim() > 0


def left_over(func, *args) -> Tensor:
    """The result of a loss, which lies in the memory of all elements' losses."""
    result = func(*args)
    if not _reduces(result, args):
        return result
    each = result.new_empty(each_bytes(args) // result.element_size())
    return each.as_strided((), ())


def resized(func, given: Tensor, *args) -> Tensor:
    """A result that keeps the memory of a tensor like `given` if it needs less."""
    result = func(given, *args)
    if result.numel() >= given.numel():
        return result
    return given.new_empty(given.numel()).as_strided(result.shape, result.stride())


def sum_bytes(target: str, name: str, given: Tensor, result: Tensor) -> int:
    wide = result.dtype
    means = 0
    if target == "cpu" and name == "aten::mean" and wide in HALF:
        wide = torch.float32
        means = wide.itemsize * result.numel()
    if target == "cuda" and (given.dtype in HALF or wide == torch.bool):
        return 0
    return means + (given.numel() * wide.itemsize if given.dtype != wide else 0)


def half_sum_bytes(result: Tensor, given: Tensor, dims=None, *_) -> int:
    """Half precision is summed as fp32 on a CPU if the dimensions that are summed do not lie in
    memory as one, such as rows and columns around channels (aten/native/ReduceOps.cpp).
    """
    if given.dtype not in HALF:
        return 0
    dims = dims or range(given.dim())
    steps = sorted((given.stride(dim), given.shape[dim]) for dim in dims if given.shape[dim] > 1)
    are_one = all(step * size == after for (step, size), (after, _) in itertools.pairwise(steps))
    return 0 if are_one else 4 * (given.numel() + result.numel())


def converted_bytes(func, args, outputs) -> int:
    """Operands, and a result, in another dtype than that in which the operator computes."""
    named = zip(func._schema.arguments, args, strict=False)
    given = [leaf for name, value in named if name.name not in MASKS for leaf in tree_leaves(value)]
    given = [leaf for leaf in given if isinstance(leaf, Tensor) and leaf.dim()]
    if not given or not isinstance(outputs, Tensor):
        return 0
    dtypes = [value.dtype for value in given]
    common = functools.reduce(torch.promote_types, dtypes)
    is_new = not func._schema.is_mutable
    if is_new and outputs.dtype != torch.bool:
        common = outputs.dtype
    if any(dtype.is_complex for dtype in dtypes) and not common.is_complex:
        return 0
    converted = [value for value in given if value.dtype != common]
    if not is_new and outputs.dtype != common:
        converted.append(outputs)
    return other_bytes(converted, common)
