"""The whole decoder: configuration, attention, vocabulary head, loss and KV cache. Imports torch
alone.

Copied alone into an empty folder this file trains and generates:

    from model import Decoder, ModelConfig
    decoder = Decoder(ModelConfig.preset("tiny"))
    loss = decoder(tokens_BT, labels_BT)       # labels[:, t] is already the target of position t
    loss.backward()

The geometry is Qwen3's (pre-norm, grouped-query attention, RMSNorm on queries and keys, SwiGLU,
rotary positions).
Parallelism, checkpointing and compilation are applied from outside: nothing here knows of them. Two
lazy edges leave this file:
`attention_type="nsa"` runs the branches of nsa/, and `kernels="triton"` the twins of fused/.

Letters: B batch, T tokens, N = B*T, S cached tokens, H query heads, G key/value heads, K head
dimension, D model width,
F feed-forward width, V vocabulary. Activations take `compute_dtype`; parameters keep their own
(fp32 master weights).
"""

import contextlib
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # the label of a position without a target
GIB = 2**30
# vocabulary from which the chunked loss takes no more time than the standard one
# (benchmarks/vocab_loss.py)
TILES_WIN = 8192


# ------------------------------------------------------------------------------------ configuration

PRESETS = {  # what differs from the defaults of ModelConfig, which are those of the 4B
    "tiny": dict(
        vocab_size=8192,
        hidden_size=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        ffn_size=768,
    ),
    "0.6B": dict(hidden_size=1024, num_layers=28, num_heads=16, ffn_size=3072),
    "1.7B": dict(hidden_size=2048, num_layers=28, num_heads=16, ffn_size=6144),
    "4B": dict(),
    "8B": dict(hidden_size=4096, ffn_size=12288, tie_embeddings=False),
}
CHOICES = {
    "attention_type": ("standard", "nsa"),
    "rope_scaling": ("none", "linear", "yarn"),
    "loss": ("auto", "standard", "chunked"),
    "kernels": ("auto", "torch", "compiled", "triton"),
    "compute_dtype": ("float32", "bfloat16", "float16", "float64"),
}


@dataclass(frozen=True)
class NSAConfig:
    """Sizes of Native Sparse Attention (arXiv 2502.11089), in tokens and blocks; letters of the
    paper in brackets.
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
        smallest = dict(
            cmp_block=1, cmp_stride=1, sel_block=1, sel_count=1, sel_init=0, sel_local=1, window=1
        )
        for allowed, holds, remedy in [
            (
                f"{name} an integer >= {n}",
                type(value := getattr(self, name)) is int and value >= n,
                f"change {name}",
            )
            for name, n in smallest.items()
        ] + [
            *(
                (
                    f"{name} a multiple of cmp_stride",
                    getattr(self, name) % max(1, self.cmp_stride) == 0,
                    "change one of them",
                )
                for name in ("cmp_block", "sel_block")
            ),
            (
                "cmp_block <= sel_block",
                self.cmp_block <= self.sel_block,
                "lower cmp_block or raise sel_block",
            ),
            (
                "sel_count >= sel_init + sel_local",
                self.sel_count >= self.sel_init + self.sel_local,
                "raise sel_count or force fewer blocks",
            ),
            ("cmp_kind 'mlp' or 'mean'", self.cmp_kind in ("mlp", "mean"), "choose one of them"),
            ("kv 'shared' or 'separate'", self.kv in ("shared", "separate"), "choose one of them"),
        ]:
            if not holds:
                given = ", ".join(
                    f"{name}={value!r}" for name, value in vars(self).items() if name in allowed
                )
                raise ValueError(f"NSAConfig: given {given}; allowed: {allowed}; remedy: {remedy}")

    def compressed_blocks(self, tokens):
        """Compressed blocks of a document: those that lie wholly inside it. `tokens`: an int, or a
        tensor of them.
        """
        blocks = (tokens - self.cmp_block) // self.cmp_stride + 1
        return blocks.clamp(min=0) if isinstance(blocks, Tensor) else max(0, blocks)


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and numerics of a decoder; validated once, never mutated (use
    `dataclasses.replace`).
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
    attention_type: str = "standard"
    nsa: NSAConfig = NSAConfig()  # read where attention_type is "nsa"
    loss: str = "auto"
    logits_threshold_gib: float = 10.0  # `auto` never builds logits larger than this
    loss_chunk_size: int = 0  # tokens of a tile of the chunked loss; 0: chosen by shape and device
    kernels: str = (
        "auto"  # who computes fused parts: torch, torch.compile, or the Triton twins of fused/
    )
    compute_dtype: str = "float32"
    init_std: float = 0.02

    def __post_init__(self):
        above = dict.fromkeys(
            (
                "vocab_size",
                "hidden_size",
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "ffn_size",
                "rope_original_context",
                "norm_eps",
                "init_std",
            ),
            0,
        ) | dict(rope_theta=1)
        for name, bound in above.items():
            if not bound < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)} is out of range: give a number above {bound}"
                )
        for name, unit in dict(
            loss_chunk_size="tokens (0: chosen by shape and device)", logits_threshold_gib="GiB"
        ).items():
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)} is out of range: give 0 or more {unit}"
                )
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(allowed)}"
                )
        if self.num_heads % self.num_kv_heads:
            divisors = [g for g in range(1, self.num_heads + 1) if self.num_heads % g == 0]
            raise ValueError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}: "
                f"choose num_kv_heads from {divisors}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd: rotary positions turn pairs, choose an even head_dim"
            )
        if not 1 <= self.rope_factor < math.inf or (self.rope_scaling == "none") != (
            self.rope_factor == 1
        ):
            raise ValueError(
                f"rope_scaling={self.rope_scaling!r} with rope_factor={self.rope_factor}: give a factor above 1 "
                "with linear or yarn, and no factor with none"
            )

    @classmethod
    def preset(cls, name: str, **overrides) -> "ModelConfig":
        """The named preset with some fields replaced; ValueError lists the known presets or fields."""
        if name not in PRESETS:
            raise ValueError(f"model size {name!r} is unknown: choose one of {', '.join(PRESETS)}")
        known = [field.name for field in fields(cls)]
        for key in overrides:
            if key not in known:
                raise ValueError(
                    f"ModelConfig has no field {key!r}: choose from {', '.join(known)}"
                )
        return cls(**{**PRESETS[name], **overrides})

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.compute_dtype)

    def layer_params(self) -> int:
        """Parameters of one block: projections, feed-forward, the two norms and the q/k norms, and
        what NSA adds.
        """
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        sparse = sum(self.sparse_params()) if self.attention_type == "nsa" else 0
        return (
            attention
            + sparse
            + 3 * self.hidden_size * self.ffn_size
            + 2 * self.hidden_size
            + 2 * self.head_dim
        )

    def sparse_params(self) -> tuple[int, int, int]:
        """What NSA adds to a layer: (matrices over tokens, matrices over compressed blocks,
        vectors).
        """
        K, mlp, separate = self.head_dim, self.nsa.cmp_kind == "mlp", self.nsa.kv == "separate"
        tokens = self.hidden_size * (3 * self.num_heads + separate * 4 * self.num_kv_heads * K)
        return (
            tokens,
            mlp * 2 * (self.nsa.cmp_block + 1) * K * K,
            3 * self.num_heads + K + mlp * self.nsa.cmp_block * K + separate * 2 * K,
        )

    def num_params(self) -> int:
        """Parameters of the decoder, a tied embedding counted once; nothing is allocated."""
        vocabularies = 1 if self.tie_embeddings else 2
        return (
            vocabularies * self.vocab_size * self.hidden_size
            + self.num_layers * self.layer_params()
            + self.hidden_size
        )

    def logits_gib(self, batch: int, seq: int) -> float:
        """GiB of bf16 logits."""
        return batch * seq * self.vocab_size * 2 / GIB

    def should_chunk(self, batch: int, seq: int) -> bool:
        """The threshold rule."""
        return (
            self.loss == "chunked"
            or self.loss == "auto"
            and self.logits_gib(batch, seq) > self.logits_threshold_gib
        )

    def loss_path(self, batch: int, seq: int) -> str:
        """Which loss runs, "standard" or "chunked": `auto` also takes the chunked one where it was
        measured to be no slower.
        """
        faster = self.loss == "auto" and self.vocab_size >= TILES_WIN
        return "chunked" if faster or self.should_chunk(batch, seq) else "standard"


# ----------------------------------------------------------------------------------------- platform


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

    def tile_body(self, function, kernels: str):
        """What runs an elementwise tile function of the loss."""
        return fastest_body(function, kernels)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The RMSNorm of a CUDA device: one fused kernel."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def attention(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, **options) -> Tensor:
        """Softmax attention by a memory-linear kernel; `options` are those of PyTorch's SDPA."""
        return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, **options)

    def host_memory(self) -> contextlib.AbstractContextManager:
        """Entered around code whose new tensors are in host memory, not on the device."""
        return contextlib.nullcontext()

    def from_host(self, x: Tensor, device: torch.device) -> Tensor:
        """A tensor of host memory, copied to the device; on a CPU the tensor itself."""
        return x.to(device, non_blocking=True)


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


