"""What the machine decides: which kernels and which precision, by the device of a tensor.

model.py does not know this file: only its faster twins and what stands around them ask. It needs
only torch.
"""

import contextlib
import functools
import importlib.util
import resource
import sys
import time
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

FP32 = 4  # bytes
MARGIN = 1.25  # by which fp32 products must be faster to be taken
Device = torch.device | str


# ---- loops

_few_rounds = [False]  # whether a prediction runs


def rounds(parts: Sequence, grow: bool = False) -> Sequence:
    """The rounds of a loop that run, of those that do equal work: all of them. In a prediction of
    memory the first two, of which the second finds the buffers of the first, and the last one,
    which may be smaller, stand for all; of rounds that grow also the last but one, the largest.
    """
    last = 2 if grow else 1
    if not _few_rounds[-1] or len(parts) <= 2 + last:
        return parts
    return [*parts[:2], *parts[-last:]]


@contextlib.contextmanager
def few_rounds(few: bool = True) -> Iterator[None]:
    """Loops inside the `with` block run a few rounds, or again all."""
    _few_rounds.append(few)
    try:
        yield
    finally:
        _few_rounds.pop()


# ---- products


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products with x are fastest: its own, or fp32 on a CPU whose products
    of low-precision numbers are slower than that (they are less exact, too).
    """
    if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float16):
        return x.dtype
    return torch.float32 if fp32_is_faster(x.dtype) else x.dtype


def mixed_product(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    beta: int,
) -> None:
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


def fp32_is_faster(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies fp32 matrices faster than those of a low-precision dtype, by a
    clear margin, so that all runs on a machine decide alike. Measured once, in milliseconds.

    A Xeon with AVX-512 bf16 and without AMX reaches 70 GFLOP/s in bf16 and 110 in fp32; an EPYC
    with AVX-512 bf16 524 and 113; one without 1 and 55, as most laptops.
    """
    return MARGIN * _product_seconds(torch.float32) < _product_seconds(dtype)


# torch.compiler.assume_constant_result, without its import of torch._dynamo: a second of each start
fp32_is_faster._dynamo_marked_constant = True


@functools.cache
def _product_seconds(dtype: torch.dtype) -> float:
    """Seconds of a product of [128, 256] and [256, 512], the fastest of several."""
    taken = []
    # values are needed, whatever simulation or record goes on
    with _disable_current_modes(), torch.no_grad():
        a = torch.ones(128, 256, dtype=dtype, device="cpu")
        b = torch.ones(256, 512, dtype=dtype, device="cpu")
        for _ in range(6):
            start = time.perf_counter()
            torch.mm(a, b)
            taken.append(time.perf_counter() - start)
    return min(taken)


# ---- kernels


def takes_elementwise(x: Tensor, kernels: str) -> bool:
    """Whether the Triton kernels of longhaul/elementwise/ compute with x.

    Not inside a compiled caller, because the compiler fuses these operators itself.
    """
    if x.device.type != "cuda" or kernels not in ("auto", "triton"):
        return False
    if torch.compiler.is_compiling() or x.dtype == torch.float64:
        return False
    return has_triton() and capability(x.device) >= (8, 0)


def attention(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, **options) -> Tensor:
    """Softmax attention by a memory-linear kernel; `options` are those of PyTorch's SDPA.

    On CUDA, PyTorch itself would take a kernel that holds [T, T] for grouped heads in fp32 or
    under a mask. ValueError if no other kernel takes these heads. Only fp64, which is for
    comparisons, has no other.
    """
    on_cuda = q_BHTK.device.type == "cuda"
    masked = options.get("attn_mask") is not None
    by_flash = takes_flash(q_BHTK) and not masked
    if on_cuda and not by_flash and q_BHTK.dtype != torch.float64:
        return efficient_attention(q_BHTK, k_BGSK, v_BGSK, **options)

    # a few queries that read a long cache do not copy it
    is_whole = q_BHTK.shape[-2] == k_BGSK.shape[-2]
    products = product_dtype(q_BHTK) if is_whole else q_BHTK.dtype
    qkv = (x.to(products) for x in (q_BHTK, k_BGSK, v_BGSK))
    return F.scaled_dot_product_attention(*qkv, **options).to(q_BHTK.dtype)


def takes_flash(q: Tensor) -> bool:
    """Whether FlashAttention-2 computes these heads [..., K]: on CUDA from Ampere on, in 16
    bits, of at most 192 elements, in a multiple of 8. (On some cards its backward is limited
    to 192.)
    """
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    K = q.shape[-1]
    return K % 8 == 0 and K <= 192 and capability(q.device) >= (8, 0)


def prefers_cudnn(q: Tensor) -> bool:
    """Whether PyTorch's first choice for these heads [..., K] is cuDNN, which builds a plan for
    each new length: those that FlashAttention takes too, on Hopper and Blackwell. Its backward
    does not repeat its bits.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    if not takes_flash(q) or q.shape[-1] > 128:
        return False
    major, _ = capability(q.device)
    return major in (9, 10)


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    card = torch.cuda.get_device_properties(device)  # a constant to torch.compile
    return card.major, card.minor


def lengths_vary(x: Tensor) -> contextlib.AbstractContextManager:
    """Entered around attention whose lengths differ from call to call.

    On Hopper PyTorch prefers cuDNN, which builds a plan for each new length: about 0.4 s
    (github.com/sgl-project/sglang/issues/4650). The other kernels take all lengths.
    """
    if x.device.type != "cuda":
        return contextlib.nullcontext()
    any_length = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if x.dtype == torch.float64:
        any_length.append(SDPBackend.MATH)
    return sdpa_kernel(any_length)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


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


def flash_attention(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
    """Full causal attention of the last T of S positions, by the operator that PyTorch's
    `causal_lower_right` calls; it takes grouped heads and all lengths.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    o_BHTK, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)
    return o_BHTK.transpose(1, 2)


def cudnn_attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, K], log-sum-exp [B, H, T] in fp32) by the operator of cuDNN, which PyTorch's
    public attention calls without the latter.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    o, lse, *_ = attention(q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=causal)
    return o.transpose(1, 2), lse.view(lse.shape[:3])  # it is [B, H, T, 1]


def cudnn_attention_backward(
    do_BTHK: Tensor,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    o_BTHK: Tensor,
    lse_BHT: Tensor,
    causal: bool,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of `cudnn_attention`."""
    given = (x.transpose(1, 2) for x in (do_BTHK, q_BTHK, k_BSGK, v_BSGK, o_BTHK))
    unread = q_BTHK.new_empty((), dtype=torch.int64)  # the state of dropout
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *given,
        lse_BHT.contiguous()[..., None],
        philox_seed=unread,
        philox_offset=unread,
        attn_bias=None,
        cum_seq_q=None,
        cum_seq_k=None,
        max_q=q_BTHK.shape[1],
        max_k=k_BSGK.shape[1],
        dropout_p=0.0,
        is_causal=causal,
    )
    return tuple(x.transpose(1, 2) for x in grads)


# ---- a process on the machine


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use only deterministic kernels inside, and put the setting back afterwards; as outside, if
    that is not wanted. An operator that has no such kernel raises a RuntimeError.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory

    torch.use_deterministic_algorithms(True, warn_only=False)
    # otherwise every new tensor would first be written with NaN
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process so far: the allocator's on CUDA, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "linux":
        # not ru_maxrss, which a process inherits from the one that started it
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes, others in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
