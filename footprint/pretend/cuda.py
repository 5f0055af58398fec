"""How a step differs on CUDA from the same step on a CPU, on which fake tensors lie.

Each rule names its source in PyTorch. What no rule covers is listed by `not_modelled`, by the
operators that the step has run.
"""

import functools
import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from footprint.kernels.attention import EFFICIENT, FLASH, Attention, SDPAParams
from footprint.kernels.probe import LINEAR_ALGEBRA
from footprint.pretend.fast_path import FastPath, Ragged
from footprint.pretend.places import StepTracker
from footprint.pretend.values import KnownValues
from footprint.python.patches import patched
from footprint.record.trace import Trace

aten = torch.ops.aten

# pattern in "operator dtype" of a result -> what the prediction leaves out if the step makes it
NOT_MODELLED = {
    "convolution": "workspaces of cuDNN's convolutions, which it chooses by their time",
    "batch_norm": "what cuDNN's batch norm reserves for the backward",
    "_grouped_mm": "workspaces of grouped products",
    "topk": "scratch memory of top-k",
    "_fft_": "workspaces of cuFFT, and copies of what it transforms",
    "index_put": "scratch memory of index_put, which sorts indices",
    "masked_scatter_backward": "scratch memory of masked_scatter's backward, which selects",
    "attention_for_cpu": "attention in torch.jit.script, whose kernel on a GPU is not known",
    "_efficient_attention": "scratch memory of the memory-efficient attention's backward",
}
# the same on any device
ANYWHERE = {
    LINEAR_ALGEBRA.pattern: "scratch memory of linear algebra, such as decompositions",
    "_embedding_bag": "scratch memory of bags of embeddings by their largest elements",
    "kthvalue": "scratch memory of kthvalue and of quantiles",
}
# the same on a CPU, under a dispatch mode
BY_VALUES = "backward formulas that depend on values, such as whether an element is zero"
ON_A_CPU = {
    r"\.(cum)?prod\.|\.sgn\.|\.(max|min)\.default|median\.default": BY_VALUES,
    r"\.(atan2|xlogy)\.|\.pow\.Tensor_Tensor|\.clamp\.Tensor": "backward formulas of two tensors",
    "searchsorted": "copies of what searchsorted is given",
    r"attention_for_cpu\S* (b?float16)": "keys and values that attention packs for the processor",
    r"\.is(inf|nan)\.": "comparisons with infinity",
}
CUDNN = "attention by cuDNN, which PyTorch prefers on some GPUs (9.0, 10.0)"
AUTOCAST = "operators that autocast runs in another precision on CUDA than on a CPU"
RECURRENT = "recurrent layers, which cuDNN runs in one kernel: taken as a CPU runs them"
# what the first line of a report says of what is left out, if it may be a large part of the step
IN_HEADING = {RECURRENT: "recurrent layers not as cuDNN runs them"}
RANKS = "parameters that FSDP2 gathers ahead, and buckets that NCCL holds, on streams of their own"


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """One kernel that keeps a mask of booleans (aten/native/Dropout.cpp); a CPU keeps numbers."""
    if not training or inplace or not 0 < p < 1:
        return aten.dropout(x, p, training)
    return torch.native_dropout(x, p, True)[0]


