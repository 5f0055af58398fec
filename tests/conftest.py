"""What all tests share: one thread, Triton's interpreter if there is no GPU, slow tests first.

Small tensors are faster with one thread, and results then do not depend on the number of cores.
"""

import base.with_torch  # noqa: F401  (first: torch reads what it sets only once)

import gc
import importlib.metadata
import os
import sys
import time

import pytest
import torch

from longhaul import dist

if not torch.cuda.is_available():
    # triton reads it when the first test file imports a kernel
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection():
    """What test files import holds no garbage, and looking for it takes a third of the time."""
    gc.disable()


def pytest_collection_finish():
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip, and do not fail, a test whose kernel these packages cannot interpret."""
    try:
        return (yield)
    except Exception as error:
        if type(error).__name__ == "InterpreterError" and not can_interpret():
            pytest.skip("the interpreter of Triton 3.6 does not run with NumPy 2.4 or newer")
        raise


def pytest_runtest_setup(item: pytest.Item):
    """Skip a slow test that would begin after SLOW_UNTIL, in seconds since 1970: on a slow machine
    CI has no time for all of them.
    """
    leave_out_what_stays(item.session)
    until = float(os.environ.get("SLOW_UNTIL", "inf"))
    if item.get_closest_marker("slow") and time.time() > until:
        pytest.skip("a slow test that would begin after SLOW_UNTIL")


IMPORTED = pytest.StashKey[int]()  # how many modules there were the last time
BEGUN = pytest.StashKey[int]()  # how many tests have begun
EVERY = 50  # tests, at least so often


def leave_out_what_stays(session: pytest.Session):
    """Python looks for garbage among what a test makes, not among what imports and tests before it
    have left: a million objects take 0.25 s, and `footprint.kernels.measure` looks each time.
    """
    modules = len(sys.modules)
    begun = session.stash.get(BEGUN, 0)
    session.stash[BEGUN] = begun + 1
    if begun % EVERY == 0 or modules > session.stash[IMPORTED]:
        session.stash[IMPORTED] = modules
        gc.collect()
        gc.freeze()


def can_interpret() -> bool:
    return version("triton") >= (3, 7) or version("numpy") < (2, 4)


def version(package: str) -> tuple[int, ...]:
    """Major and minor version of an installed package, such as (2, 4)."""
    return tuple(map(int, importlib.metadata.version(package).split(".")[:2]))


# The test files that take longest, first. Whoever runs them last keeps the others waiting.
LONG_FILES = (
    "test_kill",
    "test_simulate",
    "test_context",
    "test_hosts",
    "test_rehearsal",
    "test_policy_run",
    "test_docs",
    "test_operators",
    "test_fused_nsa",
    "test_parallel",
    "test_analysis_memory",
    "test_analysis_run",
    "test_memory_posttrain",
    "test_nsa_model",
    "test_train",
    "test_nsa",
)


def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Slow tests first, then the long files, so that at the end no worker waits for another."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[bool, int]:
    is_fast = item.get_closest_marker("slow") is None
    name = item.path.stem
    file = LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES)
    return is_fast, file


@pytest.fixture(autouse=True, scope="session")
def one_core():
    """`dist.start` counts one core, also in the fixtures of a module, which are made before those
    of a test.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "cores", lambda: 1)
        torch.set_num_threads(1)
        yield


@pytest.fixture
def products_in_their_dtype(monkeypatch):
    """On every CPU: one that is faster in fp32 would multiply in that."""
    monkeypatch.setattr("base.machine.fp32_is_faster", lambda dtype: False)


@pytest.fixture(autouse=True)
def one_thread(one_core):
    """One thread in this process, whatever the test before has set."""
    torch.set_num_threads(1)
