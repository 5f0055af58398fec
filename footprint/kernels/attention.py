"""The kernel of attention that PyTorch takes on a card, and what it allocates.

scaled_dot_product_attention tries FlashAttention, the memory-efficient kernel, plain products and
cuDNN, in this order or in that of sdpa_kernel(..., set_priority=True), and takes the first one that
the step allows and that can compute the inputs on the card. The rules are those of
aten/native/transformers/cuda/sdp_utils.cpp, sdp_utils_cpp.h and attention.cpp in PyTorch 2.12 to
2.15. Letters: B rows, H query heads, T queries, S keys, K head dimension.
"""

import contextlib
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel

from footprint.cards.device import HALF_SINCE, Card
from footprint.kernels.copies import HALF
from footprint.python.patches import Patches, patched

aten = torch.ops.aten
FLASH = SDPBackend.FLASH_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
MATH = SDPBackend.MATH
CUDNN = SDPBackend.CUDNN_ATTENTION
# From 2.14 on, rows may be missing, a head of keys may serve all queries, and the memory-efficient
# kernel takes grouped heads, but no tensors that start in the middle of 16 bytes.
IS_2_14 = torch.__version__ >= (2, 14)
IS_2_15 = torch.__version__ >= (2, 15)
MOST_BLOCKS = 65_535  # rows, or heads, that a kernel of 2.15 is started for
# Dimensions above 128 of a query's head and of a value's, for cuDNN on large cards
WIDE_HEADS = ((192, 128), (256, 256)) if IS_2_15 else ((192, 128),)
WIDEST_HEAD = 256  # of FlashAttention
NEWEST = 121  # capability x 10 of the last cards that have kernels
PREFER_CUDNN = (9, 10)  # the first digits of their capability
PRIORITY = [FLASH, EFFICIENT, MATH, CUDNN]


class NoKernel(RuntimeError):
    """The card has no kernel for the attention that a step asks for, as PyTorch raises there."""


# ---- what the kernels take


def dtypes(backend: SDPBackend, cc: int) -> tuple[torch.dtype, ...]:
    """What a fused kernel computes on cards of that capability."""
    if not 50 <= cc <= NEWEST:
        return ()
    if backend is EFFICIENT:
        half = HALF if cc >= HALF_SINCE else (torch.float16,)
        return (*half, torch.float32)
    return HALF if cc >= HALF_SINCE else ()


def takes_flash(cc: int, given: SDPAParams) -> bool:
    """FlashAttention-2, which pads heads to a multiple of 8."""
    q = given.query
    k = given.key
    if given.attn_mask is not None:
        return False
    if not is_dense(given, dtypes(FLASH, cc)) or not heads_match(given):
        return False
    if not q.shape[-1] == k.shape[-1] == given.value.shape[-1] <= WIDEST_HEAD:
        return False
    if given.is_causal and q.shape[-2] != k.shape[-2]:
        return False
    if IS_2_15 and max(q.shape[:2]) > MOST_BLOCKS:
        return False
    has_little_memory = 86 <= cc <= 89 or cc >= 120
    if has_little_memory and trains(given):
        return is_narrow(given)
    return True


def is_narrow(given: SDPAParams) -> bool:
    """Whether processors with little memory compute the backward of FlashAttention."""
    K = given.query.shape[-1]
    return K <= 192 or (K > 224 and not given.dropout)


def takes_efficient(cc: int, given: SDPAParams) -> bool:
    """The memory-efficient kernel, which reads heads in pieces of up to 16 bytes."""
    q = given.query
    if not is_dense(given, dtypes(EFFICIENT, cc)):
        return False
    if not heads_match(given, takes_groups=IS_2_14):
        return False
    if q.shape[-1] != given.key.shape[-1]:
        return False
    inputs = (q, given.key, given.value)
    if any(x.stride(-1) != 1 for x in inputs):
        return False
    multiple = head_multiple(cc, q.dtype)
    if any(x.shape[-1] % multiple for x in inputs):
        return False
    checks_start = IS_2_14 and cc >= HALF_SINCE
    return not checks_start or not any(x.storage_offset() % multiple for x in inputs)


def head_multiple(cc: int, dtype: torch.dtype) -> int:
    """What divides the head dimension of the memory-efficient kernel."""
    if dtype in HALF:
        return 8 if cc >= 70 else 1
    return 4 if cc >= HALF_SINCE else 1


