"""Everything that reads files from elsewhere accepts damaged bytes or refuses them in one line that
is a ValueError: no other exception, no crash of a C or Rust parser, no 10 s of CPU time, no 100 MB
for an input of some KB.

Each input is a good file, damaged by a generator of its own seed. The readers run in a forked
child, which a crash ends and this process survives.
"""

import json
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
import torch

from footprint.kernels.measure import peak_bytes
from tests.events import python_bytes
from tests.readers import TARGETS, Target

INPUTS = 200
SECONDS = 10  # of CPU time, for one input
LIMIT = 100e6  # bytes that the reader holds at one time
FORK = multiprocessing.get_context("fork")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_reader_refuses_damaged_files_in_one_line(target, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    good = target.make(folder)
    target.read(folder)  # the good file is accepted; imports are made before the memory counts

    log = tmp_path / "log"
    child = FORK.Process(target=read_all, args=(target, good, folder, log))
    child.start()
    child.join()
    words = log.read_text(encoding="utf-8", errors="replace")
    assert child.exitcode == 0, f"exit code {child.exitcode} at the seed above: {words[-2000:]}"
    refused, held = json.loads(words.splitlines()[-1])
    assert refused > INPUTS // 10, "the damage does nothing"
    assert held < LIMIT


def read_all(target: Target, good, folder: Path, log: Path):
    """In the child: every input in turn. `log` gets the seeds, a traceback, and at the end how many
    inputs were refused and the most bytes that a reader held.
    """
    screen = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    refused = []
    held = []

    def read_each():
        for seed in range(INPUTS):
            os.write(screen, f"\nseed {seed}\n".encode())
            target.damage(random.Random(seed), good, folder)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            held.append(python_bytes(lambda: refused.append(is_refused(target, folder))))
            signal.setitimer(signal.ITIMER_PROF, 0)

    tensors = peak_bytes(read_each, torch.device("cpu"))
    figures = [sum(refused), tensors + max(held)]
    os.write(screen, f"\n{json.dumps(figures)}\n".encode())


def is_refused(target: Target, folder: Path) -> bool:
    """Whether the reader raises a ValueError that names a remedy in one line."""
    try:
        target.read(folder)
    except ValueError as error:
        bare = isinstance(error, (UnicodeError, json.JSONDecodeError))
        if bare or "\n" in str(error):
            raise AssertionError(f"words that name no remedy: {error!r}") from None
        return True
    return False
