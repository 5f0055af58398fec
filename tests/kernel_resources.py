"""What the Triton kernels of attention take on a GPU: Triton's compiler needs none.

    python -m tests.kernel_resources 90-bfloat16 90-float32-pair_backward_kernel

prints a line of JSON per kernel of Native Sparse Attention for sm_90, with heads of 128 and
selection blocks of 64 tokens: all kernels in bf16, and one of them in fp32.

It runs one layer, forward and backward, and decodes a token; it compiles each launch instead of
running it.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longhaul.sparse.nsa import NSAState, nsa_attention
from longhaul.sparse.triton import blocks, decode, nsa, stock
from model import NSAConfig

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# KiB of a block of threads; sm_80 has 163, and takes the tiles of cards with 99, such as sm_86
SHARED_MEMORY = {80: 99, 90: 227, 100: 227}
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int64: "*i64",
    int: "i32",
    float: "fp32",
}


def source_of(kernel, arguments: dict) -> ASTSource:
    """The kernel as a launch with these arguments compiles it."""
    assert set(arguments) == set(kernel.arg_names)
    kinds = {}
    constants = {}
    aligned = {}
    for position, parameter in enumerate(kernel.params):
        name = parameter.name
        value = arguments[name]
        if parameter.is_constexpr or value is None:
            kinds[name] = "constexpr"
            constants[name] = value
            continue
        kinds[name] = TYPES[getattr(value, "dtype", type(value))]
        if kinds[name][0] == "*" or kinds[name] == "i32" and value % 16 == 0:
            aligned[(position,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, kinds, constants, aligned)


def compiled(kernel, arguments: dict, capability: int, **options: int):
    """The kernel as a launch with these arguments would run it on such a card."""
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source_of(kernel, arguments), target=target, options=options)


def resources(built) -> dict:
    """Registers, bytes of stack and of shared memory, CTAs per SM, and kinds of products."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assembly = [CUOBJDUMP, "-sass", file.name]
        code = subprocess.run(assembly, capture_output=True, text=True, check=True).stdout
    registers = int(re.search(r"REG:(\d+)", used)[1])
    warps = built.metadata.num_warps
    products = re.findall(
        r"(wgmma\.mma_async\S*?\.m64n\d+|tcgen05\.mma|mma\.sync)", built.asm["ptx"]
    )
    return {
        "registers": registers,
        "stack": int(re.search(r"STACK:(\d+)", used)[1]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "shared": built.metadata.shared,
        "warps": warps,
        "ctas": min(65536 // (registers * 32 * warps), 232448 // max(built.metadata.shared, 1)),
        "products": sorted({product.rpartition(".")[2] for product in products}),
        "atomics": bool(re.search(r"\b(atom|red)\.", built.asm["ptx"])),
        "wide loads": "ld.global.v4" in built.asm["ptx"] or "cp.async" in built.asm["ptx"],
    }


def compiles(capability: int, dtype: str, only: str) -> Callable:
    """Takes the place of a launch: compiles each kernel, or only one, once per set of constants,
    and prints what it takes.
    """
    done = set()

    def compile_launch(kernel, grid, num_warps=4, **arguments):
        name = kernel.__name__
        source = source_of(kernel, arguments)
        key = name, str(sorted(source.constants.items()))
        if key in done or only not in ("", name):
            return
        done.add(key)
        built = compiled(kernel, arguments, capability, num_warps=num_warps, num_stages=1)
        card = {"capability": capability, "dtype": dtype}
        print(json.dumps(card | {"kernel": name, **resources(built)}), flush=True)

    return compile_launch


def no_attention(lines: stock.Lines, q_CEK: Tensor, *kv: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros of the shapes that `stock.attend` returns."""
    C, E, _ = q_CEK.shape
    return torch.zeros_like(q_CEK), torch.zeros((E, C))


def sparse(capability: int, dtype_name: str, only: str = "") -> None:
    """The kernels of Native Sparse Attention."""
    cfg, K = NSAConfig(), 128
    dtype = getattr(torch, dtype_name)
    nsa.launch = blocks.launch = decode.launch = compiles(capability, dtype_name, only)
    nsa.require = lambda *_, **__: None
    # PyTorch's own kernels, which take minutes on a CPU and whose values nobody reads
    stock.attend = no_attention
    stock.attend_backward = lambda lines, do, *qkv_o_lse: map(torch.zeros_like, qkv_o_lse[:3])
    blocks.PARTIAL_RESULT_NUMBERS = 2**24  # several parts
    for module in (nsa, blocks):
        module.shared_memory = lambda _: SHARED_MEMORY[capability] * 1024

    T = 4096
    N = cfg.compressed_blocks(T)
    q = torch.zeros(1, T, 8, K, dtype=dtype, requires_grad=True)
    gates = torch.zeros(1, T, 8, 3, dtype=dtype)
    kv = [torch.zeros(1, n, 2, K, dtype=dtype) for n in (T, T, N, N, T, T)]
    nsa_attention(q, *kv, gates, cfg, fused=True).sum().backward()

    state = NSAState(cfg, 1, T, 2, K, dtype=dtype, kernels="torch")
    state.fused = True
    state.length = T - 2
    token, one = q[:, :1].detach(), kv[0][:, :1]
    rope = [torch.zeros(1, 1, 1, K // 2)] * 2
    state.decode((token, one, one, one, one, one, one, gates[:, :1]), rope, None)


if __name__ == "__main__":
    for card in sys.argv[1:]:
        capability, *rest = card.split("-")
        sparse(int(capability), *rest)