# ------------------------------------------------------------------- rotary positions and documents


def rope_frequencies(config: ModelConfig, device) -> tuple[Tensor, float]:
    """Inverse frequencies [K/2] in fp32 and the factor on cos and sin.

    none: theta^(-2i/K). linear: the same divided by `factor` (position interpolation, Chen et al.
    2023).
    yarn: a ramp between the two over the dimensions whose wavelength turns between 1 and 32 times
    in the original context,
    and cos, sin scaled by 0.1 ln(factor) + 1 (Peng et al. 2023).
    """
    exponent_k = (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    )
    plain_k = config.rope_theta**-exponent_k
    if config.rope_scaling == "none":
        return plain_k, 1.0
    interpolated_k = plain_k / config.rope_factor
    if config.rope_scaling == "linear":
        return interpolated_k, 1.0

    def dimension(
        turns: float,
    ) -> float:  # the index whose wavelength turns that often within the original context
        ratio = config.rope_original_context / (turns * 2 * math.pi)
        return config.head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), config.head_dim - 1)
    index_k = torch.arange(config.head_dim // 2, dtype=torch.float32, device=device)
    ramp_k = ((index_k - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain_k * (1 - ramp_k) + interpolated_k * ramp_k, 0.1 * math.log(
        config.rope_factor
    ) + 1.0


class RotaryCache:
    """cos and sin [1, T, 1, K/2] in fp32, on the device that asks, grown by doubling when a longer
    sequence comes.

    A plain object, not a buffer: `.to()`, `to_empty()` and meta construction cannot leave it on the
    wrong device or unfilled.
    """

    def __init__(self, config: ModelConfig):
        self.config, self.cos, self.sin = config, None, None

    def __call__(self, length: int, device, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Positions offset .. offset+length-1, from the cache."""
        end = offset + length
        if self.cos is None or self.cos.device != device or self.cos.shape[1] < end:
            size = max(
                end,
                2 * self.cos.shape[1] if self.cos is not None and self.cos.device == device else 0,
            )
            with torch.inference_mode(False):  # tables made while sampling must serve training too
                self.cos, self.sin = self.at(torch.arange(size, device=device)[None])
        return self.cos[:, offset:end], self.sin[:, offset:end]

    def at(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Any positions [B, T], computed directly: equal bit for bit to the cache's rows."""
        frequencies_k, factor = rope_frequencies(self.config, positions_BT.device)
        angles_BT1k = (positions_BT[..., None].float() * frequencies_k)[
            :, :, None
        ]  # fp32: bf16 cannot count past 256
        return angles_BT1k.cos() * factor, angles_BT1k.sin() * factor


class _Rotate(torch.autograd.Function):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) in fp32; the backward turns the other way and
    saves nothing of x.
    """

    @staticmethod
    def forward(ctx, x_BTHK, cos_BT1k, sin_BT1k):
        ctx.save_for_backward(cos_BT1k, sin_BT1k)
        return _rotated(x_BTHK, cos_BT1k, sin_BT1k)

    @staticmethod
    def backward(ctx, grad_BTHK):
        cos_BT1k, sin_BT1k = ctx.saved_tensors
        return _rotated(grad_BTHK, cos_BT1k, -sin_BT1k), None, None


def _rotated(x_BTHK: Tensor, cos_BT1k: Tensor, sin_BT1k: Tensor) -> Tensor:
    parts = (
        1 if torch.compiler.is_compiling() else max(1, min(4, x_BTHK.shape[1] // 2048))
    )  # of a long row one part at a time is in fp32
    y_BTHK = torch.empty_like(x_BTHK)
    for x, cos, sin, y in zip(
        *(whole.tensor_split(parts, dim=1) for whole in (x_BTHK, cos_BT1k, sin_BT1k, y_BTHK))
    ):
        x1, x2 = x.to(wide(x.dtype)).chunk(2, dim=-1)
        y.copy_(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1))
    return y_BTHK


def document_boundaries(doc_ids_BT: Tensor) -> Tensor:
    """cu_seqlens [documents+1], int64 on the host: ends of the runs of equal ids in the B*T
    flattened tokens; a row starts a document.

    Attention loops over documents, so it needs lengths on the host: keep `doc_ids` there (a CUDA
    tensor costs one synchronisation).
    """
    ids_BT = doc_ids_BT.cpu()
    starts_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
    return torch.cat([starts_BT.flatten().nonzero()[:, 0], torch.tensor([ids_BT.numel()])])


def document_positions(cu_seqlens: Tensor, shape: tuple[int, int]) -> Tensor:
    """Positions [B, T] that restart at 0 with each document."""
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    return (torch.arange(int(cu_seqlens[-1])) - starts).view(shape)


# ---------------------------------------------------------------------------------------- attention


def sdpa(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, causal: bool, mask_TS: Tensor | None = None
) -> Tensor:
    """Softmax attention in the [B, T, H, K] layout; memory-linear kernels on CPU and CUDA (no [T,
    T]).
    """
    o_BHTK = platform().attention(
        q_BTHK.transpose(1, 2),
        k_BSGK.transpose(1, 2),
        v_BSGK.transpose(1, 2),
        attn_mask=mask_TS,
        is_causal=causal,
        enable_gqa=q_BTHK.shape[2] != k_BSGK.shape[2],
    )
    return o_BHTK.transpose(1, 2)


def packed_attention(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, cu_seqlens: Tensor) -> Tensor:
    """One SDPA call per document. `split` and `cat`, not slices: a slice's backward zero-fills the
    whole row each time.
    """
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(x.flatten(0, 1)[None].split(lengths, dim=1) for x in (q_BTHK, k_BTGK, v_BTGK)))
    return torch.cat([sdpa(q, k, v, causal=True) for q, k, v in parts], dim=1).view_as(q_BTHK)


def standard_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    cu_seqlens: Tensor | None = None,
    packed=packed_attention,
) -> Tensor:
    """Causal attention, by documents where cu_seqlens (over B*T) are given; a compiled model passes
    an uncompiled `packed`.
    """
    if (
        cu_seqlens is None or len(cu_seqlens) == len(q_BTHK) + 1
    ):  # as many documents as rows: every row is one
        return sdpa(q_BTHK, k_BTGK, v_BTGK, causal=True)
    return packed(q_BTHK, k_BTGK, v_BTGK, cu_seqlens)


def cached_attention(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, query_chunk: int = 256
) -> Tensor:
    """Causal attention of the last T of S positions, over chunks of queries so that a mask is
    [chunk, S] at most.
    """
    T, S = q_BTHK.shape[1], k_BSGK.shape[1]
    if T == S or T == 1:
        return sdpa(q_BTHK, k_BSGK, v_BSGK, causal=T == S and T > 1)
    key_S = torch.arange(S, device=q_BTHK.device)
    outputs = []
    for start in range(0, T, query_chunk):
        q_chunk = q_BTHK[:, start : start + query_chunk]
        last_C1 = torch.arange(q_chunk.shape[1], device=q_BTHK.device)[:, None] + (S - T + start)
        outputs.append(sdpa(q_chunk, k_BSGK, v_BSGK, causal=False, mask_TS=key_S <= last_C1))
    return torch.cat(outputs, dim=1)


class LayerCache:
    """Keys and values of one layer, [B, max_length, G, K], filled from the left."""

    def __init__(self, shape: tuple[int, int, int, int], device, dtype):
        self.k_BSGK = torch.empty(shape, device=device, dtype=dtype)
        self.v_BSGK = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, k_BTGK: Tensor, v_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; returns views of all of them."""
        end = self.length + k_BTGK.shape[1]
        if len(k_BTGK) != len(self.k_BSGK):
            raise ValueError(
                f"the KV cache holds {len(self.k_BSGK)} rows and {len(k_BTGK)} are given: build it with batch_size={len(k_BTGK)}"
            )
        if end > self.k_BSGK.shape[1]:
            raise ValueError(
                f"the KV cache holds {self.k_BSGK.shape[1]} positions and {end} are needed: build it with max_length >= {end}"
            )
        self.k_BSGK[:, self.length : end], self.v_BSGK[:, self.length : end] = k_BTGK, v_BTGK
        self.length = end
        return self.k_BSGK[:, :end], self.v_BSGK[:, :end]


class KVCache:
    """One LayerCache (with NSA, one NSAState) per layer: 2 * L * B * max_length * G * K elements
    (NSA: about 1/16 more), allocated once.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_length: int,
        device="cpu",
        dtype: torch.dtype | None = None,
    ):
        if batch_size < 1 or max_length < 1:
            raise ValueError(
                f"batch_size={batch_size}, max_length={max_length}: both must be at least 1"
            )
        shape = (batch_size, max_length, config.num_kv_heads, config.head_dim)
        layer = (
            LayerCache
            if config.attention_type == "standard"
            else nsa_package().layer_cache(config.nsa)
        )
        self.layers = [
            layer(shape, device, dtype or config.dtype) for _ in range(config.num_layers)
        ]

    @property
    def length(self) -> int:
        """Positions stored so far."""
        return self.layers[0].length


# ------------------------------------------------------------------------------------------- layers


class Linear(nn.Linear):
    """y = x W^T without bias; W is cast to the dtype of x on use, so that fp32 master weights serve
    bf16 activations.
    """

    def __init__(self, fan_in: int, fan_out: int):
        super().__init__(fan_in, fan_out, bias=False)

    def reset_parameters(self):
        # Decoder.init_weights fills every parameter by name; drawing here too would double the
        # start-up time
        pass

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class _RMSNorm(torch.autograd.Function):
    """x * rstd * w with the statistics in fp32; saves x and rstd [rows], as the fused CUDA kernel
    does.

    dx = rstd * (g w - n mean(g w n)), dw = sum(g n), with n = x * rstd.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = (
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, rstd = ctx.saved_tensors
        normed, wide = x.to(rstd.dtype) * rstd, grad.to(rstd.dtype)
        grad_weight = torch.linalg.vecdot(wide.flatten(0, -2), normed.flatten(0, -2), dim=0).to(
            weight.dtype
        )
        wide = wide * weight
        inner = torch.linalg.vecdot(wide, normed, dim=-1)[..., None] / x.shape[-1]
        return wide.sub_(normed.mul_(inner)).mul_(rstd).to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension, in fp32 (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        if platform().device(x).type == "cuda":
            return platform().rms_norm(x, self.weight.to(x.dtype), self.eps)
        return _RMSNorm.apply(x, self.weight, self.eps)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up; saves its two inputs alone (autograd would also keep silu(gate): 2.4 GiB per
    layer of the 4B at 131k).
    """

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.ffn_size)
        self.up_proj = Linear(config.hidden_size, config.ffn_size)
        self.down_proj = Linear(config.ffn_size, config.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(_SwiGLU.apply(self.gate_proj(x_BTD), self.up_proj(x_BTD)))


def nsa_package():
    """The lazy edge to nsa/, where the branches of Native Sparse Attention live; without it only
    standard attention runs.
    """
    try:
        import nsa
    except ImportError as error:
        raise ValueError(
            f"attention_type='nsa': {error}: put the folder nsa/ beside model.py, or use attention_type='standard'"
        ) from None
    return nsa


def nsa_attention(
    q,
    k_slc,
    v_slc,
    k_cmp,
    v_cmp,
    k_win,
    v_win,
    gates,
    cfg: NSAConfig,
    cu_seqlens=None,
    return_parts=False,
):
    """o = g_cmp o_cmp + g_slc o_slc + g_win o_win (arXiv 2502.11089): nsa.engine's, which says
    shapes and errors.
    """
    return nsa_package().nsa_attention(
        q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates, cfg, cu_seqlens, return_parts
    )


class Attention(nn.Module):
    """Grouped-query attention with RMSNorm on q and k; `core` is the seam that context parallelism
    wraps from outside.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim, self.sparse = config.head_dim, None
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.core = standard_attention
        if config.attention_type == "nsa":
            self.sparse = nsa_package().SparseBranches(config, RMSNorm, _Rotate.apply)

    def forward(self, x_BTD, rope, documents=None, cache: LayerCache | None = None) -> Tensor:
        heads = (-1, self.head_dim)
        q_BTHK = _Rotate.apply(self.q_norm(self.q_proj(x_BTD).unflatten(-1, heads)), *rope)
        raw_BTGK = self.k_norm(self.k_proj(x_BTD).unflatten(-1, heads))
        k_BTGK, v_BTGK = _Rotate.apply(raw_BTGK, *rope), self.v_proj(x_BTD).unflatten(-1, heads)
        if self.sparse is not None:
            o_BTHK = self.sparse(x_BTD, q_BTHK, raw_BTGK, k_BTGK, v_BTGK, rope, documents, cache)
        elif cache is None:
            o_BTHK = self.core(q_BTHK, k_BTGK, v_BTGK, documents)
        else:
            o_BTHK = cached_attention(q_BTHK, *cache.append(k_BTGK, v_BTGK))
        return self.o_proj(o_BTHK.flatten(-2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the unit of checkpointing, compiling and
    sharding.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BTD, rope, documents=None, cache: LayerCache | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, documents, cache)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


# ------------------------------------------------------------------------------ the vocabulary head


class LMHead(nn.Module):
    """Holds the output weight [V, D] and applies functions to it inside its own forward, where a
    sharded weight is whole.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, hidden_ND: Tensor, function, *args):
        """function(hidden_ND, weight_VD, *args): a tensor or a pytree of tensors."""
        return function(hidden_ND, self.weight, *args)


def logits(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """All logits [N, V]: for short inputs and for the last position of a generation step."""
    return F.linear(hidden_ND, weight_VD.to(hidden_ND.dtype))


def standard_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, num_valid: Tensor
) -> Tensor:
    """sum over valid positions of -log p(label) / num_valid, through the full logits in fp32 (at
    least).
    """
    logits_NV = logits(hidden_ND, weight_VD).to(wide(hidden_ND.dtype))
    return (
        F.cross_entropy(logits_NV, labels_N.long(), ignore_index=IGNORE, reduction="sum")
        / num_valid
    )


# ----------------------------------------------------------- the loss, over tiles of the vocabulary

# The standard loss moves [N, V] through memory about ten times in fp32: that, not arithmetic, is
# most of its time. Here the forward walks the vocabulary once with an online log-sum-exp and the
# backward recomputes each tile: four products instead of three, yet faster, and 8 bytes saved per
# token instead of 4V. n: the valid tokens, packed; V inside a tile: the tile's columns.


def default_tiles(N: int, V: int, device: torch.device, kernels: str) -> tuple[int, int]:
    """(token_tile, vocab_tile): [N, vocab_tile] exists in the inputs' dtype, [token_tile,
    vocab_tile] in fp32 where the bodies are eager.
    """
    cpu = device.type == "cpu"
    token_tile = (
        (512 if kernels == "torch" else 2048) if cpu else 8192
    )  # a compiled body keeps fp32 in registers: no cache to miss
    vocab_tile = (2**22 if cpu else 2**28) // max(N, 1) // 128 * 128
    return token_tile, min(max(vocab_tile, 1024), 2048 if cpu else 8192, max(V, 1))


def spans(size: int, tile: int) -> list[slice]:
    """The tiles of `size` tokens or columns; the last one may be shorter."""
    starts = platform().tiles(range(0, size, tile))
    return [slice(start, min(start + tile, size)) for start in starts]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and exponentials."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def choose_kernels(kernels: str, tile_like: Tensor) -> str:
    """Who computes the elementwise tile bodies: "torch" (eager), "compiled" (torch.compile) or
    "triton" (fused/).

    "auto": compiled on CUDA and inside a compiled caller, else torch. The Triton twins are used
    where they are asked for.
    """
    if kernels not in ("auto", "torch", "compiled", "triton"):
        raise ValueError(f"kernels={kernels!r} is unknown: choose auto, torch, compiled or triton")
    if kernels == "triton":
        try:
            from fused import linear_ce  # the one lazy edge
        except ImportError as error:
            raise ValueError(
                f"kernels='triton': {error}: pip install triton, or choose kernels='auto' or 'torch'"
            ) from None
        linear_ce.require(tile_like)
    on_cuda = platform().device(tile_like).type == "cuda"
    automatic = "compiled" if on_cuda or torch.compiler.is_compiling() else "torch"
    return automatic if kernels == "auto" else kernels


def tile_body(function, kernels: str):
    """An elementwise tile function, or what replaces it on this platform."""
    return platform().tile_body(function, kernels)


@functools.cache
def fastest_body(function, kernels: str):
    """An elementwise tile function or its fused twin; compiled dynamically, or every ragged last
    tile would compile again.
    """
    if kernels == "triton":
        from fused import linear_ce

        return getattr(linear_ce, function.__name__)
    return torch.compile(function, dynamic=True) if kernels == "compiled" else function


def tile_logits(hidden_ND: Tensor, weight_VD: Tensor, buffer: Tensor) -> Tensor:
    """hidden @ weight^T into the reused flat buffer; a ragged last tile stays contiguous."""
    return torch.mm(
        hidden_ND,
        weight_VD.t(),
        out=buffer[: len(hidden_ND) * len(weight_VD)].view(len(hidden_ND), len(weight_VD)),
    )


def capped(z_NV: Tensor, softcap: float | None, dtype: torch.dtype) -> Tensor:
    """softcap * tanh(z / softcap), always as a copy that may be overwritten."""
    x_NV = z_NV.to(dtype, copy=True)
    return x_NV if softcap is None else x_NV.div_(softcap).tanh_().mul_(softcap)


def exp_(x: Tensor) -> Tensor:
    """exp in place. On CPU torch.exp is MKL's, four times slower on AMD than exp2; the product's
    rounding is below that of x = z - lse.
    """
    return x.mul_(1.4426950408889634).exp2_()


def put_target(x_NV: Tensor, target_N: Tensor, value_N: Tensor) -> Tensor:
    """x[n, target_n] = value_n where the target lies inside the tile, without asking the device how
    often.
    """
    V = x_NV.shape[1]
    if (
        torch.compiler.is_compiling()
    ):  # a comparison fuses into the body; an indexed write would split it
        return torch.where(
            torch.arange(V, device=x_NV.device, dtype=target_N.dtype) == target_N[:, None],
            value_N[:, None],
            x_NV,
        )
    row_N, column_N = torch.arange(len(x_NV), device=x_NV.device), target_N.clamp(0, V - 1).long()
    value_N = torch.where(target_N == column_N, value_N, x_NV[row_N, column_N])
    return x_NV.index_put_(
        (row_N, column_N), value_N
    )  # scatter_ copies the whole tile on CPU: 2x slower


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b. Low-precision products are summed in fp32: bf16 sums make gradients 6x
    noisier.
    """
    total.addmm_(a, b) if total.dtype == a.dtype else total.add_(a @ b)


def set_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    torch.mm(a, b, out=out) if out.dtype == a.dtype else out.copy_(a @ b)


def pack_valid(labels_N: Tensor, ignore_index: int) -> tuple[slice | Tensor, Tensor]:
    """(rows, target_n) of the valid tokens: ignored ones then cost nothing. int32, or comparing
    columns costs more than the exp.

    On CUDA the number of valid tokens would cost a host sync, so all rows stay, and ignored ones
    get target -1 and zero gradient.
    """
    valid_N = labels_N != ignore_index
    if labels_N.device.type != "cpu" or valid_N.all():
        return slice(None), torch.where(valid_N, labels_N, -1).int()
    rows = valid_N.nonzero()[:, 0]
    return rows, labels_N[rows].int()


def unpack(value_n: Tensor, rows: slice | Tensor, N: int) -> Tensor:
    """Scatter packed rows back to N tokens, zero where ignored."""
    if isinstance(rows, slice):
        return value_n
    return value_n.new_zeros(N, *value_n.shape[1:]).index_copy_(0, rows, value_n)


def fold_logsumexp(z_NV, target_N, max_N, sum_N, total_N, softcap):
    """Fold a tile into (max, sum exp(z - max)) of all logits but the target's, and into the sum of
    all logits.
    """
    x_NV = capped(z_NV, softcap, max_N.dtype)
    total_N = total_N + x_NV.sum(1)
    x_NV = put_target(x_NV, target_N, torch.full_like(max_N, -torch.inf))
    new_max_N = torch.maximum(max_N, x_NV.amax(1))
    sum_N = sum_N * (max_N - new_max_N).exp() + exp_(x_NV.sub_(new_max_N[:, None])).sum(1)
    return new_max_N, sum_N, total_N


def logits_to_gradient(z_NV, target_N, lse_N, slope_N, shift_N, softcap):
    """Overwrite z by (slope * exp(z - lse) + shift) * d softcap, and by 0 at the target."""
    x_NV = capped(z_NV, softcap, lse_N.dtype)
    chain_NV = None if softcap is None else 1 - (x_NV / softcap).square()
    d_NV = exp_(x_NV.sub_(lse_N[:, None])).mul_(slope_N[:, None]).add_(shift_N[:, None])
    if chain_NV is not None:
        d_NV = d_NV.mul_(chain_NV)
    z_NV.copy_(put_target(d_NV, target_N, torch.zeros_like(lse_N)))


@torch.library.custom_op("longhaul::vocab_nll", mutates_args=())
def vocab_nll(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    ignore_index: int,
    softcap: float | None,
    tiles: list[int],
    kernels: str,
    validate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(-log p(label), logsumexp of the logits, mean of the logits) per token in fp32, 0 where
    ignored. Opaque to torch.compile, which would unroll the loops.
    """
    N, V = len(hidden_ND), len(weight_VD)
    if validate or labels_N.device.type == "cpu":
        check_labels(labels_N, V, ignore_index)
    rows, target_n = pack_valid(labels_N, ignore_index)
    h_nD, fold = hidden_ND[rows], tile_body(fold_logsumexp, kernels)
    z_target_n = target_logits(h_nD, weight_VD, target_n, tiles[0], softcap)
    max_n, sum_n, total_n = (
        z_target_n.clone(),
        torch.zeros_like(z_target_n),
        torch.zeros_like(z_target_n),
    )
    buffer = h_nD.new_empty(min(tiles[0], len(h_nD)) * min(tiles[1], V))
    for v in spans(V, tiles[1]):
        w_VD = weight_VD[v].to(h_nD.dtype)
        for t in spans(len(h_nD), tiles[0]):
            z_NV = tile_logits(h_nD[t], w_VD, buffer)
            max_n[t], sum_n[t], total_n[t] = fold(
                z_NV, target_n[t] - v.start, max_n[t], sum_n[t], total_n[t], softcap
            )
    # log(1 + sum of the others / exp(z_target)): exact also for p(target) near 1 and under a large
    # common offset
    nll_n = torch.logaddexp(max_n - z_target_n + sum_n.log(), torch.zeros_like(sum_n))
    ignored_n = target_n < 0
    return tuple(
        unpack(x_n.masked_fill_(ignored_n, 0), rows, N)
        for x_n in (nll_n, z_target_n + nll_n, total_n / V)
    )


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


@torch.library.custom_op("longhaul::vocab_nll_backward", mutates_args=())
def vocab_nll_backward(
    grads: list[Tensor],
    nll_N: Tensor,
    lse_N: Tensor,
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
    """Gradients of hidden and weight (empty where not needed): dz = (d_nll + d_lse) p + d_mean / V,
    minus d_nll at the label.
    """
    N, V = len(hidden_ND), len(weight_VD)
    rows, target_n = pack_valid(labels_N, ignore_index)
    h_nD, nll_n, lse_n, fill = (
        hidden_ND[rows],
        nll_N[rows],
        lse_N[rows],
        tile_body(logits_to_gradient, kernels),
    )
    d_nll_n, d_lse_n, shift_n = (
        d_N[rows].masked_fill(target_n < 0, 0) for d_N in (grads[0], grads[1], grads[2] / V)
    )
    slope_n = d_nll_n + d_lse_n
    # p - 1 = expm1(-nll), and nll holds the fp32 target logit: never pair that lse with the tile's
    # rounded target logit
    d_target_n = d_nll_n * torch.expm1(-nll_n) + d_lse_n * torch.exp(-nll_n) + shift_n
    if softcap is not None:
        d_target_n *= 1 - ((lse_n - nll_n) / softcap).square()
    tile_lse_n = lse_n.masked_fill(
        target_n < 0, torch.inf
    )  # of an ignored row exp gives 0; its 0 * exp(overflow) would be NaN in dW
    dh_nD = lse_n.new_empty(0)
    if need_hidden:  # the label's term is by far the largest: it stays in fp32, outside the tiles
        dh_nD = (
            weight_VD.index_select(0, target_n.clamp(min=0))
            .to(h_nD.dtype)
            .to(lse_n.dtype)
            .mul_(d_target_n[:, None])
        )
    dw_VD = torch.empty_like(weight_VD) if need_weight else weight_VD.new_empty(0)
    buffer = h_nD.new_empty(len(h_nD) * min(tiles[1], V))
    for v in spans(V, tiles[1]):
        w_VD = weight_VD[v].to(h_nD.dtype)
        z_nV = buffer[: len(h_nD) * len(w_VD)].view(len(h_nD), len(w_VD))
        for t in spans(len(h_nD), tiles[0]):
            torch.mm(h_nD[t], w_VD.t(), out=z_nV[t])
            fill(z_nV[t], target_n[t] - v.start, tile_lse_n[t], slope_n[t], shift_n[t], softcap)
            if need_hidden:
                add_product(dh_nD[t], z_nV[t], w_VD)
        # one product over all tokens: rounded once, however many token tiles, and no fp32 [V, D]
        if need_weight:
            set_product(
                dw_VD[v], put_target(z_nV, target_n - v.start, d_target_n.to(z_nV.dtype)).t(), h_nD
            )
    return unpack(dh_nD.to(hidden_ND.dtype), rows, N) if need_hidden else dh_nD, dw_VD


@vocab_nll.register_fake
def _(hidden_ND, *_):
    return tuple(hidden_ND.new_empty(len(hidden_ND), dtype=wide(hidden_ND.dtype)) for _ in range(3))


@vocab_nll_backward.register_fake
def _(grads, nll_N, lse_N, hidden_ND, weight_VD, *args):
    need_hidden, need_weight = args[-2:]
    return (
        hidden_ND.new_empty(hidden_ND.shape)
        if need_hidden
        else lse_N.new_empty(0),  # contiguous, whatever hidden's strides
        torch.empty_like(weight_VD) if need_weight else weight_VD.new_empty(0),
    )


def _save(ctx, inputs, output):
    hidden_ND, weight_VD, labels_N, *ctx.options, _validate = inputs
    nll_N, lse_N, _mean_N = output
    ctx.save_for_backward(
        nll_N, lse_N, hidden_ND, weight_VD, labels_N
    )  # beyond the inputs: 8 bytes per token


def _backward(ctx, *grads):
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    dh_ND, dw_VD = vocab_nll_backward(
        grads, *ctx.saved_tensors, *ctx.options, need_hidden, need_weight
    )
    return dh_ND if need_hidden else None, dw_VD if need_weight else None, *[None] * 6


vocab_nll.register_autograd(_backward, setup_context=_save)


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "sum",
    num_valid: Tensor | float | None = None,
    token_tile: int | None = None,
    vocab_tile: int | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    kernels: str = "auto",
    validate: bool = False,
) -> Tensor:
    """Cross-entropy of the logits z = softcap(hidden @ weight^T), which never exist as a whole.

        loss_n = (1 - e) (lse_n - z_n,label) + e (lse_n - mean_v z_nv) + z_loss lse_n^2,   e = label_smoothing

    hidden and weight: any floating dtype, the products run in hidden's (also under autocast); the
    loss is fp32, gradients have their input's dtype. "sum" is for a caller that divides; "mean"
    divides by num_valid, which under data parallelism or accumulation is the *global* number of
    valid tokens; without it, by the valid tokens given here. No valid token: loss 0 and zero
    gradients. `kernels`: see `choose_kernels`. Raises ValueError for shapes, devices, dtypes and
    tiles, IndexError for labels outside [0, V): always on CPU, on CUDA only with `validate`, which
    costs a host sync.
    """
    check_inputs(hidden_ND, weight_VD, labels_N, reduction, token_tile, vocab_tile)
    if (
        not (softcap is None or softcap > 0)
        or not 0 <= label_smoothing <= 1
        or not math.isfinite(z_loss)
    ):
        raise ValueError(
            f"softcap={softcap}, label_smoothing={label_smoothing}, z_loss={z_loss}: need softcap > 0 or None, smoothing in [0, 1], finite z_loss"
        )
    if num_valid is not None and (
        num_valid.ndim if isinstance(num_valid, Tensor) else not num_valid >= 0
    ):
        raise ValueError(
            f"num_valid={num_valid}: give a number of tokens, 0 or more, or a tensor without dimensions"
        )
    kernels = choose_kernels(kernels, hidden_ND)
    device = platform().device(hidden_ND)
    auto = default_tiles(len(hidden_ND), len(weight_VD), device, kernels)
    tiles = [token_tile or auto[0], vocab_tile or auto[1]]
    nll_N, lse_N, mean_N = vocab_nll(
        hidden_ND, weight_VD, labels_N, ignore_index, softcap, tiles, kernels, validate
    )
    loss_N = nll_N
    if label_smoothing:
        loss_N = (1 - label_smoothing) * nll_N + label_smoothing * (lse_N - mean_N)
    if z_loss:
        loss_N = loss_N + z_loss * lse_N.square()
    if reduction != "mean":
        return loss_N if reduction == "none" else loss_N.sum()
    if num_valid is None:
        num_valid = (labels_N != ignore_index).sum()
    return loss_N.sum() / (
        num_valid.clamp(min=1).to(loss_N.dtype)
        if isinstance(num_valid, Tensor)
        else max(num_valid, 1)
    )


def check_inputs(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, reduction: str, *tiles: int | None
) -> None:
    shapes = tuple(hidden_ND.shape), tuple(weight_VD.shape), tuple(labels_N.shape)
    if (
        [len(shape) for shape in shapes] != [2, 2, 1]
        or shapes[0] != (*shapes[2], shapes[1][1])
        or not shapes[1][0]
    ):
        raise ValueError(
            f"hidden, weight, labels have shapes {shapes}; needed: (N, D), (V, D), (N,) with V >= 1"
        )
    if len({hidden_ND.device, weight_VD.device, labels_N.device}) > 1:
        raise ValueError(
            f"hidden is on {hidden_ND.device}, weight on {weight_VD.device}, labels on {labels_N.device}; move them to one"
        )
    if not (
        hidden_ND.is_floating_point() and weight_VD.is_floating_point()
    ) or labels_N.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"hidden is {hidden_ND.dtype}, weight {weight_VD.dtype}, labels {labels_N.dtype}; needed: floating, floating, int64"
        )
    if any(tile is not None and not (isinstance(tile, int) and tile >= 1) for tile in tiles):
        raise ValueError(
            f"token_tile, vocab_tile = {tiles}: both must be whole numbers >= 1, or None to choose by shape and device"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: allowed are 'mean', 'sum', 'none'")


def check_labels(labels_N: Tensor, V: int, ignore_index: int) -> None:
    bad_N = ((labels_N < 0) | (labels_N >= V)) & (labels_N != ignore_index)
    if bad_N.any():
        n = int(bad_N.nonzero()[0, 0])
        raise IndexError(
            f"label {int(labels_N[n])} at position {n}: allowed are 0 to {V - 1}, and {ignore_index} to ignore the token"
        )


# ------------------------------------------------------------------------------------------ decoder


class Decoder(nn.Module):
    """The model: token ids in; logits, or the mean loss where labels are given, out.

    Built on the meta device it allocates nothing: materialise it with `to_empty(device=...)`,
    `tie_weights()` and `init_weights(seed)`,
    which seeds each parameter by its name: values depend on neither the order of construction nor
    the number of processes.
    """

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(
            config.vocab_size,
            config.hidden_size,
            _weight=torch.empty(config.vocab_size, config.hidden_size),
        )
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = LMHead(config)
        self.rotary = RotaryCache(config)
        self.validate = (
            False  # check that labels are in the vocabulary also where that costs a host sync
        )
        self.tie_weights()
        if not self.embed.weight.is_meta:
            self.init_weights(seed)

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        positions: Tensor | None = None,
        doc_ids: Tensor | None = None,
        cache: KVCache | None = None,
        num_valid: Tensor | float | None = None,
    ) -> Tensor:
        """Logits [B, T, V] in the compute dtype, or with labels the scalar loss in fp32.

        labels_BT: the target of each position (shifted by the loader), -100 where there is none.
        positions, doc_ids: [B, T]; a change of id within a row starts a new document: positions
        restart at 0 there unless
        they are given, and attention does not cross. cache: decoding; the tokens continue what it
        holds.
        num_valid: divisor of the summed loss, by default the number of labels here that are not
        -100; a training
        step over several ranks and micro-batches passes the global count, so that the loss is one
        mean, not a mean of means.
        """
        hidden_ND = self.hidden(tokens_BT, positions, doc_ids, cache).flatten(0, 1)
        if labels_BT is None:
            return self.lm_head(hidden_ND, logits).unflatten(0, tokens_BT.shape)
        if labels_BT.shape != tokens_BT.shape:
            raise ValueError(
                f"labels are {tuple(labels_BT.shape)} and tokens {tuple(tokens_BT.shape)}: "
                "give one target per position (labels[:, t] is the target of position t)"
            )
        if self.validate:
            check_labels(labels_BT.flatten(), self.config.vocab_size, IGNORE)
        if num_valid is None:
            num_valid = (labels_BT != IGNORE).sum().clamp(min=1)
        return self.lm_head(
            hidden_ND, self.loss_function(*tokens_BT.shape), labels_BT.flatten(), num_valid
        )

    def hidden(
        self,
        tokens_BT: Tensor,
        positions: Tensor | None = None,
        doc_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Normalised hidden states [B, T, D]; see `forward` for the arguments."""
        if tokens_BT.ndim != 2 or tokens_BT.shape[1] == 0:
            raise ValueError(
                f"tokens have shape {tuple(tokens_BT.shape)}: give [batch, tokens] with at least one token"
            )
        if cache is not None and doc_ids is not None:
            raise ValueError(
                "cache and doc_ids together: decode one document per row, or drop the cache"
            )
        if doc_ids is not None and doc_ids.shape != tokens_BT.shape:
            raise ValueError(
                f"doc_ids are {tuple(doc_ids.shape)} and tokens {tuple(tokens_BT.shape)}: give one id per token"
            )
        if positions is not None and positions.shape not in (tokens_BT.shape, tokens_BT[:1].shape):
            raise ValueError(
                f"positions are {tuple(positions.shape)} and tokens {tuple(tokens_BT.shape)}: give [B, T] or [1, T]"
            )
        cu_seqlens = None if doc_ids is None else document_boundaries(doc_ids)
        if positions is None and cu_seqlens is not None:
            positions = document_positions(cu_seqlens, tokens_BT.shape)
        rope = (
            self.rotary.at(positions.to(tokens_BT.device, non_blocking=True))
            if positions is not None
            else self.rotary(
                tokens_BT.shape[1], tokens_BT.device, offset=cache.length if cache else 0
            )
        )
        documents = cu_seqlens
        if self.config.attention_type == "nsa" and cache is None:
            documents = nsa_package().layout(
                cu_seqlens, tokens_BT.shape, self.config.nsa, tokens_BT.device
            )
        x_BTD = self.embed(tokens_BT).to(self.config.dtype)
        for index, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, rope, documents, cache.layers[index] if cache else None)
        return self.norm(x_BTD)

    def logits_gib(self, batch: int, seq: int) -> float:
        """Size of the bf16 logits [batch*seq, V] in GiB: 37.09 at 131,072 tokens of the 4B."""
        return self.config.logits_gib(batch, seq)

    def should_chunk(self, batch: int, seq: int) -> bool:
        """Whether memory demands the chunked loss: it is asked for, or `auto` and the logits are
        above the threshold.
        """
        return self.config.should_chunk(batch, seq)

    def loss_function(self, batch: int, seq: int):
        """The function that `lm_head` applies: (hidden_ND, weight_VD, labels_N, num_valid) ->
        scalar.
        """
        return (
            standard_cross_entropy
            if self.config.loss_path(batch, seq) == "standard"
            else self._chunked_loss
        )

    def _chunked_loss(self, hidden_ND, weight_VD, labels_N, num_valid):
        return linear_cross_entropy(
            hidden_ND,
            weight_VD,
            labels_N,
            reduction="mean",
            num_valid=num_valid,
            token_tile=self.config.loss_chunk_size or None,
            kernels=self.config.kernels,
        )

    def num_params(self) -> int:
        """Parameters, a tied embedding counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def tie_weights(self):
        """Make the head's weight the embedding's, where the configuration says so (again after
        `to_empty`).
        """
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed.weight

    @torch.no_grad()
    def init_weights(self, seed: int = 0, part: str = ""):
        """Norms 1, matrices normal(0, init_std), the two projections into the residual stream by a
        further 1/sqrt(2L).

        `part`: of a name, to fill those alone. Works on sharded parameters (DTensor) too: every
        rank draws the same whole tensor and keeps its shard.
        """
        for name, parameter in [item for item in self.named_parameters() if part in item[0]]:
            if parameter.is_meta:
                raise ValueError(
                    f"parameter {name} is on the meta device: call to_empty(device=...) and tie_weights() first"
                )
            full = self._initial_value(name, parameter.shape, parameter.device, seed)
            if hasattr(parameter, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                full = distribute_tensor(
                    full, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.copy_(full)

    def _initial_value(self, name: str, shape, device, seed: int) -> Tensor:
        starts_at_zero = name.endswith(
            ("bias", "_w2")
        )  # NSA's gates start at 1/2, its compression as the mean
        if starts_at_zero or len(shape) == 1:
            return torch.full(shape, 0.0 if starts_at_zero else 1.0, device=device)
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = self.config.init_std / (math.sqrt(2 * self.config.num_layers) if residual else 1.0)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)
