"""Jobs for tests/test_gpu_benchmark.py that crash, hang and end well: a program like benchmarks.gpu
with a part that only tests have.

    python -m tests.gpu_jobs --out FOLDER
"""

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import torch

from benchmarks.gpu import command
from benchmarks.gpu.jobs import Job
from benchmarks.record import Table

ILLEGAL = "CUDA error: an illegal memory access was encountered"
TABLE = Table("found", "What ended well", {"name": "text"})


def well(name):
    return lambda run: run.row(TABLE, name=name)


def illegal_access(run):
    run.row(TABLE, name="before the illegal access")
    raise torch.AcceleratorError(ILLEGAL)


def segmentation_fault(run):
    os.kill(os.getpid(), signal.SIGSEGV)


def endless(run):
    """Hangs, with a process of its own, and does not listen to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path(os.environ["PIDS"]).write_text(f"{os.getpid()} {grandchild.pid}")
    time.sleep(1000)


def killed_by_hand(run):
    run.row(TABLE, name="before it was killed")
    os.kill(os.getpid(), signal.SIGKILL)


def raising(run):
    raise ZeroDivisionError("a bug of the job's own")


JOBS = [
    Job("first", 1, 60, well("first")),
    Job("illegal", 2, 60, illegal_access),
    Job("fault", 3, 60, segmentation_fault),
    Job("endless", 4, 6, endless),
    Job("by hand", 5, 60, killed_by_hand),
    Job("bug", 5.5, 60, raising),
    Job("last", 9, 60, well("last")),
]
PARTS = {"machine": types.SimpleNamespace(jobs=lambda place: JOBS)}

if __name__ == "__main__":
    sys.exit(command.main(parts=PARTS, program="tests.gpu_jobs", began=time.monotonic()))
