"""Processes: what torchrun says of this one, the device, the process group, the named mesh,
reductions, printing, refusal.

Imports longhaul.exits of ours. torch.distributed is loaded only where there is more than one
process.
"""

import ctypes
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from longhaul.exits import Halt, StorageError, code_of

PATIENCE = timedelta(
    hours=1
)  # of a collective: rank 0 may hash a large data set or prepare one meanwhile


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls) -> "World":
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE as torchrun sets them; one process
        without it.
        """
        names = dict(
            rank="RANK", size="WORLD_SIZE", local_rank="LOCAL_RANK", local_size="LOCAL_WORLD_SIZE"
        )
        return cls(
            **{field: int(os.environ[name]) for field, name in names.items() if name in os.environ}
        )


def choose_device(name: str, world: World) -> torch.device:
    """`auto` takes this process's GPU where there is one. A GPU that is asked for and missing is an
    error.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and gpus == 0:
        raise ValueError(
            "--device cuda: torch sees no GPU here: use --device cpu, or install a CUDA build of torch"
        )
    if name == "cpu" or gpus == 0:
        return torch.device("cpu")
    if world.local_size > gpus:
        raise ValueError(
            f"{world.local_size} processes on this machine for {gpus} GPU(s): use --nproc_per_node={gpus}"
        )
    return torch.device("cuda", world.local_rank)


def keep_freed_memory():
    """Ask glibc to keep what is freed for the next allocation, in blocks of less than 32 MiB,
    instead of handing it back to the kernel.

    Activations are freed and taken again every step; a fresh page costs a fault each time: 20-30%
    of a CPU step. Larger blocks, where that is no longer measurable, are mapped one by one: among
    small ones that stay they would leave holes that nothing fits into.
    """
    if platform.libc_ver()[0] == "glibc":
        top_pad, trim_threshold, mmap_threshold = -2, -1, -3  # mallopt(3)
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 2**25)  # the most that glibc takes
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(top_pad, 2**26)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start(world: World, device: torch.device):
    """Join the process group (NCCL between GPUs, gloo between CPUs); nothing to do for one process.

    A rank that was killed or stopped is found by its heartbeat (longhaul/run/heartbeat.py), one that is
    lost in its own work after PATIENCE.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(
            max(1, cores() // world.local_size)
        )  # torchrun's default is 1 however many cores there are
        keep_freed_memory()
    if world.size > 1:
        import torch.distributed as dist

        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)


def stop():
    """Leave the process group, where there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def check_replicas(world: World, replicas: int, context: int = 1):
    """ValueError where the replicas, or the ranks that share a row in each of them, do not divide
    the ranks.
    """
    if world.size % replicas:
        raise ValueError(
            f"--dp_replicate {replicas} does not divide {world.size} rank(s): choose from {divisors(world.size)}"
        )
    if world.size // replicas % context:
        each = f" of each of the {replicas} replicas" if replicas > 1 else ""
        raise ValueError(
            f"--context_parallel_size {context} does not divide the {world.size // replicas} rank(s){each}: "
            f"choose from {divisors(world.size // replicas)}"
        )


def divisors(number: int) -> list[int]:
    """All of them, rising."""
    return [n for n in range(1, number + 1) if number % n == 0]


def data_mesh(world: World, device: torch.device, replicas: int):
    """The mesh ("replicate", "shard") of all ranks, flattened to ("shard",) for one replica; None
    for one process.
    """
    if world.size == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    if replicas == 1:
        return init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device.type, (replicas, world.size // replicas), mesh_dim_names=("replicate", "shard")
    )


def context_mesh(world: World, device: torch.device, context: int):
    """The mesh ("dp", "cp"), whose neighbours in "cp" share their rows; None where each rank has
    its own.

    A mesh of its own beside `data_mesh`, which shards parameters over dp and cp alike: a slice of
    two dimensions of one mesh would mean HSDP, and flattening one is not public.
    """
    if context == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(
        device.type, (world.size // context, context), mesh_dim_names=("dp", "cp")
    )


def all_sum(value: Tensor) -> Tensor:
    """The sum over all ranks, in place; the value itself for one process."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(value)
    return value


class Refusal(ValueError):
    """What rank 0 found wrong, on the other ranks, with its exit code."""

    def __init__(self, words: str, exit_code: int):
        super().__init__(words)
        self.exit_code = exit_code


def on_rank0(function, world: World):
    """What `function()` gives on rank 0, on every rank; an error that ends the run too. For
    decisions that all ranks must share.
    """
    answer, wrong = [None, None, 2], None
    if world.rank == 0:
        try:
            answer[0] = function()
        except (ValueError, Halt, StorageError) as error:
            wrong, answer = error, [None, str(error), code_of(error, 2)]
    if world.size > 1:
        torch.distributed.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise wrong or Refusal(answer[1], answer[2])
    return answer[0]


def barrier(group=None):
    """Wait for all ranks."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier(group)


def any_rank(flag: bool, group=None) -> bool:
    """Whether `flag` is set on any rank; all must ask together."""
    if not torch.distributed.is_initialized():
        return flag
    place = "cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu"
    votes = torch.tensor(int(flag), device=place, dtype=torch.int32)
    torch.distributed.all_reduce(votes, group=group)
    return bool(votes)


def host_group(world: World):
    """A process group between the ranks' hosts, for what must not meet the training's own
    collectives; None for one process.
    """
    return torch.distributed.new_group(backend="gloo", timeout=PATIENCE) if world.size > 1 else None


def print0(*values, world: World | None = None, **kwargs):
    """Print on rank 0."""
    if (world or World.from_environment()).rank == 0:
        print(*values, flush=True, **kwargs)


def refuse(message: str, code: int = 2):
    """End the program with `message` as the last thing on screen and exit code `code`.

    Ranks above 0 wait first, so that what all have found is said once, by rank 0.
    """
    # if rank 0 has the same to say, torchrun ends this process before it can repeat it
    if World.from_environment().rank:
        time.sleep(5)
    last_words(message)
    sys.exit(code)


def last_words(message: str):
    """`message` on standard error, and where torchrun's report, which it prints below a failed
    rank's words, ends with it.
    """
    print(message, file=sys.stderr, flush=True)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with open(report, "w", encoding="utf-8") as file:
            extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
