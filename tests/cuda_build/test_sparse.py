"""Sparse attention on fake CUDA tensors: the whole operator, with no device mix, no wait for the
device, and every argument that a kernel expects; attention of its lines: which kernels run, how
often, on which cards.
"""

import contextlib
import itertools

import pytest
import torch

from longhaul.sparse.nsa import engine
from longhaul.sparse.nsa.branches import Sizes
from longhaul.sparse.tiles import Buffers, product_fp32
from model import NSAConfig
from tests.cuda_build.fakes import AMPERE, HOPPER, card

nsa, blocks, stock = (
    pytest.importorskip(
        f"longhaul.sparse.triton.{name}",
        reason="triton is not installed: no kernel is launched",
    )
    for name in ("nsa", "blocks", "stock")
)

CFG = NSAConfig()
SIZES = [getattr(CFG, name) for name in Sizes._fields]


@pytest.fixture
def launched(monkeypatch):
    """Names of the Triton kernels that would run; without a driver there is no pinned memory."""
    names = []

    def launch(kernel, grid, **arguments):
        assert set(arguments) >= set(kernel.arg_names)
        for name in kernel.arg_names:
            tensor = name.endswith("_ptr") and arguments[name] is not None
            assert not tensor or arguments[name].is_cuda, (kernel.__name__, name)
        names.append(kernel.__name__)

    def upload(on_host, device):
        assert on_host.device.type == "cpu"
        return torch.empty(on_host.shape, dtype=on_host.dtype, device=device)

    for module in (nsa, blocks):
        monkeypatch.setattr(module, "launch", launch)
        monkeypatch.setattr(module, "upload", upload)
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(nsa, "require", lambda *_, **__: None)
    return names


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
@pytest.mark.parametrize("documents", [None, [5000, 40, 3, 3149]])
def test_forward_and_backward_stay_on_the_device(launched, capability, documents):
    T = 8192
    blocks = [CFG.compressed_blocks(n) for n in documents or [T]]
    cu = None
    if documents is not None:
        cu = torch.tensor([0, *documents]).cumsum(0)
    with card(capability):
        q = torch.empty(1, T, 8, 128, dtype=torch.bfloat16, device="cuda")
        gates = torch.empty(1, T, 8, 3, dtype=torch.bfloat16, device="cuda")
        kv = [
            torch.empty(1, n, 2, 128, dtype=torch.bfloat16, device="cuda")
            for n in (T, T, sum(blocks), sum(blocks), T, T)
        ]
        inputs = (q, *kv, gates)
        o, *saved = engine.nsa_forward._init_fn(*inputs, cu, SIZES, True)
        forward = len(launched)
        grads = engine.nsa_backward._init_fn(o, *inputs, *saved, cu, SIZES, True)
    assert [x.shape for x in grads] == [x.shape for x in inputs]
    assert all(x.is_cuda for x in grads)
    assert "importance_kernel" in launched[:forward]
    assert "pair_backward_kernel" in launched[forward:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_half_precision_is_one_call_and_not_rounded(dtype):
    with card(HOPPER):
        a = torch.empty(20, 128, dtype=dtype, device="cuda")
        buffers = Buffers(a)
        product = product_fp32(a, a, buffers, "logits")
    assert product.dtype == torch.float32
    assert not buffers.by_name


# ---- attention of lines

FLASH = ["aten::_flash_attention_forward", "aten::_flash_attention_backward"]
CUDNN = [
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
]


def fake(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


def run_both(kind: str, lengths: list[int], whole_rows: bool, dtype=torch.bfloat16) -> None:
    """Forward and backward of one branch with 4 query heads on one KV head."""
    window, heads = CFG.window, 4
    if kind == "compressed":
        lengths = [CFG.compressed_blocks(n) for n in lengths if CFG.compressed_blocks(n)]
        window, heads = None, 4 * CFG.cmp_stride
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    lines = stock.Lines(lengths, ends, window, whole_rows)
    q_CEK = fake(sum(lengths), heads, 128, dtype=dtype)
    k_CGK = fake(len(q_CEK), 1, 128, dtype=dtype)

    o_CEK, lse_EC = stock.attend(lines, q_CEK, k_CGK, k_CGK)
    assert o_CEK.shape == q_CEK.shape
    assert o_CEK.is_contiguous()
    assert lse_EC.shape == (q_CEK.shape[1], len(q_CEK))
    assert lse_EC.dtype == torch.float32
    grads = stock.attend_backward(lines, o_CEK, q_CEK, k_CGK, k_CGK, o_CEK, lse_EC)
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


@pytest.mark.parametrize("kind", ["compressed", "window"])
def test_what_flash_attention_does_not_take_is_computed_a_few_lines_at_a_time(kind):
    with card(HOPPER) as run:
        run_both(kind, [2048, 2048], whole_rows=True, dtype=torch.float32)
    assert not run.kernels
