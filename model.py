"""A decoder in one file: configuration, layers, attention, loss and KV cache. It needs only torch.

Copied into an empty folder, this file trains and generates:

    from model import Decoder, ModelConfig
    decoder = Decoder(ModelConfig.preset("tiny"))
    loss = decoder(tokens_BT, labels_BT)       # labels[:, t] is already the target of position t
    loss.backward()

The geometry is Qwen3's: pre-norm, grouped-query attention, RMSNorm on queries and keys, SwiGLU,
rotary positions. The decoder comes first, then the two parts for long rows: the loss over tiles of
the vocabulary, Native Sparse Attention, and indexed attention. ATTENTIONS, at the end, lists the
kinds of attention.

Parallelism, checkpointing and compilation are applied from outside, and no forward communicates. A
kind of attention only answers their questions, such as which exchanges it allows.
Some functions have faster twins. Native Sparse Attention runs in nsa/ if that package can be
imported. kernels="triton" takes the Triton kernels of fused/ and nsa/triton/ and is refused if they
cannot run. On CUDA, kernels="auto" takes those of fused/elementwise.py if Triton is installed.

Letters: B rows of a batch, T tokens, N = B*T, S cached tokens, H query heads, G key/value heads,
K head dimension, D model width, F feed-forward width, V vocabulary. Activations have the dtype
`compute_dtype`; parameters keep their own, which is fp32 for master weights.
"""

import contextlib
import copy
import functools
import hashlib
import importlib.util
import inspect
import itertools
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # the label of a position without a target
GIB = 2**30
FP32 = 4  # bytes

Rope = tuple[Tensor, Tensor]  # cos and sin [B or 1, T, 1, K/2] of the tokens
Device = torch.device | str

# From this vocabulary on, the loss in tiles takes no more time than the standard one
# (benchmarks/vocab_loss.py).
TILES_WIN = 8192


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

# The choices of attention_type are the names in ATTENTIONS.
CHOICES = {
    "rope_scaling": ("none", "linear", "yarn"),
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
    "logits_threshold_gib": "GiB",
}


@dataclass(frozen=True)
class NSAConfig:
    """Sizes of Native Sparse Attention (arXiv 2502.11089), in tokens and blocks; in brackets the
    paper's letters.
    """

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

    def compressed_blocks(self, tokens: int | Tensor) -> int | Tensor:
        """Number of compressed blocks of a document: those that end inside its `tokens` tokens."""
        blocks = (tokens - self.cmp_block) // self.cmp_stride + 1
        if isinstance(blocks, Tensor):
            return blocks.clamp(min=0)
        return max(0, blocks)


@dataclass(frozen=True)
class IndexerConfig:
    """Sizes of indexed attention: what its indexer is, and how much a query reads."""

    budget: int = 2048  # tokens of the blocks that a query reads, besides its own unfinished block
    r: int = 4  # tokens of a block, which are read together
    heads: int = 4  # query heads of the indexer, which has one key head
    head_dim: int = 128  # of the indexer's heads

    def __post_init__(self):
        for name, value in asdict(self).items():
            if type(value) is not int or value < 1:
                raise self._refusal([name], f"{name} an integer >= 1", f"change {name}")
        if self.budget < self.r:
            raise self._refusal(
                ["budget", "r"], "budget >= r, which is one block", "raise budget or lower r"
            )
        if self.budget % self.r:
            raise self._refusal(["budget", "r"], "budget a multiple of r", "change one of them")
        if self.head_dim % 2:
            raise self._refusal(["head_dim"], "an even head_dim", "change head_dim")

    def _refusal(self, names: list[str], allowed: str, remedy: str) -> ValueError:
        given = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return ValueError(f"IndexerConfig: given {given}; allowed: {allowed}; remedy: {remedy}")

    @property
    def most_blocks(self) -> int:
        """Blocks that a query reads at most, besides its own."""
        return self.budget // self.r


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
    rope_theta: float = 1e6  # ABF (adjusted base frequency) is a larger theta
    rope_scaling: str = "none"
    rope_factor: float = 1.0  # context extension of linear and yarn scaling
    rope_original_context: int = 32_768  # yarn: the context that the weights were trained at
    attention_type: str = "standard"  # a name in ATTENTIONS
    nsa: NSAConfig = NSAConfig()  # read if attention_type is "nsa"
    indexer: IndexerConfig = IndexerConfig()  # read if attention_type is "indexed"
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
        for name, allowed in {"attention_type": ATTENTIONS, **CHOICES}.items():
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
                "above 1 with linear or yarn, and no factor with none"
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

    def layer_params(self) -> int:
        """Parameters of one block: attention, feed-forward and the two norms before them."""
        attention = attention_kind(self).params(self)
        feed_forward = 3 * self.hidden_size * self.ffn_size
        norms = 2 * self.hidden_size
        return attention + feed_forward + norms

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

    def loss_path(self, batch: int, seq: int, low_precision: bool = False) -> str:
        """Which loss runs, "standard", "chunked" or "one_pass".

        "auto" takes tiles also for vocabularies at which they were measured to be no slower. It
        takes them in one pass, which is faster, unless that would add gradients of the head in
        `low_precision`. Raises ValueError if one pass was asked for and would do so.
        """
        N = batch * seq
        sizes = self.vocab_size, self.hidden_size, self.dtype.itemsize
        adds_in_low_precision = low_precision and N > block_tokens(N, *sizes)

        if self.loss == "one_pass" and adds_in_low_precision:
            raise ValueError(SEVERAL_BLOCKS.format(N, block_tokens(N, *sizes)))
        if self.loss != "auto":
            return self.loss
        if self.vocab_size < TILES_WIN and not self.should_chunk(batch, seq):
            return "standard"
        return "chunked" if adds_in_low_precision else "one_pass"


def _is_number(value) -> bool:
    return isinstance(value, numbers.Real)


# ---- platform


class Platform:
    """What the machine decides. Code that depends on the machine asks `platform()` for it.

    A real run uses this class as it is. The memory planner runs the same code on tensors without
    values, so it passes a platform of its own to `running_on`, which answers for the machine that
    it predicts.
    """

    def device(self, x: Tensor) -> torch.device:
        """The device on which x is computed."""
        return x.device

    def tiles(self, tiles: Sequence) -> Sequence:
        """The tiles that a loop visits, of those that do the same work: all of them."""
        return tiles

    def parts(self, parts: list, size: Callable) -> list:
        """The parts that run, of independent ones with different size(part): all of them."""
        return parts

    def last(self, parts: list) -> list:
        """The parts that run, of those that grow and keep their buffers: all of them."""
        return parts

    def tile_body(self, function: Callable, kernels: str) -> Callable:
        """What runs an elementwise tile function of the loss."""
        return fastest_body(function, kernels)

    def mixed_product(self, out: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
        """out = beta * out + a @ b, where `out` has another dtype than a and b.

        On CUDA the product of low-precision numbers is written in fp32. Elsewhere it is rounded to
        their dtype before it is added.
        """
        if out.is_cuda and out.dtype == torch.float32 and a.itemsize < FP32:
            torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, out=out)
        elif beta == 0:
            out.copy_(a @ b)
        else:
            out.add_(a @ b)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """PyTorch's RMSNorm, which is one fused kernel on CUDA."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def fused(self, x: Tensor, kernels: str) -> ModuleType | None:
        """fused/elementwise.py if its Triton kernels compute with x; None for PyTorch's operators.

        A compiled caller gets None, because the compiler fuses these operators itself.
        """
        if self.device(x).type != "cuda" or kernels not in ("auto", "triton"):
            return None
        if torch.compiler.is_compiling() or x.dtype == torch.float64:
            return None
        return elementwise_twins() if self.capability(x.device) >= (8, 0) else None

    def attention(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, **options) -> Tensor:
        """Softmax attention by a memory-linear kernel; `options` are those of PyTorch's SDPA.

        On CUDA, PyTorch itself would take a kernel that holds [T, T] for grouped heads in fp32 or
        under a mask. ValueError if no other kernel takes these heads. Only fp64, which is for
        comparisons, has no other.
        """
        on_cuda = self.device(q_BHTK).type == "cuda"
        masked = options.get("attn_mask") is not None
        by_flash = self.takes_flash(q_BHTK) and not masked
        if on_cuda and not by_flash and q_BHTK.dtype != torch.float64:
            return efficient_attention(q_BHTK, k_BGSK, v_BGSK, **options)
        return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, **options)

    def takes_flash(self, q: Tensor) -> bool:
        """Whether FlashAttention-2 computes these heads [..., K]: on CUDA from Ampere on, in 16
        bits, of at most 192 elements, in a multiple of 8. (On some cards its backward is limited
        to 192.)
        """
        device = self.device(q)
        if device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
            return False
        K = q.shape[-1]
        return K % 8 == 0 and K <= 192 and self.capability(device) >= (8, 0)

    def prefers_cudnn(self, q: Tensor) -> bool:
        """Whether PyTorch's first choice for these heads [..., K] is cuDNN, which builds a plan for
        each new length: those that FlashAttention takes too, on Hopper and Blackwell. Its backward
        does not repeat its bits.
        """
        if torch.are_deterministic_algorithms_enabled():
            return False
        if not self.takes_flash(q) or q.shape[-1] > 128:
            return False
        major, _ = self.capability(self.device(q))
        return major in (9, 10)

    def capability(self, device: torch.device) -> tuple[int, int]:
        """The compute capability of a CUDA device."""
        card = torch.cuda.get_device_properties(device)  # a constant to torch.compile
        return card.major, card.minor

    def lengths_vary(self, x: Tensor) -> contextlib.AbstractContextManager:
        """Entered around attention whose lengths differ from call to call.

        On Hopper PyTorch prefers cuDNN, which builds a plan for each new length: about 0.4 s
        (github.com/sgl-project/sglang/issues/4650). The other kernels take all lengths.
        """
        if self.device(x).type != "cuda":
            return contextlib.nullcontext()
        any_length = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        if x.dtype == torch.float64:
            any_length.append(SDPBackend.MATH)
        return sdpa_kernel(any_length)

    def host_memory(self) -> contextlib.AbstractContextManager:
        """Entered around code whose new tensors are in host memory, not on the device."""
        return contextlib.nullcontext()

    def from_host(self, x: Tensor, device: torch.device) -> Tensor:
        """A tensor of host memory, copied to the device; on a CPU the tensor itself."""
        return x.to(device, non_blocking=True)


@functools.cache
def elementwise_twins() -> ModuleType | None:
    """fused/elementwise.py, or None if it or Triton is absent."""
    if importlib.util.find_spec("fused") is None or importlib.util.find_spec("triton") is None:
        return None
    from fused import elementwise

    return elementwise


def efficient_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    enable_gqa: bool = False,
    **options,
) -> Tensor:
    """PyTorch's memory-efficient CUDA kernel, which takes fp32 but no grouped heads: keys and
    values are repeated for each query head.

    ValueError if the heads are not a multiple of 16 bytes.
    """
    check_efficient(q_BHTK)
    if enable_gqa:
        k_BGSK = for_each_query_head(k_BGSK, q_BHTK.shape[1])
        v_BGSK = for_each_query_head(v_BGSK, q_BHTK.shape[1])
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, **options)


def check_efficient(q: Tensor) -> None:
    """ValueError for heads [..., K] that PyTorch's memory-efficient CUDA kernel does not take."""
    K = q.shape[-1]
    multiple = 16 // q.element_size()
    if K % multiple:
        raise ValueError(
            f"head_dim={K} in {q.dtype} on CUDA: its attention kernels take a multiple of "
            f"{multiple}, and no other one is linear in the length: choose such a head_dim"
        )


