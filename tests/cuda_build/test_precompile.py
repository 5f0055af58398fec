"""benchmarks.gpu --precompile: every kernel of a step compiles for a card that is not here, with
the Triton of a CUDA build of torch. Other tests compile those of attention for other cards.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import kernels

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_every_kernel_compiles_into_a_folder_that_can_be_carried(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--precompile", str(tmp_path)]
    done = subprocess.run(
        [*command, "--capability", "90"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(name in done.stdout for name in kernels.found()), done.stdout
    assert len(list(tmp_path.glob("**/*.cubin"))) >= len(kernels.found())
