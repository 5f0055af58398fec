"""The operators of indexed attention on fake CUDA tensors: no device mix, no wait for the device,
and every argument that a kernel expects.
"""

import contextlib

import pytest
import torch

from longhaul.sparse.indexed.operators import indexed_backward, indexed_forward
from tests.cuda_build.fakes import AMPERE, HOPPER, card

attention = pytest.importorskip(
    "longhaul.sparse.indexed.triton.attention",
    reason="triton is not installed: no kernel is launched",
)


@pytest.fixture
def launched(monkeypatch):
    """Names of the Triton kernels that would run."""
    names = []

    def launch(kernel, grid, **arguments):
        assert set(arguments) >= set(kernel.arg_names)
        for name in kernel.arg_names:
            assert not name.endswith("_ptr") or arguments[name].is_cuda, (kernel.__name__, name)
        names.append(kernel.__name__)

    monkeypatch.setattr(attention, "launch", launch)
    monkeypatch.setattr(attention, "require_values", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: contextlib.nullcontext())
    return names


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
def test_forward_and_backward_stay_on_the_device(launched, capability):
    T = 8192
    r, most = 4, 512
    with card(capability):
        q, k, v, q_idx = (
            torch.empty(2, T, heads, 128, dtype=torch.bfloat16, device="cuda")
            for heads in (8, 2, 2, 4)
        )
        k_idx = torch.empty(2, T // r, 128, dtype=torch.bfloat16, device="cuda")
        inputs = (q, k, v, q_idx, k_idx)
        o, kl, *saved = indexed_forward._init_fn(*inputs, r, most, True, "triton")
        forward = len(launched)
        grads = indexed_backward._init_fn(o, kl, *inputs, o, *saved, r, most, "triton")
    assert [x.shape for x in grads] == [x.shape for x in inputs]
    assert all(x.is_cuda for x in grads)
    assert set(launched[:forward]) == {"rank_kernel", "attend_kernel", "mass_kernel"}
    assert {"dq_kernel", "indexer_dq_kernel"} < set(launched[forward:])
    assert {"dkv_kernel", "indexer_dk_kernel"} < set(launched[forward:])
