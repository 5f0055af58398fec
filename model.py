"""A decoder in one file: configuration, layers, attention, loss and KV cache. It needs only torch.

Copied into an empty folder, this file trains and generates:

    from model import Decoder, ModelConfig
    decoder = Decoder(ModelConfig.preset("tiny"))
    loss = decoder(tokens_BT, labels_BT)       # labels[:, t] is already the target of position t
    loss.backward()

The geometry is Qwen3's: pre-norm, grouped-query attention, RMSNorm on queries and keys, SwiGLU,
rotary positions. The file is read from top to bottom: configuration, positions, layers, standard
attention, Native Sparse Attention, the loss in chunks, the decoder.

Everything here is plain PyTorch, exact and linear in memory. What has faster versions is an entry
of `Ops`, an object that `Decoder` is given; longhaul/kernels.py makes one with them. Parallelism,
checkpointing and compilation are applied from outside, and no forward communicates. Two objects
say what attention reads, and both have attend(layer, inputs, rope): `rows`, which tokens of a
batch see each other, for one forward; and a layer's `cache`, for one generation.

Letters: B rows of a batch, T tokens, N = B*T, S cached tokens, H query heads, G key/value heads,
K head dimension, D model width, F feed-forward width, V vocabulary. Activations have the dtype
`compute_dtype`; parameters keep their own, which is fp32 for master weights.
"""

import functools
import hashlib
import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # the label of a position without a target
GIB = 2**30

Rope = tuple[Tensor, Tensor]  # cos and sin [B or 1, T, 1, K/2] of the tokens
Device = torch.device | str


# ---- configuration


# What differs from the defaults of ModelConfig, which are those of the 4B.
PRESETS = {
    "tiny": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 32,
        "ffn_size": 768,
    },
    "0.6B": {"hidden_size": 1024, "num_layers": 28, "num_heads": 16, "ffn_size": 3072},
    "1.7B": {"hidden_size": 2048, "num_layers": 28, "num_heads": 16, "ffn_size": 6144},
    "4B": {},
    "8B": {"hidden_size": 4096, "ffn_size": 12288, "tie_embeddings": False},
}

CHOICES = {
    "rope_scaling": ("none", "linear", "yarn", "llama3"),
    "loss": ("auto", "standard", "chunked", "one_pass"),
    "kernels": ("auto", "torch", "compiled", "triton"),
    "compute_dtype": ("float32", "bfloat16", "float16", "float64"),
}

# The smallest value of each number of NSAConfig.
NSA_LEAST = {
    "cmp_block": 1,
    "cmp_stride": 1,
    "sel_block": 1,
    "sel_count": 1,
    "sel_init": 0,
    "sel_local": 1,
    "window": 1,
}

# Each number of ModelConfig is above its bound.
ABOVE = {
    "vocab_size": 0,
    "hidden_size": 0,
    "num_layers": 0,
    "num_heads": 0,
    "num_kv_heads": 0,
    "head_dim": 0,
    "ffn_size": 0,
    "rope_original_context": 0,
    "norm_eps": 0,
    "init_std": 0,
    "rope_theta": 1,
}

# Numbers of ModelConfig that may be 0, with their unit.
ZERO_OR_MORE = {
    "loss_chunk_size": "tokens (0: chosen by shape and device)",
    "rope_context": "tokens (0: 16 times rope_original_context)",
    "logits_threshold_gib": "GiB",
}


@dataclass(frozen=True)
class Standard:
    """Full causal attention: the kind of attention that has no sizes.

    A kind is such a frozen dataclass with a `name`, and `layer`, which makes one layer of it.
    """

    name = "standard"

    def layer(self, config: "ModelConfig", ops: "Ops") -> "Attention":
        return StandardAttention(config, ops)


