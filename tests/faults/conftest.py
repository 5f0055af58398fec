"""What the tests of faults share: a small dataset, and runs in processes that may be killed."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import train
from tests import kit, ranks


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return kit.dataset(tmp_path_factory.mktemp("data") / "set")


class Child:
    """A rank of a run in a process of its own, whose words go to a file."""

    def __init__(self, process, log: Path):
        self.process = process
        self.log = log

    def wait(self, seconds: float = 120) -> int:
        """Its exit code, negative for a signal."""
        self.process.join(seconds)
        assert not self.process.is_alive(), f"still running after {seconds} s: {self.words()}"
        return self.process.exitcode

    def signal(self, number: int):
        """Send a signal, unless it has ended."""
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def words(self) -> str:
        """All that it wrote on screen."""
        return self.log.read_text(errors="replace")

    def last_line(self) -> str:
        return self.words().strip().splitlines()[-1]


@pytest.fixture
def start(tmp_path):
    """Starts a run of some ranks; each calls `before()` first, which injects the fault. What is
    still running after the test is killed.
    """
    started = []

    def start(words: list[str], size: int = 1, before: Callable = int) -> list[Child]:
        log = tmp_path / f"log-{len(started)}"
        begun = ranks.begin(_train, size, log, kit.last_given(words), before)
        children = [
            Child(process, Path(f"{log}-{rank}")) for rank, process in enumerate(begun.processes)
        ]
        started.extend(children)
        return children

    yield start
    for child in started:
        child.signal(signal.SIGKILL)


def _train(rank: int, log: Path, words: list[str], before: Callable):
    screen = os.open(f"{log}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    sys.stdout = sys.stderr = os.fdopen(screen, "w", buffering=1)
    torch.set_num_threads(1)
    before()
    train.main(words)