def rms_norm(
    x: Tensor, normalized_shape, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """One kernel that keeps a number per vector (aten/native/layer_norm.cpp)."""
    return FusedRMSNorm.apply(x, weight)


class FusedRMSNorm(torch.autograd.Function):
    """What the fused kernel allocates: the result, one fp32 number per vector that it keeps with x,
    and in the backward the gradients.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None) -> Tensor:
        scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        grad = grad.contiguous()  # copied unless it is, for as long as the kernel runs
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def multi_head_attention(attention: Attention, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
    """The function behind nn.MultiheadAttention, with the attention and the dropout of CUDA. It is
    written in Python, inside which PyTorch has modes for functions off.
    """
    with patched({(F, "scaled_dot_product_attention"): attention, (F, "dropout"): dropout}):
        return MULTI_HEAD(*args, **kwargs)


class FastPathOfCuda(FastPath):
    """The same on CUDA, where attention to itself takes a kernel that keeps no scores, unless the
    card has none for it, it needs the scores, or heads are no multiple of 8 wide.
    """

    rounds_to = 8

    def __init__(self, known: KnownValues, sdpa: Attention):
        super().__init__(known)
        self.sdpa = sdpa

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        width: int,
        heads: int,
        qkv: Tensor,
        bias: Tensor,
        out: Tensor,
        out_bias: Tensor,
        mask: Tensor | None = None,
        needs_weights: bool = True,
        *args,
    ) -> tuple[Tensor, Tensor | None]:
        is_one = query is key and key is value
        keeps_none = mask is None and not needs_weights
        is_aligned = width // heads % 8 == 0
        is_long = min(self.lengths, default=2) > 1
        may_keep_none = is_one and keeps_none and is_aligned and is_long
        if not (may_keep_none and self._has_kernel(query, heads)):
            given = query, key, value
            weights = qkv, bias, out, out_bias
            return super().attention(*given, width, heads, *weights, mask, needs_weights, *args)

        projected = F.linear(query, qkv, bias)
        parts = []
        for part in projected.chunk(3, -1):
            by_head = part.unflatten(-1, (heads, -1))
            parts.append(by_head.transpose(1, 2))
        attended = self.sdpa(*parts).transpose(1, 2)
        return F.linear(attended.flatten(2), out, out_bias), None

    def _has_kernel(self, x_BTD: Tensor, heads: int) -> bool:
        """Whether the card's kernel for these rows is one that the fast path uses."""
        x_BHTK = x_BTD.unflatten(-1, (heads, -1)).transpose(1, 2)
        given = SDPAParams(x_BHTK, x_BHTK, x_BHTK, None, 0.0, False, False)
        return self.sdpa.backend(given) in (FLASH, EFFICIENT)

    def _softmax(self, scores: Tensor) -> Tensor:
        B, _, T, _ = scores.shape
        mask = scores.new_empty((B, T), dtype=torch.bool)
        return aten._masked_softmax(scores, mask, 3, 1)

    def _joined(self, x_BHTK: Tensor) -> Tensor:
        _, H, _, K = x_BHTK.shape
        tokens = sum(self.lengths)
        return x_BHTK.new_empty((tokens, H * K))

    def _restored(self, ragged: Ragged, size: Sequence[int]) -> Tensor:
        return ragged.tokens_ND.new_empty(size)

    def _padded(
        self,
        tokens_ND: Tensor,
        lengths: list[int],
    ) -> Tensor:
        """As they are: the kernel pads as it reads."""
        return tokens_ND

    def _selected(
        self,
        x_BTD: Tensor,
        lengths: list[int],
    ) -> Tensor:
        tokens = sum(lengths)
        width = x_BTD.shape[2]
        return x_BTD.new_empty((tokens, width))


MULTI_HEAD = F.multi_head_attention_forward


def rules(attention: Attention) -> dict[Callable, Callable]:
    """Functions of PyTorch -> what they allocate on CUDA."""
    packet = torch.ops.aten.scaled_dot_product_attention
    by_name = (F.scaled_dot_product_attention, packet, packet.default)
    return {
        **dict.fromkeys(by_name, attention),
        MULTI_HEAD: functools.partial(multi_head_attention, attention),
        F.dropout: dropout,
        F.rms_norm: rms_norm,
    }


def not_modelled(trace: Trace, tracker: StepTracker, ranks: int) -> list[str]:
    """What of this step the prediction leaves out."""
    ran = {f"{storage.op} {storage.dtype}" for storage in trace.storages.values()}
    is_cuda = tracker.target == "cuda"
    parts = ANYWHERE | (NOT_MODELLED if is_cuda else ON_A_CPU)
    found = [words for pattern, words in parts.items() if any(map(re.compile(pattern).search, ran))]
    if is_cuda and tracker.recurrent:
        found.append(RECURRENT)
    if tracker.attention and tracker.attention.may_be_cudnn:
        found.append(CUDNN)
    if is_cuda and tracker.autocast:
        found.append(AUTOCAST)
    if is_cuda and ranks > 1:
        found.append(RANKS)
    return list(dict.fromkeys(found))
