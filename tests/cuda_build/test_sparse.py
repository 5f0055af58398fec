"""The whole operator of sparse attention on fake CUDA tensors: no device mix, no wait for the
device, and every argument that a kernel expects.
"""

import contextlib

import pytest
import torch

from longhaul.sparse.nsa import engine
from longhaul.sparse.nsa.branches import Sizes
from model import NSAConfig
from tests.cuda_build.fakes import AMPERE, HOPPER, card

nsa, blocks = (
    pytest.importorskip(
        f"longhaul.sparse.triton.{name}",
        reason="triton is not installed: no kernel is launched",
    )
    for name in ("nsa", "blocks")
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
