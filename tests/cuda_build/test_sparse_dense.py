"""The compressed branch and the window of sparse attention on CUDA: which kernels run, how often,
and how they compile.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: nothing can be compiled")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from longhaul.sparse.nsa.triton import dense  # noqa: E402
from longhaul.sparse.nsa.triton.layout import Documents  # noqa: E402
from model import NSAConfig  # noqa: E402
from tests.cuda_build.fakes import AMPERE, HOPPER, TURING, card  # noqa: E402

CFG = NSAConfig()
FLASH = ["aten::_flash_attention_forward", "aten::_flash_attention_backward"]
CUDNN = [
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
]
EFFICIENT = [
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_efficient_attention_backward",
]


@pytest.fixture(autouse=True)
def no_uploads_and_no_launches(monkeypatch):
    """Without a driver there is no pinned memory and nothing to launch on."""

    def to_device(numbers, device):
        return torch.empty(len(numbers), dtype=torch.int32, device=device)

    monkeypatch.setattr(dense, "to_device", to_device)
    monkeypatch.setattr(dense, "launch", lambda *_, **__: None)


def fake(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


def documents_of(*lengths: int) -> Documents:
    table_D4 = torch.empty(len(lengths), 4, dtype=torch.int32, device="cuda")
    compressed = [CFG.compressed_blocks(n) for n in lengths]
    return Documents(table_D4, list(lengths), compressed)


def run_both(kind: str, lengths: list[int], whole_rows: bool, dtype=torch.bfloat16) -> None:
    """Forward and backward of one branch with 4 query heads on one KV head."""
    documents = documents_of(*lengths)
    lines = dense.Lines.of_tokens(documents, whole_rows, CFG)
    if kind == "compressed":
        lines = dense.Lines.of_blocks(documents, lines.document_Z, whole_rows, CFG)
    heads = dense.Heads(H=32, M=4, kv_heads=1, K=128)
    Z = sum(lengths)
    x_ZHK = fake(Z, 32, 128, dtype=dtype)
    (q_CEK,) = dense.fold(lines, heads, x_ZHK)
    k_CGK = fake(len(q_CEK), 1, 128, dtype=dtype)

    o_CEK, lse_EC = dense.attend(lines, q_CEK, k_CGK, k_CGK)
    assert o_CEK.shape == q_CEK.shape
    assert o_CEK.is_contiguous()
    assert lse_EC.shape == (q_CEK.shape[1], len(q_CEK))
    assert lse_EC.dtype == torch.float32
    grads = dense.attend_backward(lines, o_CEK, q_CEK, k_CGK, k_CGK, o_CEK, lse_EC)
    assert [x.shape for x in grads] == [q_CEK.shape, k_CGK.shape, k_CGK.shape]


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
@pytest.mark.parametrize("kind", ["compressed", "window"])
def test_packed_documents_are_one_call_of_flash_attention(capability, kind):
    with card(capability) as run:
        run_both(kind, [5000, 40, 3, 2000], whole_rows=False)
    assert run.kernels == FLASH


def test_whole_rows_take_cudnn_where_pytorch_prefers_it():
    with card(HOPPER) as hopper:
        run_both("compressed", [4096, 4096], whole_rows=True)
    assert hopper.kernels == CUDNN
    with card(AMPERE) as ampere:
        run_both("compressed", [4096, 4096], whole_rows=True)
    assert ampere.kernels == FLASH
    with card(HOPPER) as window:
        run_both("window", [4096, 4096], whole_rows=True)
    assert window.kernels == FLASH


def test_deterministic_algorithms_exclude_cudnn():
    torch.use_deterministic_algorithms(True)
    try:
        with card(HOPPER) as run:
            run_both("compressed", [4096], whole_rows=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert run.kernels == FLASH


@pytest.mark.parametrize("capability, dtype", [(HOPPER, torch.float32), (TURING, torch.float16)])
@pytest.mark.parametrize("kind, calls", [("compressed", 2), ("window", 2 * 4)])
def test_what_flash_attention_does_not_take_goes_to_the_memory_efficient_kernel_in_pieces(
    capability, dtype, kind, calls
):
    with card(capability) as run:
        run_both(kind, [2048, 2048], whole_rows=True, dtype=dtype)
    assert sorted(run.kernels) == sorted(EFFICIENT * calls)


# ---- the kernels that fold


def compiled(kernel, sizes: dict, architecture: int):
    """The kernel with 16-byte pointers, for this architecture."""
    kinds = {}
    constants = {}
    aligned = {}
    for position, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            kinds[name] = "constexpr"
            constants[name] = sizes[name]
        elif name.endswith("_ptr"):
            whole = name.startswith(("document", "table"))
            kinds[name] = "*i32" if whole else "*bf16"
            aligned[(position,)] = [["tt.divisibility", 16]]
        else:
            kinds[name] = "i32"
    for name in ("lse_ptr", "folded_lse_ptr", "total_ptr"):
        if name in kinds:
            kinds[name] = "*fp32"
    source = ASTSource(kernel, kinds, constants, aligned)
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 1})


def registers_and_spills(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [tool, "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", used)[1]), int(re.search(r"STACK:(\d+)", used)[1])


@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100])
@pytest.mark.parametrize("stride", [1, 16])
def test_folding_spills_nothing_and_moves_16_bytes_at_a_time(architecture, stride):
    sizes = {"STRIDE": stride, "SPAN": 2 * stride, "FIRST_LINE": 2, "M": 4, "K": 128, "KP": 128}
    sizes |= {"R": dense.ROWS, "COUNT": 3, "GATED": True}
    for kernel in (dense.fold_kernel, dense.unfold_kernel, dense.add_unfolded_kernel):
        built = compiled(kernel, sizes, architecture)
        registers, spilled = registers_and_spills(built.asm["cubin"])
        assert spilled == 0, kernel
        assert registers <= 128, kernel
        assert "ld.global.v4" in built.asm["ptx"], kernel
        assert "st.global.v4" in built.asm["ptx"], kernel
