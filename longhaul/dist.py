"""Processes: this rank among its peers, its device, process groups and meshes, reductions, and how
a rank ends the program.

torch.distributed is loaded only if there is more than one process.
"""

import ctypes
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor

from longhaul.exits import BAD_INPUT, Halt, StorageError, last_words

# Ranks may wait in a collective while rank 0 hashes or prepares a large data set.
COLLECTIVE_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls) -> "World":
        """What torchrun says in the environment; one process if it says nothing."""
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            size=int(os.environ.get("WORLD_SIZE", 1)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        )


# ---- the device


def visible_gpus() -> int:
    """GPUs that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(name: str, world: World) -> torch.device:
    """The device of this rank; `auto` takes its GPU if there is one.

    ValueError if a GPU was asked for and is missing, or if there are fewer GPUs than ranks.
    """
    gpus = visible_gpus()
    if name == "cuda" and gpus == 0:
        raise ValueError(
            "--device cuda, but torch sees no GPU here: use --device cpu, install a CUDA build of "
            "torch, or plan for a GPU with `python profile_memory.py` and the same flags"
        )
    if name == "cpu" or gpus == 0:
        return torch.device("cpu")

    if world.local_size > gpus:
        raise ValueError(
            f"{world.local_size} processes were started on this machine, which has {gpus} GPU(s): "
            f"use --nproc_per_node={gpus}"
        )
    return torch.device("cuda", world.local_rank)


def named_device(name: str) -> torch.device:
    """The device of a program of one process: auto, cpu, cuda or cuda:N.

    ValueError for another name, and if the GPU is not there.
    """
    if name in ("auto", "cpu", "cuda"):
        return choose_device(name, World())
    gpus = visible_gpus()
    if name not in [f"cuda:{index}" for index in range(gpus)]:
        raise ValueError(
            f"--device {name} is unknown, and torch sees {gpus} GPU(s) here: use auto, cpu, cuda "
            "or cuda:N"
        )
    return torch.device(name)


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Ask glibc to keep freed blocks of less than 32 MiB for later allocations.

    Activations are freed and allocated again every step. If glibc gives them back to the kernel, a
    page fault for each fresh page costs 20-30% of a CPU step. Larger blocks are still mapped one by
    one, which costs nothing measurable: on the heap they would leave holes that fit nothing else.
    """
    if platform.libc_ver()[0] != "glibc":
        return

    # The parameters' numbers in mallopt(3).
    top_pad = -2
    trim_threshold = -1
    mmap_threshold = -3

    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, 2**25)  # 32 MiB, the most that glibc accepts
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(top_pad, 2**26)


# ---- process groups


def start(world: World, device: torch.device) -> None:
    """Set up the device and join the process group (NCCL for GPUs, gloo for CPUs).

    A rank that was killed or stopped is found by its heartbeat (longhaul/run/heartbeat.py), a rank
    that hangs in its own work after COLLECTIVE_TIMEOUT.
    """
    # torchrun sets OMP_NUM_THREADS=1 for several ranks, however many cores there are; that of a
    # single rank is the user's. With a GPU, the update of an offloaded optimizer needs threads.
    if world.local_size > 1 or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // world.local_size))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # the gradient of a weight is a sum over all tokens of a row, which bf16 would round
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    else:
        keep_freed_memory()

    if world.size > 1:
        _join(device)


def _join(device: torch.device) -> None:
    """Join the group of all ranks; NCCL connects at once, not within the first step."""
    import torch.distributed as dist

    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=COLLECTIVE_TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)


def stop() -> None:
    """Leave the process group, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def host_group(world: World):
    """A gloo group of all ranks, whose collectives do not mix with those of training.

    None for one process.
    """
    if world.size == 1:
        return None
    return torch.distributed.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)


def decision_group(world: World):
    """The group in which hosts decide together: a collective of NCCL would wait for all that is
    queued on the GPU. None stands for the default group, if that is one of hosts.
    """
    if world.size == 1 or torch.distributed.get_backend() == "gloo":
        return None
    return host_group(world)


# ---- meshes and shards


def check_replicas(world: World, replicas: int, context: int = 1) -> None:
    """ValueError if the replicas do not divide the ranks, or the ranks per row not a replica."""
    if world.size % replicas:
        raise ValueError(
            f"--dp_replicate {replicas} does not divide {world.size} rank(s): "
            f"choose from {divisors(world.size)}"
        )

    ranks = world.size // replicas
    if ranks % context:
        each = f" of each of the {replicas} replicas" if replicas > 1 else ""
        raise ValueError(
            f"--context_parallel_size {context} does not divide the {ranks} rank(s){each}: "
            f"choose from {divisors(ranks)}"
        )


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def data_mesh(world: World, device: torch.device, replicas: int):
    """The mesh of all ranks over which FSDP2 shards: ("shard",), or ("replicate", "shard").

    None for one process.
    """
    if world.size == 1:
        return None
    if replicas == 1:
        return _mesh(device, {"shard": world.size})
    return _mesh(device, {"replicate": replicas, "shard": world.size // replicas})


def context_mesh(world: World, device: torch.device, context: int):
    """The mesh ("dp", "cp"): neighbours in "cp" share their rows. None if each rank has its own.

    It is separate from `data_mesh`, which shards parameters over dp and cp alike: FSDP2 reads two
    dimensions of one mesh as HSDP, and the method that flattens them is not public.
    """
    if context == 1:
        return None
    return _mesh(device, {"dp": world.size // context, "cp": context})


def _mesh(device: torch.device, sizes: dict[str, int]):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; of an unsharded one, all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """The tensor, which every rank has, sharded as `like` is; nothing is sent."""
    if not hasattr(like, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


# ---- what all ranks decide or compute together


def all_sum(value: Tensor) -> Tensor:
    """The sum over all ranks, in place; for one process the value itself."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(value)
    return value


