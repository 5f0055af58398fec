"""Fake tensors, which have shapes but no memory, and what an operator returns of them if PyTorch's
imitation differs from the kernel.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache

from footprint.kernels.copies import HALF, LEFT_OVER, RESIZED, left_over, resized
from footprint.kernels.recurrent import BACKWARD, FORWARD, layer, layer_backward

aten = torch.ops.aten
WRITES_PRODUCT = aten.addmm.dtype_out  # torch 2.12 takes it for the one without a dtype
GIVEN_STORAGES = (aten.set_.source_Storage, aten.set_.source_Storage_storage_offset)


def is_fake(value: object) -> bool:
    """Whether it is a fake tensor. Since torch 2.14 those that are made in C++ are not instances of
    FakeTensor.
    """
    known = getattr(fake_tensor, "is_fake_tensor", None)
    return known(value) if known else isinstance(value, fake_tensor.FakeTensor)


class FakeTensors(FakeTensorMode):
    """PyTorch's mode, with a product that it cannot imitate, and with three corrections that let a
    storage be one, and end when it does.

    A copy of a fake tensor belongs to the same mode. copy.deepcopy copies the attributes of a
    tensor, too, and so the mode. For every operator the new one would then make a second storage of
    the copied tensor: the weights of layers that are copies, as nn.TransformerEncoder makes them,
    counted twice.

    A tensor that is set to a real storage, as loaders of weights do, gets one without memory.

    No result is remembered by the storage that an operator was given. PyTorch keeps what operators
    return, by their arguments, and would keep what torch.load has read for as long as it runs.
    """

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        # address of a real storage -> what stands for it, until its last tensor ends
        self.storages: weakref.WeakValueDictionary = weakref.WeakValueDictionary()

    def dispatch(self, func, types, args=(), kwargs=None):
        if func is WRITES_PRODUCT:
            return kwargs["out"]
        if func not in GIVEN_STORAGES:
            return super().dispatch(func, types, args, kwargs)
        tensor, storage, *layout = args
        with disable_fake_tensor_cache(self):
            args = (tensor, self._without_memory(storage), *layout)
            return super().dispatch(func, types, args, kwargs)

    def _without_memory(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if not isinstance(storage, torch.UntypedStorage) or storage.device.type != "cpu":
            return storage
        known = self.storages.get(storage._cdata)
        if known is None or known.nbytes() != storage.nbytes():
            known = torch.UntypedStorage(storage.nbytes(), device="meta")
            self.storages[storage._cdata] = known
        return known

    def __deepcopy__(self, memo: dict) -> "FakeTensors":
        return self


@contextlib.contextmanager
def fake_zeros() -> Iterator[None]:
    """Views of the zeros that forward derivatives begin with are fake inside the `with` block, too.

    PyTorch's own kernels of the two operators, which others do without, come before its modes: they
    would return a view on meta.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in ("view", "as_strided"):
            library.impl(name, torch.library.fallthrough_kernel, "ZeroTensor")
        yield


# ---- operators


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, which adds the bias of a row that is not contiguous in place, but for tensors that
    have a mode into a third one (aten/native/Linear.cpp).
    """
    is_plain = is_fake(input) and bias is not None  # not a DTensor, say
    if not is_plain or input.dim() == 2 or input.is_contiguous():
        return F.linear(input, weight, bias)
    product = torch.matmul(input, weight.t())
    return product.add_(bias.to(product.dtype))


# functions of PyTorch -> what they run on tensors that have no mode
WITHOUT_MODE: dict[Callable, Callable] = {F.linear: linear}


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


def contiguous_backward(grad: Tensor, x: Tensor, *_) -> Tensor:
    """The gradient has the dtype of x and is contiguous; the imitation computes it of all operands,
    and it lies as they do (aten/native/Loss.cpp, GatedLinearUnit.cpp).
    """
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The gradient is contiguous; that of the imitation has the layout of `grad`."""
    return grad.new_empty(grad.shape, dtype=dtype)


def activation_backward(grad: Tensor, *args) -> Tensor:
    """Kernels of one iterator give their result the layout of the first operand, `grad`; imitations
    by several operators that of x, which they compare first (aten/native/Activation.cpp).
    """
    x = next(value for value in args if isinstance(value, Tensor))
    return grad * x