@dataclass(frozen=True)
class NSAConfig:
    """Sizes of Native Sparse Attention (arXiv 2502.11089), in tokens and blocks; in brackets the
    paper's letters.
    """

    name = "nsa"

    cmp_block: int = 32  # tokens of a compressed block [l]
    cmp_stride: int = 16  # tokens from one compressed block to the next [s]
    sel_block: int = 64  # tokens of a selection block [l']
    sel_count: int = 16  # selection blocks that a query reads [n], the forced ones included
    sel_init: int = 1  # of these, the first blocks of the document
    sel_local: int = 2  # of these, the query's own block and those before it
    window: int = 512  # tokens of the sliding window [w], the query itself included
    cmp_kind: str = "mlp"  # compression: "mlp" learns, "mean" pools
    kv: str = "shared"  # "shared": one K/V for all branches; "separate": one per branch

    def __post_init__(self):
        for name, least in NSA_LEAST.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise self._refusal([name], f"{name} an integer >= {least}", f"change {name}")

        for name in ("cmp_block", "sel_block"):
            if getattr(self, name) % self.cmp_stride:
                names = sorted([name, "cmp_stride"])
                raise self._refusal(names, f"{name} a multiple of cmp_stride", "change one of them")

        if self.cmp_block > self.sel_block:
            raise self._refusal(
                ["cmp_block", "sel_block"],
                "cmp_block <= sel_block",
                "lower cmp_block or raise sel_block",
            )
        if self.sel_count < self.sel_init + self.sel_local:
            raise self._refusal(
                ["sel_count", "sel_init", "sel_local"],
                "sel_count >= sel_init + sel_local",
                "raise sel_count or force fewer blocks",
            )

        if self.cmp_kind not in ("mlp", "mean"):
            raise self._refusal(["cmp_kind"], "cmp_kind 'mlp' or 'mean'", "choose one of them")
        if self.kv not in ("shared", "separate"):
            raise self._refusal(["kv"], "kv 'shared' or 'separate'", "choose one of them")

    def _refusal(self, names: list[str], allowed: str, remedy: str) -> ValueError:
        given = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return ValueError(f"NSAConfig: given {given}; allowed: {allowed}; remedy: {remedy}")

    def layer(self, config: "ModelConfig", ops: "Ops") -> "Attention":
        return NativeSparseAttention(config, ops)

    def compressed_blocks(self, tokens: int | Tensor) -> int | Tensor:
        """Number of compressed blocks of a document: those that end inside its `tokens` tokens."""
        blocks = (tokens - self.cmp_block) // self.cmp_stride + 1
        if isinstance(blocks, Tensor):
            return blocks.clamp(min=0)
        return max(0, blocks)


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and numerics of a decoder, validated once and never changed.

    `dataclasses.replace` makes a changed copy.
    """

    vocab_size: int = 151_936
    hidden_size: int = 2560
    num_layers: int = 36
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    ffn_size: int = 9728
    tie_embeddings: bool = True
    norm_eps: float = 1e-6
    qk_norm: bool = True  # RMSNorm on the heads of q and k, as in Qwen3
    qkv_bias: bool = False  # biases of the projections to q, k and v, as in Qwen2.5
    rope_theta: float = 1e6  # ABF (adjusted base frequency) is a larger theta
    rope_scaling: str = "none"
    rope_factor: float = 1.0  # context extension of linear, yarn and llama3 scaling
    rope_original_context: int = 32_768  # yarn, llama3: the context before the extension
    rope_context: int = 0  # llama3: the context after it; 0: 16 times the original
    attention: Standard | NSAConfig = Standard()  # the kind of attention: these, or your own
    loss: str = "auto"
    logits_threshold_gib: float = 10.0  # "auto" never builds logits larger than this
    loss_chunk_size: int = 0  # tokens of a tile of the loss; 0: chosen by shape and device
    kernels: str = "auto"  # backend of fused operations: torch, torch.compile, or Triton
    compute_dtype: str = "float32"
    init_std: float = 0.02

    def __post_init__(self):
        self._check_numbers()
        self._check_choices()
        self._check_heads()
        self._check_rope()

    def _check_numbers(self) -> None:
        for name, bound in ABOVE.items():
            value = getattr(self, name)
            if not _is_number(value) or not bound < value < math.inf:
                raise ValueError(f"{name}={value} is out of range: give a number above {bound}")

        for name, unit in ZERO_OR_MORE.items():
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} is out of range: give 0 or more {unit}")

    def _check_choices(self) -> None:
        if not hasattr(self.attention, "layer"):
            raise ValueError(
                f"attention={self.attention!r} is no kind of attention: give Standard() or "
                "NSAConfig()"
            )
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                names = ", ".join(allowed)
                raise ValueError(f"{name}={value!r} is unknown: choose one of {names}")

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            divisors = [g for g in range(1, self.num_heads + 1) if self.num_heads % g == 0]
            raise ValueError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}: "
                f"choose num_kv_heads from {divisors}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd, and rotary positions rotate pairs of elements: "
                "choose an even head_dim"
            )

    def _check_rope(self) -> None:
        factor = self.rope_factor
        in_range = _is_number(factor) and 1 <= factor < math.inf
        extended = self.rope_scaling != "none"
        if not in_range or extended != (factor > 1):
            raise ValueError(
                f"rope_scaling={self.rope_scaling!r} with rope_factor={factor}: give a factor "
                "above 1 with linear, yarn or llama3, and no factor with none"
            )

    @classmethod
    def preset(cls, name: str, **overrides) -> "ModelConfig":
        """The named preset with some fields replaced; ValueError lists the known names."""
        if name not in PRESETS:
            raise ValueError(f"model size {name!r} is unknown: choose one of {', '.join(PRESETS)}")

        known = [field.name for field in fields(cls)]
        for key in overrides:
            if key not in known:
                names = ", ".join(known)
                raise ValueError(f"ModelConfig has no field {key!r}: choose from {names}")
        return cls(**{**PRESETS[name], **overrides})

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return getattr(torch, self.compute_dtype)

    @property
    def rope_reach(self) -> int:
        """Tokens that the rotary positions reach."""
        if self.rope_scaling == "llama3":  # 3.1 to 3.3 were trained at 131,072, from 8,192
            return self.rope_context or 16 * self.rope_original_context
        return round(self.rope_original_context * self.rope_factor)

    def layer_params(self) -> int:
        """Parameters of one block: attention, feed-forward and the two norms before them."""
        return _count_block(self)

    def num_params(self) -> int:
        """Parameters of the decoder, a tied embedding counted once; nothing is allocated."""
        tables = 1 if self.tie_embeddings else 2
        vocabulary = tables * self.vocab_size * self.hidden_size
        layers = self.num_layers * self.layer_params()
        final_norm = self.hidden_size
        return vocabulary + layers + final_norm

    def logits_gib(self, batch: int, seq: int) -> float:
        """Size of the bf16 logits [batch * seq, V] in GiB."""
        return batch * seq * self.vocab_size * 2 / GIB

    def should_chunk(self, batch: int, seq: int) -> bool:
        """Whether the loss must be chunked: because it is asked for, or to stay below the
        threshold.
        """
        if self.loss == "auto":
            return self.logits_gib(batch, seq) > self.logits_threshold_gib
        return self.loss != "standard"


def _is_number(value) -> bool:
    return isinstance(value, numbers.Real)


@functools.lru_cache(maxsize=256)
def _count_block(config: ModelConfig) -> int:
    with torch.device("meta"):
        block = Block(config, Ops())
    return sum(parameter.numel() for parameter in block.parameters())


# ---- rotary positions


def rope_frequencies(config: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """Inverse frequencies [K/2] in fp32, and the factor on cos and sin.

    none    1 / theta^(2i/K)
    linear  the same divided by rope_factor (position interpolation, Chen et al. 2023)
    yarn    a ramp between the two over the dimensions that turn between 1 and 32 times within the
            original context; cos and sin times 0.1 ln(rope_factor) + 1 (Peng et al. 2023)
    llama3  a ramp between the two, linear in the turns within the original context, over the
            dimensions that turn between 1 and 4 times there (Llama 3.1, arXiv 2407.21783)

    The operations and their order are those of transformers, so that pretrained weights meet the
    same bits: one unit in the last place is 0.007 radians at position 131,072.
    """
    index_k = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    wavelength_k = config.rope_theta ** (index_k / config.head_dim)  # over 2 pi, in tokens
    plain_k = 1.0 / wavelength_k
    if config.rope_scaling == "none":
        return plain_k, 1.0
    if config.rope_scaling == "linear":
        return plain_k / config.rope_factor, 1.0
    if config.rope_scaling == "llama3":
        turns_k = config.rope_original_context / (2 * math.pi / plain_k)
        kept_k = ((turns_k - 1) / 3).clamp(0, 1)
        return (1 - kept_k) * plain_k / config.rope_factor + kept_k * plain_k, 1.0

    interpolated_k = 1.0 / (config.rope_factor * wavelength_k)
    kept_k = 1 - _yarn_ramp(config, device)
    mixed_k = interpolated_k * (1 - kept_k) + plain_k * kept_k
    return mixed_k, 0.1 * math.log(config.rope_factor) + 1.0


def _yarn_ramp(config: ModelConfig, device: torch.device) -> Tensor:
    """0 for dimensions that keep their frequency, 1 for those that are interpolated."""

    def dimension(turns: float) -> float:
        """The index whose angle makes that many turns within the original context."""
        ratio = config.rope_original_context / (turns * 2 * math.pi)
        return config.head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(32)), 0)
    high = min(math.ceil(dimension(1)), config.head_dim - 1)
    index_k = torch.arange(config.head_dim // 2, dtype=torch.float32, device=device)
    return ((index_k - low) / max(high - low, 1e-3)).clamp(0, 1)


class RotaryCache:
    """cos and sin [1, T, 1, K/2] in fp32 on the device that asks, doubled in length if a longer
    sequence comes.

    It is a plain object and not a buffer, so that `.to()`, `to_empty()` and construction on meta
    cannot leave it on the wrong device or unfilled.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None

    def __call__(self, length: int, device: torch.device, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Positions offset .. offset + length - 1, from the cache."""
        end = offset + length
        held = 0
        if self.cos is not None and self.cos.device == device:
            held = self.cos.shape[1]

        if held < end:
            positions = torch.arange(max(end, 2 * held), device=device)
            with torch.inference_mode(False):  # tables made while sampling must serve training too
                self.cos, self.sin = self.at(positions[None])
        return self.cos[:, offset:end], self.sin[:, offset:end]

    def at(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Any positions [B, T], computed without the cache, with the same bits."""
        frequencies_k, factor = rope_frequencies(self.config, positions_BT.device)
        # fp32, because bf16 cannot count past 256
        angles_BTk = positions_BT[..., None].float() * frequencies_k
        angles_BT1k = angles_BTk[:, :, None]
        return angles_BT1k.cos() * factor, angles_BT1k.sin() * factor


class _Rotate(torch.autograd.Function):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) in fp32.

    The backward rotates by the negative angle, so nothing of x is saved.
    """

    @staticmethod
    def forward(ctx, x_BTHK, cos_BT1k, sin_BT1k):
        ctx.save_for_backward(cos_BT1k, sin_BT1k)
        return _rotated(x_BTHK, cos_BT1k, sin_BT1k)

    @staticmethod
    def backward(ctx, grad_BTHK):
        cos_BT1k, sin_BT1k = ctx.saved_tensors
        return _rotated(grad_BTHK, cos_BT1k, -sin_BT1k), None, None


def rotate(x_BTHK: Tensor, cos_BT1k: Tensor, sin_BT1k: Tensor) -> Tensor:
    """Rotate the pairs (x_k, x_{k+K/2}) of each head by its token's angles."""
    return _Rotate.apply(x_BTHK, cos_BT1k, sin_BT1k)


def _rotated(x_BTHK: Tensor, cos_BT1k: Tensor, sin_BT1k: Tensor) -> Tensor:
    # Of a long row, only one of up to four parts is in fp32 at a time.
    parts = max(1, min(4, x_BTHK.shape[1] // 2048))
    if torch.compiler.is_compiling():
        parts = 1

    y_BTHK = torch.empty_like(x_BTHK)
    tensors = (x_BTHK, cos_BT1k, sin_BT1k, y_BTHK)
    split = [whole.tensor_split(parts, dim=1) for whole in tensors]
    for x, cos, sin, y in zip(*split, strict=True):
        x1, x2 = x.to(wide(x.dtype)).chunk(2, dim=-1)
        y.copy_(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1))
    return y_BTHK


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and exponentials: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- documents


@dataclass(frozen=True, eq=False)
class OnHost:
    """A tensor that stays in host memory.

    FSDP2 moves every CPU tensor among the model's inputs to the GPU; into a plain object it does
    not look.
    """

    tensor: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape


def document_boundaries(doc_ids_BT: Tensor | OnHost) -> Tensor:
    """cu_seqlens [documents + 1], int64 on the host: the boundaries of the runs of equal ids in the
    B*T flattened tokens. Each row starts a document.

    Attention needs the lengths of documents on the host. Keep `doc_ids` there: a CUDA tensor costs
    one synchronisation.
    """
    if isinstance(doc_ids_BT, OnHost):
        doc_ids_BT = doc_ids_BT.tensor
    ids_BT = doc_ids_BT.cpu()
    starts_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
    starts = starts_BT.flatten().nonzero()[:, 0]
    return torch.cat([starts, torch.tensor([ids_BT.numel()])])


def document_positions(cu_seqlens: Tensor, shape: tuple[int, int]) -> Tensor:
    """Positions [B, T] that restart at 0 with each document."""
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    return (torch.arange(int(cu_seqlens[-1])) - starts).view(shape)


# Not a tuple and not frozen: torch.compile would look inside and compile anew for other lengths.
@dataclass(eq=False)
class Documents:
    """The documents of rows that hold several, made once for all layers and never changed.

    lengths  tokens of each document
    bounds   cu_seqlens [documents + 1] over the B*T flattened tokens, int32 on the GPU; None on a
             CPU
    """

    lengths: list[int]
    bounds: Tensor | None = None

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, rows: int, device: Device) -> "Documents | None":
        """None if every row is one document."""
        if cu_seqlens is None or len(cu_seqlens) == rows + 1:
            return None
        lengths = cu_seqlens.diff().tolist()
        if torch.device(device).type != "cuda":
            return cls(lengths)
        return cls(lengths, on_device(cu_seqlens.int(), device))

    def attend(self, layer: "Attention", inputs: Sequence[Tensor], rope: Rope) -> Tensor:
        """o [B, T, H, K] of the layer: each document by itself."""
        return layer.packed(inputs, rope, self)


