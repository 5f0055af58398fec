"""Run a function in several gloo processes and collect what each returns.

The ranks are forked from a server that has imported torch and has started no thread, because the
imports would take each rank 3 s of CPU time. The ranks share the server's hash seed, which
processes of torchrun do not: the tests that start torchrun find what depends on it.
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
    """What `function(World, *args)` returns on rank 0, rank 1, and so on.

    The function must be at module level, and may return tensors, numbers and containers of them.
    """
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
    dist.cores = lambda: 1  # one thread a rank: dist.start counts the cores
    world = dist.World.from_environment()
    dist.start(world, torch.device("cpu"))
    torch.save(function(world, *args), Path(folder) / f"{rank}.pt")
    dist.stop()


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