def with_statistics(target: str, func, x: Tensor, *args) -> tuple[Tensor, Tensor, Tensor]:
    """A norm's result, means and deviations. Those of x in half precision are in fp32: on a GPU
    always, on a CPU if the weights are. Their imitations have the dtype of x. On a CPU a batch
    norm's result is laid out by channels or with channels last; that of the imitation as x is.

    aten/native/cpu/mixed_data_type.h, aten/native/cuda/layer_norm_kernel.cu and Normalization.cu.
    """
    result, means, deviations = func(x, *args)
    if target == "cpu" and func is aten.native_batch_norm.default:
        result = torch.empty_like(result, memory_format=suggest_memory_format(x))
    weights = next((value for value in args if isinstance(value, Tensor)), None)
    wide = target == "cuda" or (weights is not None and weights.dtype == torch.float32)
    if x.dtype not in HALF or not wide:
        return result, means, deviations
    found = (torch.empty_like(values, dtype=torch.float32) for values in (means, deviations))
    return result, *found


def norm_backward(func, grad: Tensor, x: Tensor, *args) -> tuple[Tensor | None, ...]:
    """The gradient of x has the dtype of x, and is laid out by channels or with channels last; the
    imitations give it the dtype of the weights, or the layout of `grad`.

    aten/native/group_norm.cpp and Normalization.cpp.
    """
    found, *others = func(grad, x, *args)
    if found is not None:
        found = torch.empty_like(x, memory_format=suggest_memory_format(x))
    return found, *others


def cpu_attention(q: Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    """The CPU's FlashAttention sums in fp64 if its inputs are; torch 2.12's imitation in fp32."""
    attend = aten._scaled_dot_product_flash_attention_for_cpu.default
    o, lse = attend(q, *args, **options)
    is_double = q.dtype == torch.float64
    return o, lse.double() if is_double else lse


def rescaled_projection(qkv: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values in one storage (aten/native/transformers/attention.cpp)."""
    B, T, width = qkv.shape
    K = width // 3 // heads
    made = qkv.new_empty((3, B, heads, T, K))
    return made.unbind()


def svd_on_cuda(x: Tensor, *args, **options) -> tuple[Tensor, Tensor, Tensor]:
    """Right vectors lie by rows, as cuSOLVER has them: the first ones are contiguous, and keep all
    of them. Those of the imitation, which runs on a CPU, lie by columns
    (aten/native/BatchLinearAlgebra.cpp).
    """
    left, values, right = aten._linalg_svd.default(x, *args, **options)
    return left, values, torch.empty_like(right, memory_format=torch.contiguous_format)


def masked_softmax(x: Tensor, *_) -> Tensor:
    return torch.empty_like(x)


NORMS = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
)
ACTIVATIONS = (
    aten.elu_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.logit_backward.default,
    aten.softplus_backward.default,
)
CONTIGUOUS_GRADIENTS = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.glu_backward.default,
)
CORRECTED: dict[object, Callable] = {
    aten._grouped_mm.default: grouped_mm,
    aten._scaled_dot_product_flash_attention_for_cpu.default: cpu_attention,
    aten._masked_softmax.default: masked_softmax,
    aten._transform_bias_rescale_qkv.default: rescaled_projection,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten.native_group_norm_backward.default: functools.partial(
        norm_backward, aten.native_group_norm_backward.default
    ),
    FORWARD: layer,
    BACKWARD: layer_backward,
    **dict.fromkeys(ACTIVATIONS, activation_backward),
    **dict.fromkeys(CONTIGUOUS_GRADIENTS, contiguous_backward),
}


def corrected(func, target: str) -> Callable:
    """What returns on fake tensors what the operator does on the target, "cpu" or "cuda"."""
    if func in NORMS:
        return functools.partial(with_statistics, target, func)
    if target == "cpu" and func is aten.native_batch_norm_backward.default:
        return functools.partial(norm_backward, func)
    if target == "cuda" and func is aten._linalg_svd.default:
        return svd_on_cuda
    if func._schema.name in LEFT_OVER:
        return functools.partial(left_over, func)
    if func._schema.name in RESIZED:
        return functools.partial(resized, func)
    return CORRECTED.get(func, func)
