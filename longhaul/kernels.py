"""The one file that knows which faster versions of model.py's functions exist, and puts them into a
model: `decoder(config)` in place of `Decoder(config)`.

    attention  PyTorch's own kernels, chosen by hand on CUDA (base/machine.py says which)
    linear     products in fp32 on CPUs that are slower in bf16
    elementwise norms, rotation and SwiGLU: Triton kernels on CUDA (elementwise/)
    sparse     block-major operators (sparse/nsa/), on CUDA Triton kernels (sparse/triton/)
    loss       tiles of the vocabulary (vocab/), their bodies compiled or in Triton on CUDA

`config.kernels`: "auto" takes the fastest that can run; "torch" PyTorch's operators alone;
"compiled" and "triton" ask for one kind, and are refused if it cannot run. The functions ask
for the device of their tensors when they are called.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import model
from base import machine
from base.machine import FP32, Device, flash_attention
from longhaul.elementwise import operators as elementwise
from longhaul.sparse.layer import BlockConfig
from longhaul.sparse.nsa.decode import NSAState
from longhaul.sparse.nsa.engine import nsa_attention
from longhaul.vocab.loss import (
    SEVERAL_BLOCKS,
    TILES_WIN,
    block_tokens,
    choose_kernels,
    linear_cross_entropy,
)
from model import (
    Decoder,
    Documents,
    ModelConfig,
    NSAConfig,
    Ops,
    Rope,
    attend_each_document,
    causal_attention,
    standard_cross_entropy,
)


def decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    """A decoder that computes with the fastest functions for its configuration."""
    return Decoder(config, choose(config), seed)


def choose(config: ModelConfig) -> Ops:
    """The functions that a decoder of this configuration computes with.

    ValueError if kernels are asked for that are absent or cannot serve the sizes.
    """
    kernels = config.kernels
    ops = Ops(
        attention=attention,
        packed=packed_attention,
        varying=vary_lengths,
        linear=linear,
        norm=rms_norm,
        block_norm=block_norm,
        norm_rotate=functools.partial(norm_rotate, kernels),
        rotate=functools.partial(rotate, kernels),
        swiglu=functools.partial(swiglu, kernels),
        loss=functools.partial(mean_loss, config),
    )
    if isinstance(config.attention, NSAConfig):
        cache = functools.partial(NSAState, kernels=kernels)
        ops = dataclasses.replace(ops, sparse=sparse_core(config), sparse_cache=cache)
    return ops


def chosen_in_words(config: ModelConfig, device: Device) -> str:
    """What computes a model's functions on the device, for the log of a run."""
    sample = torch.empty(0, dtype=config.dtype, device=device)
    takes_kernels = machine.takes_elementwise(sample, config.kernels)
    parts = [f"RMSNorm, RoPE and SwiGLU by {'Triton' if takes_kernels else 'PyTorch'}"]
    if machine.product_dtype(sample) != config.dtype:
        parts.append("products in fp32, in which this CPU is faster")

    if isinstance(config.attention, NSAConfig | BlockConfig):
        on_cuda = torch.device(device).type == "cuda"
        by_triton = config.kernels == "triton" or (on_cuda and takes_triton(config))
        parts.append(f"sparse attention by {'Triton' if by_triton else 'PyTorch, block by block'}")
    parts.append(f"tiles of the loss by {choose_kernels(config.kernels, sample)}")
    return "; ".join(parts)


# ---- attention


def sdpa(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    causal: bool,
    mask_TS: Tensor | None = None,
) -> Tensor:
    """Softmax attention in the [B, T, H, K] layout, by a kernel whose memory is linear in T."""
    o_BHTK = machine.attention(
        q_BTHK.transpose(1, 2),
        k_BSGK.transpose(1, 2),
        v_BSGK.transpose(1, 2),
        attn_mask=mask_TS,
        is_causal=causal,
        enable_gqa=q_BTHK.shape[2] != k_BSGK.shape[2],
    )
    return o_BHTK.transpose(1, 2)


def attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
    """Full causal attention of the last T of S positions."""
    if q_BTHK.shape[1] != k_BSGK.shape[1] and machine.takes_flash(q_BTHK):
        return flash_attention(q_BTHK, k_BSGK, v_BSGK)
    return causal_attention(q_BTHK, k_BSGK, v_BSGK, sdpa=sdpa)


def packed_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    documents: Documents,
) -> Tensor:
    """Full causal attention inside each of the documents."""
    inputs = (q_BTHK, k_BTGK, v_BTGK)
    if documents.bounds is None or not machine.takes_flash(q_BTHK):
        with vary_lengths(q_BTHK):
            return attend_each_document(attention, inputs, documents)
    flat = [x.flatten(0, 1) for x in inputs]
    return packed_flash_attention(*flat, documents).view_as(q_BTHK)


def packed_flash_attention(
    q_NHK: Tensor,
    k_NGK: Tensor,
    v_NGK: Tensor,
    documents: Documents,
) -> Tensor:
    """Full causal attention inside each of the documents, in one call."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.15 would take cuDNN on a Hopper, which builds a plan for each set of lengths
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return varlen_attn(
            q_NHK,
            k_NGK,
            v_NGK,
            cu_seq_q=documents.bounds,
            cu_seq_k=documents.bounds,
            max_q=max(documents.lengths),
            max_k=max(documents.lengths),
            window_size=(-1, 0),  # causal
            enable_gqa=True,
        )


def vary_lengths(q: Tensor):
    """Entered around attention whose lengths differ from call to call."""
    return machine.lengths_vary(q)


# ---- products


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, in the dtype in which this machine multiplies fastest."""
    if machine.product_dtype(x) == x.dtype:
        return F.linear(x, weight, bias)
    y = _LinearInFP32.apply(x, weight)
    return y if bias is None else y + bias