def takes_math(cc: int, given: SDPAParams) -> bool:
    """Plain products compute everything."""
    return True


def takes_cudnn(cc: int, given: SDPAParams) -> bool:
    """cuDNN, as far as that depends on no version of it."""
    if not is_dense(given, dtypes(CUDNN, cc)):
        return False
    if not heads_match(given, alike=False):
        return False
    if is_deterministic() or not is_plain_mask(given):
        return False
    if given.dropout * 16 % 1 or given.key.shape[-2] == 1:
        return False
    widths = (given.query.shape[-1], given.value.shape[-1])
    if widths[0] % 8 or widths[1] % 8:
        return False
    if cc == 90 or cc // 10 == 10:
        return max(widths) <= 128 or widths in WIDE_HEADS
    return max(widths) <= 128


def is_deterministic() -> bool:
    """Whether kernels that do not repeat their bits are forbidden."""
    if torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    return torch.are_deterministic_algorithms_enabled()


def is_plain_mask(given: SDPAParams) -> bool:
    """Whether cuDNN takes the mask: 2 or 4 dimensions, each whole or 1, and without a gradient."""
    mask = given.attn_mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    whole = (*given.query.shape[:-1], given.key.shape[-2])
    sizes = zip(mask.shape, whole[-mask.dim() :], strict=True)
    return all(size in (1, full) for size, full in sizes)


def trains(given: SDPAParams) -> bool:
    """Whether a backward follows."""
    if not torch.is_grad_enabled():
        return False
    inputs = (given.query, given.key, given.value)
    return any(x.requires_grad for x in inputs)


def is_dense(given: SDPAParams, taken: tuple[torch.dtype, ...]) -> bool:
    """Whether all have four dimensions, one of these dtypes, as many rows and at least one token,
    and lie without gaps inside a head.
    """
    inputs = (given.query, given.key, given.value)
    if any(x.dim() != 4 or x.dtype != inputs[0].dtype for x in inputs):
        return False
    if inputs[0].dtype not in taken:
        return False
    if any(not x.shape[2] or len(x) != len(inputs[0]) for x in inputs):
        return False
    mask = given.attn_mask
    if mask is not None and mask.stride(-1) != 1:
        return False
    return inputs[0].shape[-1] == 1 or all(x.stride(-1) == 1 for x in inputs)


def heads_match(
    given: SDPAParams,
    takes_groups: bool = True,
    alike: bool = True,
) -> bool:
    """takes_groups: grouped heads; alike: keys have as many heads as values."""
    H = given.query.shape[1]
    of_keys = given.key.shape[1]
    of_values = given.value.shape[1]
    if alike and of_keys != of_values:
        return False
    if given.enable_gqa and takes_groups:
        return H % of_keys == 0 and H % of_values == 0
    if IS_2_14 and of_keys == of_values == 1:
        return True
    return H == of_keys == of_values


TAKES: dict[SDPBackend, Callable[[int, SDPAParams], bool]] = {
    FLASH: takes_flash,
    EFFICIENT: takes_efficient,
    MATH: takes_math,
    CUDNN: takes_cudnn,
}


# ---- what the step allows


def allowed() -> list[SDPBackend]:
    """The kernels that the step allows, first choice first."""
    order = torch._C._get_sdp_priority_order()
    settings = torch.backends.cuda
    is_allowed = {
        FLASH: settings.flash_sdp_enabled(),
        EFFICIENT: settings.mem_efficient_sdp_enabled(),
        MATH: settings.math_sdp_enabled(),
        CUDNN: settings.cudnn_sdp_enabled(),
    }
    found = [backend for backend, is_on in is_allowed.items() if is_on]
    return sorted(found, key=lambda backend: order.index(int(backend)))


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """What a step inside the `with` block allows for attention ends with the block."""
    order = torch._C._get_sdp_priority_order()
    in_half = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    try:
        with sdpa_kernel(allowed()):
            yield
    finally:
        torch._C._set_sdp_priority_order(order)
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(in_half)


def chosen(card: Card, given: SDPAParams) -> SDPBackend:
    """The kernel that PyTorch takes on the card; NoKernel if there is none."""
    backends = allowed()
    for backend in backends:
        if TAKES[backend](card.cc, given):
            return backend
    names = ", ".join(f"SDPBackend.{backend.name}" for backend in backends) or "none"
    raise NoKernel(
        f"No available kernel: {card.name} (capability {card.cc / 10}) cannot compute this "
        f"attention ({in_words(given)}) by what the step allows ({names}): "
        "allow SDPBackend.MATH, too, which holds all scores"
    )


