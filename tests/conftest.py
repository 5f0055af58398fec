"""What all tests share: one thread, Triton's interpreter if there is no GPU, slow tests first.

Small tensors are faster with one thread, and results then do not depend on the number of cores.
"""

import os

import pytest
import torch

from longhaul import dist

if not torch.cuda.is_available():
    # triton reads it when the first test file imports a kernel
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list):
    """Slow tests first, so that at the end no worker waits for the other's slow tests."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """One thread in this process, also after `dist.start`, which counts the cores."""
    monkeypatch.setattr(dist, "cores", lambda: 1)
    torch.set_num_threads(1)
