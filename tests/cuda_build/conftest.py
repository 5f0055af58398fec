"""Tests that need a CUDA build of torch, but no GPU: fake CUDA tensors, and Triton's compiler.

Without a GPU the other tests interpret Triton's kernels, and these compile them; Triton reads which
when a kernel is imported. So each file of this folder runs in a process of its own, and its tests
pass or fail here by what they did there. To run one here, under a debugger, say so:

    TRITON_INTERPRET=0 python -m pytest tests/cuda_build/test_loss.py
"""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
REASON = "torch is a CPU build here, and a CUDA build is tested: the one that pip installs on Linux"


def pytest_runtest_setup():
    """Skip this folder's tests without a CUDA build, and say why."""
    if torch.version.cuda is None:
        pytest.skip(REASON)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Whether the test has run, in the process of its file; None runs it here."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return None
    items = pyfuncitem.session.items
    names = tuple(item.nodeid for item in items if item.path == pyfuncitem.path)
    output, failures = compiled(names)
    failure = failures.get(pyfuncitem.name, f"the process ended without it:\n{output}")
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


@functools.cache
def compiled(names: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """What a process that runs these tests prints, and each test's failure, empty if it passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *names],
            cwd=ROOT,
            env=os.environ | {"TRITON_INTERPRET": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        found = {case.get("name"): "".join(case.itertext()) for case in cases}
    return done.stdout[-5000:], found