def written(x: Tensor) -> str:
    """Shape and dtype, as "bfloat16 [1, 32, 2048, 128]"."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def in_words(given: SDPAParams) -> str:
    """What decides about kernels."""
    found = [written(given.query)]
    if given.query.shape[:-2] != given.key.shape[:-2]:
        found.append("grouped heads")
    if given.attn_mask is not None:
        found.append("under a mask")
    return ", ".join(found)


def may_be_cudnn(card: Card, given: SDPAParams) -> bool:
    """Whether some builds of PyTorch prefer cuDNN here, by its version and that of CUDA, which
    nothing on a machine without a GPU knows.
    """
    backends = allowed()
    if backends != [backend for backend in PRIORITY if backend in backends]:
        return False
    if CUDNN not in backends or card.cc // 10 not in PREFER_CUDNN:
        return False
    return takes_cudnn(card.cc, given)


# ---- what the kernels allocate

# operators -> the kernel that they are
NAMED = {
    "aten::_scaled_dot_product_flash_attention": FLASH,
    "aten::_flash_attention_forward": FLASH,
    "aten::_scaled_dot_product_efficient_attention": EFFICIENT,
    "aten::_efficient_attention_forward": EFFICIENT,
    "aten::_scaled_dot_product_cudnn_attention": CUDNN,
    "torch_attn::_varlen_attn": FLASH,
    "aten::_cudnn_attention_forward": CUDNN,
}


class Attention:
    """scaled_dot_product_attention as it runs on a card."""

    def __init__(self, card: Card):
        self.card = card
        self.may_be_cudnn = False  # whether cuDNN may have computed any

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if type(attn_mask).__name__ == "CausalBias":
            return self.under_bias(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                enable_gqa,
            )
        tensors = (autocast(tensor) for tensor in (query, key, value, attn_mask))
        given = SDPAParams(*tensors, dropout_p, is_causal, enable_gqa)
        run = RUNS[self.backend(with_rows(given))]
        if run is plain_products or query.dim() == 4:
            return run(given, scale)
        return run(with_rows(given), scale).squeeze(0)

    def backend(self, given: SDPAParams) -> SDPBackend:
        """The kernel that is taken."""
        found = chosen(self.card, given)
        if found is not CUDNN and may_be_cudnn(self.card, given):
            self.may_be_cudnn = True
        return found

    def check(self, name: str, args: tuple) -> None:
        """NoKernel if the operator of that name does not run in its dtype on the card."""
        backend = NAMED.get(name)
        if backend is None or args[0].dtype in dtypes(backend, self.card.cc):
            return
        raise NoKernel(
            f"{name.replace('::', '.')} has no kernel for {written(args[0])} on "
            f"{self.card.name} (capability {self.card.cc / 10}): call "
            "scaled_dot_product_attention, which takes one that the card has"
        )

    def under_bias(self, *args) -> Tensor:
        """Attention under a mask that PyTorch's own code makes, or leaves to a kernel."""
        kind = type(args[3])
        module = sys.modules[kind.__module__]
        replaced = self.answers(module) | {(F, "scaled_dot_product_attention"): self}
        with patched(replaced):
            return kind._dispatch(*args)

    def answers(self, module: types.ModuleType) -> Patches:
        """What a module of PyTorch says about the kernels."""
        return {
            (module, name): functools.partial(self.can_use, backend)
            for name, backend in ASKED.items()
            if hasattr(module, name)
        }

    def can_use(
        self,
        backend: SDPBackend,
        given: SDPAParams,
        debug: bool = False,
    ) -> bool:
        return backend in allowed() and TAKES[backend](self.card.cc, given)

    def patches(self) -> Patches:
        """What PyTorch says to a step that asks for the kernels."""
        found = self.answers(torch.backends.cuda)
        found[torch.backends.cuda, "is_flash_attention_available"] = lambda: True
        return found


ASKED = {
    "can_use_flash_attention": FLASH,
    "can_use_efficient_attention": EFFICIENT,
    "can_use_cudnn_attention": CUDNN,
}


