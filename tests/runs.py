"""Small training runs in forked processes, for the rows that end them.

A child is forked from a parent that has imported everything and has started no thread, so a run
costs what its steps cost.
"""

import contextlib
import io
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # noqa: F401  here and below: what a child would otherwise import each time
import torch.utils.tensorboard  # noqa: F401
from torch.distributed import device_mesh, fsdp  # noqa: F401
from tqdm import tqdm  # noqa: F401

import data.corpus  # noqa: F401
import longhaul.generate  # noqa: F401
import longhaul.run.log  # noqa: F401
import longhaul.step  # noqa: F401
import train
from base.flags import underscored
from data.writer import write_dataset
from longhaul import cli
from longhaul.config import TrainConfig
from longhaul.flops import step_seconds
from longhaul.memory.needs import needs
from selfcheck.faults.rows import require
from tests.ranks import free_port

FORK = multiprocessing.get_context("fork")
VOCAB, CONTEXT = 64, 32
SMALL = [
    "--model_size",
    "tiny",
    "--model_overrides",
    "hidden_size=32",
    "num_layers=2",
    "num_heads=2",
    "num_kv_heads=1",
    "head_dim=32",
    "ffn_size=48",
    "--vocab_size",
    str(VOCAB),
    "--context_length",
    str(CONTEXT),
    "--warmup_steps",
    "2",
    "--eval_every",
    "0",
    "--dtype",
    "fp32",
    "--device",
    "cpu",
]


def dataset(folder: Path, rows: int = 40) -> Path:
    """About `rows` rows of random ids in documents of many lengths."""
    draw = np.random.default_rng(0)
    documents = (
        draw.integers(1, VOCAB, size) for size in draw.integers(3, 3 * CONTEXT, rows * 2 // 3)
    )
    write_dataset(documents, folder, vocab_size=VOCAB, eod_id=0, val_fraction=0.1)
    return folder


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    """Flags of a small run of the data in `folder`."""
    return [*SMALL, "--data", str(folder), "--output_dir", str(out), *more]


def plan_once():
    """Plan a small run here, as each of them would in its own process: two thirds of the CPU time
    that it takes. On one thread: those that are started here, no child would have.
    """
    torch.set_num_threads(1)
    cfg = cli.parse(TrainConfig, SMALL)
    step_seconds(cfg, cfg.model(), 1, "cpu")
    needs(cfg, 1)


def last_given(args: list[str]) -> list[str]:
    """`args` with the last value of each flag that is given twice, which train.py refuses."""
    values: dict[str, list[str]] = {}
    flag = ""
    for word in args:
        if word.startswith("--"):
            flag = underscored(word).split("=")[0]
            values[flag] = []
        values[flag].append(word)
    return [word for words in values.values() for word in words]


def run(words: list[str], code: int = 0) -> str:
    """What a run of train.py in this process says before it ends with this code."""
    said = io.StringIO()
    ended = 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            train.main(last_given(words))
        except SystemExit as stop:
            ended = stop.code
    assert ended == code, said.getvalue()
    return said.getvalue()


class Child:
    """A forked process that runs `function(*args)`; its words go to a file."""

    def __init__(self, log: Path, function: Callable, *args):
        self.log = log
        self.process = FORK.Process(target=_inside, args=(log, function, args))
        self.process.start()

    def wait(self, seconds: float = 120) -> int:
        """Its exit code, negative for a signal; Failed, after a kill, if it takes longer."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.kill()
            require(False, f"a process was still running after {seconds} s: {self.words()[-600:]}")
        return self.process.exitcode

    def signal(self, number: int):
        """Send a signal to a process that may have ended."""
        if self.process.is_alive():
            os.kill(self.process.pid, number)

    def kill(self):
        """kill -9, and wait for its end."""
        self.signal(signal.SIGKILL)
        self.process.join()

    def words(self) -> str:
        """All that it wrote on screen."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def last_line(self) -> str:
        lines = [line for line in self.words().splitlines() if line.strip()]
        return lines[-1] if lines else ""


def _inside(log: Path, function: Callable, args: tuple):
    screen = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    # in the place of whatever a test reads them with
    sys.stdout = sys.stderr = os.fdopen(screen, "w", buffering=1)
    torch.set_num_threads(1)
    function(*args)


def start(args: list[str], log: Path, before: Callable = lambda: None) -> Child:
    """train.py with these flags in a child, which calls `before()` first: the place to inject a
    fault.
    """
    return Child(log, _train, args, before, {})


def start_ranks(
    args: list[str],
    log: Path,
    size: int,
    before: Callable = lambda: None,
    main: Callable = train.main,
) -> list[Child]:
    """The same on `size` ranks, each with a file of its own; `main` may be another program's."""
    port = free_port()
    worlds = [
        dict(
            RANK=rank,
            WORLD_SIZE=size,
            LOCAL_RANK=rank,
            LOCAL_WORLD_SIZE=size,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in range(size)
    ]
    return [
        Child(log.with_name(f"{log.name}-{rank}"), _train, args, before, world, main)
        for rank, world in enumerate(worlds)
    ]


def _train(args: list[str], before: Callable, world: dict, main: Callable = train.main):
    os.environ.update({name: str(value) for name, value in world.items()})
    longhaul.dist.cores = lambda: 1
    before()
    main(last_given(args))


def finish(args: list[str], log: Path, code: int = 0, before: Callable = lambda: None) -> Child:
    """Run to the end, which must be exit code `code`."""
    child = start(args, log, before)
    found = child.wait()
    require(found == code, f"exit code {found}, not {code}: {child.words()[-600:]}")
    return child


def wait_for(
    condition: Callable[[], bool],
    seconds: float = 300,
    words: str = "what was waited for did not come",
):
    """Until `condition()` holds; Failed after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        require(time.monotonic() < end, words)
        time.sleep(0.002)


def steps_logged(out: Path) -> int:
    """Steps in metrics.jsonl so far."""
    path = out / "metrics.jsonl"
    return len(steps(path)) if path.exists() else 0


def steps(path: Path) -> list[dict]:
    """The records of steps in metrics.jsonl, without validations and without a torn line."""
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
    return [record for record in map(json.loads, whole) if "loss" in record]


def same_end(out: Path, whole: Path) -> bool:
    """Whether two runs ended with the same bits and logged the same losses."""
    return final_bits(out) == final_bits(whole) and losses(out) == losses(whole)


def losses(out: Path) -> list[float | None]:
    """The loss of every step; None without labels."""
    return [record["loss"] for record in steps(out / "metrics.jsonl")]


def final_bits(out: Path) -> list[bytes]:
    """The shards of the newest checkpoint."""
    newest = max(out.glob("step-????????"))
    return [path.read_bytes() for path in sorted(newest.glob("rank-*"))]


def exit_record(out: Path) -> dict:
    """exit.json of a run."""
    return json.loads((out / "exit.json").read_text())
