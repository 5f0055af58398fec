"""Run a function in W gloo processes and collect what each returns. The function must be importable
(module level).

Ranks are forked from one server that has imported torch and has started no thread: a rank would
import for 3 s of CPU time. They share its order of sets of strings, which processes of torchrun do
not: what depends on that is found by the tests that start torchrun.
"""

import multiprocessing
import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

from longhaul import dist


def run_ranks(function, size: int, *args) -> list:
    """[function(World, *args) of rank 0, rank 1, ...]: tensors, numbers and containers of them."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(
            ["train", "torch._dynamo", "torch.distributed.device_mesh", "torch.distributed.fsdp"]
        )
        work = function, size, free_port(), folder, args, dict(os.environ)
        mp.start_processes(_rank, work, nprocs=size, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(size)]


def _rank(rank: int, function, size: int, port: int, folder: str, args: tuple, environment: dict):
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
    dist.cores = lambda: 1  # dist.start sets the threads of the process from it
    world = dist.World.from_environment()
    dist.start(world, torch.device("cpu"))
    torch.save(function(world, *args), Path(folder) / f"{rank}.pt")
    dist.stop()


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