def autocast(tensor: Tensor | None) -> Tensor | None:
    """The tensor in the precision of autocast, which runs attention in it (autocast_mode.h)."""
    if tensor is None or not torch.is_autocast_enabled("cpu"):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def with_rows(given: SDPAParams) -> SDPAParams:
    """The same with one row if rows are missing, and the kernels of this version take that."""
    inputs = given.query, given.key, given.value
    if not IS_2_14 or any(x.dim() != 3 for x in inputs):
        return given
    mask = given.attn_mask
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    inputs = (x.unsqueeze(0) for x in inputs)
    return SDPAParams(*inputs, mask, given.dropout, given.is_causal, given.enable_gqa)


def flash(given: SDPAParams, scale: float | None) -> Tensor:
    """FlashAttention, on heads that are padded to a multiple of 8."""
    K = given.query.shape[-1]
    inputs = [given.query, given.key, given.value]
    options = (given.dropout, given.is_causal)
    kernel = aten._scaled_dot_product_flash_attention
    if K % 8 == 0:
        return kernel(*inputs, *options, scale=scale)[0]
    if scale is None:
        scale = K**-0.5
    padded = [F.pad(x, (0, 8 - K % 8)) for x in inputs]
    out = kernel(*padded, *options, scale=scale)[0]
    return out[..., :K]


def efficient(given: SDPAParams, scale: float | None) -> Tensor:
    """The memory-efficient kernel under a mask of numbers, whose rows begin at multiples of 8."""
    q = given.query
    S = given.key.shape[2]
    mask = numbers(given.attn_mask, q.dtype)
    if mask is not None:
        mask = aligned(mask).expand(*q.shape[:3], S)
    return with_mask(aten._scaled_dot_product_efficient_attention, given, mask, scale)


def aligned(mask: Tensor) -> Tensor:
    """The mask, or a copy in wider rows."""
    if not any(step % 8 for step in mask.stride()[:-1]):
        return mask
    S = mask.shape[-1]
    return F.pad(mask, (0, 8 - S % 8))[..., :S]


def cudnn(given: SDPAParams, scale: float | None) -> Tensor:
    mask = numbers(given.attn_mask, given.query.dtype)
    return with_mask(aten._scaled_dot_product_cudnn_attention, given, mask, scale)


def with_mask(
    kernel: Callable,
    given: SDPAParams,
    mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """The result of a kernel that keeps a sum per query if a backward follows."""
    results = kernel(
        given.query,
        given.key,
        given.value,
        mask,
        trains(given),
        given.dropout,
        given.is_causal,
        scale=scale,
    )
    return results[0]


def plain_products(given: SDPAParams, scale: float | None) -> Tensor:
    """_scaled_dot_product_attention_math: half precision is computed in fp32 unless the step has
    allowed otherwise, and the probabilities are kept. Scores take their mask in place, which they
    do not for tensors that have a mode. What a name holds here, PyTorch holds as long.
    """
    q = wide(given.query)
    k = wide(given.key)
    v = wide(given.value)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    root = math.sqrt(abs(factor))
    scaled = q * math.copysign(root, factor)
    mask = numbers(given.attn_mask, given.query.dtype)
    if given.is_causal:
        mask = numbers(q.new_ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(), q.dtype)

    keys = k
    values = v
    if given.enable_gqa:
        keys = for_each_query_head(k, q.shape[-3])
        values = for_each_query_head(v, q.shape[-3])
    weights = scaled @ (keys.transpose(-2, -1) * root)
    if mask is not None:
        weights.add_(mask)
    weights = torch._safe_softmax(weights, -1)
    if given.dropout:
        weights = torch.native_dropout(weights, given.dropout, True)[0]
    return (weights @ values).to(given.query.dtype)


def wide(x: Tensor) -> Tensor:
    """In fp32, unless the step allows half precision."""
    if torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        return x
    return x.float() if x.dtype in HALF else x


def for_each_query_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values once for each query head of their group."""
    repeats = heads // x.shape[-3]
    return x if repeats == 1 else x.repeat_interleave(repeats, -3)


def numbers(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask of booleans becomes numbers (aten/native/transformers/attention.cpp)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    found = torch.zeros_like(mask, dtype=dtype)
    return found.masked_fill_(mask.logical_not(), float("-inf"))


RUNS: dict[SDPBackend, Callable[[SDPAParams, float | None], Tensor]] = {
    FLASH: flash,
    EFFICIENT: efficient,
    MATH: plain_products,
    CUDNN: cudnn,
}
