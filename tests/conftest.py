"""One thread, whatever a test starts: small tensors run faster so, and bits do not depend on the
machine's cores.
"""

import os

import pytest
import torch

from longhaul import dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when a first test file imports a kernel


def pytest_collection_modifyitems(items: list):
    """Slow tests first: of two workers none is left alone with them at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(
        dist, "cores", lambda: 1
    )  # dist.start sets the threads of the process from it
    torch.set_num_threads(1)