def for_each_query_head(x_BGSK: Tensor, heads: int) -> Tensor:
    """Keys or values [B, H, S, K] for a kernel that takes no grouped heads."""
    return x_BGSK.repeat_interleave(heads // x_BGSK.shape[1], dim=1)


_platforms = [Platform()]


def platform() -> Platform:
    """The platform that code runs on now."""
    return _platforms[-1]


@contextlib.contextmanager
def running_on(other: Platform) -> Iterator[None]:
    """Code inside the `with` block runs on the `other` platform."""
    _platforms.append(other)
    try:
        yield
    finally:
        _platforms.pop()


# ---- rotary positions


def rope_frequencies(config: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """Inverse frequencies [K/2] in fp32, and the factor on cos and sin.

    none    1 / theta^(2i/K)
    linear  the same divided by rope_factor (position interpolation, Chen et al. 2023)
    yarn    a ramp between the two over the dimensions that turn between 1 and 32 times within the
            original context; cos and sin times 0.1 ln(rope_factor) + 1 (Peng et al. 2023)

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


def rotate(x_BTHK: Tensor, cos_BT1k: Tensor, sin_BT1k: Tensor, kernels: str = "torch") -> Tensor:
    """Rotate the pairs (x_k, x_{k+K/2}) of each head by its token's angles."""
    fused = platform().fused(x_BTHK, kernels)
    if fused is not None:
        return fused.rotate(x_BTHK, cos_BT1k, sin_BT1k)
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
        return cls(lengths, pinned_copy(cu_seqlens.int(), device))


def pinned_copy(x: Tensor, device: Device) -> Tensor:
    """A tensor of the host, on the device: to CUDA through pinned memory, so that the host does not
    wait.
    """
    if torch.device(device).type != "cuda":
        return x.to(device)
    return platform().from_host(x.pin_memory(), device)


# ---- layers


class Linear(nn.Linear):
    """y = x W^T, plus b if `bias`.

    Weights are cast to the dtype of x on use, so that fp32 master weights serve bf16 activations.
    """

    def __init__(self, fan_in: int, fan_out: int, bias: bool = False):
        super().__init__(fan_in, fan_out, bias=bias)

    def reset_parameters(self):
        # Decoder.init_weights fills every parameter by name; drawing values here too would double
        # the start-up time.
        pass

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, weight, bias)


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


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension, in fp32 (Zhang, Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if platform().device(x).type == "cuda":
            return platform().rms_norm(x, self.weight.to(x.dtype), self.eps)
        return _RMSNorm.apply(x, self.weight, self.eps)


def norm_and_rotate(x_BTHK: Tensor, norm: RMSNorm, rope: Rope, kernels: str) -> Tensor:
    """The normed heads, rotated by their tokens' angles."""
    fused = platform().fused(x_BTHK, kernels)
    if fused is not None:
        return fused.norm_rotate(x_BTHK, norm.weight, *rope, norm.eps)
    return rotate(norm(x_BTHK), *rope)


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


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.ffn_size)
        self.up_proj = Linear(config.hidden_size, config.ffn_size)
        self.down_proj = Linear(config.ffn_size, config.hidden_size)
        self.kernels = config.kernels

    def forward(self, x_BTD: Tensor) -> Tensor:
        fused = platform().fused(x_BTD, self.kernels)
        swiglu = _SwiGLU.apply if fused is None else fused.swiglu
        return self.down_proj(swiglu(self.gate_proj(x_BTD), self.up_proj(x_BTD)))


# ---- attention


def sdpa(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, causal: bool, mask_TS: Tensor | None = None
) -> Tensor:
    """Softmax attention in the [B, T, H, K] layout, by a kernel whose memory is linear in T."""
    o_BHTK = platform().attention(
        q_BTHK.transpose(1, 2),
        k_BSGK.transpose(1, 2),
        v_BSGK.transpose(1, 2),
        attn_mask=mask_TS,
        is_causal=causal,
        enable_gqa=q_BTHK.shape[2] != k_BSGK.shape[2],
    )
    return o_BHTK.transpose(1, 2)


def standard_attention(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, query_chunk: int = 256
) -> Tensor:
    """Full causal attention of the last T of S positions; S > T if a cache holds earlier ones.

    Without FlashAttention it then runs over chunks of queries, so that a mask has at most
    [query_chunk, S] elements.
    """
    T, S = q_BTHK.shape[1], k_BSGK.shape[1]
    if T == S:
        return sdpa(q_BTHK, k_BSGK, v_BSGK, causal=True)
    if platform().takes_flash(q_BTHK):
        return flash_attention(q_BTHK, k_BSGK, v_BSGK)
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


def flash_attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
    """Full causal attention of the last T of S positions, by the operator that PyTorch's
    `causal_lower_right` calls; it takes grouped heads and all lengths.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    o_BHTK, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)
    return o_BHTK.transpose(1, 2)


def packed_flash_attention(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, documents: Documents
) -> Tensor:
    """Full causal attention inside each of the documents, in one call."""
    from torch.nn.attention.varlen import varlen_attn

    options = {}
    # From torch 2.12 on, grouped heads must be announced; 2.11 takes them as they are.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    return varlen_attn(
        q_NHK,
        k_NGK,
        v_NGK,
        cu_seq_q=documents.bounds,
        cu_seq_k=documents.bounds,
        max_q=max(documents.lengths),
        max_k=max(documents.lengths),
        window_size=(-1, 0),  # causal
        **options,
    )


# ---- attention over a part of the keys

# PyTorch's public attention returns no log-sum-exp. These operators do; it runs on them itself.


def attention_kernel(q_BTHK: Tensor) -> str:
    """The kernel of these queries whatever their number: "cpu", "flash" (FlashAttention-2) or
    "efficient" (PyTorch's memory-efficient one). ValueError for heads on CUDA that have none, as
    those in fp64.
    """
    if platform().device(q_BTHK).type != "cuda":
        return "cpu"
    if platform().takes_flash(q_BTHK):
        return "flash"
    if q_BTHK.dtype == torch.float64:
        raise ValueError(
            "attention in parts has no float64 kernel on CUDA: choose float32, or a CPU"
        )
    check_efficient(q_BTHK)
    return "efficient"


def attention_part(
    kernel: str, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, K], log-sum-exp [B, H, T] in fp32) of the queries over these keys, with memory
    linear in T and S.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    aten = torch.ops.aten
    if kernel == "cudnn":
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=causal
        )
        lse = lse.view(lse.shape[:3])  # [B, H, T, 1]
    elif kernel == "flash":
        o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
    elif kernel == "efficient":
        k, v = (for_each_query_head(x, q.shape[1]) for x in (k, v))
        o, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=causal
        )
        lse = lse[:, :, : q.shape[2]]  # its length is a multiple of 32
    else:
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
    return o.transpose(1, 2), lse


def merge_parts(
    o_BTHK: Tensor, lse_BHT: Tensor, other_BTHK: Tensor, other_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """(o, log-sum-exp) over all keys, from those over two parts of them.

    The outputs are averaged with their shares of the sum of exponentials.
    """
    total_BHT = torch.logaddexp(lse_BHT, other_BHT)
    share_BTH1 = (other_BHT - total_BHT).exp().transpose(1, 2)[..., None]
    dtype = wide(o_BTHK.dtype)
    merged_BTHK = torch.lerp(o_BTHK.to(dtype), other_BTHK.to(dtype), share_BTH1)
    return merged_BTHK.to(o_BTHK.dtype), total_BHT


def attention_part_backward(
    kernel: str,
    grad_BTHK: Tensor,
    q_BTHK: Tensor,
    o_BTHK: Tensor,
    lse_BHT: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from these keys, for queries whose output over all their keys is (o, lse).

    With these two, a probability exp(s - lse) and its gradient are those over all keys, so that the
    parts add up to the gradients.
    """
    grad, q, k, v, o = (x.transpose(1, 2) for x in (grad_BTHK, q_BTHK, k_BSGK, v_BSGK, o_BTHK))
    if kernel == "cudnn":
        grads = _backward_cudnn(grad, q, k, v, o, lse_BHT, causal)
    elif kernel == "flash":
        grads = _backward_flash(grad, q, k, v, o, lse_BHT, causal)
    elif kernel == "efficient":
        grads = _backward_efficient(grad, q, k, v, o, lse_BHT, causal)
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, o, lse_BHT, 0.0, causal
        )
    return tuple(x.transpose(1, 2) for x in grads)


# The CUDA operators also take the state of the random numbers of dropout, of which there is none.


def _backward_cudnn(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        q,
        k,
        v,
        o,
        lse.contiguous()[..., None],
        philox_seed=state,
        philox_offset=state,
        attn_bias=None,
        cum_seq_q=None,
        cum_seq_k=None,
        max_q=q.shape[2],
        max_k=k.shape[2],
        dropout_p=0.0,
        is_causal=causal,
    )


def _backward_flash(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        o,
        lse.contiguous(),
        cum_seq_q=None,
        cum_seq_k=None,
        max_q=q.shape[2],
        max_k=k.shape[2],
        dropout_p=0.0,
        is_causal=causal,
        philox_seed=seed,
        philox_offset=offset,
    )


def _backward_efficient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    H, T = q.shape[1:3]
    G = k.shape[1]
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad,
        q,
        for_each_query_head(k, H),
        for_each_query_head(v, H),
        attn_bias=None,
        out=o,
        logsumexp=F.pad(lse, (0, -T % 32), value=math.inf).contiguous(),
        philox_seed=state,
        philox_offset=state,
        dropout_p=0.0,
        grad_input_mask=[True, True, True, False],
        is_causal=causal,
    )
    dk, dv = (x.unflatten(1, (G, H // G)).sum(dim=2) for x in (dk, dv))
    return dq, dk, dv


# ---- prompts that several responses share


# Not a tuple and not frozen, as Documents.
@dataclass(eq=False)
class SharedPrompts:
    """What the B*T flattened tokens hold: each prompt once, with all responses to it behind it,

        prompt | response | ... | response | next prompt | response | ...

    A response attends to its prompt and causally to itself, and its positions continue the
    prompt's. So it is computed as if it stood behind its prompt in a row of its own.

    lengths  for each prompt, its number of tokens and those of its responses: at least one
             response, and at least one token of each. Padding at the end of a row belongs to its
             last response, whose own tokens do not see it.
    """

    lengths: Sequence[Sequence[int]]

    def __post_init__(self):
        if not self.lengths:
            raise ValueError("shared prompts without a prompt: give the lengths of at least one")
        for index, (prompt, *responses) in enumerate(self.lengths):
            if not responses:
                raise ValueError(
                    f"prompt {index} of {prompt} tokens has no response: give at least one, or "
                    "leave the prompt out"
                )
            if min(prompt, *responses) < 1:
                raise ValueError(
                    f"prompt {index} of {prompt} tokens with responses of {responses}: each needs "
                    "at least one token: leave out what is empty"
                )

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and responses."""
        return sum(sum(group) for group in self.lengths)

    def positions(self, shape: tuple[int, int]) -> Tensor:
        """[B, T] on the host: each response continues its prompt."""
        parts = []
        for prompt, *responses in self.lengths:
            parts.append(torch.arange(prompt))
            parts += [torch.arange(prompt, prompt + response) for response in responses]
        return torch.cat(parts).view(shape)

    def scored(self) -> tuple[Tensor, Tensor]:
        """For every token of the responses, in order: the flattened position whose logits score it,
        and its own. Both are on the host.

        The logits of a prompt's last token score the first token of each of its responses.
        """
        scoring = []
        own = []
        for prompt, *responses in self.spans():
            last = torch.tensor([prompt.stop - 1])
            for response in responses:
                tokens = torch.arange(response.start, response.stop)
                scoring += [last, tokens[:-1]]
                own.append(tokens)
        return torch.cat(scoring), torch.cat(own)

    def spans(self) -> Iterator[list[slice]]:
        """For each prompt, where it and its responses are among the flattened tokens."""
        start = 0
        for group in self.lengths:
            ends = list(itertools.accumulate(group, initial=start))
            yield [slice(*pair) for pair in itertools.pairwise(ends)]
            start = ends[-1]


def shared_prompt_attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, prompts: SharedPrompts
) -> Tensor:
    """Full causal attention of every prompt and response, each response behind its prompt.

    A prompt's keys are read by all of its responses in one call. It saves nothing of the size of a
    prompt for each response.
    """
    flat = [x.flatten(0, 1)[None] for x in (q_BTHK, k_BTGK, v_BTGK)]
    return _SharedPromptAttention.apply(*flat, prompts).view_as(q_BTHK)


class _SharedPromptAttention(torch.autograd.Function):
    """All inputs are [1, N, heads, K]. Prompts and responses attend to themselves; then what the
    responses read of their prompt is merged into that.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, prompts: SharedPrompts) -> Tensor:
        kernel = attention_kernel(q)
        _, N, H, _ = q.shape
        o = torch.empty_like(q)
        lse = q.new_empty((1, H, N), dtype=wide(q.dtype))

        for spans in prompts.spans():
            prompt, *responses = spans
            for span in spans:
                parts = attention_part(kernel, q[:, span], k[:, span], v[:, span], causal=True)
                o[:, span], lse[:, :, span] = parts

            behind = slice(prompt.stop, responses[-1].stop)
            past, past_lse = attention_part(
                kernel, q[:, behind], k[:, prompt], v[:, prompt], causal=False
            )
            lengths = [span.stop - span.start for span in responses]
            pasts = zip(past.split(lengths, 1), past_lse.split(lengths, 2), strict=True)
            for span, part in zip(responses, pasts, strict=True):
                o[:, span], lse[:, :, span] = merge_parts(o[:, span], lse[:, :, span], *part)

        ctx.save_for_backward(q, k, v, o, lse)
        ctx.prompts = prompts
        ctx.kernel = kernel
        return o

    @staticmethod
    def backward(ctx, grad: Tensor):
        saved = ctx.saved_tensors
        grad = grad.contiguous()
        gradients = []
        for spans in ctx.prompts.spans():
            gradients += _gradients_of_group(ctx.kernel, grad, saved, spans)
        dq, dk, dv = (torch.cat(parts, dim=1) for parts in zip(*gradients, strict=True))
        return dq, dk, dv, None


def _gradients_of_group(
    kernel: str, grad: Tensor, saved: tuple[Tensor, ...], spans: list[slice]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(dq, dk, dv) of a prompt and of each of its responses."""
    q, k, v, o, lse = saved

    def gradients(queries: slice, keys: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        of_queries = (grad[:, queries], q[:, queries], o[:, queries], lse[:, :, queries])
        return attention_part_backward(kernel, *of_queries, k[:, keys], v[:, keys], causal)

    prompt, *responses = spans
    behind = slice(prompt.stop, responses[-1].stop)
    past_dq, past_dk, past_dv = gradients(behind, prompt, causal=False)
    own = [gradients(span, span, causal=True) for span in spans]

    (_, prompt_dk, prompt_dv), *of_responses = own
    prompt_dk += past_dk
    prompt_dv += past_dv
    shares = past_dq.split([span.stop - span.start for span in responses], dim=1)
    for (dq, _, _), share in zip(of_responses, shares, strict=True):
        dq += share
    return own


def attention_behind_prompts(
    q_B1HK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, k_CPGK: Tensor, v_CPGK: Tensor
) -> Tensor:
    """Attention of one token of each row over the row's own keys and those of its prompt. Each of C
    prompts belongs to B/C rows, which are next to each other.

    The query heads of a group, and for a prompt those of all its rows, are queries of one head. So
    all prompts take one call, and no kernel repeats keys.
    """
    B, _, H, K = q_B1HK.shape
    G = k_BSGK.shape[2]
    kernel = attention_kernel(q_B1HK)
    q_BQGK = q_B1HK.reshape(B, G, H // G, K).transpose(1, 2)
    o_BQGK, lse_BGQ = attention_part(kernel, q_BQGK, k_BSGK, v_BSGK, causal=False)

    q_CNGK = q_BQGK.unflatten(0, (len(k_CPGK), -1)).flatten(1, 2)
    past_CNGK, past_CGN = attention_part(kernel, q_CNGK, k_CPGK, v_CPGK, causal=False)
    past_BQGK = past_CNGK.reshape(q_BQGK.shape)
    past_BGQ = past_CGN.unflatten(2, (-1, H // G)).transpose(1, 2).flatten(0, 1)
    o_BQGK, _ = merge_parts(o_BQGK, lse_BGQ, past_BQGK, past_BGQ)
    return o_BQGK.transpose(1, 2).reshape(q_B1HK.shape)


class Clock:
    """Where decoding is, in tensors on the device: so a step of one token has the same shapes for
    all tokens, and a CUDA graph can repeat it.

    position      [1] int64, of the token that is decoded
    lengths       [B] int32, tokens of each row with it
    query_bounds  [B + 1] int32, 0, 1, ..., B
    key_bounds    [B + 1] int32, 0, S, ..., B * S, with S = `capacity`
    """

    def __init__(self, position: int, rows: int, capacity: int, device: Device):
        self.capacity = capacity
        self.position = torch.full((1,), position, device=device)
        self.lengths = torch.full((rows,), position + 1, device=device, dtype=torch.int32)
        self.query_bounds = torch.arange(rows + 1, device=device, dtype=torch.int32)
        self.key_bounds = self.query_bounds * capacity
        self._shared: dict[str, Tensor] = {}

    def set(self, position: int) -> None:
        """The next token is that of this position."""
        self.position.fill_(position)
        self.lengths.fill_(position + 1)
        self._shared.clear()

    def tick(self) -> None:
        """The token is decoded."""
        self.position.add_(1)
        self.lengths.add_(1)
        self._shared.clear()

    def shared(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """What all layers need of this position, made by the first one."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def visible(self) -> Tensor:
        """Whether each stored position [1, S] is at or before the token's."""
        index_S = torch.arange(self.capacity, device=self.position.device)
        return (index_S <= self.position)[None]


class LayerCache:
    """Keys and values of one layer, [B, max_length, G, K], filled from the left.

    With a clock, one token at a time is put at the clock's position, and `length` stays. With a
    `prompt`, the rows continue those of that cache.
    """

    takes_clock = True

    def __init__(self, shape: tuple[int, int, int, int], device: Device, dtype: torch.dtype):
        self.k_BSGK = torch.empty(shape, device=device, dtype=dtype)
        self.v_BSGK = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0
        self.clock: Clock | None = None
        self.prompt: LayerCache | None = None

    def start_clock(self, clock: Clock) -> None:
        """Decode by this clock from now on."""
        self.clock = clock
        # Masked keys are read, so they must be numbers.
        self.k_BSGK[:, self.length :] = 0
        self.v_BSGK[:, self.length :] = 0

    def variant(self, position: int) -> bool:
        """Steps with equal variants do the same work: here all."""
        return False

    def put(self, k_B1GK: Tensor, v_B1GK: Tensor) -> None:
        """Store one token's keys and values at the clock's position."""
        self.k_BSGK.index_copy_(1, self.clock.position, k_B1GK)
        self.v_BSGK.index_copy_(1, self.clock.position, v_B1GK)

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


def attention_by_clock(q_B1HK: Tensor, cache: LayerCache) -> Tensor:
    """Attention of one token over the cache, up to the clock's position, at fixed shapes.

    FlashAttention is told the lengths by a tensor and reads no further; other kernels read the
    whole cache under a mask.
    """
    clock = cache.clock
    if not platform().takes_flash(q_B1HK):
        visible_1S = clock.shared("visible", clock.visible)
        return sdpa(q_B1HK, cache.k_BSGK, cache.v_BSGK, causal=False, mask_TS=visible_1S)

    o_BHK, *_ = torch.ops.aten._flash_attention_forward(
        q_B1HK.flatten(0, 1),
        cache.k_BSGK.flatten(0, 1),
        cache.v_BSGK.flatten(0, 1),
        cum_seq_q=clock.query_bounds,
        cum_seq_k=clock.key_bounds,
        max_q=1,
        max_k=clock.capacity,
        dropout_p=0.0,
        is_causal=False,
        return_debug_mask=False,
        seqused_k=clock.lengths,
    )
    return o_BHK.view_as(q_B1HK)


class KVCache:
    """What every layer keeps while decoding, as its attention kind says, allocated once.

    Standard attention keeps 2 * L * B * max_length * G * K elements, NSA about 1/16 more.

    prompt  a cache whose rows are prompts of one length, which the rows of this one continue, each
            by max_length tokens of its own: equally many to a prompt, next to each other. Its keys
            and values are read where they are, so it must not change any more.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_length: int,
        device: Device = "cpu",
        dtype: torch.dtype | None = None,
        prompt: "KVCache | None" = None,
    ):
        if batch_size < 1 or max_length < 1:
            raise ValueError(
                f"batch_size={batch_size}, max_length={max_length}: both must be at least 1"
            )
        self.kind = attention_kind(config)
        self.shape = (batch_size, max_length, config.num_kv_heads, config.head_dim)
        self.device = device
        self.clock: Clock | None = None
        dtype = dtype or config.dtype
        make = functools.partial(self.kind.cache, config, self.shape, device, dtype)
        self.layers = [make() for _ in range(config.num_layers)]
        self.prompt_length = 0
        if prompt is not None:
            self._continue(prompt)

    def _continue(self, prompt: "KVCache") -> None:
        self.kind.check_shared_prompts()
        rows, *_ = self.shape
        prompts, *_ = prompt.shape
        if rows % prompts:
            raise ValueError(
                f"{rows} rows that continue {prompts} prompts: give a multiple of {prompts} rows"
            )
        if prompt.length < 1 or prompt.clock:
            raise ValueError(
                f"a prompt's cache of {prompt.length} tokens: fill it with one token or more, and "
                "do not start its clock"
            )
        self.prompt_length = prompt.length
        for layer, of_prompt in zip(self.layers, prompt.layers, strict=True):
            layer.prompt = of_prompt

    @property
    def length(self) -> int:
        """Positions stored so far, before the clock started; those of a shared prompt included."""
        return self.prompt_length + self.layers[0].length

    def rewind(self, length: int) -> None:
        """Forget what follows the first `length` positions. ValueError for an attention that keeps
        more than keys and values of single positions.
        """
        if not self.kind.prompt_in_parts:
            raise ValueError(f"a cache of {self.kind.__name__} cannot be rewound: make a new one")
        own = max(0, length - self.prompt_length)
        for layer in self.layers:
            layer.length = min(layer.length, own)

    @property
    def takes_clock(self) -> bool:
        """Whether `start_clock` can be called."""
        by_clock = self.kind.decodes_by_clock and self.layers[0].takes_clock
        return by_clock and not self.prompt_length

    def start_clock(self) -> Clock:
        """From now on each forward is of one token, by a clock on the device."""
        rows, capacity, *_ = self.shape
        self.clock = Clock(self.length, rows, capacity, self.device)
        for layer in self.layers:
            layer.start_clock(self.clock)
        return self.clock


class LayerHistory:
    """Keys and values of one layer, one tensor [B, T, G, K] of each for every forward so far."""

    clock = None
    prompt = None

    def __init__(self, keys: tuple[Tensor, ...] = (), values: tuple[Tensor, ...] = ()):
        self.keys = keys
        self.values = values
        self.newest: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Positions before the newest forward."""
        return sum(k_BTGK.shape[1] for k_BTGK in self.keys)

    def append(self, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, those of the newest forward included."""
        if self.newest is None:  # a checkpoint that runs the layer again makes the same ones
            self.newest = (k_BTGK, v_BTGK)
        return torch.cat([*self.keys, k_BTGK], 1), torch.cat([*self.values, v_BTGK], 1)

    def extended(self) -> "LayerHistory":
        """The history with the newest forward."""
        k_BTGK, v_BTGK = self.newest
        return LayerHistory((*self.keys, k_BTGK), (*self.values, v_BTGK))


class GradientCache:
    """A KV cache that gradients pass through: keys and values stay the tensors that the forwards
    made, and attention concatenates them for as long as it needs them.

    A forward does not change what the cache holds, so a checkpoint can run it again. The next
    forward takes `extended()`. ValueError for an attention that keeps more than keys and values of
    single positions.
    """

    clock = None
    prompt_length = 0

    def __init__(self, config: ModelConfig):
        if not attention_kind(config).prompt_in_parts:
            raise ValueError(
                f"{config.attention_type} attention keeps more than keys and values, and its cache "
                "passes no gradients: take --attention_type standard"
            )
        self.layers = [LayerHistory() for _ in range(config.num_layers)]

    @property
    def length(self) -> int:
        """Positions before the newest forward."""
        return self.layers[0].length

    def extended(self) -> "GradientCache":
        """The cache with the tokens of the newest forward, for the one after it."""
        longer = copy.copy(self)
        longer.layers = [layer.extended() for layer in self.layers]
        return longer


# ---- attention kinds


class KeyExchange(Protocol):
    """What a kind may ask for if ranks share rows and gather their keys; made outside of the model
    for each micro-batch. The inputs of attention are those of a rank's tokens.
    """

    def cut(self, x_BT: Tensor) -> Tensor:
        """The rank's tokens [B, t] of whole rows."""

    def attention(self, q_BtHK: Tensor, k_BtGK: Tensor, v_BtGK: Tensor) -> Tensor:
        """Full causal attention over the keys of all ranks."""

    def indexed(self, *inputs: "Tensor | Reading") -> tuple[Tensor, Tensor, Tensor]:
        """Indexed attention over them: o, the indexer's loss, and its recall."""


class Attention(nn.Module):
    """Grouped-query attention with RMSNorm on q and k: the base of every attention kind.

    A kind is one subclass and one entry of ATTENTIONS. A causal kind overrides `attend_document`
    and `keys_read`. The other methods answer what the rest of longhaul asks about an attention,
    namely its parameters, FLOPs, cache, memory and exchange; they hold for such a kind as they are.
    """

    # The kind that the planner proposes if this one does not fit.
    cheaper: str = ""
    # The field of ModelConfig that only this kind reads.
    settings: str = ""
    # Whether a cache can take a prompt in several forwards.
    prompt_in_parts: bool = True
    # Whether `decode` follows the cache's clock.
    decodes_by_clock: bool = False
    # Whether a Hugging Face Qwen3 folder can hold it.
    is_qwen3: bool = False
    # Submodules that Qwen3's weights do not have.
    starts_fresh: tuple[str, ...] = ()
    # Modes of context parallelism that cannot serve it, with the reason.
    refused_exchanges: dict[str, str] = {"gather_kv": "which is not full causal attention"}
    # Settings of a run that cannot serve it, with the reason.
    refused_levers: dict[str, str] = {}
    # Why responses cannot share a prompt, if they cannot.
    refused_prompts: str = "which is not full causal attention"
    # The submodule that learns from a loss of its own, which the rest of the model does not see.
    learner: str = ""
    # What each layer measures in a forward that learns, for the log. `measured` has the sums of the
    # figures, and by what they are to be divided: [2, figures].
    figures: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.kernels = config.kernels
        self.losses = LayerLosses()  # in a decoder, that of the decoder
        self.measured: Tensor | None = None
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(
        self,
        x_BTD: Tensor,
        rope: Rope,
        documents: "Documents | Layout | None" = None,
        cache: "LayerCache | SparseCache | None" = None,
    ) -> Tensor:
        """`documents` and `cache` are what the kind's methods of these names returned."""
        projected = self.project(x_BTD, rope)
        if cache is None:
            o_BTHK = self.attend(self.inputs(x_BTD, rope, projected), rope, documents)
        else:
            o_BTHK = self.decode(self.inputs(x_BTD, rope, projected), rope, cache)
        return self.o_proj(o_BTHK.flatten(-2))

    # ---- what a kind computes

    def project(self, x_BTD: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v, and k before RoPE, each [B, T, heads, K]."""
        heads = (-1, self.head_dim)
        q_BTHK = self.q_proj(x_BTD).unflatten(-1, heads)
        q_BTHK = norm_and_rotate(q_BTHK, self.q_norm, rope, self.kernels)
        raw_BTGK = self.k_norm(self.k_proj(x_BTD).unflatten(-1, heads))
        k_BTGK = rotate(raw_BTGK, *rope, self.kernels)
        v_BTGK = self.v_proj(x_BTD).unflatten(-1, heads)
        return q_BTHK, k_BTGK, v_BTGK, raw_BTGK

    def inputs(
        self, x_BTD: Tensor, rope: Rope, projected: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Everything that `attend` reads of the tokens, each [B, T, heads, ...]."""
        q_BTHK, k_BTGK, v_BTGK, _ = projected
        return q_BTHK, k_BTGK, v_BTGK

    def attend(self, inputs: tuple[Tensor, ...], rope: Rope, documents: Documents | None) -> Tensor:
        """o [B, T, H, K] of whole rows. Context parallelism wraps this method from outside."""
        if documents is None:  # every row is one document
            return self.attend_document(*inputs)
        return self.packed(inputs, rope, documents)

    def attend_gathered(
        self,
        inputs: tuple[Tensor, ...],
        documents: "Documents | SharedBlocks",
        exchange: "KeyExchange",
    ) -> Tensor:
        """The same for a rank's tokens [B, t, H, K], if it gathers the keys of whole rows from the
        ranks that share them; `documents` is what `whole_rows` returned.
        """
        return exchange.attention(*inputs)

    def packed(self, inputs: tuple[Tensor, ...], rope: Rope, documents: Documents) -> Tensor:
        """The same for rows that hold several documents; a compiled model leaves it uncompiled."""
        # `split` and not slices: the backward of each slice fills the whole row with zeros.
        flat = [x.flatten(0, 1)[None].split(documents.lengths, dim=1) for x in inputs]
        with platform().lengths_vary(inputs[0]):
            outputs = [self.attend_document(*parts) for parts in zip(*flat, strict=True)]
        return torch.cat(outputs, dim=1).view_as(inputs[0])

    def attend_document(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
        """o [B, T, H, K] of the last T of the S positions of one document in each row."""
        raise NotImplementedError(f"{type(self).__name__} defines no attend_document")

    def decode(self, inputs: tuple[Tensor, ...], rope: Rope, cache: LayerCache) -> Tensor:
        """o [B, T, H, K] of T tokens that continue what the cache holds."""
        q_BTHK, k_BTGK, v_BTGK = inputs
        keys_and_values = cache.append(k_BTGK, v_BTGK)
        with platform().lengths_vary(q_BTHK):
            return self.attend_document(q_BTHK, *keys_and_values)

    # ---- what the rest of longhaul asks about a kind

    @classmethod
    def check(cls, config: ModelConfig, device: Device | None = None) -> None:
        """ValueError if the kernels that are asked for cannot run with these sizes, or not on the
        device.
        """

    @classmethod
    def check_shared_prompts(cls) -> None:
        """ValueError if responses cannot share a prompt."""
        if cls.refused_prompts:
            raise ValueError(
                f"responses cannot share a prompt under {cls.__name__}, {cls.refused_prompts}: "
                "choose attention_type standard"
            )

    @classmethod
    def warning(cls, config: ModelConfig, device: Device) -> str | None:
        """What a user should know about this kind on the device, in one line."""

    @classmethod
    def documents(
        cls,
        config: ModelConfig,
        cu_seqlens: Tensor | None,
        shape: tuple[int, int],
        device: Device,
    ) -> "Documents | Layout | None":
        """What the layers get as `documents`; made once for all of them.

        cu_seqlens [documents + 1] over the B*T tokens; None if every row is one document.
        """
        return Documents.of(cu_seqlens, shape[0], device)

    @classmethod
    def whole_rows(
        cls,
        config: ModelConfig,
        cu_seqlens: Tensor,
        positions_BT: Tensor,
        rotary: RotaryCache,
    ) -> "Documents | Layout | SharedBlocks | None":
        """The same for whole rows whose tokens several ranks share: the `rope` of the layers then
        holds only this rank's tokens.
        """
        return cls.documents(config, cu_seqlens, positions_BT.shape, positions_BT.device)

    @classmethod
    def cache(
        cls,
        config: ModelConfig,
        shape: tuple[int, int, int, int],
        device: Device,
        dtype: torch.dtype,
    ) -> "LayerCache | SparseCache":
        """What a layer keeps while decoding; shape [B, max_length, G, K]."""
        return LayerCache(shape, device, dtype)

    @classmethod
    def is_learner(cls, name: str) -> bool:
        """Whether the parameter of this name learns from a loss of its own."""
        return cls.learner in name.split(".")

    @classmethod
    def identity(cls, config: ModelConfig) -> dict:
        """Its settings by name, as they belong to the identity of a run."""
        if not cls.settings:
            return {}
        sizes = asdict(getattr(config, cls.settings))
        return {f"{cls.settings}.{name}": value for name, value in sizes.items()}

    @classmethod
    def params(cls, config: ModelConfig) -> int:
        """Parameters of one layer's attention."""
        return cls.products(config) + 2 * config.head_dim

    @classmethod
    def products(cls, config: ModelConfig) -> float:
        """Parameters of one layer's attention that multiply each token, for FLOPs."""
        heads = config.num_heads + config.num_kv_heads
        return 2 * config.hidden_size * heads * config.head_dim

    @classmethod
    def keys_read(cls, config: ModelConfig, positions: Tensor) -> Tensor:
        """Number of keys that a query reads, by its position in its document."""
        raise NotImplementedError(f"{cls.__name__} defines no keys_read")

    @classmethod
    def saved_bytes(cls, config: ModelConfig, tokens: int, element: int) -> int:
        """Bytes that one layer's attention keeps for its backward.

        q and k before and after norm and rotation, v and o in the compute dtype (`element` bytes),
        and in fp32 the statistics of the two norms and the log-sum-exp.
        """
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        statistics = FP32 * tokens * (2 * config.num_heads + config.num_kv_heads)
        return 3 * element * tokens * (queries + keys) + statistics

    @classmethod
    def output_bytes(cls, config: ModelConfig, tokens: int, element: int) -> int:
        """Bytes of what the operator returns: o, and the log-sum-exp in fp32. Selective
        checkpointing keeps them, so that attention runs once.
        """
        return tokens * config.num_heads * (element * config.head_dim + FP32)

    @classmethod
    def backward_bytes(cls, config: ModelConfig, tokens: int, element: int) -> int:
        """Bytes of the gradients of keys and values, and what FlashAttention-2 sums them in."""
        queries = element * tokens * config.num_heads * config.head_dim
        keys = element * tokens * config.num_kv_heads * config.head_dim
        workspace = FP32 * tokens * config.num_heads * (config.head_dim + 1)
        if config.num_heads != config.num_kv_heads:
            workspace += 2 * queries
        return 2 * keys + workspace


class StandardAttention(Attention):
    """Full causal attention, by kernels whose memory is linear in T."""

    cheaper = "nsa"
    decodes_by_clock = True
    is_qwen3 = True
    refused_exchanges: dict[str, str] = {}
    refused_prompts = ""

    def attend_document(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
        return standard_attention(q_BTHK, k_BSGK, v_BSGK)

    def packed(
        self, inputs: tuple[Tensor, ...], rope: Rope, documents: Documents | SharedPrompts
    ) -> Tensor:
        if isinstance(documents, SharedPrompts):
            return shared_prompt_attention(*inputs, documents)
        if documents.bounds is None or not platform().takes_flash(inputs[0]):
            return super().packed(inputs, rope, documents)
        flat = [x.flatten(0, 1) for x in inputs]
        return packed_flash_attention(*flat, documents).view_as(inputs[0])

    def decode(self, inputs: tuple[Tensor, ...], rope: Rope, cache: LayerCache) -> Tensor:
        if cache.prompt is not None:
            q_B1HK, *keys_and_values = inputs
            own = cache.append(*keys_and_values)
            return attention_behind_prompts(q_B1HK, *own, *cache.prompt.stored())
        if cache.clock is None:
            return super().decode(inputs, rope, cache)
        q_B1HK, k_B1GK, v_B1GK = inputs
        cache.put(k_B1GK, v_B1GK)
        return attention_by_clock(q_B1HK, cache)

    @classmethod
    def keys_read(cls, config: ModelConfig, positions: Tensor) -> Tensor:
        return positions + 1


def attention_kind(config) -> type[Attention]:
    """The class of `config.attention_type`; config is a ModelConfig or a TrainConfig."""
    return ATTENTIONS[config.attention_type]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the unit of checkpointing, compiling and
    sharding.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = attention_kind(config)(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x_BTD: Tensor,
        rope: Rope,
        documents: "Documents | Layout | None" = None,
        cache: "LayerCache | SparseCache | None" = None,
    ) -> Tensor:
        """`documents` and `cache` are what the attention kind returned under these names."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, documents, cache)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


# ---- the vocabulary: tokens in, and what is made of hidden states


class SoftTokens(NamedTuple):
    """Mixtures of tokens: row [b, t] stands for sum_k weight[b, t, k] * embedding[index[b, t, k]].

    index_BTK None: the weights are those of the whole vocabulary, K = V.
    """

    weight_BTK: Tensor
    index_BTK: Tensor | None = None


def mix(soft: SoftTokens, table_VD: Tensor) -> Tensor:
    """The embeddings [B, T, D] of soft tokens, in the dtype of the table; with an index, nothing
    of size [B, T, K, D] exists.
    """
    weight_BTK = soft.weight_BTK.to(table_VD.dtype)
    if soft.index_BTK is None:
        return weight_BTK @ table_VD
    mixed_ND = F.embedding_bag(
        soft.index_BTK.flatten(0, 1),
        table_VD,
        per_sample_weights=weight_BTK.flatten(0, 1),
        mode="sum",
    )
    return mixed_ND.unflatten(0, weight_BTK.shape[:2])


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


def logits(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """All logits [N, V]: for short inputs, and for the last position of a generation step."""
    return F.linear(hidden_ND, weight_VD.to(hidden_ND.dtype))


def standard_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, num_valid: Tensor
) -> Tensor:
    """Sum over the valid positions of -log p(label) / num_valid, through all logits in fp32 (or
    fp64).
    """
    logits_NV = logits(hidden_ND, weight_VD).to(wide(hidden_ND.dtype))
    total = F.cross_entropy(logits_NV, labels_N.long(), ignore_index=IGNORE, reduction="sum")
    return total / num_valid


# ---- decoder


class Decoder(nn.Module):
    """The model: takes token ids, and returns logits, or the mean loss if labels are given.

    Built on the meta device it allocates nothing. Materialise it with `to_empty(device=...)`,
    `tie_weights()` and `init_weights(seed)`. The latter seeds each parameter by its name, so values
    depend neither on the order of construction nor on the number of processes.
    """

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = LMHead(config)
        self.rotary = RotaryCache(config)
        self.losses = LayerLosses()
        for layer in self.layers:
            layer.attention.losses = self.losses
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
        prompts: SharedPrompts | None = None,
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
        prompts     instead of doc_ids: which tokens are prompts, and which are responses that share
                    them
        """
        with self.losses.collected() as terms:
            hidden_BTD = self.hidden(tokens_BT, positions, doc_ids, cache, prompts)
        hidden_ND = hidden_BTD.flatten(0, 1)
        if labels_BT is None and head is not None:
            return self.lm_head(hidden_ND, head)
        if labels_BT is None:
            return self.lm_head(hidden_ND, logits).unflatten(0, tokens_BT.shape)

        if labels_BT.shape != tokens_BT.shape:
            raise ValueError(
                f"labels are {tuple(labels_BT.shape)} and tokens {tuple(tokens_BT.shape)}: "
                "give one target per position (labels[:, t] is the target of position t)"
            )
        if self.validate:
            check_labels(labels_BT.flatten(), self.config.vocab_size, IGNORE)
        if head is not None:
            return self.lm_head(hidden_ND, head, labels_BT.flatten())
        if num_valid is None:
            num_valid = (labels_BT != IGNORE).sum().clamp(min=1)
        function = self.loss_function(*tokens_BT.shape)
        loss = self.lm_head(hidden_ND, function, labels_BT.flatten(), num_valid)
        return with_gradient_of(loss, terms, num_valid)

    def hidden(
        self,
        tokens_BT: Tensor,
        positions: Tensor | None = None,
        doc_ids: Tensor | OnHost | None = None,
        cache: KVCache | GradientCache | None = None,
        prompts: SharedPrompts | None = None,
    ) -> Tensor:
        """Normalised hidden states [B, T, D]; the arguments are those of `forward`.

        tokens_BT may also be embeddings [B, T, D], such as those that `embedded` returns.
        """
        kind = attention_kind(self.config)
        shape = tokens_BT.shape[:2]
        _check_tokens(tokens_BT, positions, doc_ids, cache)
        cu_seqlens = None
        if doc_ids is not None:
            cu_seqlens = document_boundaries(doc_ids)
        if prompts is not None:
            kind.check_shared_prompts()
            _check_prompts(prompts, shape, doc_ids, cache)
            if positions is None:
                positions = prompts.positions(shape)

        rope = self._rope(tokens_BT, positions, cu_seqlens, cache)
        documents = prompts
        if cache is None and prompts is None:
            documents = kind.documents(self.config, cu_seqlens, shape, tokens_BT.device)

        x_BTD = tokens_BT
        if not tokens_BT.is_floating_point():
            x_BTD = self.embed(tokens_BT)  # not `embedded`, which FSDP2 takes for a forward
        x_BTD = x_BTD.to(self.config.dtype)
        for index, layer in enumerate(self.layers):
            layer_cache = cache.layers[index] if cache else None
            x_BTD = layer(x_BTD, rope, documents, layer_cache)
        if cache and cache.clock:
            cache.clock.tick()
        return self.norm(x_BTD)

    def embedded(self, tokens: Tensor | SoftTokens) -> Tensor:
        """Embeddings [B, T, D] of token ids [B, T] or of soft tokens, in the compute dtype."""
        if isinstance(tokens, SoftTokens):
            return mix(tokens, self.embed.weight).to(self.config.dtype)
        return self.embed(tokens).to(self.config.dtype)

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
        cache: KVCache | GradientCache | None,
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of the tokens."""
        if positions is None and cu_seqlens is not None:
            positions = document_positions(cu_seqlens, tokens_BT.shape[:2])
        if positions is not None:
            return self.rotary.at(positions.to(tokens_BT.device, non_blocking=True))
        if cache and cache.clock:
            tables = self.rotary(cache.clock.capacity, tokens_BT.device)
            cos, sin = (table.index_select(1, cache.clock.position) for table in tables)
            return cos, sin
        offset = cache.length if cache else 0
        return self.rotary(tokens_BT.shape[1], tokens_BT.device, offset)

    def figures(self) -> Tensor:
        """What the layers measured in the newest forward that learned, [2, figures]: sums, and by
        what they are to be divided, in the order of the names in `figures` of the attention kind.
        """
        names = attention_kind(self.config).figures
        if not names:
            return torch.empty((2, 0), device=self.norm.weight.device)
        return torch.stack([layer.attention.measured for layer in self.layers]).sum(0)

    # ---- which loss

    def logits_gib(self, batch: int, seq: int) -> float:
        """Size of the bf16 logits [batch*seq, V] in GiB: 37.09 at 131,072 tokens of the 4B."""
        return self.config.logits_gib(batch, seq)

    def should_chunk(self, batch: int, seq: int) -> bool:
        """Whether the loss must be chunked: because it is asked for, or because "auto" finds the
        logits above its threshold.
        """
        return self.config.should_chunk(batch, seq)

    def loss_function(self, batch: int, seq: int) -> Callable:
        """What `lm_head` applies: (hidden_ND, weight_VD, labels_N, num_valid) -> scalar."""
        if self.config.loss_path(batch, seq) == "standard":
            return standard_cross_entropy
        return self._tiled_loss

    def _tiled_loss(self, hidden_ND, weight_VD, labels_N, num_valid) -> Tensor:
        path = self.config.loss_path(len(hidden_ND), 1, weight_VD.element_size() < FP32)
        return linear_cross_entropy(
            hidden_ND,
            weight_VD,
            labels_N,
            reduction="mean",
            num_valid=num_valid,
            token_tile=self.config.loss_chunk_size or None,
            kernels=self.config.kernels,
            one_pass=path == "one_pass",
        )

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
    cache: KVCache | GradientCache | None,
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
    if cache is not None and cache.prompt_length and shape[1] > 1:
        raise ValueError(
            f"{shape[1]} tokens of each row behind a shared prompt: give one token at a time"
        )
    if cache is not None and cache.clock and shape[1] > 1:
        raise ValueError(
            f"{shape[1]} tokens for a cache whose clock runs: give one token, or fill the cache "
            "before start_clock"
        )
    if doc_ids is not None and tuple(doc_ids.shape) != shape:
        raise ValueError(
            f"doc_ids are {tuple(doc_ids.shape)} and tokens {shape}: give one id per token"
        )
    if positions is not None and tuple(positions.shape) not in (shape, (1, shape[1])):
        raise ValueError(
            f"positions are {tuple(positions.shape)} and tokens {shape}: give [B, T] or [1, T]"
        )


def _check_prompts(
    prompts: SharedPrompts,
    shape: tuple[int, int],
    doc_ids: Tensor | OnHost | None,
    cache: KVCache | GradientCache | None,
) -> None:
    """ValueError for prompts that do not fit the other arguments."""
    if doc_ids is not None:
        raise ValueError("prompts and doc_ids together: a prompt begins a document: drop doc_ids")
    if cache is not None:
        raise ValueError(
            "prompts and cache together: to decode, give a KVCache with prompt=, and no prompts"
        )
    tokens = math.prod(shape)
    if prompts.tokens != tokens:
        raise ValueError(
            f"prompts and responses have {prompts.tokens} tokens, and {tokens} are given: give "
            f"lengths that add up to {tokens}"
        )


# ---- the loss over tiles of the vocabulary


# The standard loss moves [N, V] through memory about ten times in fp32; that, not arithmetic, takes
# most of its time. Here the forward walks the vocabulary once with an online log-sum-exp, and the
# backward recomputes each tile. That is four products instead of three, yet faster, and it saves 8
# bytes per token instead of 4V.
#
# In one pass there are three products: the logits of a block of tokens stay until their sums are
# known, become their own gradients, and then those of hidden and weight. These wait for the
# backward, which would make them next anyway.
#
# Letters: n the valid tokens, packed; V inside a tile: the tile's columns.


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_valid: Tensor | float | None = None,
    token_tile: int | None = None,
    vocab_tile: int | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    kernels: str = "auto",
    validate: bool = False,
    one_pass: bool = False,
) -> Tensor:
    """Cross-entropy of the logits z = softcap(hidden @ weight^T), which never exist as a whole.

        loss_n = (1 - e) (lse_n - z_n,label) + e (lse_n - mean_v z_nv) + z_loss lse_n^2
        with e = label_smoothing

    hidden and weight have any floating dtype; the products run in hidden's, also under autocast.
    The loss is fp32, and gradients have the dtype of their input. As in torch's cross_entropy,
    `reduction` is "mean" by default, over the valid tokens given here. With `num_valid` it divides
    by that number: under data parallelism or accumulation, the *global* number of valid tokens.
    "sum" is for a caller that divides. Without a valid token the loss is 0 and gradients are zero.
    `kernels`: see `choose_kernels`.

    `one_pass` computes the gradients with the loss, unless none are needed. This saves a product
    and keeps, instead of 8 bytes per token, the gradients themselves and while it computes them the
    logits of `block_tokens` tokens. It needs one number as the loss, and one backward.

    Raises ValueError for shapes, devices, dtypes and tiles, and IndexError for labels outside
    [0, V): always on a CPU, on CUDA only with `validate`, which costs a host synchronisation.
    """
    check_inputs(hidden_ND, weight_VD, labels_N, reduction, token_tile, vocab_tile)
    if one_pass:
        _check_one_pass(hidden_ND, weight_VD, reduction)
    _check_options(softcap, label_smoothing, z_loss, num_valid)

    kernels = choose_kernels(kernels, hidden_ND)
    device = platform().device(hidden_ND)
    shape = len(hidden_ND), len(weight_VD)
    tokens, columns = default_tiles(*shape, device, kernels)
    wide_columns = forward_columns(*shape, device, kernels)
    tiles = [token_tile or tokens, vocab_tile or columns, vocab_tile or wide_columns]
    divisor = _divisor(labels_N, ignore_index, reduction, num_valid, wide(hidden_ND.dtype))

    needed = [torch.is_grad_enabled() and x.requires_grad for x in (hidden_ND, weight_VD)]
    if one_pass and any(needed):
        return vocab_loss_one_pass(
            hidden_ND,
            weight_VD,
            labels_N,
            torch.as_tensor(divisor, dtype=wide(hidden_ND.dtype), device=hidden_ND.device),
            ignore_index,
            label_smoothing,
            z_loss,
            softcap,
            tiles,
            kernels,
            validate,
            *needed,
        )[0]

    sums = vocab_nll(
        hidden_ND, weight_VD, labels_N, ignore_index, softcap, tiles, kernels, validate
    )
    loss_N = token_losses(*sums, label_smoothing, z_loss)
    return loss_N if reduction == "none" else loss_N.sum() / divisor


def _divisor(
    labels_N: Tensor,
    ignore_index: int,
    reduction: str,
    num_valid: Tensor | float | None,
    dtype: torch.dtype,
) -> Tensor | float:
    """What the summed loss is divided by, at least 1."""
    if reduction != "mean":
        return 1.0
    if num_valid is None:
        num_valid = (labels_N != ignore_index).sum()
    if isinstance(num_valid, Tensor):
        return num_valid.clamp(min=1).to(dtype)
    return max(num_valid, 1)


def token_losses(
    nll_N: Tensor,
    max_N: Tensor,
    log_sum_N: Tensor,
    mean_N: Tensor,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """The loss of each token, from what `vocab_nll` returns."""
    loss_N = nll_N
    if label_smoothing:
        uniform_N = max_N - mean_N + log_sum_N
        loss_N = (1 - label_smoothing) * nll_N + label_smoothing * uniform_N
    if z_loss:
        loss_N = loss_N + z_loss * (max_N + log_sum_N).square()
    return loss_N


def check_inputs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    reduction: str,
    *tiles: int | None,
) -> None:
    """ValueError for shapes, devices, dtypes, tiles or a reduction that cannot be used."""
    if not _shapes_fit(hidden_ND, weight_VD, labels_N):
        shapes = tuple(hidden_ND.shape), tuple(weight_VD.shape), tuple(labels_N.shape)
        raise ValueError(
            f"hidden, weight, labels have shapes {shapes}; needed: (N, D), (V, D), (N,) with V >= 1"
        )

    if len({hidden_ND.device, weight_VD.device, labels_N.device}) > 1:
        raise ValueError(
            f"hidden is on {hidden_ND.device}, weight on {weight_VD.device}, labels on "
            f"{labels_N.device}: move them to one device"
        )

    floating = hidden_ND.is_floating_point() and weight_VD.is_floating_point()
    if not floating or labels_N.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"hidden is {hidden_ND.dtype}, weight {weight_VD.dtype}, labels {labels_N.dtype}; "
            "needed: floating, floating, int64"
        )

    for tile in tiles:
        if tile is not None and not (isinstance(tile, int) and tile >= 1):
            raise ValueError(
                f"token_tile, vocab_tile = {tiles}: both must be whole numbers >= 1, or None to "
                "choose by shape and device"
            )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: allowed are 'mean', 'sum', 'none'")


def _shapes_fit(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> bool:
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or labels_N.ndim != 1:
        return False
    V, D = weight_VD.shape
    return hidden_ND.shape == (len(labels_N), D) and V >= 1


def _check_options(
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
    num_valid: Tensor | float | None,
) -> None:
    capped = softcap is None or softcap > 0
    if not capped or not 0 <= label_smoothing <= 1 or not math.isfinite(z_loss):
        raise ValueError(
            f"softcap={softcap}, label_smoothing={label_smoothing}, z_loss={z_loss}: need softcap "
            "> 0 or None, smoothing in [0, 1], finite z_loss"
        )

    if isinstance(num_valid, Tensor):
        wrong = num_valid.ndim > 0
    else:
        wrong = num_valid is not None and not num_valid >= 0
    if wrong:
        raise ValueError(
            f"num_valid={num_valid}: give a number of tokens, 0 or more, or a tensor without "
            "dimensions"
        )


def _check_one_pass(hidden_ND: Tensor, weight_VD: Tensor, reduction: str) -> None:
    if reduction == "none":
        raise ValueError(
            "one_pass=True with reduction='none': gradients can be computed with the loss only if "
            "it is one number: give reduction='mean' or 'sum', or one_pass=False"
        )
    N = len(hidden_ND)
    block = block_tokens(N, *weight_VD.shape, hidden_ND.element_size())
    if weight_VD.element_size() < FP32 and N > block:
        raise ValueError(SEVERAL_BLOCKS.format(N, block))


def check_labels(labels_N: Tensor, V: int, ignore_index: int) -> None:
    """IndexError for the first label outside [0, V) that is not `ignore_index`."""
    bad_N = ((labels_N < 0) | (labels_N >= V)) & (labels_N != ignore_index)
    if bad_N.any():
        n = int(bad_N.nonzero()[0, 0])
        raise IndexError(
            f"label {int(labels_N[n])} at position {n}: allowed are 0 to {V - 1}, and "
            f"{ignore_index} to ignore the token"
        )


# ---- tiles, and what computes them


def default_tiles(N: int, V: int, device: torch.device, kernels: str) -> tuple[int, int]:
    """(token_tile, vocab_tile).

    [N, vocab_tile] exists in the inputs' dtype, and [token_tile, vocab_tile] in fp32 if the bodies
    are eager. A compiled body keeps fp32 in registers and has no cache to miss.
    """
    if device.type == "cpu":
        token_tile = 512 if kernels == "torch" else 2048
        elements = 2**22
        widest = 2048
    else:
        token_tile = 8192
        elements = 2**28
        widest = 8192
    vocab_tile = elements // max(N, 1) // 128 * 128
    return token_tile, min(max(vocab_tile, 1024), widest, max(V, 1))


def forward_columns(N: int, V: int, device: torch.device, kernels: str) -> int:
    """vocab_tile if a tile never holds more than token_tile tokens, as in the forward and in one
    pass: 8192 columns on CUDA, so that at 131,072 tokens a fourth of the kernels is launched.
    """
    token_tile, _ = default_tiles(N, V, device, kernels)
    return default_tiles(min(N, token_tile), V, device, kernels)[1]


def spans(size: int, tile: int) -> list[slice]:
    """The tiles of `size` tokens or columns; the last one may be shorter."""
    starts = platform().tiles(range(0, size, tile))
    return [slice(start, min(start + tile, size)) for start in starts]


def choose_kernels(kernels: str, tile_like: Tensor) -> str:
    """What computes the elementwise tile bodies: "torch" (eager), "compiled" (torch.compile) or
    "triton" (fused/).

    "auto" is compiled on CUDA and inside a compiled caller, and eager otherwise. The Triton twins
    are used only if they are asked for.
    """
    if kernels not in CHOICES["kernels"]:
        raise ValueError(f"kernels={kernels!r} is unknown: choose auto, torch, compiled or triton")

    device = platform().device(tile_like)
    if kernels == "triton":
        try:
            from fused import linear_ce
        except ImportError as error:
            raise ValueError(
                f"kernels='triton': {error}: pip install triton, or choose kernels='auto' or "
                "'torch'"
            ) from None
        if device == tile_like.device:  # else a simulation, for a GPU elsewhere
            linear_ce.require(tile_like)

    if kernels == "auto":
        return "compiled" if device.type == "cuda" or torch.compiler.is_compiling() else "torch"
    return kernels


def tile_body(function: Callable, kernels: str) -> Callable:
    """An elementwise tile function, or what replaces it on this platform."""
    return platform().tile_body(function, kernels)


@functools.cache
def fastest_body(function: Callable, kernels: str) -> Callable:
    """An elementwise tile function or its fused twin.

    Compiled with dynamic shapes: otherwise every ragged last tile would compile again.
    """
    if kernels == "triton":
        from fused import linear_ce

        return getattr(linear_ce, function.__name__)
    if kernels == "compiled":
        return torch.compile(function, dynamic=True)
    return function


def tile_logits(hidden_ND: Tensor, weight_VD: Tensor, buffer: Tensor) -> Tensor:
    """hidden @ weight^T into the reused flat buffer; a ragged last tile stays contiguous."""
    N, V = len(hidden_ND), len(weight_VD)
    return torch.mm(hidden_ND, weight_VD.t(), out=buffer[: N * V].view(N, V))


def capped(z_NV: Tensor, softcap: float | None, dtype: torch.dtype) -> Tensor:
    """softcap * tanh(z / softcap), always as a copy that may be overwritten."""
    x_NV = z_NV.to(dtype, copy=True)
    if softcap is None:
        return x_NV
    return x_NV.div_(softcap).tanh_().mul_(softcap)


def exp_(x: Tensor) -> Tensor:
    """exp in place.

    On a CPU torch.exp is MKL's, four times slower on AMD than exp2. The product's rounding is below
    that of x = z - max.
    """
    return x.mul_(1.4426950408889634).exp2_()


def below_(x_NV: Tensor, max_N: Tensor) -> Tensor:
    """x - max in place, at most 0."""
    return x_NV.sub_(max_N[:, None]).clamp_(max=0)


def put_target(x_NV: Tensor, target_N: Tensor, value_N: Tensor) -> Tensor:
    """x[n, target_n] = value_n for targets inside the tile, without asking the device how many."""
    V = x_NV.shape[1]
    if torch.compiler.is_compiling():
        # A comparison fuses into the body; an indexed write would split it.
        column_V = torch.arange(V, device=x_NV.device, dtype=target_N.dtype)
        return torch.where(column_V == target_N[:, None], value_N[:, None], x_NV)

    row_N = torch.arange(len(x_NV), device=x_NV.device)
    column_N = target_N.clamp(0, V - 1).long()
    value_N = torch.where(target_N == column_N, value_N, x_NV[row_N, column_N])
    # scatter_ would copy the whole tile on a CPU: twice as slow
    return x_NV.index_put_((row_N, column_N), value_N)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b. Low-precision products are summed in fp32: bf16 sums make gradients 6x
    noisier.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        platform().mixed_product(total, a, b, beta=1)


def set_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        platform().mixed_product(out, a, b, beta=0)


def pack_valid(labels_N: Tensor, ignore_index: int) -> tuple[slice | Tensor, Tensor]:
    """(rows, target_n) of the valid tokens, so that ignored ones cost nothing.

    Targets are int32, because comparing int64 columns costs more than the exp. On CUDA the number
    of valid tokens would cost a host synchronisation, so all tokens stay there, and ignored ones
    get the target -1 and a zero gradient.
    """
    valid_N = labels_N != ignore_index
    if labels_N.device.type != "cpu" or valid_N.all():
        return slice(None), torch.where(valid_N, labels_N, -1).int()
    rows = valid_N.nonzero()[:, 0]
    return rows, labels_N[rows].int()


def unpack(value_n: Tensor, rows: slice | Tensor, N: int) -> Tensor:
    """Scatter packed values back to N tokens, zero for the ignored ones."""
    if isinstance(rows, slice):
        return value_n
    return value_n.new_zeros(N, *value_n.shape[1:]).index_copy_(0, rows, value_n)


# ---- the bodies: one tile


def fold_logsumexp(
    z_NV: Tensor,
    target_N: Tensor,
    max_N: Tensor,
    sum_N: Tensor,
    total_N: Tensor,
    softcap: float | None,
) -> None:
    """Fold a tile into (max, sum exp(z - max)) of all logits except the target's, and into the sum
    of all logits. All three are overwritten.
    """
    x_NV = capped(z_NV, softcap, max_N.dtype)
    total_N.add_(x_NV.sum(1))

    x_NV = put_target(x_NV, target_N, torch.full_like(max_N, -torch.inf))
    new_max_N = torch.maximum(max_N, x_NV.amax(1))
    sum_N.mul_((max_N - new_max_N).exp()).add_(exp_(x_NV.sub_(new_max_N[:, None])).sum(1))
    max_N.copy_(new_max_N)


def logits_to_gradient(
    z_NV: Tensor,
    target_N: Tensor,
    max_N: Tensor,
    slope_N: Tensor,
    shift_N: Tensor,
    softcap: float | None,
) -> None:
    """Overwrite z by (slope * exp(z - max) + shift) * d softcap, and by 0 at the target.

    No logit counts as larger than `max`, so that the exp is at most 1.
    """
    x_NV = capped(z_NV, softcap, max_N.dtype)
    chain_NV = None if softcap is None else 1 - (x_NV / softcap).square()

    d_NV = exp_(below_(x_NV, max_N)).mul_(slope_N[:, None]).add_(shift_N[:, None])
    if chain_NV is not None:
        d_NV = d_NV.mul_(chain_NV)
    z_NV.copy_(put_target(d_NV, target_N, torch.zeros_like(max_N)))


# ---- the operators: all tiles


class _Problem(NamedTuple):
    """The valid tokens, packed, and how their logits are computed."""

    hidden_nD: Tensor
    weight_VD: Tensor
    target_n: Tensor
    softcap: float | None
    tiles: list[int]
    kernels: str

    def vocabulary_tiles(self) -> list[slice]:
        return spans(len(self.weight_VD), self.tiles[1])

    def token_tiles(self) -> list[slice]:
        return spans(len(self.hidden_nD), self.tiles[0])


class _Sums(NamedTuple):
    """What `vocab_nll` returns, of packed tokens."""

    nll: Tensor
    max: Tensor
    log_sum: Tensor
    mean: Tensor


@torch.library.custom_op("longhaul::linear_nll", mutates_args=())
def vocab_nll(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    ignore_index: int,
    softcap: float | None,
    tiles: list[int],
    kernels: str,
    validate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(-log p(label), max of the logits, log sum exp(z - max), mean of the logits) per token in
    fp32, 0 for ignored tokens. `tiles`: tokens, columns in the backward, columns in the forward.

    The maximum and the logarithm stay apart, because their sum would round away the logarithm where
    logits are large. Gradients take the maximum for a constant. The operator is opaque to
    torch.compile, which would unroll the loops.
    """
    N, V = len(hidden_ND), len(weight_VD)
    if validate or labels_N.device.type == "cpu":
        check_labels(labels_N, V, ignore_index)

    rows, target_n = pack_valid(labels_N, ignore_index)
    tiles = [tiles[0], tiles[-1]]
    problem = _Problem(hidden_ND[rows], weight_VD, target_n, softcap, tiles, kernels)
    tokens = min(tiles[0], len(target_n))
    buffer = hidden_ND.new_empty(tokens * min(tiles[1], V))

    def reused(v: slice, t: slice) -> Tensor:
        return tile_at(buffer, 0, t.stop - t.start, v.stop - v.start)

    sums = _fold_vocabulary(problem, reused)
    return tuple(unpack(x_n, rows, N) for x_n in sums)


def tile_at(buffer: Tensor, start: int, N: int, V: int) -> Tensor:
    """A tile [N, V] in a flat buffer; a ragged last tile is contiguous too."""
    return buffer[start : start + N * V].view(N, V)


def _fold_vocabulary(problem: _Problem, tile_of: Callable) -> _Sums:
    """Each token's sums over the vocabulary; the logits go into tile_of(columns, tokens)."""
    h_nD, weight_VD, target_n, softcap, tiles, kernels = problem
    z_target_n = target_logits(h_nD, weight_VD, target_n, tiles[0], softcap)
    max_n = z_target_n.clone()
    sum_n = torch.zeros_like(z_target_n)
    total_n = torch.zeros_like(z_target_n)

    fold = tile_body(fold_logsumexp, kernels)
    for v in problem.vocabulary_tiles():
        w_VD = weight_VD[v].to(h_nD.dtype)
        target_in_v = target_n - v.start
        for t in problem.token_tiles():
            z_NV = torch.mm(h_nD[t], w_VD.t(), out=tile_of(v, t))
            fold(z_NV, target_in_v[t], max_n[t], sum_n[t], total_n[t], softcap)

    # If the label's logit is the maximum, then log(1 + sum of the others) is exact also for a
    # p(label) near 1. Differences from the maximum are exact under a large common offset.
    above_target_n = max_n - z_target_n
    all_n = sum_n + (-above_target_n).exp()
    log_sum_n = torch.where(above_target_n > 0, all_n.log(), sum_n.log1p())
    nll_n = above_target_n + log_sum_n

    sums = nll_n, max_n, log_sum_n, total_n / len(weight_VD)
    return _Sums(*(x_n.masked_fill_(target_n < 0, 0) for x_n in sums))


def target_logits(
    h_nD: Tensor, weight_VD: Tensor, target_n: Tensor, token_tile: int, softcap: float | None
) -> Tensor:
    """The label's logit from an fp32 dot product: a low-precision tile would round the one logit
    that the loss subtracts.
    """
    z_n = h_nD.new_empty(len(h_nD), dtype=wide(h_nD.dtype))
    for t in spans(len(h_nD), token_tile):
        w_nD = weight_VD.index_select(0, target_n[t].clamp(min=0)).to(h_nD.dtype)
        z_n[t] = (h_nD[t].to(z_n.dtype) * w_nD).sum(1)
    return capped(z_n, softcap, z_n.dtype)


@torch.library.custom_op("longhaul::linear_nll_backward", mutates_args=())
def vocab_nll_backward(
    grads: list[Tensor],
    max_N: Tensor,
    log_sum_N: Tensor,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    ignore_index: int,
    softcap: float | None,
    tiles: list[int],
    kernels: str,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden and weight, empty if not needed.

    `grads` are those of nll, log_sum and mean: dz = (d_nll + d_log_sum) p + d_mean / V, minus d_nll
    at the label, with p = exp(z - max) exp(-log_sum).
    """
    rows, target_n = pack_valid(labels_N, ignore_index)
    problem = _Problem(hidden_ND[rows], weight_VD, target_n, softcap, tiles, kernels)
    max_n = max_N[rows]
    slopes = _slopes(problem, [grad_N[rows] for grad_N in grads], max_n, log_sum_N[rows])

    n = len(target_n)
    buffer = hidden_ND.new_empty(n * min(tiles[1], len(weight_VD)))

    def reused(v: slice) -> Tensor:
        return tile_at(buffer, 0, n, v.stop - v.start)

    dh_nD = label_gradient(problem, slopes) if need_hidden else None
    dw_VD = torch.empty_like(weight_VD) if need_weight else None
    _gradient_products(problem, max_n, slopes, reused, True, dh_nD, dw_VD, set_product)

    if need_hidden:
        dh_nD = unpack(dh_nD.to(hidden_ND.dtype), rows, len(hidden_ND))
    else:
        dh_nD = max_n.new_empty(0)
    return dh_nD, dw_VD if need_weight else weight_VD.new_empty(0)


class _Slopes(NamedTuple):
    """The gradient dz of each token's logits: exp(z - max) * slope + constant; at the label,
    `target`.
    """

    slope: Tensor
    constant: Tensor
    target: Tensor


def _slopes(
    problem: _Problem, grads: Sequence[Tensor], max_n: Tensor, log_sum_n: Tensor
) -> _Slopes:
    """`grads` as in `vocab_nll_backward`, of packed tokens."""
    h_nD, weight_VD, target_n, softcap, tiles, _ = problem
    ignored_n = target_n < 0
    d_nll_n, d_log_sum_n, d_mean_n = [grad_n.masked_fill(ignored_n, 0) for grad_n in grads]
    constant_n = d_mean_n / len(weight_VD)
    slope_n = (d_nll_n + d_log_sum_n) * torch.exp(-log_sum_n)

    # p - 1 = expm1(-nll), and nll holds the fp32 logit of the label, which a tile would round.
    z_target_n = target_logits(h_nD, weight_VD, target_n, tiles[0], softcap)
    nll_n = (max_n - z_target_n + log_sum_n).masked_fill_(ignored_n, 0)
    d_target_n = d_nll_n * torch.expm1(-nll_n) + d_log_sum_n * torch.exp(-nll_n) + constant_n
    if softcap is not None:
        d_target_n.mul_(1 - (z_target_n / softcap).square())
    return _Slopes(slope_n, constant_n, d_target_n)


def label_gradient(problem: _Problem, slopes: _Slopes) -> Tensor:
    """The label's term of dh, by far the largest: it stays in fp32, outside the tiles."""
    column_n = problem.target_n.clamp(min=0)
    w_nD = problem.weight_VD.index_select(0, column_n).to(problem.hidden_nD.dtype)
    return w_nD.to(slopes.target.dtype).mul_(slopes.target[:, None])


def _gradient_products(
    problem: _Problem,
    max_n: Tensor,
    slopes: _Slopes,
    tile_of: Callable,
    recompute: bool,
    dh_nD: Tensor | None,
    dw_VD: Tensor | None,
    put_product: Callable,
) -> None:
    """Overwrite the logits in tile_of(columns) by their gradient, and add its products to dh_nD
    and, with `put_product`, to dw_VD, unless they are None. `recompute`: the logits are not there.
    """
    h_nD, weight_VD, target_n, softcap, _, kernels = problem
    fill = tile_body(logits_to_gradient, kernels)
    label_n = slopes.target.to(h_nD.dtype)
    for v in problem.vocabulary_tiles():
        w_VD = weight_VD[v].to(h_nD.dtype)
        z_nV = tile_of(v)
        target_in_v = target_n - v.start
        for t in problem.token_tiles():
            if recompute:
                torch.mm(h_nD[t], w_VD.t(), out=z_nV[t])
            slope_N, constant_N, _ = (x_n[t] for x_n in slopes)
            fill(z_nV[t], target_in_v[t], max_n[t], slope_N, constant_N, softcap)
            if dh_nD is not None:
                add_product(dh_nD[t], z_nV[t], w_VD)

        # One product over all tokens is rounded once, however many token tiles there are, and needs
        # no fp32 [V, D].
        if dw_VD is not None:
            dz_nV = put_target(z_nV, target_in_v, label_n)
            put_product(dw_VD[v], dz_nV.t(), h_nD)


@vocab_nll.register_fake
def _(hidden_ND, *_):
    return tuple(hidden_ND.new_empty(len(hidden_ND), dtype=wide(hidden_ND.dtype)) for _ in range(4))


@vocab_nll_backward.register_fake
def _(grads, max_N, log_sum_N, hidden_ND, weight_VD, *args):
    need_hidden, need_weight = args[-2:]
    dh_ND = max_N.new_empty(0)
    if need_hidden:  # contiguous, whatever hidden's strides are
        dh_ND = hidden_ND.new_empty(hidden_ND.shape)
    dw_VD = torch.empty_like(weight_VD) if need_weight else weight_VD.new_empty(0)
    return dh_ND, dw_VD


def _save(ctx, inputs, output):
    hidden_ND, weight_VD, labels_N, *ctx.options, _validate = inputs
    _nll_N, max_N, log_sum_N, _mean_N = output
    # beyond the inputs, 8 bytes per token
    ctx.save_for_backward(max_N, log_sum_N, hidden_ND, weight_VD, labels_N)
    ctx.mark_non_differentiable(max_N)


def _backward(ctx, d_nll_N, _d_max_N, d_log_sum_N, d_mean_N):
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    grads = [d_nll_N, d_log_sum_N, d_mean_N]
    dh_ND, dw_VD = vocab_nll_backward(
        grads, *ctx.saved_tensors, *ctx.options, need_hidden, need_weight
    )
    dh_ND = dh_ND if need_hidden else None
    dw_VD = dw_VD if need_weight else None
    return dh_ND, dw_VD, *[None] * 6


vocab_nll.register_autograd(_backward, setup_context=_save)


# ---- one pass: the loss and its gradients together, in blocks of tokens


# Bytes of logits that a block has at most. Each block reads and writes the sum dW once: with 4096
# bytes of logits per vocabulary entry, that is a small part of its products.
BLOCK_BYTES = 2**30
SEVERAL_BLOCKS = (
    "the loss in one pass was given {} tokens, which makes blocks of {}, and a weight in low "
    "precision, which would round the gradient of each block: give fewer tokens, a weight in fp32, "
    "or take the loss that recomputes (one_pass=False; --loss chunked)"
)


def block_tokens(N: int, V: int, D: int, element: int) -> int:
    """Tokens of a block in one pass, if logits have `element` bytes: N tokens make blocks of equal
    length.

    The logits of a block never take more than BLOCK_BYTES, nor more than twice dW in fp32, which
    the pass makes anyway.
    """
    most = max(min(BLOCK_BYTES, 2 * FP32 * V * D) // (element * V), 1)
    blocks = max(math.ceil(N / most), 1)
    return max(math.ceil(N / blocks), 1)


@torch.library.custom_op("longhaul::linear_loss_one_pass", mutates_args=())
def vocab_loss_one_pass(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    divisor: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    tiles: list[int],
    kernels: str,
    validate: bool,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss / divisor, and its gradients of hidden and weight, empty if not needed."""
    N, V = len(hidden_ND), len(weight_VD)
    if validate or labels_N.device.type == "cpu":
        check_labels(labels_N, V, ignore_index)

    rows, target_n = pack_valid(labels_N, ignore_index)
    tiles = [tiles[0], tiles[-1]]
    problem = _Problem(hidden_ND[rows], weight_VD, target_n, softcap, tiles, kernels)
    h_nD = problem.hidden_nD
    n, D = h_nD.shape
    tokens = block_tokens(n, V, D, h_nD.element_size())
    buffer = h_nD.new_empty(tokens * V)

    loss_n = divisor.new_empty(n)
    dh_nD = h_nD.new_empty(h_nD.shape) if need_hidden else None
    dw_VD = torch.empty_like(weight_VD) if need_weight else None
    if need_weight and n == 0:
        dw_VD.zero_()
    for t in spans(n, tokens):
        block = problem._replace(hidden_nD=h_nD[t], target_n=target_n[t])
        dh_tD = dh_nD[t] if need_hidden else None
        put_product = add_product if t.start else set_product
        loss_n[t] = _one_block(
            block, buffer, divisor, label_smoothing, z_loss, dh_tD, dw_VD, put_product
        )
    del buffer

    loss = unpack(loss_n, rows, N).sum() / divisor
    dh_ND = unpack(dh_nD, rows, N) if need_hidden else h_nD.new_empty(0)
    return loss, dh_ND, dw_VD if need_weight else weight_VD.new_empty(0)


def _one_block(
    problem: _Problem,
    buffer: Tensor,
    divisor: Tensor,
    label_smoothing: float,
    z_loss: float,
    dh_nD: Tensor | None,
    dw_VD: Tensor | None,
    put_product: Callable,
) -> Tensor:
    """Each token's loss; its gradients go to dh_nD and, with `put_product`, to dw_VD, unless they
    are None.
    """
    n = len(problem.target_n)

    def kept(v: slice, t: slice = slice(None)) -> Tensor:
        return tile_at(buffer, n * v.start, n, v.stop - v.start)[t]

    sums = _fold_vocabulary(problem, kept)
    loss_n = token_losses(*sums, label_smoothing, z_loss)

    each = divisor.reciprocal()
    lse_n = sums.max + sums.log_sum
    grads = [
        ((1 - label_smoothing) * each).expand(n),
        (label_smoothing + 2 * z_loss * lse_n) * each,
        (-label_smoothing * each).expand(n),
    ]
    slopes = _slopes(problem, grads, sums.max, sums.log_sum)
    sum_nD = None if dh_nD is None else label_gradient(problem, slopes)
    _gradient_products(problem, sums.max, slopes, kept, False, sum_nD, dw_VD, put_product)
    if dh_nD is not None:
        dh_nD.copy_(sum_nD)
    return loss_n


@vocab_loss_one_pass.register_fake
def _(hidden_ND, weight_VD, labels_N, divisor, *args):
    need_hidden, need_weight = args[-2:]
    dh_ND = hidden_ND.new_empty(hidden_ND.shape if need_hidden else 0)
    dw_VD = torch.empty_like(weight_VD) if need_weight else weight_VD.new_empty(0)
    return torch.empty_like(divisor), dh_ND, dw_VD


@torch.library.custom_op("longhaul::scale_gradients", mutates_args=("gradients",))
def scale_gradients(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply in place by the gradient of the loss; a factor of 1 costs nothing on a CPU."""
    if factor.device.type == "cpu" and factor == 1:
        return
    for gradient in gradients:
        gradient.mul_(factor)


def _save_gradients(ctx, inputs, output):
    _loss, dh_ND, dw_VD = output
    ctx.mark_non_differentiable(dh_ND, dw_VD)
    ctx.set_materialize_grads(False)  # zeros of the size of dW otherwise
    ctx.save_for_backward(dh_ND, dw_VD)
    ctx.is_spent = False


def _scaled_gradients(ctx, d_loss, _d_dh_ND, _d_dw_VD):
    if ctx.is_spent:
        raise ValueError(
            "the one-pass loss was given a second backward, and the first one has used its "
            "gradients: call the backward once, or take the loss that recomputes "
            "(one_pass=False; in a model loss='chunked')"
        )
    ctx.is_spent = True
    gradients = list(ctx.saved_tensors)
    scale_gradients(gradients, d_loss)
    needed = ctx.needs_input_grad[:2]
    found = [x if is_needed else None for x, is_needed in zip(gradients, needed, strict=True)]
    return *found, *[None] * 11


vocab_loss_one_pass.register_autograd(_scaled_gradients, setup_context=_save_gradients)


# ---- Native Sparse Attention (arXiv 2502.11089)


# Three branches, mixed by gates: a query reads all keys in compressed form, the few blocks of keys
# that matter most, and a window of the last keys. This section has the layer; the next one has the
# plain computation, which `choose_sparse_core` replaces by a faster twin.
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
        """The layout of (B, T) = `shape` tokens; cu_seqlens as in `Attention.documents`."""
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
        return cls(cu_seqlens, *(pinned_copy(column, device) for column in joined))


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


class Compressor(nn.Module):
    """Makes one key and one value of a block of l tokens.

        phi(x) = mean(x) + W2 silu(W1 flatten(x + pe))

    With W2 = 0 it pools: training starts there, and cmp_kind="mean" stays there. Keys are taken
    before RoPE. The compressed key is normed again, because averaging shrinks it by up to sqrt(l),
    and rotated as the token at its block's centre. KV heads share the weights.
    """

    def __init__(self, head_dim: int, cfg: NSAConfig, eps: float = 1e-6):
        super().__init__()
        self.cfg = cfg
        self.eps = eps
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
        weight = self.norm_weight.float()
        return platform().rms_norm(k_BNGK.float(), weight, self.eps).to(k_BNGK.dtype)

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

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.cfg = config.nsa
        self.heads = (-1, config.head_dim)
        self.core = choose_sparse_core(config)
        self.gate = Linear(config.hidden_size, 3 * config.num_heads, bias=True)
        self.compressor = Compressor(config.head_dim, config.nsa, config.norm_eps)
        self.kv_proj = None
        if self.cfg.kv == "separate":
            width = config.num_kv_heads * config.head_dim
            self.kv_proj = Linear(config.hidden_size, 4 * width)
            self.cmp_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.win_norm = RMSNorm(config.head_dim, config.norm_eps)

    def separate_keys_and_values(self, x_BTD: Tensor, rope: Rope) -> tuple[Tensor, ...]:
        """Keys before RoPE and values of the compressed branch, keys and values of the window."""
        parts = self.kv_proj(x_BTD).chunk(4, -1)
        k_cmp, v_cmp, k_win, v_win = (part.unflatten(-1, self.heads) for part in parts)
        return self.cmp_norm(k_cmp), v_cmp, rotate(self.win_norm(k_win), *rope), v_win


class NativeSparseAttention(Attention):
    """o = sum over the branches compressed, selected, window of sigmoid(W_g x + b_g) * o_branch."""

    settings = "nsa"
    prompt_in_parts = False
    decodes_by_clock = True
    starts_fresh = ("sparse",)
    refused_exchanges = {"gather_kv": "whose queries choose blocks over the whole row"}
    refused_prompts = "whose queries choose blocks over the whole row"

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.sparse = SparseBranches(config)

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

    def attend(self, inputs: tuple[Tensor, ...], rope: Rope, documents: Layout) -> Tensor:
        if documents.cu_seqlens is None:
            return self._branches(inputs, rope, documents)
        return self.packed(inputs, rope, documents)

    def packed(self, inputs: tuple[Tensor, ...], rope: Rope, documents: Layout) -> Tensor:
        """All branches over the B*T flattened tokens of rows that hold several documents."""
        rows = len(inputs[0])
        flat = [x.flatten(0, 1)[None] for x in inputs]
        if documents.rope is None:
            rope = [x.expand(rows, *x.shape[1:]).flatten(0, 1)[None] for x in rope]
        return self._branches(flat, rope, documents).view_as(inputs[0])

    def _branches(self, inputs: Sequence[Tensor], rope: Rope, layout: Layout) -> Tensor:
        q, k, v, raw, v_raw, k_win, v_win, gates = inputs

        def rotate_as(k_cmp: Tensor, centre: slice | Tensor) -> Tensor:
            cos, sin = rope if layout.rope is None else layout.rope
            return rotate(k_cmp, cos[:, centre], sin[:, centre])

        sparse = self.sparse
        k_cmp, v_cmp = sparse.compressor(raw, v_raw, rotate_as, layout)
        return sparse.core(
            q, k, v, k_cmp, v_cmp, k_win, v_win, gates, sparse.cfg, layout.cu_seqlens
        )

    def decode(self, inputs: tuple[Tensor, ...], rope: Rope, cache: "SparseCache") -> Tensor:
        return cache.attend(inputs, rope, self.sparse.compressor, self.sparse.core)

    @classmethod
    def check(cls, config: ModelConfig, device: Device | None = None) -> None:
        choose_sparse_core(config)
        if config.kernels == "triton":
            triton_sparse_core(config, device)

    @classmethod
    def warning(cls, config: ModelConfig, device: Device) -> str | None:
        if config.kernels != "auto" or torch.device(device).type != "cuda":
            return None
        why = why_no_triton(config, device)
        if why is None:
            return None
        return (
            f"sparse attention runs in PyTorch operators, slowly, because the kernels cannot: {why}"
        )

    @classmethod
    def documents(
        cls,
        config: ModelConfig,
        cu_seqlens: Tensor | None,
        shape: tuple[int, int],
        device: Device,
    ) -> Layout:
        return Layout.of(cu_seqlens, shape, config.nsa, device)

    @classmethod
    def whole_rows(
        cls,
        config: ModelConfig,
        cu_seqlens: Tensor,
        positions_BT: Tensor,
        rotary: RotaryCache,
    ) -> Layout:
        layout = cls.documents(config, cu_seqlens, positions_BT.shape, positions_BT.device)
        if layout.cu_seqlens is not None:
            positions_BT = positions_BT.flatten()[None]
        rope = rotary.at(positions_BT[:, layout.centre])
        return layout._replace(centre=slice(None), rope=rope)

    @classmethod
    def cache(
        cls,
        config: ModelConfig,
        shape: tuple[int, int, int, int],
        device: Device,
        dtype: torch.dtype,
    ) -> "SparseCache":
        twin = sparse_twin()
        kind = SparseCache if twin is None else twin.NSAState
        return kind(config.nsa, *shape, device, dtype)

    @classmethod
    def added_params(cls, config: ModelConfig) -> tuple[int, int, int]:
        """(matrices over tokens, matrices over compressed blocks, vectors) of SparseBranches."""
        nsa = config.nsa
        K = config.head_dim
        tokens = config.hidden_size * 3 * config.num_heads
        blocks = 0
        vectors = 3 * config.num_heads + K
        if nsa.kv == "separate":
            tokens += config.hidden_size * 4 * config.num_kv_heads * K
            vectors += 2 * K
        if nsa.cmp_kind == "mlp":
            blocks = 2 * (nsa.cmp_block + 1) * K * K
            vectors += nsa.cmp_block * K
        return tokens, blocks, vectors

    @classmethod
    def params(cls, config: ModelConfig) -> int:
        plain = super().products(config) + 2 * config.head_dim
        return plain + sum(cls.added_params(config))

    @classmethod
    def products(cls, config: ModelConfig) -> float:
        """A compression matrix works once per stride and KV head."""
        tokens, blocks, _ = cls.added_params(config)
        blocks_per_token = config.num_kv_heads / config.nsa.cmp_stride
        return super().products(config) + tokens + blocks * blocks_per_token

    @classmethod
    def keys_read(cls, config: ModelConfig, positions: Tensor) -> Tensor:
        """The sum over the branches."""
        nsa = config.nsa
        past = positions + 1
        most_selected = (nsa.sel_count - 1) * nsa.sel_block + positions % nsa.sel_block + 1

        compressed = nsa.compressed_blocks(past)
        selected = past.minimum(most_selected)
        window = past.clamp(max=nsa.window)
        return compressed + selected + window

    @classmethod
    def saved_bytes(cls, config: ModelConfig, tokens: int, element: int) -> int:
        """NSA adds the selected branch's output, gates, chosen blocks (int16), keys and values cut
        into units, compressed blocks, and with kv="separate" 5 k and the statistics of two norms.
        """
        nsa = config.nsa
        G = config.num_kv_heads
        q = element * tokens * config.num_heads * config.head_dim
        k = element * tokens * G * config.head_dim

        gates = 3 * config.num_heads * element
        chosen = 2 * G * nsa.sel_count
        added = q + tokens * (gates + chosen)
        if takes_triton(config):  # the twin keeps o_cmp, its log-sum-exp, and pairs for blocks
            added += q + FP32 * config.num_heads * tokens
            added += tokens * (cls.sorted_pairs(config) - chosen)

        statistics = FP32 * (G + config.head_dim)
        block = (FP32 + 6 * element) * G * config.head_dim + statistics
        added += block * (tokens // nsa.cmp_stride)
        if nsa.kv == "separate":
            added += 5 * k + 2 * FP32 * G * tokens
        if nsa.cmp_kind == "mlp":
            added += 2 * k
        return super().saved_bytes(config, tokens, element) + added

    @classmethod
    def output_bytes(cls, config: ModelConfig, tokens: int, element: int) -> int:
        """NSA returns the selected branch's output and the chosen blocks (int16) as well; the
        Triton twin also the compressed branch's output and log-sum-exp, and the sorted pairs.
        """
        q = element * tokens * config.num_heads * config.head_dim
        chosen = 2 * tokens * config.num_kv_heads * config.nsa.sel_count
        added = q + chosen
        if takes_triton(config):
            added += q + tokens * (FP32 * config.num_heads + cls.sorted_pairs(config))
        return super().output_bytes(config, tokens, element) + added

    @classmethod
    def sorted_pairs(cls, config: ModelConfig) -> int:
        """Bytes per token of the Triton twin's list of the blocks that are not forced."""
        nsa = config.nsa
        return FP32 * config.num_kv_heads * (nsa.sel_count - nsa.sel_init - nsa.sel_local)

    @classmethod
    def backward_bytes(cls, config: ModelConfig, tokens: int, element: int) -> int:
        """Keys and values have a gradient from each branch that reads them."""
        keys = element * tokens * config.num_kv_heads * config.head_dim
        return 4 * keys


def sparse_twin() -> ModuleType | None:
    """The package nsa/, the block-major twin of the plain version, or None if it is absent."""
    if not is_package("nsa"):
        return None
    import nsa

    return nsa


def is_package(name: str) -> bool:
    """Whether a package of this name can be imported."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None  # no origin: a folder that is no package


def triton_sparse_core(config: ModelConfig, device: Device | None = None) -> Callable:
    """The Triton twin of NSA.

    Raises ValueError if it is absent, or cannot serve the sizes, or cannot run on the device; None
    stands for a GPU that is not at hand.
    """
    remedy = "choose kernels='auto' or 'torch'"
    try:
        from nsa.triton import attention
    except ImportError as error:
        raise ValueError(
            f"kernels='triton': {error}: put the folder nsa/ next to model.py and pip install "
            f"triton, or {remedy}"
        ) from None

    group = config.num_heads // config.num_kv_heads
    attention.require_sizes(group, config.head_dim, config.dtype, config.nsa, device)
    return attention.nsa_attention


def choose_sparse_core(config: ModelConfig) -> Callable:
    """The function that computes NSA: the twin in nsa/ if that can be imported, otherwise
    `plain_nsa_attention`; with kernels="triton" the Triton twin; with kernels="auto" that one for
    tensors on CUDA, if it can run there.

    Raises ValueError if the Triton twin is asked for, and absent or unable to serve the sizes.
    """
    if config.dtype == torch.float64:
        raise ValueError(
            "compute_dtype='float64' is not supported with attention_type='nsa': use float32, "
            "bfloat16 or float16"
        )
    if config.kernels == "triton":
        return triton_sparse_core(config)

    twin = sparse_twin()
    core = plain_nsa_attention if twin is None else twin.nsa_attention
    if not takes_triton(config):
        return core
    on_cuda = triton_sparse_core(config)

    def attention(q: Tensor, *others: Tensor, **options) -> Tensor | dict[str, Tensor]:
        chosen = on_cuda if platform().device(q).type == "cuda" else core
        return chosen(q, *others, **options)

    return attention


def takes_triton(config: ModelConfig) -> bool:
    """Whether NSA on CUDA runs as the Triton twin, there or, without a GPU, on one that can."""
    device = "cuda" if torch.cuda.is_available() else None
    return config.kernels == "triton" or (
        config.kernels == "auto" and why_no_triton(config, device) is None
    )


def why_no_triton(config: ModelConfig, device: Device | None) -> str | None:
    """Why the Triton twin of NSA cannot run on the device, or None if it can; see
    `triton_sparse_core`.
    """
    try:
        triton_sparse_core(config, device)
    except ValueError as error:
        return str(error)
    return None


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
    queries are checkpointed, so its memory is linear, and nothing of size [T, T] exists. The twins
    `nsa.nsa_attention` and `nsa.triton.attention.nsa_attention` skip the blocks.
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

    takes_clock = False

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

    def attend(
        self,
        inputs: tuple[Tensor, ...],
        rope: Rope,
        compressor: Compressor,
        core: Callable,
    ) -> Tensor:
        """o [B, T, H, K] of T tokens that continue what is stored. Only the twin needs `core`."""
        q, k, v, raw, v_raw, k_win, v_win, gates = inputs
        k_slc, v_slc = self.selected.append(k, v)
        if self.window is None:
            k_win, v_win = k_slc, v_slc
        else:
            k_win, v_win = self.window.append(k_win, v_win)

        cos, sin = (x.expand(len(q), *x.shape[1:]) for x in rope)
        self.rope.append(cos, sin)
        self.raw.append(raw, v_raw)
        k_cmp, v_cmp = self._compress(compressor)

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


# ---- indexed attention


# A small indexer scores the past in blocks of r tokens. Each query reads the best blocks, and the
# unfinished block that it is in; all heads of a layer share the choice. The indexer learns to
# predict where attention looks, from a loss of its own that the rest of the model does not see.
#
# Letters: M = H/G query heads per KV head, h query heads of the indexer, E its head dimension, N
# whole blocks of a document, C queries of a chunk.


class LayerLosses:
    """The losses that layers have of their own, such as an indexer's, in one forward of a decoder.

    A term counts while the decoder collects them. Otherwise it is dropped: a checkpoint that runs a
    layer again adds nothing.

    warming  whether only these losses teach the model, as in the indexer's dense warm-up
    """

    def __init__(self):
        self.warming = False
        self._terms: list[Tensor] | None = None

    def add(self, term: Tensor) -> None:
        """A layer's sum over its tokens, 0-d."""
        if self._terms is not None:
            self._terms.append(term)

    @contextlib.contextmanager
    def warming_up(self, warming: bool) -> Iterator[None]:
        """Inside, `warming` is as given. Elsewhere, as when the model is evaluated, it is not."""
        self.warming = warming
        try:
            yield
        finally:
            self.warming = False

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[Tensor]]:
        """Inside, the terms that are added are put into the list."""
        self._terms = []
        try:
            yield self._terms
        finally:
            self._terms = None


def with_gradient_of(loss: Tensor, terms: list[Tensor], divisor: Tensor | float) -> Tensor:
    """The value of `loss`, with the gradient of loss + mean over the layers of term / divisor."""
    if not terms:
        return loss
    own = torch.stack(terms).mean() / divisor
    return loss + (own - own.detach())


class Indexer(nn.Module):
    """Makes the queries and keys by which blocks are scored.

    Both are normed. Their first elements turn like the model's heads, a key like the first token of
    its block. The input is detached, so the model does not learn from the indexer's loss.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.cfg = config.indexer
        self.q_proj = Linear(config.hidden_size, self.cfg.heads * self.cfg.head_dim)
        self.k_proj = Linear(config.hidden_size, self.cfg.head_dim)
        self.q_norm = RMSNorm(self.cfg.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(self.cfg.head_dim, config.norm_eps)

    def forward(self, x_BTD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Queries [B, T, h, E], and keys [B, T, 1, E] before rotation."""
        x_BTD = x_BTD.detach()
        heads = (-1, self.cfg.head_dim)
        q_BThE = self.q_norm(self.q_proj(x_BTD).unflatten(-1, heads))
        k_BT1E = self.k_norm(self.k_proj(x_BTD).unflatten(-1, heads))
        return rotate_first(q_BThE, rope), k_BT1E


def rotate_first(x_BThE: Tensor, rope: Rope) -> Tensor:
    """Each head with as many of its first elements rotated as there are angles for."""
    turning = 2 * rope[0].shape[-1]
    turned = rotate(x_BThE[..., :turning], *rope)
    return torch.cat((turned, x_BThE[..., turning:]), dim=-1)


def pooled_keys(k_BT1E: Tensor, r: int) -> Tensor:
    """[B, N, E]: the mean of the indexer's keys over each whole block, summed in fp32."""
    B, T, _, E = k_BT1E.shape
    N = T // r
    blocks_BNrE = k_BT1E[:, : N * r].reshape(B, N, r, E)
    return blocks_BNrE.to(wide(k_BT1E.dtype)).mean(2).to(k_BT1E.dtype)


@dataclass(eq=False)  # not frozen, as Documents
class BlockLayout:
    """The documents of a batch, and the blocks of tokens in them; made once for all layers.

    lengths  tokens of each document of the B*T flattened tokens; None if every row is one document
    first    for each token of a row, or of the flattened tokens, the first one of its block
    """

    lengths: list[int] | None
    first: Tensor
    _angles: Rope | None = None

    @classmethod
    def of(
        cls, cu_seqlens: Tensor | None, shape: tuple[int, int], r: int, device: Device
    ) -> "BlockLayout":
        """The layout of (B, T) = `shape` tokens; cu_seqlens as in `Attention.documents`."""
        B, T = shape
        if cu_seqlens is None or len(cu_seqlens) == B + 1:
            return cls(None, torch.arange(T, device=device) // r * r)

        lengths = cu_seqlens.diff().tolist()
        starts = cu_seqlens[:-1].tolist()
        first = [
            start + torch.arange(length) // r * r
            for start, length in zip(starts, lengths, strict=True)
        ]
        return cls(lengths, pinned_copy(torch.cat(first), device))

    def angles(self, rope: Rope, rows: int) -> Rope:
        """cos and sin of each token's block, whose first token's they are."""
        if self._angles is None:
            if self.lengths is not None:
                rope = [x.expand(rows, *x.shape[1:]).flatten(0, 1)[None] for x in rope]
            cos, sin = (x[:, self.first] for x in rope)
            self._angles = (cos, sin)
        return self._angles


@dataclass(eq=False)
class SharedBlocks:
    """The blocks of whole rows whose tokens several ranks share; made once for all layers.

    positions_BT  for each token the position of the first one of its block
    """

    positions_BT: Tensor
    rotary: RotaryCache
    _angles: Rope | None = None

    def angles(self, cut: Callable[[Tensor], Tensor]) -> Rope:
        """As those of BlockLayout, for the tokens of a rank: `cut` takes them from whole rows."""
        if self._angles is None:
            self._angles = self.rotary.at(cut(self.positions_BT))
        return self._angles


class IndexedAttention(Attention):
    """Attention of each query over the blocks that an indexer chose, and its own unfinished one.

        I[t, b] = sum over heads of relu(q_I[t] . k_I[b]) / sqrt(E)

    Of the blocks that end before t in the document, the budget / r best ones are read, the lower
    index first on a tie. A budget of at least the document's length is standard attention.

    The indexer's loss is KL(p || softmax(I)) over the chosen blocks, where p is the probability
    that attention gives each block, summed over heads and normalised. In the dense warm-up all
    blocks count as chosen, and only the indexer learns.
    """

    settings = "indexer"
    prompt_in_parts = False
    starts_fresh = ("indexer",)
    learner = "indexer"
    figures = ("indexer_kl", "indexer_recall", "indexer_recall_limit")
    refused_exchanges = {"ulysses": "whose heads share one choice"}
    refused_levers = {
        "compile": "whose indexer's loss leaves the layer",
        "attention_head_groups": "whose heads share one choice",
    }
    refused_prompts = "whose queries choose blocks over the whole row"

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.check(config)
        self.indexer = Indexer(config)

    def inputs(
        self, x_BTD: Tensor, rope: Rope, projected: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """q, k and v; the indexer's queries, and its keys before rotation."""
        return *super().inputs(x_BTD, rope, projected), *self.indexer(x_BTD, rope)

    def attend(self, inputs: tuple[Tensor, ...], rope: Rope, documents: BlockLayout) -> Tensor:
        shape = inputs[0].shape
        lengths = [shape[1]]
        if documents.lengths is not None:
            lengths = documents.lengths
            inputs = [x.flatten(0, 1)[None] for x in inputs]

        *others, raw_BT1E = inputs
        k_BT1E = rotate_first(raw_BT1E, documents.angles(rope, shape[0]))
        parts = [x.split(lengths, dim=1) for x in (*others, k_BT1E)]
        found = [self._attend_document(*part) for part in zip(*parts, strict=True)]

        outputs, divergences, recalls = zip(*found, strict=True)
        if torch.is_grad_enabled():
            self._learn(torch.cat(divergences, dim=1), torch.stack(recalls).sum(0))
        # of one document the output is not copied
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1).view(shape)

    def attend_gathered(
        self, inputs: tuple[Tensor, ...], documents: SharedBlocks, exchange: "KeyExchange"
    ) -> Tensor:
        *others, raw_BT1E = inputs
        k_BT1E = rotate_first(raw_BT1E, documents.angles(exchange.cut))
        o_BTHK, kl_BT, recall_3 = exchange.indexed(*self._seen(*others), k_BT1E, self._reading())
        if torch.is_grad_enabled():
            self._learn(kl_BT, recall_3)
        return o_BTHK

    def _attend_document(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        q_BThE: Tensor,
        k_BT1E: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """o, the indexer's loss [B, T], and what `Reading.recall` gives."""
        reading = self._reading()
        k_BNE = pooled_keys(k_BT1E, reading.r)
        recall_3 = reading.recall(q_BTHK, k_BTGK, q_BThE, k_BNE, q_BTHK.shape[1])
        most = reading.most_of(k_BNE.shape[1])
        seen = self._seen(q_BTHK, k_BTGK, v_BTGK, q_BThE)
        numbers = reading.r, most, reading.learns, reading.kernels
        o_BTHK, kl_BT, *_ = indexed_forward(*seen, k_BNE, *numbers)
        return o_BTHK, kl_BT, recall_3

    def _reading(self) -> "Reading":
        cfg, warming = self.indexer.cfg, self.losses.warming
        return Reading(cfg.r, cfg.most_blocks, warming, torch.is_grad_enabled(), self.kernels)

    def _seen(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """q, k, v and the indexer's queries; in the warm-up the first three learn nothing."""
        *of_model, q_BThE = inputs
        if self.losses.warming:
            of_model = [x.detach() for x in of_model]
        return *of_model, q_BThE

    def _learn(self, kl_BT: Tensor, recall_3: Tensor) -> None:
        """Add this layer's loss to those of the model, and keep what the log shows of it."""
        self.losses.add(kl_BT.sum())
        read, readable, queries = recall_3.unbind()
        tokens = kl_BT.new_full((), kl_BT.numel())
        sums = torch.stack((kl_BT.detach().sum(), read, readable))
        self.measured = torch.stack((sums, torch.stack((tokens, queries, queries))))

    def decode(self, inputs: tuple[Tensor, ...], rope: Rope, cache: "IndexedCache") -> Tensor:
        q_BTHK, k_BTGK, v_BTGK, q_BThE, raw_BT1E = inputs
        k_BNE = cache.append_blocks(raw_BT1E, rope)
        keys_and_values = cache.append(k_BTGK, v_BTGK)
        cfg = self.indexer.cfg
        numbers = cfg.r, cfg.most_blocks, False, self.kernels
        o_BTHK, *_ = indexed_forward(q_BTHK, *keys_and_values, q_BThE, k_BNE, *numbers)
        return o_BTHK

    @classmethod
    def check(cls, config: ModelConfig, device: Device | None = None) -> None:
        if config.indexer.head_dim < config.head_dim:
            raise ValueError(
                f"--indexer: given head_dim={config.indexer.head_dim}; allowed: at least the "
                f"model's {config.head_dim}, whose rotary positions it shares; remedy: raise it"
            )
        if config.kernels == "triton":
            triton_indexed_core(*cls._sizes(config), device)

    @staticmethod
    def _sizes(config: ModelConfig) -> tuple:
        """What `triton_indexed_core` asks for."""
        indexer = config.indexer
        heads = config.num_heads // config.num_kv_heads, indexer.heads
        return heads, (config.head_dim, indexer.head_dim), config.dtype

    @classmethod
    def warning(cls, config: ModelConfig, device: Device) -> str | None:
        if config.kernels == "auto" and torch.device(device).type == "cuda":
            why = why_no_indexed_triton(*cls._sizes(config), device)
            if why is None:
                return None
            return (
                "indexed attention runs in PyTorch operators, slowly, because the kernels cannot: "
                + why
            )
        if config.kernels == "triton" or indexed_twin(config.dtype) is not None:
            return None
        return (
            "indexed attention masks what it does not read instead of skipping it: its memory is "
            "bounded, but its time grows with the square of the context; the folders indexed/ and "
            "nsa/ next to model.py skip it"
        )

    @classmethod
    def documents(
        cls,
        config: ModelConfig,
        cu_seqlens: Tensor | None,
        shape: tuple[int, int],
        device: Device,
    ) -> BlockLayout:
        return BlockLayout.of(cu_seqlens, shape, config.indexer.r, device)

    @classmethod
    def whole_rows(
        cls,
        config: ModelConfig,
        cu_seqlens: Tensor,
        positions_BT: Tensor,
        rotary: RotaryCache,
    ) -> SharedBlocks:
        layout = cls.documents(config, cu_seqlens, positions_BT.shape, positions_BT.device)
        if layout.lengths is None:
            return SharedBlocks(positions_BT[:, layout.first], rotary)
        first_BT = positions_BT.flatten()[layout.first].view_as(positions_BT)
        return SharedBlocks(first_BT, rotary)

    @classmethod
    def cache(
        cls,
        config: ModelConfig,
        shape: tuple[int, int, int, int],
        device: Device,
        dtype: torch.dtype,
    ) -> "IndexedCache":
        return IndexedCache(config.indexer, shape, device, dtype)

    @classmethod
    def added_products(cls, config: ModelConfig) -> int:
        """Parameters of the indexer's two projections."""
        indexer = config.indexer
        return config.hidden_size * (indexer.heads + 1) * indexer.head_dim

    @classmethod
    def params(cls, config: ModelConfig) -> int:
        plain = super().products(config) + 2 * config.head_dim
        return plain + cls.added_products(config) + 2 * config.indexer.head_dim

    @classmethod
    def products(cls, config: ModelConfig) -> float:
        """The indexer's projections count 2/3: their input, detached, needs no gradient."""
        return super().products(config) + cls.added_products(config) * 2 / 3

    @classmethod
    def keys_read(cls, config: ModelConfig, positions: Tensor) -> Tensor:
        """Keys of attention, and the indexer's scores in units of a key's operations.

        Over forward and backward a key takes 12 H K operations. A score takes 2 h E, and if its
        block is chosen twice as many more, for the gradients of its query and its key.
        """
        indexer = config.indexer
        candidates = positions // indexer.r
        chosen = candidates.clamp(max=indexer.most_blocks)
        keys = chosen * indexer.r + positions % indexer.r + 1

        operations = 2 * indexer.heads * indexer.head_dim * (candidates + 2 * chosen)
        return keys + operations / (12 * config.num_heads * config.head_dim)

    @classmethod
    def saved_bytes(cls, config: ModelConfig, tokens: int, element: int) -> int:
        """The indexer's queries before norm and rotated, keys before norm and pooled, the
        statistics of both norms, and for each query its rank (8 bytes) and a log-sum-exp.
        """
        indexer = config.indexer
        rows = (2 * indexer.heads + 1) * tokens + tokens // indexer.r
        statistics = FP32 * tokens * (indexer.heads + 1)
        added = element * rows * indexer.head_dim + statistics + tokens * (8 + FP32)
        return super().saved_bytes(config, tokens, element) + added

    @classmethod
    def output_bytes(cls, config: ModelConfig, tokens: int, element: int) -> int:
        """The indexer's loss, the ranks and two log-sum-exps as well."""
        return super().output_bytes(config, tokens, element) + tokens * (8 + 2 * FP32)

    @classmethod
    def backward_bytes(cls, config: ModelConfig, tokens: int, element: int) -> int:
        """Gradients of keys and values, of the indexer's queries and of its pooled keys."""
        indexer = config.indexer
        keys = element * tokens * config.num_kv_heads * config.head_dim
        queries = element * tokens * indexer.heads * indexer.head_dim
        return 2 * keys + queries + element * tokens // indexer.r * indexer.head_dim


# ---- indexed attention in plain PyTorch


TILE_KEYS = 2**20  # elements of keys that are converted at once: 4 MiB in fp32
SAMPLED_QUERIES = 16  # of a document, over whose keys the recall is measured


# indexed/ skips what is not read. This version masks it, so its time is quadratic. It works on
# chunks of queries, forward and backward, and saves for each query only two log-sum-exps and the
# rank of the last block that it chose: memory is linear, and nothing of size [T, N] exists.


def block_scores(q_BChE: Tensor, k_BNE: Tensor) -> Tensor:
    """I [B, C, N] in fp32 or wider; no score is negative."""
    dtype = wide(q_BChE.dtype)
    k_BEN = k_BNE.to(dtype).mT
    B, C, _, E = q_BChE.shape
    total_BCN = torch.zeros((B, C, k_BNE.shape[1]), dtype=dtype, device=q_BChE.device)
    for q_BCE in q_BChE.to(dtype).unbind(2):
        total_BCN += (q_BCE @ k_BEN).relu_()
    return total_BCN.mul_(E**-0.5)


def block_ranks(scores_BCN: Tensor, query_C1: Tensor, r: int) -> Tensor:
    """int64 [B, C, N] that orders blocks by score and, on a tie, the lower index first; -1 for a
    block that does not end before the query.

    Scores that are not negative order like the bits of their fp32 values.
    """
    block_N = torch.arange(scores_BCN.shape[-1], device=scores_BCN.device)
    bits_BCN = scores_BCN.float().contiguous().view(torch.int32).long()
    rank_BCN = (bits_BCN << 31) + (2**31 - 1 - block_N)
    return torch.where(block_N * r + r <= query_C1, rank_BCN, -1)


def least_rank(rank_BCN: Tensor, most: int) -> Tensor:
    """[B, C]: a block is chosen if its rank is at least this; so `most` blocks are, or all."""
    if rank_BCN.shape[-1] <= most:
        return rank_BCN.new_zeros(rank_BCN.shape[:-1])
    return rank_BCN.topk(most).values[..., -1].clamp(min=0)


def readable_keys(chosen_BCN: Tensor, query_C1: Tensor, r: int, tokens: int) -> Tensor:
    """Whether each of the first `tokens` tokens is in a chosen block, or in the query's own and not
    after it: [B, C, tokens].
    """
    key = torch.arange(tokens, device=query_C1.device)
    tail = (key <= query_C1) & (key >= query_C1 // r * r)
    N = chosen_BCN.shape[-1]
    read = F.pad(chosen_BCN.repeat_interleave(r, -1), (0, tokens - N * r))
    return read | tail


def by_group(x_BCHK: Tensor, G: int) -> Tensor:
    """[B, G, M*C, K] in fp32 or wider: the query heads of a group one after another."""
    x_BCGMK = x_BCHK.to(wide(x_BCHK.dtype)).unflatten(2, (G, -1))
    return x_BCGMK.permute(0, 2, 3, 1, 4).flatten(2, 3)


def keys_by_group(k_BSGK: Tensor) -> Tensor:
    """[B, G, S, K] in fp32 or wider, contiguous: a product would copy it inside."""
    return k_BSGK.to(wide(k_BSGK.dtype)).transpose(1, 2).contiguous()


def key_tiles(k_BSGK: Tensor) -> Iterator[slice]:
    """Tiles of the keys, of which each is converted when it is read: whole rows of 131,072 tokens
    with 8 KV heads of 128 would take 512 MiB in fp32.
    """
    B, S, G, K = k_BSGK.shape
    size = max(1, TILE_KEYS // (B * G * K))
    for start in platform().tiles(range(0, S, size)):
        yield slice(start, min(start + size, S))


def by_token(x_BGRK: Tensor, C: int) -> Tensor:
    """The inverse of `by_group`: [B, C, H, K]."""
    x_BGMCK = x_BGRK.unflatten(2, (-1, C))
    return x_BGMCK.permute(0, 3, 1, 2, 4).flatten(2, 3)


def masked_logits(q_BCHK: Tensor, k_BSGK: Tensor, visible_BCS: Tensor) -> Tensor:
    """q k / sqrt(K) [B, G, M, C, S] in fp32 or wider, -inf where a key is not visible."""
    _, C, _, K = q_BCHK.shape
    _, S, G, _ = k_BSGK.shape
    q_BGRK = by_group(q_BCHK, G)
    logits_BGRS = q_BGRK.new_empty((*q_BGRK.shape[:3], S))
    for keys in key_tiles(k_BSGK):
        k_BGsK = keys_by_group(k_BSGK[:, keys])
        torch.matmul(q_BGRK, k_BGsK.mT, out=logits_BGRS[..., keys])
    logits_BGMCS = logits_BGRS.mul_(K**-0.5).unflatten(2, (-1, C))
    return logits_BGMCS.masked_fill_(~visible_BCS[:, None, None], -torch.inf)


def weighted_values(p_BGMCS: Tensor, v_BSGK: Tensor) -> Tensor:
    """p v [B, C, H, K] in fp32 or wider."""
    p_BGRS = p_BGMCS.flatten(2, 3)
    o_BGRK = p_BGRS.new_zeros((*p_BGRS.shape[:3], v_BSGK.shape[-1]))
    for keys in key_tiles(v_BSGK):
        o_BGRK += p_BGRS[..., keys] @ keys_by_group(v_BSGK[:, keys])
    return by_token(o_BGRK, p_BGMCS.shape[3])


def softmax_(logits: Tensor) -> Tensor:
    """Overwrites logits by their softmax over the last dimension; returns their log-sum-exp. (That
    of PyTorch holds a second tensor of their size.)
    """
    largest = logits.amax(-1, keepdim=True)
    logits.sub_(largest).exp_()
    total = logits.sum(-1, keepdim=True)
    logits.div_(total)
    return (largest + total.log_()).squeeze(-1)


def log_sum_of_chosen(scores_BCN: Tensor, chosen_BCN: Tensor) -> Tensor:
    """[B, C]: the log-sum-exp of the scores of the chosen blocks; -inf if none is."""
    others_BCN = ~chosen_BCN
    largest_BC1 = scores_BCN.masked_fill(others_BCN, 0.0).amax(-1, keepdim=True)
    shares_BCN = (scores_BCN - largest_BC1).exp_().masked_fill_(others_BCN, 0.0)
    return (largest_BC1 + shares_BCN.sum(-1, keepdim=True).log_()).squeeze(-1)


def _block_sums(x_BCS: Tensor, r: int) -> Tensor:
    """[B, C, N]: the sum over each whole block of tokens."""
    N = x_BCS.shape[-1] // r
    return x_BCS[..., : N * r].unflatten(-1, (N, r)).sum(-1)


def block_target(p_BGMCS: Tensor, chosen_BCN: Tensor, r: int) -> Tensor:
    """[B, C, N]: the probability of each chosen block, summed over heads and normalised; 0 for a
    query that gives its chosen blocks none.
    """
    mass_BCN = _block_sums(p_BGMCS.sum((1, 2)), r).masked_fill_(~chosen_BCN, 0.0)
    total_BC1 = mass_BCN.sum(-1, keepdim=True)
    return mass_BCN.div_(total_BC1.clamp(min=torch.finfo(mass_BCN.dtype).tiny))


class IndexedInputs(NamedTuple):
    """What attention and the indexer read; of a call, or of some of its queries."""

    q_BTHK: Tensor
    k_BSGK: Tensor
    v_BSGK: Tensor
    q_BThE: Tensor  # the indexer's queries
    k_BNE: Tensor  # its keys of the N = S // r whole blocks

    def of(self, chunk: "QueryChunk") -> "IndexedInputs":
        return IndexedInputs(
            self.q_BTHK[:, chunk.queries],
            self.k_BSGK[:, chunk.keys],
            self.v_BSGK[:, chunk.keys],
            self.q_BThE[:, chunk.queries],
            self.k_BNE[:, chunk.blocks],
        )


class IndexedOutputs(NamedTuple):
    """What the forward fills; of a call, or of some of its queries."""

    o_BTHK: Tensor
    kl_BT: Tensor  # the indexer's loss in nats, 0 if it is not computed
    lse_BTH: Tensor  # log-sum-exp of attention
    log_sum_BT: Tensor  # log-sum-exp of the chosen scores
    least_BT: Tensor  # `least_rank`

    @classmethod
    def empty(cls, q_BTHK: Tensor) -> "IndexedOutputs":
        B, T, H, _ = q_BTHK.shape
        dtype = wide(q_BTHK.dtype)
        return cls(
            o_BTHK=q_BTHK.new_empty(q_BTHK.shape),
            kl_BT=q_BTHK.new_zeros((B, T), dtype=dtype),
            lse_BTH=q_BTHK.new_empty((B, T, H), dtype=dtype),
            log_sum_BT=q_BTHK.new_zeros((B, T), dtype=dtype),
            least_BT=q_BTHK.new_empty((B, T), dtype=torch.int64),
        )

    def of(self, chunk: "QueryChunk") -> "IndexedOutputs":
        return IndexedOutputs(*(x[:, chunk.queries] for x in self))


class QueryChunk(NamedTuple):
    """Some queries of a call, and the keys and blocks that they may see."""

    queries: slice
    keys: slice
    blocks: slice

    @property
    def size(self) -> int:
        """Logits of one head."""
        return (self.queries.stop - self.queries.start) * self.keys.stop

    def positions(self, device: Device) -> Tensor:
        """[C, 1]: those of the queries in the document, which are the last of the keys'."""
        first = self.keys.stop - (self.queries.stop - self.queries.start)
        return torch.arange(first, self.keys.stop, device=device)[:, None]


def query_chunks(inputs: IndexedInputs, r: int) -> list[QueryChunk]:
    """The chunks of the queries, which are the last T of the S positions."""
    B, T, H, _ = inputs.q_BTHK.shape
    S = inputs.k_BSGK.shape[1]
    size = min(256, max(16, CHUNK_LOGITS // (B * H * S)))
    chunks = []
    for start in range(0, T, size):
        stop = min(start + size, T)
        seen = S - T + stop
        chunks.append(QueryChunk(slice(start, stop), slice(0, seen), slice(0, seen // r)))
    return platform().parts(chunks, size=lambda chunk: chunk.size)


@torch.library.custom_op("longhaul::indexed_forward", mutates_args=())
def indexed_forward(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    q_BThE: Tensor,
    k_BNE: Tensor,
    r: int,
    most: int,
    learns: bool,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Indexed attention of the last T of the S tokens of one document in each row.

    The tensors are the fields of IndexedInputs, the results those of IndexedOutputs. `most`: blocks
    that a query reads at most, besides its own. `learns`: whether the indexer's loss is computed.
    `kernels`: as in ModelConfig. Gradients of o are those of q, k and v, and of the loss those of
    the indexer: neither sees the other.
    """
    inputs = IndexedInputs(q_BTHK, k_BSGK, v_BSGK, q_BThE, k_BNE)
    outputs = IndexedOutputs.empty(q_BTHK)
    twin = indexed_core(inputs, kernels)
    forward = plain_indexed_forward if twin is None else twin.forward
    forward(inputs, r, most, learns, outputs)
    return tuple(outputs)


def indexed_twin(dtype: torch.dtype) -> ModuleType | None:
    """The package indexed/, whose time is that of what is read; None for the plain version, which
    alone computes in fp64, or if that package or nsa/, which it uses, is absent.
    """
    if dtype == torch.float64 or sparse_twin() is None or not is_package("indexed"):
        return None
    import indexed

    return indexed


def indexed_core(inputs: IndexedInputs, kernels: str) -> ModuleType | None:
    """What computes indexed attention: with kernels="triton" the Triton twin, with "auto" that one
    for tensors on CUDA if it can run there, and otherwise `indexed_twin`.
    """
    G = inputs.k_BSGK.shape[2]
    _, _, H, K = inputs.q_BTHK.shape
    _, _, h, E = inputs.q_BThE.shape
    sizes = (H // G, h), (K, E), inputs.q_BTHK.dtype
    if kernels == "triton":
        return triton_indexed_core(*sizes)

    q_BTHK = inputs.q_BTHK
    if kernels == "auto" and platform().device(q_BTHK).type == "cuda":
        at_hand = q_BTHK.device if q_BTHK.is_cuda else None  # the planner's tensors are elsewhere
        if why_no_indexed_triton(*sizes, at_hand) is None:
            return triton_indexed_core(*sizes)
    return indexed_twin(inputs.q_BTHK.dtype)


def triton_indexed_core(
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: Device | None = None,
) -> ModuleType:
    """The Triton twin of indexed attention, for so many query heads per KV head and of the indexer,
    and their dims.

    Raises ValueError if it is absent, or cannot serve the sizes, or cannot run on the device; None
    stands for a GPU that is not at hand.
    """
    remedy = "choose kernels='auto' or 'torch'"
    try:
        from indexed.triton import attention
    except ImportError as error:
        raise ValueError(
            f"kernels='triton': {error}: put the folders indexed/ and nsa/ next to model.py and "
            f"pip install triton, or {remedy}"
        ) from None

    device = None if device is None else torch.device(device)
    try:
        attention.require(heads, dims, dtype, device)
    except ValueError as error:
        raise ValueError(f"{error}; remedy: {remedy}") from None
    return attention


def why_no_indexed_triton(
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: Device | None,
) -> str | None:
    """Why the Triton twin of indexed attention cannot run, or None if it can."""
    try:
        triton_indexed_core(heads, dims, dtype, device)
    except ValueError as error:
        return str(error)
    return None


def plain_indexed_forward(
    inputs: IndexedInputs, r: int, most: int, learns: bool, outputs: IndexedOutputs
) -> None:
    """Fills the outputs of `indexed_forward`."""
    for chunk in query_chunks(inputs, r):
        position_C1 = chunk.positions(inputs.q_BTHK.device)
        _forward_chunk(inputs.of(chunk), position_C1, r, most, learns, outputs.of(chunk))


def _forward_chunk(
    inputs: IndexedInputs,
    position_C1: Tensor,
    r: int,
    most: int,
    learns: bool,
    outputs: IndexedOutputs,
) -> None:
    """Fills the outputs of some queries."""
    q_BCHK, k_BSGK, v_BSGK, q_BChE, k_BNE = inputs
    scores_BCN = block_scores(q_BChE, k_BNE)
    rank_BCN = block_ranks(scores_BCN, position_C1, r)
    outputs.least_BT.copy_(least_rank(rank_BCN, most))
    chosen_BCN = rank_BCN >= outputs.least_BT[..., None]
    del rank_BCN

    visible_BCS = readable_keys(chosen_BCN, position_C1, r, k_BSGK.shape[1])
    p_BGMCS = masked_logits(q_BCHK, k_BSGK, visible_BCS)
    lse_BGMC = softmax_(p_BGMCS)
    outputs.lse_BTH.copy_(lse_BGMC.flatten(1, 2).transpose(1, 2))
    outputs.o_BTHK.copy_(weighted_values(p_BGMCS, v_BSGK))

    if learns and k_BNE.shape[1]:
        log_sum_BC = log_sum_of_chosen(scores_BCN, chosen_BCN)
        target_BCN = block_target(p_BGMCS, chosen_BCN, r)
        outputs.kl_BT.copy_(_divergence(target_BCN, scores_BCN, log_sum_BC))
        outputs.log_sum_BT.copy_(log_sum_BC)


def _divergence(target_BCN: Tensor, scores_BCN: Tensor, log_sum_BC: Tensor) -> Tensor:
    """[B, C]: the sum over blocks of target * (log target - log softmax of the scores); where the
    target is 0, a block adds 0.
    """
    log_share_BCN = scores_BCN - log_sum_BC[..., None]
    log_share_BCN.masked_fill_(target_BCN == 0, 0.0)
    return (torch.xlogy(target_BCN, target_BCN) - target_BCN * log_share_BCN).sum(-1)


@torch.library.custom_op("longhaul::indexed_backward", mutates_args=())
def indexed_backward(
    do_BTHK: Tensor | None,
    dkl_BT: Tensor | None,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    q_BThE: Tensor,
    k_BNE: Tensor,
    o_BTHK: Tensor,
    lse_BTH: Tensor,
    log_sum_BT: Tensor,
    least_BT: Tensor,
    r: int,
    most: int,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the inputs: of q, k and v from `do`, of the indexer's from `dkl`; of no token
    without.

    Scores and probabilities are computed again, chunk by chunk. Sums are fp32 or wider. `r`,
    `most` and `kernels` are those of the forward.
    """
    inputs = IndexedInputs(q_BTHK, k_BSGK, v_BSGK, q_BThE, k_BNE)
    saved = IndexedOutputs(o_BTHK, log_sum_BT, lse_BTH, log_sum_BT, least_BT)  # kl is not read
    of_model, of_indexer = _with_gradients(do_BTHK, dkl_BT, inputs)
    q, *keys = of_model
    q_idx, k_idx = of_indexer
    grads = IndexedInputs(
        q.new_zeros(q.shape),
        *map(_wide_zeros, keys),
        q_idx.new_zeros(q_idx.shape),
        _wide_zeros(k_idx),
    )
    twin = indexed_core(inputs, kernels)
    backward = plain_indexed_backward if twin is None else twin.backward
    backward(do_BTHK, dkl_BT, inputs, r, most, saved, grads)
    return tuple(x.to(like.dtype) for x, like in zip(grads, inputs, strict=True))


def plain_indexed_backward(
    do_BTHK: Tensor | None,
    dkl_BT: Tensor | None,
    inputs: IndexedInputs,
    r: int,
    most: int,
    saved: IndexedOutputs,
    grads: IndexedInputs,
) -> None:
    """Fills and adds to the gradients of `indexed_backward`."""
    for chunk in query_chunks(inputs, r):
        of_chunk = [None if x is None else x[:, chunk.queries] for x in (do_BTHK, dkl_BT)]
        position_C1 = chunk.positions(inputs.q_BTHK.device)
        _backward_chunk(
            *of_chunk, inputs.of(chunk), position_C1, r, saved.of(chunk), grads.of(chunk)
        )


def _with_gradients(
    do_BTHK: Tensor | None, dkl_BT: Tensor | None, inputs: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Attention's inputs and the indexer's: those without a gradient as if they had no token."""
    of_model = [x if do_BTHK is not None else x[:, :0] for x in inputs[:3]]
    of_indexer = [x if dkl_BT is not None else x[:, :0] for x in inputs[3:]]
    return of_model, of_indexer


def _wide_zeros(x: Tensor) -> Tensor:
    """Zeros to sum a gradient in, in fp32 or wider."""
    return x.new_zeros(x.shape, dtype=wide(x.dtype))


def _backward_chunk(
    do_BCHK: Tensor | None,
    dkl_BC: Tensor | None,
    inputs: IndexedInputs,
    position_C1: Tensor,
    r: int,
    saved: IndexedOutputs,
    grads: IndexedInputs,
) -> None:
    """Fills the gradients of some queries, and adds to those of the keys that they see."""
    q_BCHK, k_BSGK, v_BSGK, q_BChE, k_BNE = inputs
    scores_BCN = block_scores(q_BChE, k_BNE)
    chosen_BCN = block_ranks(scores_BCN, position_C1, r) >= saved.least_BT[..., None]
    visible_BCS = readable_keys(chosen_BCN, position_C1, r, k_BSGK.shape[1])
    p_BGMCS = masked_logits(q_BCHK, k_BSGK, visible_BCS)
    lse_BGMC = saved.lse_BTH.transpose(1, 2).unflatten(1, p_BGMCS.shape[1:3])
    p_BGMCS.sub_(lse_BGMC[..., None]).exp_()

    if dkl_BC is not None and k_BNE.shape[1]:
        target_BCN = block_target(p_BGMCS, chosen_BCN, r)
        share_BCN = scores_BCN.sub_(saved.log_sum_BT[..., None]).exp_()
        # a query without a target has no loss
        without = ~chosen_BCN | (target_BCN.sum(-1, keepdim=True) == 0)
        dscores_BCN = share_BCN.masked_fill_(without, 0.0).sub_(target_BCN).mul_(dkl_BC[..., None])
        _add_score_gradients(dscores_BCN, q_BChE, k_BNE, grads)
        del target_BCN, without
    del scores_BCN, chosen_BCN, visible_BCS
    if do_BCHK is not None:
        _add_attention_gradients(do_BCHK, saved.o_BTHK, p_BGMCS, inputs, grads)


def _add_score_gradients(
    dscores_BCN: Tensor, q_BChE: Tensor, k_BNE: Tensor, grads: IndexedInputs
) -> None:
    """Gradients of the indexer's queries and keys from those of the scores."""
    dtype = dscores_BCN.dtype
    q_BChE, k_BNE = q_BChE.to(dtype), k_BNE.to(dtype)
    dscores_BCN.mul_(q_BChE.shape[-1] ** -0.5)
    for head, q_BCE in enumerate(q_BChE.unbind(2)):
        d_BCN = dscores_BCN.masked_fill((q_BCE @ k_BNE.mT) <= 0, 0.0)
        grads.q_BThE[:, :, head] = d_BCN @ k_BNE
        grads.k_BNE.add_(d_BCN.mT @ q_BCE)


def _add_attention_gradients(
    do_BCHK: Tensor, o_BCHK: Tensor, p_BGMCS: Tensor, inputs: IndexedInputs, grads: IndexedInputs
) -> None:
    """Gradients of q, k and v from the probabilities."""
    _, G, _, C, _ = p_BGMCS.shape
    do, o, q = (by_group(x, G) for x in (do_BCHK, o_BCHK, inputs.q_BTHK))
    delta_BGR1 = (do * o).sum(-1, keepdim=True)
    p_BGRS = p_BGMCS.flatten(2, 3)

    dq_BGRK = torch.zeros_like(q)
    for keys in key_tiles(inputs.k_BSGK):
        k, v = (keys_by_group(x[:, keys]) for x in (inputs.k_BSGK, inputs.v_BSGK))
        p = p_BGRS[..., keys]
        grads.v_BSGK[:, keys].add_((p.mT @ do).transpose(1, 2))
        ds = (do @ v.mT).sub_(delta_BGR1).mul_(p).mul_(q.shape[-1] ** -0.5)
        dq_BGRK += ds @ k
        grads.k_BSGK[:, keys].add_((ds.mT @ q).transpose(1, 2))
    grads.q_BTHK.copy_(by_token(dq_BGRK, C))


@indexed_forward.register_fake
def _(q_BTHK, *_):
    return tuple(IndexedOutputs.empty(q_BTHK))


@indexed_backward.register_fake
def _(do_BTHK, dkl_BT, *inputs_and_saved):
    of_model, of_indexer = _with_gradients(do_BTHK, dkl_BT, inputs_and_saved[:5])
    return tuple(x.new_empty(x.shape) for x in (*of_model, *of_indexer))


def _save_indexed(ctx, inputs, output):
    *tensors, ctx.r, ctx.most, ctx.learns, ctx.kernels = inputs
    o_BTHK, _kl_BT, *statistics = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*statistics)
    ctx.save_for_backward(*tensors, o_BTHK, *statistics)


def _indexed_gradients(ctx, do_BTHK, dkl_BT, *_):
    if not any(ctx.needs_input_grad[:3]):
        do_BTHK = None
    if not ctx.learns or not any(ctx.needs_input_grad[3:5]):
        dkl_BT = None
    given = do_BTHK, dkl_BT, *ctx.saved_tensors
    grads = indexed_backward(*given, ctx.r, ctx.most, ctx.kernels)
    of_model = grads[:3] if do_BTHK is not None else (None,) * 3
    of_indexer = grads[3:] if dkl_BT is not None else (None,) * 2
    return *of_model, *of_indexer, None, None, None, None


indexed_forward.register_autograd(_indexed_gradients, setup_context=_save_indexed)


@dataclass(frozen=True)
class Reading:
    """How much the queries of a layer read, and whether its indexer learns from it."""

    r: int
    most: int  # blocks that a query reads at most, besides its own
    warming: bool
    learns: bool
    kernels: str = "auto"  # as in ModelConfig

    def most_of(self, blocks: int) -> int:
        """The same of so many blocks; in the warm-up it is all of them."""
        return max(self.most, blocks) if self.warming else self.most

    @torch.no_grad()
    def recall(
        self, q_BTHK: Tensor, k_BSGK: Tensor, q_BThE: Tensor, k_BNE: Tensor, length: int
    ) -> Tensor:
        """The share of full attention's mass on the keys that queries read, the largest share on as
        many blocks, and the number of queries, [3]; the shares are means over heads, summed over
        rows and sampled queries.

        They are 16 of the queries that have a choice, at equal distances from the end of the
        document on, which has `length` tokens. The queries are given as to `indexed_forward`.
        """
        S, T = k_BSGK.shape[1], q_BTHK.shape[1]
        total_3 = torch.zeros(3, dtype=wide(q_BTHK.dtype), device=q_BTHK.device)
        sampled = self._sampled(length, S - T, S) if self.learns else range(0)
        if not sampled:
            return total_3

        B, _, H, _ = q_BTHK.shape
        query = pinned_copy(torch.tensor(sampled), q_BTHK.device)
        for part in query.split(max(1, CHUNK_LOGITS // (B * H * S))):
            own = part - (S - T)
            total_3[:2] += self._shares(
                q_BTHK[:, own], k_BSGK, q_BThE[:, own], k_BNE, part[:, None]
            )
        total_3[2].fill_(B * len(sampled))  # assigned, the number would be copied from the host
        return total_3

    def _sampled(self, length: int, first: int, end: int) -> list[int]:
        """Those of the sampled queries of a document that are from `first` on and before `end`."""
        choosing = length - (self.most + 1) * self.r  # they have more candidates than they read
        count = max(0, min(SAMPLED_QUERIES, choosing))
        sampled = [length - 1 - index * choosing // count for index in range(count)]
        return [query for query in sampled if first <= query < end]

    def _shares(
        self, q_BCHK: Tensor, k_BSGK: Tensor, q_BChE: Tensor, k_BNE: Tensor, query_C1: Tensor
    ) -> Tensor:
        S = k_BSGK.shape[1]
        rank_BCN = block_ranks(block_scores(q_BChE, k_BNE), query_C1, self.r)
        chosen_BCN = rank_BCN >= least_rank(rank_BCN, self.most)[..., None]
        read_BCS = readable_keys(chosen_BCN, query_C1, self.r, S)

        keys = torch.arange(S, device=query_C1.device)
        p_BGMCS = masked_logits(q_BCHK, k_BSGK, (keys <= query_C1)[None])
        softmax_(p_BGMCS)
        mass_BCS = p_BGMCS.mean((1, 2))

        before_C1 = query_C1 // self.r * self.r
        blocks_BCN = _block_sums(mass_BCS.masked_fill(keys >= before_C1, 0.0), self.r)
        own_BC = mass_BCS.masked_fill(keys < before_C1, 0.0).sum(-1)
        best_BC = own_BC + blocks_BCN.topk(self.most).values.sum(-1)
        return torch.stack(((mass_BCS * read_BCS).sum(), best_BC.sum()))


class IndexedCache(LayerCache):
    """Keys and values of one layer, the indexer's keys of whole blocks [B, max_length // r, 1, E],
    and what the unfinished block needs.
    """

    takes_clock = False

    def __init__(
        self,
        cfg: IndexerConfig,
        shape: tuple[int, int, int, int],
        device: Device,
        dtype: torch.dtype,
    ):
        super().__init__(shape, device, dtype)
        rows, max_length = shape[:2]
        self.r = cfg.r
        self.k_BNE = torch.empty(
            (rows, max_length // cfg.r, cfg.head_dim), device=device, dtype=dtype
        )
        self.blocks = 0
        # of the unfinished block: keys before rotation, and the angles of its tokens
        self.open: list[Tensor] = []

    def append_blocks(self, raw_BT1E: Tensor, rope: Rope) -> Tensor:
        """Store the blocks that end with these tokens, whose keys are given before rotation;
        returns the keys [B, N, E] of all. To be called before `append`.
        """
        rows, T = raw_BT1E.shape[:2]
        self.check_room(rows, T)
        new = [raw_BT1E, *(x.expand(rows, *x.shape[1:]) for x in rope)]
        if self.open:
            new = [torch.cat(pair, dim=1) for pair in zip(self.open, new, strict=True)]

        whole = new[0].shape[1] // self.r * self.r
        raw_BT1E, *angles = (x[:, :whole] for x in new)
        angles = [x[:, :: self.r].repeat_interleave(self.r, dim=1) for x in angles]
        count = self.blocks + whole // self.r
        self.k_BNE[:, self.blocks : count] = pooled_keys(rotate_first(raw_BT1E, angles), self.r)
        self.blocks = count
        self.open = [x[:, whole:] for x in new]
        return self.k_BNE[:, :count]


# ---- the table of attention kinds


ATTENTIONS: dict[str, type[Attention]] = {
    "standard": StandardAttention,
    "nsa": NativeSparseAttention,
    "indexed": IndexedAttention,
}
