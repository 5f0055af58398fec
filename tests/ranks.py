"""Run a function in W gloo processes and collect what each returns. The function must be importable (module level)."""

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
        mp.spawn(_rank, (function, size, _free_port(), folder, args), nprocs=size)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(size)]


def _rank(rank: int, function, size: int, port: int, folder: str, args: tuple):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    world = dist.World.from_environment()
    dist.start(world, torch.device("cpu"))
    torch.save(function(world, *args), Path(folder) / f"{rank}.pt")
    dist.stop()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