def all_max(value: Tensor) -> Tensor:
    """The maximum over all ranks, in place; for one process the value itself."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
    return value


def any_rank(flag: bool, group=None) -> bool:
    """Whether `flag` is set on any rank. All ranks of the group must ask at the same time."""
    return sum_over_ranks(int(flag), group) > 0


def sum_over_ranks(number: int, group=None) -> int:
    """The sum of a small number over all ranks of the group, which must ask at the same time."""
    if not torch.distributed.is_initialized():
        return number
    device = "cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu"
    votes = torch.tensor(number, device=device, dtype=torch.int32)
    torch.distributed.all_reduce(votes, group=group)
    return int(votes)


def connect_to_store(**options: Any):
    """A connection of its own to the store of the job, which the launcher or rank 0 keeps: a wait
    in one connection blocks its other uses.
    """
    return torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        **options,
    )


def barrier(group=None) -> None:
    """Wait for all ranks."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier(group)


def on_rank0(function: Callable[[], Any], world: World) -> Any:
    """The result of `function()`, which only rank 0 calls, on every rank.

    For decisions that all ranks must share. An error that ends the run is raised on every rank.
    """
    result = None
    error = None
    if world.rank == 0:
        try:
            result = function()
        except (ValueError, Halt, StorageError) as caught:
            error = caught

    refusal = None if error is None else (str(error), getattr(error, "exit_code", BAD_INPUT))
    shared = [result, refusal]
    if world.size > 1:
        torch.distributed.broadcast_object_list(shared, src=0)
    result, refusal = shared

    if error is not None:
        raise error
    if refusal is not None:
        raise Halt(*refusal)
    return result


# ---- how long a launcher waits

TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
DEFAULT_PATIENCE = 30.0  # seconds, of torchrun, Kubernetes and Slurm


def launcher_patience(environment: Mapping[str, str]) -> float:
    """Seconds from a signal until the launcher kills this process.

    torchrun's flag --shutdown_timeout does not reach its ranks, the variable does. ValueError if
    that is no number.
    """
    told = told_patience(environment)
    return DEFAULT_PATIENCE if told is None else told


def told_patience(environment: Mapping[str, str]) -> float | None:
    """The seconds that a user has told the launcher; None if there are none."""
    text = environment.get(TIMEOUT, "")
    if not text:
        return None
    if not re.fullmatch(r"\d{1,9}(\.\d*)?", text):
        raise ValueError(f"{TIMEOUT} is {text!r}: give a number of seconds, such as {TIMEOUT}=240")
    return float(text)


def patience(allowed: float, save_seconds: float) -> float:
    """Seconds that the micro-batch is waited for: a third of those allowed, less if a save is slow
    (twice its measured time is kept for it).
    """
    return max(0.0, min(allowed / 3, allowed - 2 * save_seconds))


def enough_seconds(micro_batch_seconds: float, save_seconds: float) -> int:
    """The timeout, in tens of seconds, within which a micro-batch ends and is saved."""
    seconds = max(3 * micro_batch_seconds, micro_batch_seconds + 2 * save_seconds)
    return 10 * math.ceil(seconds / 10)


# ---- output, and the end of the program


def print0(*values, world: World | None = None, **options) -> None:
    """Print on rank 0 only."""
    if (world or World.from_environment()).rank == 0:
        print(*values, flush=True, **options)


def refuse(message: str, code: int = BAD_INPUT) -> NoReturn:
    """End the program with exit code `code` and `message` as the last thing on screen."""
    # If all ranks found the same, rank 0 says so first, and torchrun ends the others before they
    # repeat it.
    if World.from_environment().rank:
        time.sleep(5)
    last_words(message)
    sys.exit(code)


def end(code: int) -> NoReturn:
    """End this process, one of several ranks, at once.

    While the interpreter shuts down, gloo's threads may still be releasing tensors of the last
    collectives: they would abort a run that is complete (`terminate called without an active
    exception`).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
