"""Attention of lines of sparse attention on CUDA: which kernels run, how often, on which cards."""

import itertools

import pytest
import torch

from longhaul.sparse.triton import stock
from model import NSAConfig
from tests.cuda_build.fakes import AMPERE, HOPPER, card

CFG = NSAConfig()
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
