"""Run a function or a program in several gloo processes, and collect what each returns or prints.

The ranks are forked from a server that has imported torch and has started no thread, because the
imports would take each rank 3 s of CPU time. The ranks share the server's hash seed, which
processes of torchrun do not: the tests that start torchrun find what depends on it.
"""

import gc
import multiprocessing
import os
import socket
import tempfile
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path

import torch
import torch.multiprocessing as mp

from longhaul import dist

LONGEST = 600  # seconds that ranks may take
FAILED = (mp.ProcessExitedException, mp.ProcessRaisedException, TimeoutError)


def run_ranks(function, size: int, *args) -> list:
    """What `function(World, *args)` returns on rank 0, rank 1, and so on.

    The function must be at module level, and may return tensors, numbers and containers of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        _start(_rank, size, function, Path(folder), args)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(size)]


def run_program(main, size: int, words: list[str]) -> str:
    """What the first rank of `main(words)` prints. Each rank must end without an error.

    As under torchrun, whose own imports and those of its ranks take longer than a small run.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            _start(_program_of_rank, size, main, Path(folder), words)
        except FAILED as error:
            texts = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*.txt")]
            raise AssertionError("\n".join([str(error), *texts])) from None
        return (Path(folder) / "0.txt").read_text(encoding="utf-8")


def _start(body, size: int, *args):
    """`body(rank, *args)` on each rank. TimeoutError after LONGEST seconds."""
    ranks = begin(body, size, *args)
    end = time.monotonic() + LONGEST
    while not ranks.join(timeout=5):
        if time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            raise TimeoutError(f"ranks that ran for {LONGEST} s were killed")


def begin(body, size: int, *args) -> mp.ProcessContext:
    """Begin `body(rank, *args)` on each rank, with the environment of this process and its own."""
    multiprocessing.set_forkserver_preload(
        ["train", "torch._dynamo", "torch.distributed.device_mesh", "torch.distributed.fsdp"]
    )
    work = size, free_port(), dict(os.environ), body, args
    return mp.start_processes(_begin, work, nprocs=size, join=False, start_method="forkserver")


def _begin(rank: int, size: int, port: int, environment: dict, body, args: tuple):
    gc.freeze()  # or each rank looks for garbage among what the server has imported
    os.environ.clear()
    os.environ.update(
        environment,
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    dist.cores = lambda: 1  # one thread a rank: dist.start counts the cores
    body(rank, *args)


def _rank(rank: int, function, folder: Path, args: tuple):
    world = dist.World.from_environment()
    dist.start(world, torch.device("cpu"))
    torch.save(function(world, *args), folder / f"{rank}.pt")
    dist.stop()


def _program_of_rank(rank: int, main, folder: Path, words: list[str]):
    with ExitStack() as stack:
        said = stack.enter_context(open(folder / f"{rank}.txt", "w", encoding="utf-8"))
        stack.enter_context(redirect_stdout(said))
        stack.enter_context(redirect_stderr(said))
        main(words)


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
