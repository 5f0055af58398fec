"""What all Triton kernels of sparse attention share: where they run, tiles, loads and products.

Letters: K head dim, M query heads per KV head, l tokens of a block, R rows of a tile. MP, KP and LP
are M, K and l padded to powers of two.

**Rows of a tile.** The M heads that share a KV head see the same keys, so that the R rows of a
tile's matrix are (query, head): row r is query r // MP under head r % MP. With one query at a time,
a group of 4 heads would fill only a quarter of the 16 rows that a tensor core takes.

**Numerics.** Logits, softmax and sums are fp32. Hidden logits become -inf before exp2: masking
afterwards could multiply inf by 0, which is NaN. Logits are in base 2 (`scale2` is log2(e) /
sqrt(K)), since exp2 is what the hardware has. Addresses are int64: T*H*K passes 2^31 at 524,288
tokens of 32 heads of 128.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from base import machine

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
H100_SHARED_MEMORY = 227 * 1024
TRITON_3_8 = triton.__version__.startswith("3.8.")
REMEDY = 'use PyTorch\'s operators, --kernels torch or kernels="torch"'


# ---- helpers of kernels


@triton.constexpr_function
def padded(size):
    """The next power of two, at least 16."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def row_numbers(
    row,
    valid,
    K: tl.constexpr,
):
    """Where the numbers [rows, KP] of a tensor [..., K] are, and which of them exist: those of
    valid rows, without the columns past K.
    """
    k = tl.arange(0, padded(K))
    mask = valid[:, None]
    if K != padded(K):
        mask = mask & (k < K)[None, :]
    return row[:, None] * K + k[None, :], mask


@triton.jit
def load_rows(
    ptr,
    row,
    valid,
    K: tl.constexpr,
):
    """[rows, KP] of a tensor [..., K]; invalid rows and columns past K are 0."""
    number, mask = row_numbers(row, valid, K)
    return tl.load(ptr + number, mask=mask, other=0.0)


