"""The kernel of attention that PyTorch takes on a card, and what it allocates.

scaled_dot_product_attention tries FlashAttention, the memory-efficient kernel, plain products and
cuDNN, in this order or in that of sdpa_kernel(..., set_priority=True), and takes the first one that
the step allows and that can compute the inputs on the card. The rules are those of
aten/native/transformers/cuda/sdp_utils.cpp, sdp_utils_cpp.h and attention.cpp in PyTorch 2.12 to
2.15. Letters: B rows, H query heads, T queries, S keys, K head dimension.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, bias, sdpa_kernel
from torch.nn.attention.bias import CausalBias

from footprint.copies import HALF
from footprint.device import HALF_SINCE, Card
from footprint.patches import Patches, patched

aten = torch.ops.aten
# From 2.14 on, rows may be missing, a head of keys may serve all queries, and the memory-efficient
# kernel takes grouped heads, but no tensors that start in the middle of 16 bytes.
IS_2_14 = torch.__version__ >= (2, 14)
IS_2_15 = torch.__version__ >= (2, 15)
MOST_BLOCKS = 65_535  # rows, or heads, that a kernel of 2.15 is started for
NEWEST = 121  # capability x 10 of the last cards that have kernels
PREFER_CUDNN = (9, 10)  # the first digits of their capability
PRIORITY = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)


class NoKernel(RuntimeError):
    """The card has no kernel for the attention that a step asks for, as PyTorch raises there."""


# ---- what the kernels take


def dtypes(backend: SDPBackend, cc: int) -> tuple[torch.dtype, ...]:
    """What a fused kernel computes on cards of that capability."""
    if HALF_SINCE <= cc <= NEWEST:
        return (*HALF, torch.float32) if backend is SDPBackend.EFFICIENT_ATTENTION else HALF
    if 50 <= cc <= NEWEST and backend is SDPBackend.EFFICIENT_ATTENTION:
        return (torch.float16, torch.float32)
    return ()


def takes_flash(cc: int, given: SDPAParams) -> bool:
    """FlashAttention-2, which pads heads to a multiple of 8."""
    q, k, v = given.query, given.key, given.value
    if given.attn_mask is not None:
        return False
    if not is_dense(given, dtypes(SDPBackend.FLASH_ATTENTION, cc), takes_groups=True):
        return False
    if not q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256:
        return False
    if given.is_causal and q.shape[-2] != k.shape[-2]:
        return False
    if IS_2_15 and max(q.shape[:2]) > MOST_BLOCKS:
        return False
    return not (has_little_memory(cc) and trains(given)) or is_narrow(given)


def has_little_memory(cc: int) -> bool:
    """Cards whose processors hold less than the backward of wide heads needs."""
    return 86 <= cc <= 89 or 120 <= cc <= NEWEST


def is_narrow(given: SDPAParams) -> bool:
    """Whether such cards compute the backward of FlashAttention."""
    K = given.query.shape[-1]
    return K <= 192 or (K > 224 and not given.dropout)


def takes_efficient(cc: int, given: SDPAParams) -> bool:
    """The memory-efficient kernel."""
    q, k, v = given.query, given.key, given.value
    if not is_dense(given, dtypes(SDPBackend.EFFICIENT_ATTENTION, cc), takes_groups=IS_2_14):
        return False
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        return False
    multiple = head_multiple(cc, q.dtype)
    if IS_2_14 and cc >= HALF_SINCE and any(x.storage_offset() % multiple for x in (q, k, v)):
        return False
    widths = q.shape[-1], v.shape[-1]
    return q.shape[-1] == k.shape[-1] and not any(K % multiple for K in widths)


def head_multiple(cc: int, dtype: torch.dtype) -> int:
    """What divides the head dimension of the memory-efficient kernel."""
    if dtype in HALF:
        return 8 if cc >= 70 else 1
    return 4 if cc >= HALF_SINCE else 1


def takes_math(cc: int, given: SDPAParams) -> bool:
    return True


def takes_cudnn(cc: int, given: SDPAParams) -> bool:
    """cuDNN, as far as that depends on no version of it."""
    taken = dtypes(SDPBackend.CUDNN_ATTENTION, cc)
    if not is_dense(given, taken, takes_groups=True, alike=False):
        return False
    if is_deterministic() or not is_plain_mask(given):
        return False
    if given.dropout * 16 % 1 or given.key.shape[-2] == 1:
        return False
    widths = given.query.shape[-1], given.value.shape[-1]
    if any(K % 8 for K in widths):
        return False
    is_large = cc == 90 or cc // 10 == 10
    return max(widths) <= 128 or (is_large and widths in wide_heads())


def wide_heads() -> tuple[tuple[int, int], ...]:
    """Dimensions above 128 of a query's head and of a value's."""
    return ((192, 128), (256, 256)) if IS_2_15 else ((192, 128),)


def is_deterministic() -> bool:
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not only_warns


def is_plain_mask(given: SDPAParams) -> bool:
    """Whether cuDNN takes the mask: 2 or 4 dimensions, each whole or 1, and without a gradient."""
    mask = given.attn_mask
    if mask is None:
        return True
    whole = (*given.query.shape[:-1], given.key.shape[-2])[-mask.dim() :]
    sizes = zip(mask.shape, whole, strict=False)
    are_whole = all(size in (1, full) for size, full in sizes)
    return mask.dim() in (2, 4) and are_whole and not mask.requires_grad


def trains(given: SDPAParams) -> bool:
    inputs = (given.query, given.key, given.value)
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def is_dense(
    given: SDPAParams, taken: tuple[torch.dtype, ...], takes_groups: bool, alike: bool = True
) -> bool:
    """Whether all have four dimensions, the same dtype, as many rows, matching heads and at least
    one token, and lie without gaps inside a head.

    taken: the dtypes; takes_groups: grouped heads; alike: keys have as many of them as values.
    """
    q, k, v = given.query, given.key, given.value
    if not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype:
        return False
    if q.dtype not in taken or not q.shape[0] == k.shape[0] == v.shape[0]:
        return False
    if not q.shape[2] or not k.shape[2] or not heads_match(given, takes_groups, alike):
        return False
    if given.attn_mask is not None and given.attn_mask.stride(-1) != 1:
        return False
    return q.shape[-1] == 1 or all(x.stride(-1) == 1 for x in (q, k, v))


def heads_match(given: SDPAParams, takes_groups: bool, alike: bool) -> bool:
    H, of_keys, of_values = (x.shape[1] for x in (given.query, given.key, given.value))
    if given.enable_gqa and takes_groups:
        divides = not H % of_keys and not H % of_values
        return divides and (of_keys == of_values or not alike)
    serves_all = IS_2_14 and of_keys == of_values == 1
    return H == of_keys == of_values or serves_all


TAKES: dict[SDPBackend, Callable[[int, SDPAParams], bool]] = {
    SDPBackend.FLASH_ATTENTION: takes_flash,
    SDPBackend.EFFICIENT_ATTENTION: takes_efficient,
    SDPBackend.MATH: takes_math,
    SDPBackend.CUDNN_ATTENTION: takes_cudnn,
}


# ---- what the step allows


def allowed() -> list[SDPBackend]:
    """The kernels that the step allows, first choice first."""
    is_allowed = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
    }
    order = torch._C._get_sdp_priority_order()
    return sorted(filter(is_allowed.get, is_allowed), key=lambda one: order.index(int(one)))


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
    heads = given.query.shape[1:2], given.key.shape[1:2]
    found = [written(given.query)]
    found += ["grouped heads"] if heads[0] != heads[1] else []
    found += ["under a mask"] if given.attn_mask is not None else []
    return ", ".join(found)


def may_be_cudnn(card: Card, given: SDPAParams) -> bool:
    """Whether some builds of PyTorch prefer cuDNN here, by its version and that of CUDA, which
    nothing on a machine without a GPU knows.
    """
    backends = allowed()
    is_unordered = backends == [backend for backend in PRIORITY if backend in backends]
    is_preferred = card.cc // 10 in PREFER_CUDNN and SDPBackend.CUDNN_ATTENTION in backends
    return is_unordered and is_preferred and takes_cudnn(card.cc, given)


# ---- what the kernels allocate

# operators -> the kernel that they are
NAMED = {
    "aten::_scaled_dot_product_flash_attention": SDPBackend.FLASH_ATTENTION,
    "aten::_flash_attention_forward": SDPBackend.FLASH_ATTENTION,
    "aten::_scaled_dot_product_efficient_attention": SDPBackend.EFFICIENT_ATTENTION,
    "aten::_efficient_attention_forward": SDPBackend.EFFICIENT_ATTENTION,
    "aten::_scaled_dot_product_cudnn_attention": SDPBackend.CUDNN_ATTENTION,
    "torch_attn::_varlen_attn": SDPBackend.FLASH_ATTENTION,
    "aten::_cudnn_attention_forward": SDPBackend.CUDNN_ATTENTION,
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
        if isinstance(attn_mask, CausalBias):
            with patched({(F, "scaled_dot_product_attention"): self}):
                return CausalBias._dispatch(
                    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
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
        if found is not SDPBackend.CUDNN_ATTENTION and may_be_cudnn(self.card, given):
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

    def patches(self) -> Patches:
        """What PyTorch says to a step that asks for the kernels."""

        def can_use(backend: SDPBackend):
            def answer(given: SDPAParams, debug: bool = False) -> bool:
                return backend in allowed() and TAKES[backend](self.card.cc, given)

            return answer

        found: Patches = {(torch.backends.cuda, "is_flash_attention_available"): lambda: True}
        for name, backend in ASKED.items():
            found |= {(owner, name): can_use(backend) for owner in (torch.backends.cuda, bias)}
        return {place: answer for place, answer in found.items() if hasattr(*place)}


ASKED = {
    "can_use_flash_attention": SDPBackend.FLASH_ATTENTION,
    "can_use_efficient_attention": SDPBackend.EFFICIENT_ATTENTION,
    "can_use_cudnn_attention": SDPBackend.CUDNN_ATTENTION,
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
    inputs = (given.query, given.key, given.value)
    kernel = aten._scaled_dot_product_flash_attention
    if K % 8 == 0:
        return kernel(*inputs, given.dropout, given.is_causal, scale=scale)[0]
    padded = (F.pad(x, (0, 8 - K % 8)) for x in inputs)
    scale = K**-0.5 if scale is None else scale
    return kernel(*padded, given.dropout, given.is_causal, scale=scale)[0][..., :K]


def efficient(given: SDPAParams, scale: float | None) -> Tensor:
    """The memory-efficient kernel under a mask of numbers, whose rows begin at multiples of 8."""
    q, k, v = given.query, given.key, given.value
    mask = numbers(given.attn_mask, q.dtype)
    if mask is not None:
        if any(step % 8 for step in mask.stride()[:-1]):
            S = mask.shape[-1]
            mask = F.pad(mask, (0, 8 - S % 8))[..., :S]
        mask = mask.expand(*q.shape[:3], k.shape[2])
    kernel = aten._scaled_dot_product_efficient_attention
    return kernel(q, k, v, mask, trains(given), given.dropout, given.is_causal, scale=scale)[0]


def cudnn(given: SDPAParams, scale: float | None) -> Tensor:
    q, k, v = given.query, given.key, given.value
    mask = numbers(given.attn_mask, q.dtype)
    kernel = aten._scaled_dot_product_cudnn_attention
    return kernel(q, k, v, mask, trains(given), given.dropout, given.is_causal, scale=scale)[0]


def plain_products(given: SDPAParams, scale: float | None) -> Tensor:
    """_scaled_dot_product_attention_math: half precision is computed in fp32 unless the step has
    allowed otherwise, and the probabilities are kept. Scores take their mask in place, which they
    do not for tensors that have a mode. What a name holds here, PyTorch holds as long.
    """
    q, k, v = (wide(x) for x in (given.query, given.key, given.value))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    root = math.sqrt(abs(factor))
    scaled = q * math.copysign(root, factor)
    mask = numbers(given.attn_mask, given.query.dtype)
    if given.is_causal:
        mask = numbers(q.new_ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(), q.dtype)
    keys, values = k, v
    if given.enable_gqa:
        keys, values = (for_each_query_head(x, q.shape[-3]) for x in (k, v))
    weights = scaled @ (keys.transpose(-2, -1) * root)
    if mask is not None:
        weights.add_(mask)
    weights = torch._safe_softmax(weights, -1)
    if given.dropout:
        weights = torch.native_dropout(weights, given.dropout, True)[0]
    return (weights @ values).to(given.query.dtype)


def wide(x: Tensor) -> Tensor:
    keeps = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    return x if keeps or x.dtype not in HALF else x.float()


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
    SDPBackend.FLASH_ATTENTION: flash,
    SDPBackend.EFFICIENT_ATTENTION: efficient,
    SDPBackend.MATH: plain_products,
    SDPBackend.CUDNN_ATTENTION: cudnn,
}
