"""One thread, whatever a test starts: small tensors run faster so, and bits do not depend on the machine's cores."""

import pytest
import torch

from longhaul import dist


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(dist, "cores", lambda: 1)  # dist.start sets the threads of the process from it
    torch.set_num_threads(1)