def on_device(x: Tensor, device: Device) -> Tensor:
    """A tensor of the host, on the device: to CUDA through pinned memory, so that the host does not
    wait.
    """
    if torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


# ---- layers


class Linear(nn.Linear):
    """y = x W^T, plus b if `bias`, by `product`.

    Weights are cast to the dtype of x on use, so that fp32 master weights serve bf16 activations.
    """

    def __init__(
        self,
        fan_in: int,
        fan_out: int,
        product: Callable = F.linear,
        bias: bool = False,
    ):
        super().__init__(fan_in, fan_out, bias=bias)
        self.product = product

    def reset_parameters(self):
        # Decoder.init_weights fills every parameter by name; drawing values here too would double
        # the start-up time.
        pass

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return self.product(x, weight, bias)


class _RMSNorm(torch.autograd.Function):
    """x * rstd * w with the statistics in fp32; saves x and rstd [rows], as the fused CUDA kernel
    does.

    dx = rstd * (g w - n mean(g w n)) and dw = sum(g n), with n = x * rstd.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, rstd = ctx.saved_tensors
        normed = x.to(rstd.dtype) * rstd
        wide = grad.to(rstd.dtype)

        grad_weight = torch.linalg.vecdot(wide.flatten(0, -2), normed.flatten(0, -2), dim=0)
        grad_weight = grad_weight.to(weight.dtype)

        wide = wide * weight
        inner = torch.linalg.vecdot(wide, normed, dim=-1)[..., None] / x.shape[-1]
        grad_x = wide.sub_(normed.mul_(inner)).mul_(rstd)
        return grad_x.to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension, in fp32 (Zhang, Sennrich 2019)."""
    if x.is_cuda:  # one fused kernel
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    return _RMSNorm.apply(x, weight, eps)


class RMSNorm(nn.Module):
    """Holds the weight of a norm; `norm` computes it, by default `rms_norm`."""

    def __init__(self, size: int, eps: float, norm: Callable = rms_norm):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.eps)


def norm_rotate(x_BTHK: Tensor, weight_K: Tensor, eps: float, rope: Rope) -> Tensor:
    """The normed heads, rotated by their tokens' angles."""
    return rotate(rms_norm(x_BTHK, weight_K, eps), *rope)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up.

    Saves only its two inputs. Autograd would also keep silu(gate): 2.4 GiB per layer of the 4B at
    131k tokens.
    """

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, F.silu(gate).mul_(grad)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _SwiGLU.apply(gate, up)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, ops: "Ops"):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.ffn_size, ops.linear)
        self.up_proj = Linear(config.hidden_size, config.ffn_size, ops.linear)
        self.down_proj = Linear(config.ffn_size, config.hidden_size, ops.linear)
        self.swiglu = ops.swiglu

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(self.swiglu(self.gate_proj(x_BTD), self.up_proj(x_BTD)))


# ---- standard attention


def sdpa(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, causal: bool, mask_TS: Tensor | None = None
) -> Tensor:
    """Softmax attention in the [B, T, H, K] layout, by a kernel whose memory is linear in T."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    heads, groups = q.shape[1], k.shape[1]
    if q.is_cuda and heads != groups and (q.dtype == torch.float32 or mask_TS is not None):
        # PyTorch's kernel for grouped heads in fp32, or under a mask, would hold [T, S].
        k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
    o_BHTK = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask_TS, is_causal=causal, enable_gqa=k.shape[1] != heads
    )
    return o_BHTK.transpose(1, 2)


def causal_attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    query_chunk: int = 256,
    sdpa: Callable = sdpa,
) -> Tensor:
    """Full causal attention of the last T of S positions; S > T if a cache holds earlier ones.

    It then runs over chunks of queries, so that a mask has at most [query_chunk, S] elements.
    """
    T, S = q_BTHK.shape[1], k_BSGK.shape[1]
    if T == S:
        return sdpa(q_BTHK, k_BSGK, v_BSGK, causal=True)
    if T == 1:
        return sdpa(q_BTHK, k_BSGK, v_BSGK, causal=False)

    key_S = torch.arange(S, device=q_BTHK.device)
    outputs = []
    for start in range(0, T, query_chunk):
        q_chunk = q_BTHK[:, start : start + query_chunk]
        in_chunk = torch.arange(q_chunk.shape[1], device=q_BTHK.device)
        query_C1 = in_chunk[:, None] + (S - T + start)
        visible = key_S <= query_C1
        outputs.append(sdpa(q_chunk, k_BSGK, v_BSGK, causal=False, mask_TS=visible))
    return torch.cat(outputs, dim=1)


def attend_each_document(
    attend: Callable[..., Tensor], inputs: Sequence[Tensor], documents: Documents
) -> Tensor:
    """o [B, T, H, K]: `attend` of one document after the other, each [1, length, heads, K]."""
    # `split` and not slices: the backward of each slice fills the whole row with zeros.
    flat = [x.flatten(0, 1)[None].split(documents.lengths, dim=1) for x in inputs]
    outputs = [attend(*parts) for parts in zip(*flat, strict=True)]
    return torch.cat(outputs, dim=1).view_as(inputs[0])


def packed_attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, documents: Documents
) -> Tensor:
    """Full causal attention inside each of the documents."""
    return attend_each_document(causal_attention, (q_BTHK, k_BTGK, v_BTGK), documents)


