"""What the other tests of this folder rest on: fake CUDA tensors run, and raise on a host sync."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode


def test_fake_cuda_tensors_run_without_a_gpu():
    with FakeTensorMode():
        x = torch.ones(4, 8, device="cuda", dtype=torch.bfloat16)
        y = x @ x.mT
    assert y.device.type == "cuda"
    assert y.shape == (4, 4)


def test_a_fake_cuda_tensor_cannot_be_read_by_the_host():
    with FakeTensorMode():
        x = torch.ones((), device="cuda")
        with pytest.raises(DataDependentOutputException):
            bool(x > 0)
