"""Tests that need a CUDA build of torch, but no GPU: fake CUDA tensors, and Triton's compiler.

`bash scripts/test_cuda_build.sh` makes an environment for them and runs them.
"""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
REASON = "torch has no CUDA build here: run `bash scripts/test_cuda_build.sh`"


def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Skip this folder's tests without a CUDA build, and say why."""
    if torch.version.cuda is not None:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))