class LayerCache:
    """Keys and values of one layer, [B, max_length, G, K], filled from the left."""

    def __init__(self, shape: tuple[int, int, int, int], device: Device, dtype: torch.dtype):
        self.k_BSGK = torch.empty(shape, device=device, dtype=dtype)
        self.v_BSGK = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def attend(self, layer: "Attention", inputs: Sequence[Tensor], rope: Rope) -> Tensor:
        """o [B, T, H, K] of T tokens that continue what is stored, which grows by them."""
        q_BTHK, k_BTGK, v_BTGK = inputs
        keys_and_values = self.append(k_BTGK, v_BTGK)
        with layer.ops.varying(q_BTHK):
            return layer.attend_document(q_BTHK, *keys_and_values)

    def append(self, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; returns views of all of them."""
        B, T = k_BTGK.shape[:2]
        end = self.check_room(B, T)
        self.k_BSGK[:, self.length : end] = k_BTGK
        self.v_BSGK[:, self.length : end] = v_BTGK
        self.length = end
        return self.stored()

    def check_room(self, B: int, T: int) -> int:
        """The length with T more tokens of each of B rows; ValueError if the cache has no such
        room.
        """
        rows, capacity = self.k_BSGK.shape[:2]
        end = self.length + T
        if rows != B:
            raise ValueError(
                f"the KV cache holds {rows} rows and {B} are given: build it with batch_size={B}"
            )
        if end > capacity:
            raise ValueError(
                f"the KV cache holds {capacity} positions and {end} are needed: build it with "
                f"max_length >= {end}"
            )
        return end

    def stored(self) -> tuple[Tensor, Tensor]:
        """Views of all keys and values so far."""
        return self.k_BSGK[:, : self.length], self.v_BSGK[:, : self.length]


class KVCache:
    """What the layers keep while decoding, a cache for each; `Decoder.new_cache` makes it.

    Standard attention keeps 2 * L * B * max_length * G * K elements, NSA about 1/16 more.
    """

    def __init__(self, layers: list):
        self.layers = layers

    @property
    def length(self) -> int:
        """Positions stored so far."""
        return self.layers[0].length

    def rope(self, rotary: RotaryCache, tokens: int, device: torch.device) -> Rope:
        """cos and sin of so many tokens that come next."""
        return rotary(tokens, device, self.length)


class Attention(nn.Module):
    """Grouped-query attention, by default with RMSNorm on q and k: the base of every kind.

    A kind is one subclass, and a settings object whose `layer` makes it. A causal kind overrides
    `attend_document`; the rest holds for it as it is: packed documents, decoding over a cache.
    """

    def __init__(self, config: ModelConfig, ops: "Ops"):
        super().__init__()
        self.head_dim = config.head_dim
        self.ops = ops
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, queries, ops.linear, config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, keys, ops.linear, config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, keys, ops.linear, config.qkv_bias)
        self.o_proj = Linear(queries, config.hidden_size, ops.linear)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, ops.norm)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, ops.norm)

    def forward(self, x_BTD: Tensor, rope: Rope, rows=None, cache=None) -> Tensor:
        """`rows` say which tokens see each other (None: every row is one document), `cache` what
        came before; both have attend(layer, inputs, rope).
        """
        projected = self.project(x_BTD, rope)
        inputs = self.inputs(x_BTD, rope, projected)
        if cache is not None:
            o_BTHK = cache.attend(self, inputs, rope)
        elif rows is not None:
            o_BTHK = rows.attend(self, inputs, rope)
        else:
            o_BTHK = self.attend_document(*inputs)
        return self.o_proj(o_BTHK.flatten(-2))

    def project(self, x_BTD: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v, and k before RoPE, each [B, T, heads, K]."""
        heads = (-1, self.head_dim)
        q_BTHK = self.q_proj(x_BTD).unflatten(-1, heads)
        if self.q_norm is None:
            q_BTHK = self.ops.rotate(q_BTHK, *rope)
        else:
            q_BTHK = self.ops.norm_rotate(q_BTHK, self.q_norm.weight, self.q_norm.eps, rope)

        raw_BTGK = self.k_proj(x_BTD).unflatten(-1, heads)
        if self.k_norm is not None:
            raw_BTGK = self.k_norm(raw_BTGK)
        k_BTGK = self.ops.rotate(raw_BTGK, *rope)
        v_BTGK = self.v_proj(x_BTD).unflatten(-1, heads)
        return q_BTHK, k_BTGK, v_BTGK, raw_BTGK

    def inputs(
        self, x_BTD: Tensor, rope: Rope, projected: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Everything that attention reads of the tokens, each [B, T, heads, ...]."""
        q_BTHK, k_BTGK, v_BTGK, _ = projected
        return q_BTHK, k_BTGK, v_BTGK

    def attend_document(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
        """o [B, T, H, K] of the last T of the S positions of one document in each row."""
        raise NotImplementedError(f"{type(self).__name__} defines no attend_document")

    def packed(self, inputs: Sequence[Tensor], rope: Rope, documents: Documents) -> Tensor:
        """The same for rows that hold several documents; a compiled model leaves it uncompiled."""
        with self.ops.varying(inputs[0]):
            return attend_each_document(self.attend_document, inputs, documents)

    def rows(
        self, cu_seqlens: Tensor | None, shape: tuple[int, int], device: Device
    ) -> Documents | None:
        """What says which of the B, T = `shape` tokens see each other, made once for all layers.

        cu_seqlens [documents + 1] over the B*T tokens; None if every row is one document.
        """
        return Documents.of(cu_seqlens, shape[0], device)

    def cache(
        self, shape: tuple[int, int, int, int], device: Device, dtype: torch.dtype
    ) -> LayerCache:
        """What a layer keeps while decoding; shape [B, max_length, G, K]."""
        return LayerCache(shape, device, dtype)


class StandardAttention(Attention):
    """Full causal attention, by kernels whose memory is linear in T."""

    def attend_document(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
        return self.ops.attention(q_BTHK, k_BSGK, v_BSGK)

    def packed(self, inputs: Sequence[Tensor], rope: Rope, documents: Documents) -> Tensor:
        return self.ops.packed(*inputs, documents)


# ---- Native Sparse Attention (arXiv 2502.11089)


# Three branches, mixed by gates: a query reads all keys in compressed form, the few blocks of keys
# that matter most, and a window of the last keys. This section has the layer; the next one has the
# plain computation, which masks blocks: `Ops.sparse` is where one that skips them goes.
#
# Letters: M = H/G query heads per KV head, N compressed blocks, J selection blocks, n blocks that a
# query reads, U units of s tokens, C queries of a chunk. The l, s, l', n and w of the paper are the
# fields cmp_block, cmp_stride, sel_block, sel_count and window of NSAConfig.


class Layout(NamedTuple):
    """Where the documents of a batch and their compressed blocks are; made once for all layers.

    cu_seqlens  [documents + 1] over the B*T flattened tokens, on the host; None if every row is one
                document
    tokens      [U*s] the tokens of the documents' units of s tokens
    first       [N] the first unit of each compressed block
    centre      [N] the centre of each compressed block among the tokens, or in `rope`
    rope        cos and sin at the centres, if the layers' rope does not hold those tokens
    """

    cu_seqlens: Tensor | None
    tokens: slice | Tensor
    first: Tensor
    centre: slice | Tensor
    rope: Rope | None = None

    @classmethod
    def of(
        cls,
        cu_seqlens: Tensor | None,
        shape: tuple[int, int],
        cfg: NSAConfig,
        device: Device,
    ) -> "Layout":
        """The layout of (B, T) = `shape` tokens; cu_seqlens as in `Attention.rows`."""
        if cu_seqlens is None or len(cu_seqlens) == shape[0] + 1:
            return cls(None, *_layout_of_document(shape[1], cfg, device))

        units = 0
        parts = []
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            used, first, centre = _layout_of_document(end - start, cfg, "cpu")
            tokens = torch.arange(start, start + used.stop)
            parts.append((tokens, first + units, centre + start))
            units += used.stop // cfg.cmp_stride
        joined = [torch.cat(column) for column in zip(*parts, strict=True)]
        return cls(cu_seqlens, *(on_device(column, device) for column in joined))

    def spread(self, positions_BT: Tensor, rotary: RotaryCache) -> "Layout":
        """The layout of whole rows whose tokens several ranks share: the layers' rope then holds
        only a rank's tokens.
        """
        if self.cu_seqlens is not None:
            positions_BT = positions_BT.flatten()[None]
        rope = rotary.at(positions_BT[:, self.centre])
        return self._replace(centre=slice(None), rope=rope)

    def attend(self, layer: "NativeSparseAttention", inputs: Sequence[Tensor], rope: Rope):
        """o [B, T, H, K] of the layer."""
        if self.cu_seqlens is None:
            return layer.branches(inputs, rope, self)
        return layer.packed(inputs, rope, self)


def _layout_of_document(
    tokens: int, cfg: NSAConfig, device: Device
) -> tuple[slice, Tensor, Tensor]:
    """tokens, first and centre of a Layout; tokens after the last whole block belong to no unit."""
    blocks = cfg.compressed_blocks(tokens)
    units = 0
    if blocks:
        units = blocks + cfg.cmp_block // cfg.cmp_stride - 1
    first_N = torch.arange(blocks, device=device)
    centre_N = first_N * cfg.cmp_stride + cfg.cmp_block // 2
    return slice(0, units * cfg.cmp_stride), first_N, centre_N


def block_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of compressed keys, by PyTorch's operator."""
    return F.rms_norm(x, weight.shape, weight, eps)


class Compressor(nn.Module):
    """Makes one key and one value of a block of l tokens.

        phi(x) = mean(x) + W2 silu(W1 flatten(x + pe))

    With W2 = 0 it pools: training starts there, and cmp_kind="mean" stays there. Keys are taken
    before RoPE. The compressed key is normed again, because averaging shrinks it by up to sqrt(l),
    and rotated as the token at its block's centre. KV heads share the weights.
    """

    def __init__(self, head_dim: int, cfg: NSAConfig, eps: float, norm: Callable):
        super().__init__()
        self.cfg = cfg
        self.eps = eps
        self.norm = norm
        self.norm_weight = nn.Parameter(torch.empty(head_dim))
        if cfg.cmp_kind == "mlp":
            flat = cfg.cmp_block * head_dim
            self.k_w1 = nn.Parameter(torch.empty(head_dim, flat))
            self.k_w2 = nn.Parameter(torch.empty(head_dim, head_dim))
            self.v_w1 = nn.Parameter(torch.empty(head_dim, flat))
            self.v_w2 = nn.Parameter(torch.empty(head_dim, head_dim))
            self.pe_lK = nn.Parameter(torch.empty(cfg.cmp_block, head_dim))

    def forward(
        self, k_BTGK: Tensor, v_BTGK: Tensor, rotate_as: Callable, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """(k_cmp, v_cmp) [B, N, G, K] of keys before RoPE and of values.

        rotate_as(k_cmp, centre) rotates each key as the token `centre` is rotated.
        """
        k_weights = ()
        v_weights = ()
        if self.cfg.cmp_kind == "mlp":
            k_weights = (self.k_w1, self.k_w2, self.pe_lK)
            v_weights = (self.v_w1, self.v_w2)

        k_BNGK = self._phi(k_BTGK[:, layout.tokens], layout.first, *k_weights)
        v_BNGK = self._phi(v_BTGK[:, layout.tokens], layout.first, *v_weights)
        k_BNGK = self._normed(k_BNGK)
        return rotate_as(k_BNGK, layout.centre), v_BNGK

    def _normed(self, k_BNGK: Tensor) -> Tensor:
        normed = self.norm(k_BNGK.float(), self.norm_weight.float(), self.eps)
        return normed.to(k_BNGK.dtype)

    def _phi(
        self,
        x_BTGK: Tensor,
        first_N: Tensor,
        w1: Tensor | None = None,
        w2: Tensor | None = None,
        pe_lK: Tensor | None = None,
    ) -> Tensor:
        """A sum of l/s products over units of s tokens, each shifted by one unit, so that
        overlapping blocks are not copied.
        """
        s = self.cfg.cmp_stride
        spread = self.cfg.cmp_block // s
        x_BUGsK = x_BTGK.unflatten(1, (x_BTGK.shape[1] // s, s)).transpose(2, 3)

        total = x_BUGsK.float().sum(3)  # fp32: l terms
        mean = sum(total[:, first_N + i] for i in range(spread)) / self.cfg.cmp_block
        mean = mean.to(x_BTGK.dtype)
        if w1 is None:
            return mean

        w1 = w1.to(x_BTGK.dtype)
        w2 = w2.to(x_BTGK.dtype)
        flat = x_BUGsK.flatten(3)
        hidden = sum((flat @ part.T)[:, first_N + i] for i, part in enumerate(w1.chunk(spread, 1)))
        if pe_lK is not None:
            hidden = hidden + w1 @ pe_lK.to(x_BTGK.dtype).flatten()
        return mean + F.silu(hidden) @ w2.T


class SparseBranches(nn.Module):
    """What NSA adds to the parameters of a layer: gates, compression, keys and values.

    With kv="shared" one K/V serves all branches, and only gates and compression are added. With
    kv="separate" the layer's K/V serve the selected branch, and `kv_proj` makes those of the
    compressed branch and of the window.
    """

    def __init__(self, config: ModelConfig, ops: "Ops"):
        super().__init__()
        self.cfg = config.attention
        self.heads = (-1, config.head_dim)
        self.gate = Linear(config.hidden_size, 3 * config.num_heads, ops.linear, bias=True)
        self.compressor = Compressor(config.head_dim, self.cfg, config.norm_eps, ops.block_norm)
        self.kv_proj = None
        if self.cfg.kv == "separate":
            width = config.num_kv_heads * config.head_dim
            self.kv_proj = Linear(config.hidden_size, 4 * width, ops.linear)
            self.cmp_norm = RMSNorm(config.head_dim, config.norm_eps, ops.norm)
            self.win_norm = RMSNorm(config.head_dim, config.norm_eps, ops.norm)

    def separate_keys_and_values(self, x_BTD: Tensor, rope: Rope) -> tuple[Tensor, ...]:
        """Keys before RoPE and values of the compressed branch, keys and values of the window."""
        parts = self.kv_proj(x_BTD).chunk(4, -1)
        k_cmp, v_cmp, k_win, v_win = (part.unflatten(-1, self.heads) for part in parts)
        return self.cmp_norm(k_cmp), v_cmp, rotate(self.win_norm(k_win), *rope), v_win


class NativeSparseAttention(Attention):
    """o = sum over the branches compressed, selected, window of sigmoid(W_g x + b_g) * o_branch."""

    def __init__(self, config: ModelConfig, ops: "Ops"):
        super().__init__(config, ops)
        self.sparse = SparseBranches(config, ops)

    def inputs(
        self, x_BTD: Tensor, rope: Rope, projected: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """q, k, v of the selected branch; k before RoPE and v of the compressed one; k, v of the
        window; gates.
        """
        q_BTHK, k_BTGK, v_BTGK, raw_BTGK = projected
        gates_BTH3 = self.sparse.gate(x_BTD).sigmoid().unflatten(-1, (-1, 3))
        branches = (raw_BTGK, v_BTGK, k_BTGK, v_BTGK)
        if self.sparse.kv_proj is not None:
            branches = self.sparse.separate_keys_and_values(x_BTD, rope)
        return q_BTHK, k_BTGK, v_BTGK, *branches, gates_BTH3

    def packed(self, inputs: Sequence[Tensor], rope: Rope, documents: Layout) -> Tensor:
        """All branches over the B*T flattened tokens of rows that hold several documents."""
        rows = len(inputs[0])
        flat = [x.flatten(0, 1)[None] for x in inputs]
        if documents.rope is None:
            rope = [x.expand(rows, *x.shape[1:]).flatten(0, 1)[None] for x in rope]
        return self.branches(flat, rope, documents).view_as(inputs[0])

    def branches(self, inputs: Sequence[Tensor], rope: Rope, layout: Layout) -> Tensor:
        """o of rows that are one document each, or of all documents flattened into one row."""
        q, k, v, raw, v_raw, k_win, v_win, gates = inputs

        def rotate_as(k_cmp: Tensor, centre: slice | Tensor) -> Tensor:
            cos, sin = rope if layout.rope is None else layout.rope
            return rotate(k_cmp, cos[:, centre], sin[:, centre])

        sparse = self.sparse
        k_cmp, v_cmp = sparse.compressor(raw, v_raw, rotate_as, layout)
        return self.ops.sparse(
            q, k, v, k_cmp, v_cmp, k_win, v_win, gates, sparse.cfg, layout.cu_seqlens
        )

    def rows(self, cu_seqlens: Tensor | None, shape: tuple[int, int], device: Device) -> Layout:
        return Layout.of(cu_seqlens, shape, self.sparse.cfg, device)

    def cache(
        self, shape: tuple[int, int, int, int], device: Device, dtype: torch.dtype
    ) -> "SparseCache":
        return self.ops.sparse_cache(self.sparse.cfg, *shape, device, dtype)


# ---- Native Sparse Attention in plain PyTorch


CHUNK_LOGITS = 2**24  # logits that exist at once: 64 MiB in fp32, of which a few copies live


def plain_nsa_attention(
    q: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    cfg: NSAConfig,
    cu_seqlens: Tensor | None = None,
    return_parts: bool = False,
) -> Tensor | dict[str, Tensor]:
    """o = g_cmp o_cmp + g_slc o_slc + g_win o_win (arXiv 2502.11089).

    q            [B, T, H, K]
    k, v         [B, T, G, K] of the selected branch and of the window
    k_cmp, v_cmp [B, N, G, K], the compressed blocks of one document after another
    gates        [B, T, H, 3] after the sigmoid, in the order compressed, selected, window
    cu_seqlens   [documents + 1], int32 or int64, best on the host; None for one document per row

    q, k and v have one dtype: fp32, bf16 or fp16. Returns o [B, T, H, K]; with return_parts=True a
    dict of o, o_cmp, o_slc, o_win and block_idx, which is int64 [B, T, G, n] with -1 for unused
    places. Raises ValueError for shapes that do not fit.

    This version masks blocks instead of skipping them, so its time stays quadratic. But chunks of
    queries are checkpointed, so its memory is linear, and nothing of size [T, T] exists.
    """
    check_sparse_inputs(q, (k_slc, v_slc, k_win, v_win), (k_cmp, v_cmp), gates, cfg, cu_seqlens)

    parts = []
    for tokens, blocks in sparse_documents(cu_seqlens, q.shape[1], k_cmp.shape[1], cfg):
        parts += _attend_sparse_document(
            q[:, tokens],
            k_slc[:, tokens],
            v_slc[:, tokens],
            k_cmp[:, blocks],
            v_cmp[:, blocks],
            k_win[:, tokens],
            v_win[:, tokens],
            gates[:, tokens],
            cfg,
        )
    whole = [torch.cat(column, 1) for column in zip(*parts, strict=True)]
    if not return_parts:
        return whole[0]
    named = dict(zip(("o", "o_cmp", "o_slc", "o_win", "block_idx"), whole, strict=True))
    return named | {"block_idx": named["block_idx"].long()}


def check_sparse_inputs(
    q: Tensor,
    token_kv: Sequence[Tensor],
    block_kv: Sequence[Tensor],
    gates: Tensor,
    cfg: NSAConfig,
    cu_seqlens: Tensor | None,
) -> None:
    """ValueError for inputs of nsa_attention whose shapes or dtypes do not fit each other."""
    B, T, H, K = q.shape
    G = token_kv[0].shape[2]
    if T < 1:
        raise _sparse_refusal(f"T={T}", "at least one token", "drop the empty row")
    if H % G:
        given = f"{H} query heads, {G} KV heads"
        raise _sparse_refusal(given, "a multiple", "change a head count")

    N = block_kv[0].shape[1]
    if cu_seqlens is None:
        N = cfg.compressed_blocks(T)
    expected = [(x, (B, T, G, K)) for x in token_kv]
    expected += [(x, (B, N, G, K)) for x in block_kv]
    expected += [(gates, (B, T, H, 3))]
    for x, shape in expected:
        if tuple(x.shape) != shape:
            given = f"shape {tuple(x.shape)}"
            raise _sparse_refusal(given, f"{shape}", "see the docstring's shapes")

    for x in (*token_kv, *block_kv):
        if x.dtype != q.dtype:
            given = f"{x.dtype} with a q of {q.dtype}"
            raise _sparse_refusal(given, "one dtype for q, k and v", "cast them")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise _sparse_refusal(f"{q.dtype}", "fp32, bf16, fp16", "cast q, k, v")

    if cu_seqlens is not None:
        _check_boundaries(cu_seqlens)


def _check_boundaries(cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor):
        given = f"cu_seqlens as a {type(cu_seqlens).__name__}"
        raise _sparse_refusal(given, "an int32 or int64 tensor", "use torch.tensor")
    integers = cu_seqlens.dtype in (torch.int32, torch.int64)
    if not integers or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        given = f"cu_seqlens {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        raise _sparse_refusal(given, "int32 or int64 [documents + 1]", "use .long(), 1-D")


def _sparse_refusal(given: str, allowed: str, remedy: str) -> ValueError:
    return ValueError(f"nsa_attention: given {given}; allowed: {allowed}; remedy: {remedy}")


def sparse_documents(
    cu_seqlens: Tensor | None, tokens: int, blocks: int, cfg: NSAConfig
) -> list[tuple[slice, slice]]:
    """(tokens, compressed blocks) of each document in a row of so many tokens and blocks."""
    ends = [0, tokens]
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()  # keep it on the host: on CUDA this waits for the device
    pairs = list(itertools.pairwise(ends))
    if ends[0] != 0 or ends[-1] != tokens or any(start >= end for start, end in pairs):
        raise _sparse_refusal(
            f"cu_seqlens={ends} for T={tokens}",
            "increasing from 0 to T",
            "cumulative document lengths with a leading 0 and no empty document",
        )

    counts = [cfg.compressed_blocks(end - start) for start, end in pairs]
    if sum(counts) != blocks:
        raise _sparse_refusal(
            f"{blocks} compressed blocks",
            f"{sum(counts)} for cu_seqlens={ends}",
            "compress every document by itself, blocks one after another",
        )
    first = itertools.accumulate(counts, initial=0)
    return [
        (slice(start, end), slice(block, block + count))
        for (start, end), block, count in zip(pairs, first, counts, strict=False)
    ]


def _attend_sparse_document(
    q: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    cfg: NSAConfig,
) -> list[tuple[Tensor, ...]]:
    """(o, o_cmp, o_slc, o_win, block_idx) of each chunk of the T queries; these are the last of the
    S tokens.
    """
    B, T, H, _ = q.shape
    S = k_slc.shape[1]
    size = min(256, max(16, CHUNK_LOGITS // (B * H * S)))

    parts = []
    for start in range(S - T, S, size):
        stop = min(start + size, S)
        queries = slice(start - (S - T), stop - (S - T))
        blocks = cfg.compressed_blocks(stop)
        low = max(0, start - cfg.window + 1)
        part = checkpoint(
            _attend_sparse_chunk,
            q[:, queries],
            (k_slc[:, :stop], v_slc[:, :stop]),
            (k_cmp[:, :blocks], v_cmp[:, :blocks]),
            (k_win[:, low:stop], v_win[:, low:stop]),
            gates[:, queries],
            start,
            low,
            cfg,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        parts.append(part)
    return parts


def _attend_sparse_chunk(
    q: Tensor,
    kv_slc: tuple[Tensor, Tensor],
    kv_cmp: tuple[Tensor, Tensor],
    kv_win: tuple[Tensor, Tensor],
    gates: Tensor,
    start: int,
    low: int,
    cfg: NSAConfig,
) -> tuple[Tensor, ...]:
    """The branches of the queries start, start + 1, ...; kv_win begins with the token `low`."""
    stop = start + q.shape[1]
    query_C1 = torch.arange(start, stop, device=q.device)[:, None]

    # The compressed branch: blocks that have ended.
    block_N = torch.arange(kv_cmp[0].shape[1], device=q.device)
    last_N = block_N * cfg.cmp_stride + cfg.cmp_block - 1
    o_cmp, p_BGMCN = _attend_visible(q, *kv_cmp, last_N <= query_C1)

    # The selected branch: the blocks that matter most, chosen without a gradient.
    idx_BGCn = select_blocks(p_BGMCN.detach().sum(2), query_C1, cfg)
    key = torch.arange(stop, device=q.device)
    visible = _chosen_keys(idx_BGCn, stop, cfg) & (key <= query_C1)
    o_slc, _ = _attend_visible(q, *kv_slc, visible[:, :, None])

    # The window.
    key = torch.arange(low, stop, device=q.device)
    visible = (key <= query_C1) & (key > query_C1 - cfg.window)
    o_win, _ = _attend_visible(q, *kv_win, visible)

    gate_cmp, gate_slc, gate_win = gates.float().unsqueeze(-2).unbind(-1)
    o = gate_cmp * o_cmp + gate_slc * o_slc + gate_win * o_win
    outputs = [x.to(q.dtype) for x in (o, o_cmp, o_slc, o_win)]
    return *outputs, idx_BGCn.transpose(1, 2).int()


def _attend_visible(
    q_BCHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """fp32 attention over the visible keys and its probabilities [B, G, M, C, S]; a row that sees
    no key is exactly 0.
    """
    G = k_BSGK.shape[2]
    q_BCGMK = q_BCHK.float().unflatten(2, (G, -1))
    logits = torch.einsum("bcgmk,bsgk->bgmcs", q_BCGMK, k_BSGK.float())
    logits = logits * q_BCHK.shape[-1] ** -0.5

    lowest = torch.finfo(torch.float32).min  # finite: a row of -inf would be NaN
    p_BGMCS = logits.masked_fill(~visible, lowest).softmax(-1).masked_fill(~visible, 0.0)
    o_BCGMK = torch.einsum("bgmcs,bsgk->bcgmk", p_BGMCS, v_BSGK.float())
    return o_BCGMK.flatten(2, 3), p_BGMCS


def _chosen_keys(idx_BGCn: Tensor, tokens: int, cfg: NSAConfig) -> Tensor:
    """Whether each of the first `tokens` tokens lies in a chosen block, [B, G, C, tokens]."""
    J = -(-tokens // cfg.sel_block)
    chosen = idx_BGCn.new_zeros((*idx_BGCn.shape[:-1], J + 1), dtype=torch.bool)
    chosen.scatter_(-1, torch.where(idx_BGCn < 0, J, idx_BGCn), True)  # unused places go to J
    block = torch.arange(tokens, device=idx_BGCn.device) // cfg.sel_block
    return chosen[..., block]


def select_blocks(p_N: Tensor, position: Tensor, cfg: NSAConfig) -> Tensor:
    """Indices [..., n] of the blocks that a position keeps, -1 = unused, from the probabilities
    [..., N] of the compressed blocks.

    Rank, importance and index become one int64: forced blocks first, then fp32 importance
    (non-negative floats order like their bits), then the lower index; so ties do not depend on the
    device. Future blocks rank -1.
    """
    per = cfg.sel_block // cfg.cmp_stride
    spread = cfg.cmp_block // cfg.cmp_stride
    J = max(cfg.sel_count, p_N.shape[-1] // per + 2)
    block_J = torch.arange(J, device=p_N.device)
    own = position // cfg.sel_block

    padded = F.pad(p_N, (spread - 1, J * per - p_N.shape[-1]))
    importance = 0
    for i in range(per + spread - 1):
        weight = min(i + 1, spread, per, per + spread - 1 - i)  # strides shared with the block
        importance = importance + padded[..., i::per][..., :J] * weight

    forced = (block_J < cfg.sel_init) | (block_J > own - cfg.sel_local)
    bits = importance.float().contiguous().view(torch.int32).long()
    key = (bits + (forced.long() << 31) << 31) + (J - 1 - block_J)
    best = torch.where(block_J <= own, key, -1).topk(cfg.sel_count).values
    return torch.where(best < 0, -1, J - 1 - (best & 0x7FFFFFFF))


class SparseCache:
    """What a layer of plain NSA keeps while decoding: everything that a later token may read."""

    def __init__(
        self,
        cfg: NSAConfig,
        batch: int,
        max_length: int,
        kv_heads: int,
        head_dim: int,
        device: Device,
        dtype: torch.dtype,
    ):
        def pair(tokens: int, heads: int, width: int, dtype: torch.dtype) -> LayerCache:
            return LayerCache((batch, tokens, heads, width), device, dtype)

        self.cfg = cfg
        self.selected = pair(max_length, kv_heads, head_dim, dtype)
        self.raw = pair(max_length, kv_heads, head_dim, dtype)  # before RoPE and compression
        self.rope = pair(max_length, 1, head_dim // 2, torch.float32)  # cos and sin
        blocks = cfg.compressed_blocks(max_length)
        self.compressed = pair(blocks, kv_heads, head_dim, dtype)
        self.window = None
        if cfg.kv == "separate":
            self.window = pair(max_length, kv_heads, head_dim, dtype)

    @property
    def length(self) -> int:
        """Positions stored so far."""
        return self.selected.length

    def attend(self, layer: NativeSparseAttention, inputs: Sequence[Tensor], rope: Rope) -> Tensor:
        """o [B, T, H, K] of T tokens that continue what is stored."""
        q, k, v, raw, v_raw, k_win, v_win, gates = inputs
        k_slc, v_slc = self.selected.append(k, v)
        if self.window is None:
            k_win, v_win = k_slc, v_slc
        else:
            k_win, v_win = self.window.append(k_win, v_win)

        cos, sin = (x.expand(len(q), *x.shape[1:]) for x in rope)
        self.rope.append(cos, sin)
        self.raw.append(raw, v_raw)
        k_cmp, v_cmp = self._compress(layer.sparse.compressor)

        parts = _attend_sparse_document(
            q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, self.cfg
        )
        return torch.cat([part[0] for part in parts], 1)

    def _compress(self, compressor: Compressor) -> tuple[Tensor, Tensor]:
        """Compress the blocks that ended since the last call; returns all of k_cmp and v_cmp."""
        old = self.compressed.length
        new = self.cfg.compressed_blocks(self.length)
        if new == old:
            return self.compressed.stored()

        first = old * self.cfg.cmp_stride
        stop = (new - 1) * self.cfg.cmp_stride + self.cfg.cmp_block
        raw, v_raw = (x[:, first:stop] for x in self.raw.stored())
        cos, sin = (x[:, first:stop] for x in self.rope.stored())

        def rotate_as(k_cmp: Tensor, centre: Tensor) -> Tensor:
            return rotate(k_cmp, cos[:, centre], sin[:, centre])

        layout = Layout.of(None, raw.shape[:2], self.cfg, raw.device)
        return self.compressed.append(*compressor(raw, v_raw, rotate_as, layout))


# ---- the loss in chunks of tokens


CHUNK_BYTES = 2**29  # fp32 logits [chunk, V] that exist at once


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    ignore_index: int = IGNORE,
    reduction: str = "mean",
    num_valid: Tensor | float | None = None,
    token_tile: int | None = None,
) -> Tensor:
    """Cross-entropy of the logits z = hidden @ weight^T, which exist for one chunk at a time.

        loss = sum over the valid n of (log sum_v exp z_nv - z_n,label) / num_valid

    One pass: the logits of a chunk become their own gradient, softmax(z) - onehot(label), and that
    the gradients of hidden [N, D] and weight [V, D], which are what waits for the backward. The
    products run in hidden's dtype; exponentials, and the gradient of the weight, in fp32.

    hidden [N, D], weight [V, D], labels [N] int64; `reduction` is "mean" or "sum". `num_valid`
    divides the mean, by default the number of labels that are not `ignore_index`; under data
    parallelism or accumulation it is the *global* number. `token_tile` is the size of a chunk.
    Raises ValueError for shapes that do not fit, IndexError on a CPU for a label outside [0, V).
    """
    if hidden_ND.ndim != 2 or hidden_ND.shape[1:] != weight_VD.shape[1:]:
        shapes = tuple(hidden_ND.shape), tuple(weight_VD.shape)
        raise ValueError(f"hidden and weight have shapes {shapes}: give [N, D] and [V, D]")
    if labels_N.shape != hidden_ND.shape[:1]:
        raise ValueError(
            f"labels have shape {tuple(labels_N.shape)}: give one for each of the "
            f"{len(hidden_ND)} rows of hidden"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: choose 'mean' or 'sum'")
    if labels_N.device.type == "cpu":
        check_labels(labels_N, len(weight_VD), ignore_index)

    divisor = 1.0
    if reduction == "mean":
        divisor = (labels_N != ignore_index).sum() if num_valid is None else num_valid
    divisor = torch.as_tensor(divisor, dtype=wide(hidden_ND.dtype), device=hidden_ND.device)
    chunk = token_tile or max(1, CHUNK_BYTES // (4 * len(weight_VD)))
    if not torch.is_grad_enabled():  # an autograd.Function would make the gradients all the same
        hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()
    return _ChunkedLoss.apply(
        hidden_ND, weight_VD, labels_N, divisor.clamp(min=1), ignore_index, chunk
    )


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss / divisor; its gradients are made with it and saved."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, divisor, ignore_index, chunk):
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        w_VD = weight_VD.to(hidden_ND.dtype)
        total = torch.zeros_like(divisor)
        dh_ND = torch.empty_like(hidden_ND) if need_hidden else None
        # fp32, because bf16 would lose what later chunks add
        dw_VD = torch.zeros_like(weight_VD, dtype=divisor.dtype) if need_weight else None

        for start in range(0, len(hidden_ND), chunk):
            h_CD = hidden_ND[start : start + chunk]
            labels_C = labels_N[start : start + chunk]
            valid_C = labels_C != ignore_index
            target_C1 = labels_C.where(valid_C, 0)[:, None]

            x_CV = (h_CD @ w_VD.T).to(divisor.dtype)
            x_CV -= x_CV.amax(1, keepdim=True)
            own_C1 = x_CV.gather(1, target_C1)
            # exp2, because torch.exp on a CPU is up to four times slower
            sum_C1 = x_CV.mul_(math.log2(math.e)).exp2_().sum(1, keepdim=True)
            total += (sum_C1.log() - own_C1)[:, 0].where(valid_C, 0).sum()

            x_CV *= valid_C[:, None] / (divisor * sum_C1)  # softmax / divisor, 0 if ignored
            x_CV.scatter_add_(1, target_C1, -(valid_C / divisor)[:, None])
            dz_CV = x_CV.to(h_CD.dtype)
            if need_hidden:
                torch.mm(dz_CV, w_VD, out=dh_ND[start : start + chunk])
            if need_weight:
                dw_VD += dz_CV.T @ h_CD
            del x_CV, dz_CV  # before the next chunk is made

        ctx.save_for_backward(dh_ND, dw_VD if dw_VD is None else dw_VD.to(weight_VD.dtype))
        return total / divisor

    @staticmethod
    def backward(ctx, grad):
        dh_ND, dw_VD = (None if x is None else x * grad.to(x.dtype) for x in ctx.saved_tensors)
        return dh_ND, dw_VD, None, None, None, None


def check_labels(labels_N: Tensor, V: int, ignore_index: int = IGNORE) -> None:
    """IndexError for the first label outside [0, V) that is not `ignore_index`."""
    bad_N = ((labels_N < 0) | (labels_N >= V)) & (labels_N != ignore_index)
    if bad_N.any():
        n = int(bad_N.nonzero()[0, 0])
        raise IndexError(
            f"label {int(labels_N[n])} at position {n}: allowed are 0 to {V - 1}, and "
            f"{ignore_index} to ignore the token"
        )


def logits(hidden_ND: Tensor, weight_VD: Tensor, product: Callable = F.linear) -> Tensor:
    """All logits [N, V]: for short inputs, and for the last position of a generation step."""
    return product(hidden_ND, weight_VD.to(hidden_ND.dtype))


def standard_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    num_valid: Tensor,
    product: Callable = F.linear,
) -> Tensor:
    """Sum over the valid positions of -log p(label) / num_valid, through all logits in fp32 (or
    fp64).
    """
    logits_NV = logits(hidden_ND, weight_VD, product).to(wide(hidden_ND.dtype))
    total = F.cross_entropy(logits_NV, labels_N.long(), ignore_index=IGNORE, reduction="sum")
    return total / num_valid


# ---- what has faster versions


def vary_lengths(q: Tensor):
    """Entered around attention whose lengths differ from call to call."""
    return nullcontext()


@dataclass(frozen=True)
class Ops:
    """The functions that a decoder computes with; the defaults are the plain ones of this file.

    A faster one takes the same arguments and returns the same numbers but for rounding.
    """

    attention: Callable = causal_attention  # (q_BTHK, k_BSGK, v_BSGK) -> o_BTHK
    packed: Callable = packed_attention  # (q_BTHK, k_BTGK, v_BTGK, documents) -> o_BTHK
    varying: Callable = vary_lengths  # (q) -> context manager
    linear: Callable = F.linear  # (x, weight, bias) -> y
    norm: Callable = rms_norm  # (x, weight, eps) -> y
    block_norm: Callable = block_norm  # the same for compressed keys
    norm_rotate: Callable = norm_rotate  # (x_BTHK, weight_K, eps, rope) -> y
    rotate: Callable = rotate  # (x_BTHK, cos, sin) -> y
    swiglu: Callable = swiglu  # (gate, up) -> y
    sparse: Callable = plain_nsa_attention  # (q, ..., gates, cfg, cu_seqlens) -> o_BTHK
    sparse_cache: Callable = SparseCache  # (cfg, B, max_length, G, K, device, dtype) -> cache
    # (hidden_ND, weight_VD, labels_N, num_valid) -> scalar; None: in chunks if the logits are large
    loss: Callable | None = None


# ---- decoder


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the unit of checkpointing, compiling and
    sharding.
    """

    def __init__(self, config: ModelConfig, ops: Ops):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, ops.norm)
        self.attention = config.attention.layer(config, ops)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, ops.norm)
        self.mlp = MLP(config, ops)

    def forward(self, x_BTD: Tensor, rope: Rope, rows=None, cache=None) -> Tensor:
        """`rows` and `cache` as in `Attention.forward`."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, rows, cache)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class LMHead(nn.Module):
    """Holds the output weight [V, D] and applies functions to it inside its own forward, in which a
    sharded weight is whole.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, hidden_ND: Tensor, function: Callable, *args):
        """function(hidden_ND, weight_VD, *args): a tensor or a pytree of tensors."""
        return function(hidden_ND, self.weight, *args)


class Decoder(nn.Module):
    """The model: takes token ids, and returns logits, or the mean loss if labels are given.

    Built on the meta device it allocates nothing. Materialise it with `to_empty(device=...)`,
    `tie_weights()` and `init_weights(seed)`. The latter seeds each parameter by its name, so values
    depend neither on the order of construction nor on the number of processes.
    """

    def __init__(self, config: ModelConfig, ops: Ops | None = None, seed: int = 0):
        super().__init__()
        ops = ops or Ops()
        self.config = config
        self.ops = ops
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(Block(config, ops) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, ops.norm)
        self.lm_head = LMHead(config)
        self.rotary = RotaryCache(config)
        self.validate = False  # check labels even if that costs a host synchronisation

        self.tie_weights()
        if not self.embed.weight.is_meta:
            self.init_weights(seed)

    # ---- what it computes

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        positions: Tensor | None = None,
        doc_ids: Tensor | OnHost | None = None,
        cache: KVCache | None = None,
        num_valid: Tensor | float | None = None,
        head: Callable | None = None,
        rows=None,
    ) -> Tensor:
        """Logits [B, T, V] in the compute dtype, or with labels the scalar loss in fp32.

        labels_BT   the target of each position (shifted by the loader), -100 for no target
        positions   [B, T] or [1, T]; by default they count from 0 in each document
        doc_ids     [B, T]; a change of id within a row starts a new document, and attention does
                    not cross it. Best kept on the host, under FSDP2 as OnHost(doc_ids)
        cache       decoding: the tokens continue what the cache holds
        num_valid   divisor of the summed loss, by default the number of labels that are not -100.
                    A training step over several ranks and micro-batches passes the global count, so
                    that the loss is one mean and not a mean of means.
        head        what to compute instead: (hidden_ND, weight_VD, labels_N) -> tensors, such as
                    figures of each token; without labels, (hidden_ND, weight_VD) -> tensors
        rows        instead of doc_ids, and with positions: an object that says which tokens see
                    each other, with attend(layer, inputs, rope)
        """
        hidden_BTD = self.hidden(tokens_BT, positions, doc_ids, cache, rows)
        hidden_ND = hidden_BTD.flatten(0, 1)
        shape = hidden_BTD.shape[:2]
        if labels_BT is None and head is not None:
            return self.lm_head(hidden_ND, head)
        if labels_BT is None:
            return self.lm_head(hidden_ND, logits).unflatten(0, shape)

        if labels_BT.shape != shape:
            raise ValueError(
                f"labels are {tuple(labels_BT.shape)} and tokens {tuple(shape)}: "
                "give one target per position (labels[:, t] is the target of position t)"
            )
        if self.validate:
            check_labels(labels_BT.flatten(), self.config.vocab_size)
        if head is not None:
            return self.lm_head(hidden_ND, head, labels_BT.flatten())
        if num_valid is None:
            num_valid = (labels_BT != IGNORE).sum().clamp(min=1)
        function = self.loss_function(*tokens_BT.shape)
        return self.lm_head(hidden_ND, function, labels_BT.flatten(), num_valid)

    def hidden(
        self,
        tokens_BT: Tensor,
        positions: Tensor | None = None,
        doc_ids: Tensor | OnHost | None = None,
        cache: KVCache | None = None,
        rows=None,
    ) -> Tensor:
        """Normalised hidden states [B, T, D]; the arguments are those of `forward`.

        tokens_BT may also be embeddings [B, T, D], such as those of `apply_embedding`.
        """
        shape = tokens_BT.shape[:2]
        _check_tokens(tokens_BT, positions, doc_ids, cache, rows)
        cu_seqlens = None
        if doc_ids is not None:
            cu_seqlens = document_boundaries(doc_ids)
        rope = self._rope(tokens_BT, positions, cu_seqlens, cache)
        if cache is None and rows is None:
            rows = self.layers[0].attention.rows(cu_seqlens, shape, tokens_BT.device)

        x_BTD = tokens_BT
        if not tokens_BT.is_floating_point():
            x_BTD = self.embed(tokens_BT)
        x_BTD = x_BTD.to(self.config.dtype)
        for index, layer in enumerate(self.layers):
            layer_cache = cache.layers[index] if cache else None
            x_BTD = layer(x_BTD, rope, rows, layer_cache)
        return self.norm(x_BTD)

    def apply_embedding(self, function: Callable, *args) -> Tensor:
        """function(embed, *args) in the compute dtype; inside, the weight of `embed` is whole."""
        return function(self.embed, *args).to(self.config.dtype)

    def apply_head(self, hidden_ND: Tensor, function: Callable, *args):
        """function(hidden_ND, weight_VD, *args) with the whole output weight, for callers that
        have hidden states: a tensor or a pytree of tensors.
        """
        return self.lm_head(hidden_ND, function, *args)

    def _rope(
        self,
        tokens_BT: Tensor,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: KVCache | None,
    ) -> Rope:
        """cos and sin of the tokens."""
        if positions is None and cu_seqlens is not None:
            positions = document_positions(cu_seqlens, tokens_BT.shape[:2])
        if positions is not None:
            return self.rotary.at(positions.to(tokens_BT.device, non_blocking=True))
        if cache is not None:
            return cache.rope(self.rotary, tokens_BT.shape[1], tokens_BT.device)
        return self.rotary(tokens_BT.shape[1], tokens_BT.device)

    def new_cache(
        self, batch_size: int, max_length: int, dtype: torch.dtype | None = None
    ) -> KVCache:
        """A cache for so many rows of at most so many tokens, by default in the compute dtype."""
        if batch_size < 1 or max_length < 1:
            raise ValueError(
                f"batch_size={batch_size}, max_length={max_length}: both must be at least 1"
            )
        shape = (batch_size, max_length, self.config.num_kv_heads, self.config.head_dim)
        device = self.embed.weight.device
        make = [layer.attention.cache for layer in self.layers]
        return KVCache([cache(shape, device, dtype or self.config.dtype) for cache in make])

    # ---- which loss

    def loss_function(self, batch: int, seq: int) -> Callable:
        """What `lm_head` applies: (hidden_ND, weight_VD, labels_N, num_valid) -> scalar."""
        if self.ops.loss is not None:
            return self.ops.loss
        if self.config.should_chunk(batch, seq):
            return functools.partial(_chunked_mean, self.config.loss_chunk_size or None)
        return standard_cross_entropy

    # ---- parameters

    def num_params(self) -> int:
        """Parameters, a tied embedding counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's if the configuration says so; call it again after
        `to_empty`.
        """
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed.weight

    @torch.no_grad()
    def init_weights(self, seed: int = 0, part: str = "") -> None:
        """Norms 1; matrices normal(0, init_std), the two projections into the residual stream by a
        further 1/sqrt(2L).

        `part` of a name fills only the parameters whose names contain it. Sharded parameters
        (DTensor) work too: every rank draws the same whole tensor and keeps its shard.
        """
        for name, parameter in self.named_parameters():
            if part not in name:
                continue
            if parameter.is_meta:
                raise ValueError(
                    f"parameter {name} is on the meta device: call to_empty(device=...) and "
                    "tie_weights() first"
                )
            whole = self._initial_value(name, parameter.shape, parameter.device, seed)
            parameter.copy_(_shard_like(parameter, whole))

    def _initial_value(self, name: str, shape: torch.Size, device, seed: int) -> Tensor:
        # The gates of NSA start at 1/2 and its compression as the mean.
        if name.endswith(("bias", "_w2")):
            return torch.zeros(shape, device=device)
        if len(shape) == 1:
            return torch.ones(shape, device=device)

        std = self.config.init_std
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * self.config.num_layers)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        number = int.from_bytes(digest[:8], "little") >> 1
        generator = torch.Generator(device).manual_seed(number)
        return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)


def _chunked_mean(
    token_tile: int | None,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    num_valid: Tensor,
) -> Tensor:
    return linear_cross_entropy(
        hidden_ND, weight_VD, labels_N, num_valid=num_valid, token_tile=token_tile
    )


def _shard_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, if the parameter is sharded."""
    if not hasattr(parameter, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _check_tokens(
    tokens_BT: Tensor,
    positions: Tensor | None,
    doc_ids: Tensor | OnHost | None,
    cache: KVCache | None,
    rows,
) -> None:
    """ValueError for shapes that do not fit each other."""
    shape = tuple(tokens_BT.shape)
    if tokens_BT.is_floating_point():  # embeddings
        shape = shape[:-1]
    if len(shape) != 2 or shape[1] == 0:
        raise ValueError(f"tokens have shape {shape}: give [batch, tokens] with at least one token")
    if cache is not None and doc_ids is not None:
        raise ValueError(
            "cache and doc_ids together: decode one document per row, or drop the cache"
        )
    if rows is not None and (cache is not None or doc_ids is not None or positions is None):
        raise ValueError(
            "rows with a cache or doc_ids, or without positions: rows say by themselves which "
            "tokens see each other; give them with positions, and drop cache and doc_ids"
        )
    if doc_ids is not None and tuple(doc_ids.shape) != shape:
        raise ValueError(
            f"doc_ids are {tuple(doc_ids.shape)} and tokens {shape}: give one id per token"
        )
    if positions is not None and tuple(positions.shape) not in (shape, (1, shape[1])):
        raise ValueError(
            f"positions are {tuple(positions.shape)} and tokens {shape}: give [B, T] or [1, T]"
        )