@triton.jit
def store_rows(
    ptr,
    row,
    valid,
    x,
    K: tl.constexpr,
):
    """Stores the valid rows of x [rows, KP] in the dtype of the tensor."""
    number, mask = row_numbers(row, valid, K)
    tl.store(ptr + number, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def product(a, b):
    """a b in fp32. fp32 operands take three tf32 products: error near 2^-21."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def add_product(
    a,
    b,
    total,
):
    """a b + total in fp32."""
    return tl.dot(a, b, total, input_precision="tf32x3")


# The decorator decided when this file was imported, whatever the environment says by now.
INTERPRETED = not isinstance(product, triton.JITFunction)


# ---- sizes of tiles, and where they fit


class TileSizes(NamedTuple):
    """Sizes of tiles, powers of two from 16 on, the least that a tensor core takes."""

    rows: int  # (query, head) rows, in kernels with products whose results belong to queries
    key_rows: int  # the same in kernels whose results belong to keys
    blocks: int  # selection blocks of a step that computes their importance
    segment_rows: int = 2048  # rows of a segment in the backward


def tile_sizes(
    K: int,
    itemsize: int,
    shared: int,
) -> TileSizes:
    """Tiles that fit `shared` bytes of shared memory: 99 KiB on the smallest cards. Products of two
    warp groups, which only cards with 227 KiB have, want 128 rows (tests/kernel_resources.py).
    """
    if itemsize == 4:
        return TileSizes(
            rows=32,
            key_rows=16,
            blocks=32,
        )
    if K > 128:
        return TileSizes(
            rows=64,
            key_rows=16,
            blocks=32,
        )
    if shared < 200 * 1024:
        return TileSizes(
            rows=64,
            key_rows=64,
            blocks=32,
        )
    return TileSizes(
        rows=64,
        key_rows=128,
        blocks=64,
    )


def supported(
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether the kernels run on tensors of this dtype on this device."""
    if dtype not in DTYPES:
        return False
    if device.type == "cuda":
        return machine.capability(device) >= (8, 0)
    return INTERPRETED and dtype != torch.bfloat16  # whose products it gets wrong


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads can have: on a CUDA device its own answer,
    elsewhere those of an H100.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return H100_SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def shared_memory_needed(
    M: int,
    K: int,
    itemsize: int,
    block: int,
    shared: int,
) -> int:
    """Bytes of shared memory of the kernel that takes most, pair_backward_kernel, on a card that
    has `shared`; a bound of what the compiler says, see tests/kernel_resources.py. In fp32 Triton
    3.8 takes 16 rows more than 3.7 and 3.9, so that heads of 128 no longer fit an H100.
    """
    KP = padded(K)
    LP = padded(block)
    R = max(tile_sizes(K, itemsize, shared).key_rows, triton.next_power_of_2(M))
    if itemsize == 4:  # three products for one split their operands
        rows = 7 * LP + 4 * (R - 16) + 16 * TRITON_3_8
        return itemsize * rows * KP

    keys_and_rows = (2 * LP + 2 * R) * KP
    gradients = R * LP + LP * KP
    return itemsize * (keys_and_rows + gradients)


def refusal(
    M: int,
    K: int,
    dtype: torch.dtype,
    block: int,
    device: torch.device | None,
) -> str | None:
    """Why the kernels do not serve these sizes on the device, or None if they do; no device stands
    for a GPU that is not at hand.
    """
    keys = f"{padded(block) * padded(K) * dtype.itemsize / 1024:g} KiB of keys per block"
    given = f"the Triton kernels of sparse attention were given {dtype}"
    if M > 64 or K > 256 or block > 128 or padded(block) * padded(K) * dtype.itemsize > 2**15:
        sizes = f"{M} query heads per KV head, head dim {K}, blocks of {block} tokens, {keys}"
        return f"{given}, {sizes}; the limits are 64, 256, 128 and 32 KiB: {REMEDY}"
    if device is None:
        return None
    if not supported(dtype, device):
        return (
            f"{given} on {device}; they need float32, bfloat16 or float16 on a CUDA device of "
            "compute capability >= 8.0 (or, for tests, TRITON_INTERPRET=1 before triton is "
            f"imported, in float32 or float16): move the tensors there, or {REMEDY}"
        )

    available = shared_memory(device)
    needed = shared_memory_needed(M, K, dtype.itemsize, block, available)
    if device.type == "cuda" and available < needed:
        return (
            f"{given} and sizes that need {needed:,} bytes of shared memory, and {device} has "
            f"{available:,}: {REMEDY}"
        )
    return None


def require(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    block: int,
) -> None:
    """ValueError if the kernels do not run on these tensors; see `refusal`."""
    M = q_BTHK.shape[2] // k_BSGK.shape[2]
    words = refusal(M, q_BTHK.shape[3], q_BTHK.dtype, block, q_BTHK.device)
    if words:
        raise ValueError(words)


# ---- launches


def ceil_div(count: int, size: int) -> int:
    """How many groups of `size` hold `count` items."""
    return -(-count // size)


def cut_documents(
    counts: list[int],
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts each document into pieces of at most `size`: (document of each piece, what of the
    document lies before it, first piece of each document), on the host.
    """
    pieces = [ceil_div(count, size) for count in counts]
    pieces_D = torch.tensor(pieces)
    first_D = pieces_D.cumsum(0) - pieces_D
    total = sum(pieces)
    document_P = torch.arange(len(counts)).repeat_interleave(pieces_D, output_size=total)
    return document_P, (torch.arange(total) - first_D[document_P]) * size, first_D


def upload(on_host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, from pinned memory so that the host does not wait."""
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


def count_to(end: int, device: torch.device) -> Tensor:
    """0, 1, ..., end - 1 as int32."""
    return torch.arange(end, device=device, dtype=torch.int32)


def launch(
    kernel,
    grid: tuple[int, ...],
    num_warps: int = 4,
    **arguments,
) -> None:
    """Runs a Triton kernel over the grid."""
    kernel[grid](**arguments, num_warps=num_warps, num_stages=1)