class _LinearInFP32(torch.autograd.Function):
    """x W^T of low-precision numbers, multiplied in fp32 and rounded: 16 times as fast on a CPU
    without instructions for bf16. What waits for the backward is x and W as they were given.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.float()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight.float()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.flatten(0, -2).T @ x.flatten(0, -2).float()).to(weight.dtype)
        return grad_x, grad_weight


# ---- elementwise functions


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension."""
    if x.device.type == "cuda":
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    return model.rms_norm(x, weight, eps)


def block_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of compressed keys."""
    return F.rms_norm(x, weight.shape, weight, eps)


def norm_rotate(
    kernels: str,
    x_BTHK: Tensor,
    weight_K: Tensor,
    eps: float,
    rope: Rope,
) -> Tensor:
    """The normed heads, rotated by their tokens' angles."""
    if machine.takes_elementwise(x_BTHK, kernels):
        return elementwise.norm_rotate(x_BTHK, weight_K, *rope, eps)
    return model.rotate(rms_norm(x_BTHK, weight_K, eps), *rope)


def rotate(
    kernels: str,
    x_BTHK: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """The heads rotated by their tokens' angles."""
    if machine.takes_elementwise(x_BTHK, kernels):
        return elementwise.rotate(x_BTHK, cos, sin)
    return model.rotate(x_BTHK, cos, sin)


def swiglu(kernels: str, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if machine.takes_elementwise(gate, kernels):
        return elementwise.swiglu(gate, up)
    return model.swiglu(gate, up)


# ---- Native Sparse Attention


def sparse_core(config: ModelConfig) -> Callable:
    """The function that computes NSA: sparse/nsa/, which skips the blocks that are not read; with
    kernels="triton" its Triton twin; with kernels="auto" that one for tensors on CUDA, if it can
    run there.

    Raises ValueError if the Triton twin is asked for, and absent or unable to serve the sizes.
    """
    if config.dtype == torch.float64:
        raise ValueError(
            "compute_dtype='float64' is not supported with attention_type='nsa': use float32, "
            "bfloat16 or float16"
        )
    fused = functools.partial(nsa_attention, fused=True)
    if config.kernels == "triton":
        refusal = why_no_triton(config, device=None)
        if refusal:
            raise ValueError(refusal)
        return fused
    if not takes_triton(config):
        return nsa_attention

    def sparse_attention(q: Tensor, *others: Tensor, **options) -> Tensor | dict[str, Tensor]:
        chosen = fused if q.device.type == "cuda" else nsa_attention
        return chosen(q, *others, **options)

    return sparse_attention


def takes_triton(config: ModelConfig) -> bool:
    """Whether sparse attention on CUDA runs as Triton kernels, there or, without a GPU, on one that
    can.
    """
    device = "cuda" if torch.cuda.is_available() else None
    return config.kernels == "triton" or (
        config.kernels == "auto" and why_no_triton(config, device) is None
    )


def why_no_triton(config: ModelConfig, device: Device | None) -> str | None:
    """Why the Triton kernels of sparse attention are absent, or cannot serve the sizes, or cannot
    run on the device; None if they can. No device stands for a GPU that is not at hand.
    """
    try:
        from longhaul.sparse.triton import tiles
    except ImportError as error:
        return f"kernels='triton': {error}: pip install triton, or choose kernels='auto' or 'torch'"

    sizes = config.attention
    block = sizes.sel_block if isinstance(sizes, NSAConfig) else sizes.block
    group = config.num_heads // config.num_kv_heads
    device = device and torch.device(device)
    return tiles.refusal(group, config.head_dim, config.dtype, block, device)


# ---- the loss


def loss_path(config: ModelConfig, tokens: int, low_precision: bool = False) -> str:
    """Which loss so many tokens take, "standard", "chunked" or "one_pass".

    "auto" takes tiles also for vocabularies at which they were measured to be no slower. It takes
    them in one pass, which is faster, unless that would add gradients of the head in
    `low_precision`. Raises ValueError if one pass was asked for and would do so.
    """
    sizes = config.vocab_size, config.hidden_size, config.dtype.itemsize
    adds_in_low_precision = low_precision and tokens > block_tokens(tokens, *sizes)

    if config.loss == "one_pass" and adds_in_low_precision:
        raise ValueError(SEVERAL_BLOCKS.format(tokens, block_tokens(tokens, *sizes)))
    if config.loss != "auto":
        return config.loss
    if config.vocab_size < TILES_WIN and not config.should_chunk(1, tokens):
        return "standard"
    return "chunked" if adds_in_low_precision else "one_pass"


def mean_loss(
    config: ModelConfig,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    num_valid: Tensor,
) -> Tensor:
    """Sum over the valid positions of -log p(label) / num_valid, by the loss for the size."""
    path = loss_path(config, len(hidden_ND), weight_VD.element_size() < FP32)
    if path == "standard":
        return standard_cross_entropy(hidden_ND, weight_VD, labels_N, num_valid, linear)
    return linear_cross_entropy(
        hidden_ND,
        weight_VD,
        labels_N,
        reduction="mean",
        num_valid=num_valid,
        token_tile=config.loss_chunk_size or None,
        kernels=config.kernels,
        one_pass=path == "one_pass",
    )
