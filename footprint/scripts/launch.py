"""What a script finds around it: the environment that torchrun sets, other processes and threads,
compilers, standard input, and a build of PyTorch that can use a GPU.
"""

import builtins
import concurrent.futures
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures.thread import ThreadPoolExecutor

import torch
import torch.multiprocessing
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_iter

from footprint.kernels.operators import is_fake
from footprint.pretend.places import StepTracker
from footprint.pretend.values import NO_TWIN, TWIN
from footprint.python.late import Awaited
from footprint.python.patches import Patches
from footprint.python.refusal import Stopped, is_users, place

MOST_LOCAL = 8  # ranks of one machine
CUDA_VERSION = "12.8"
NCCL_VERSION = (2, 27, 5)
MASKS = "create_block_mask"  # of FlexAttention; compiled, it makes no dense masks


def environment(ranks: int) -> dict[str, str]:
    """What torchrun sets for the first of `ranks` processes."""
    local = min(ranks, MOST_LOCAL)
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "ROLE_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_WORLD_SIZE": str(-(-ranks // local)),
        "ROLE_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "footprint",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }


def surroundings(tracker: StepTracker, ranks: int) -> Patches:
    """All patches of this file for modules that are always there."""
    suppose = tracker.known.suppose
    found = one_thread() | one_process(ranks, suppose) | no_input() | not_compiled(suppose)
    found |= alike_objects() | no_anomalies(suppose)
    found[torch.profiler, "profile"] = NoProfile
    return found | built_for_cuda() if tracker.target == "cuda" else found


def built_for_cuda() -> Patches:
    """What a build of PyTorch for CUDA says of itself; its allocator records nothing."""
    records = ("_record_memory_history", "_dump_snapshot", "_snapshot", "memory_snapshot")
    silent: Patches = {(torch.cuda.memory, name): lambda *_, **__: None for name in records}
    return silent | {
        (torch.version, "cuda"): torch.version.cuda or CUDA_VERSION,
        (torch.distributed, "is_nccl_available"): lambda: True,
        (torch.cuda.nccl, "version"): lambda: NCCL_VERSION,
        (torch.backends.cuda, "is_built"): lambda: True,
    }


class NoProfile(torch.profiler.profile):
    """PyTorch's profiler, which measures nothing of a script and has nothing to write. This package
    measures kernels of a CPU by the real one.
    """

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def step(self) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        pass


def no_anomalies(suppose: Callable[[str], None]) -> Patches:
    """Gradients are not tested for NaN, which no fake tensor holds."""
    enable = torch.set_anomaly_enabled

    def enabled(mode: bool, check_nan: bool = True) -> None:
        if mode and check_nan:
            suppose(f"the tests for NaN that {place()} asks for are left out")
        enable(mode, False)

    return {(torch, "set_anomaly_enabled"): enabled}


# ---- threads and processes


class Done(concurrent.futures.Future):
    """A result, or an error of the `with` block, which is raised to whoever asks for it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, raised) -> bool:
        if not isinstance(error, Exception):
            return False
        self.set_exception(error)
        return True


def one_thread() -> Patches:
    """Pools of threads work in the thread that asks them: modes are of one thread."""

    def submit(pool, function: Callable, /, *args, **kwargs) -> concurrent.futures.Future:
        future = Done()
        with future:
            future.set_result(function(*args, **kwargs))
        return future

    return {(ThreadPoolExecutor, "submit"): submit}


def one_process(ranks: int, suppose: Callable[[str], None]) -> Patches:
    """torch.multiprocessing.spawn runs the first process here; others that the script itself starts
    are refused.
    """
    start = multiprocessing.process.BaseProcess.start

    def spawned(function, args=(), nprocs: int = 1, *_, **__) -> None:
        if nprocs > ranks:
            raise Stopped(
                f"{place()}: torch.multiprocessing.spawn starts {nprocs} processes: give "
                f"--nproc {nprocs}"
            )
        suppose(f"of {nprocs} processes that {place()} spawns the first one is predicted")
        function(0, *args)

    def started(process, *args, **kwargs) -> None:
        if is_users(sys._getframe(1).f_code.co_filename):
            raise Stopped(
                f"{place()}: the script starts a process of its own, which is not followed: give "
                "the script the flags with which one process trains, or start it by torchrun and "
                "predict it with --nproc"
            )
        start(process, *args, **kwargs)

    return {
        (torch.multiprocessing, "spawn"): spawned,
        (torch.multiprocessing.spawn, "spawn"): spawned,
        (multiprocessing.process.BaseProcess, "start"): started,
    }


def alike_objects() -> Patches:
    """Objects of Python that ranks send each other are this rank's."""

    def gathered(found: list, mine: object, *_, **__) -> None:
        found[:] = [mine] * len(found)

    def gathered_here(mine: object, found: list | None = None, *_, **__) -> None:
        if found is not None:
            found[:] = [mine] * len(found)

    def scattered(found: list, given: list | None, *_, **__) -> None:
        found[0] = given[0]

    def sent(*_, **__) -> None:
        """Nothing: the objects are here."""

    functions = {
        "all_gather_object": gathered,
        "gather_object": gathered_here,
        "scatter_object_list": scattered,
        "broadcast_object_list": sent,
    }
    modules = (torch.distributed, distributed_c10d)
    return {(module, name): do for module in modules for name, do in functions.items()}


def sharded(tracker: StepTracker) -> Awaited:
    """FullyShardedDataParallel (FSDP1) runs on the CPU, where fake tensors lie, and is named."""

    def replaced(module) -> Patches:
        kind = module.FullyShardedDataParallel
        start = kind.__init__

        def started(model, *args, **kwargs) -> None:
            tracker.known.suppose(f"FullyShardedDataParallel in {place()} runs as on a CPU")
            start(model, *args, **kwargs | {"device_id": torch.device("cpu")})

        return {(kind, "__init__"): started}

    name = "torch.distributed.fsdp.fully_sharded_data_parallel"
    return {name: replaced} if tracker.target == "cuda" else {}


class NoInput:
    """Standard input of a script that nobody answers."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 0

    def _refuse(self, *_):
        raise Stopped(
            f"{place()}: the script reads standard input, which nobody answers during a "
            "prediction: give the answer by a flag of the script"
        )

    read = readline = readlines = __iter__ = _refuse


def no_input() -> Patches:
    """input() and sys.stdin are refused."""
    stdin = NoInput()
    return {(builtins, "input"): stdin._refuse, (sys, "stdin"): stdin}


# ---- compilers


def not_compiled(suppose: Callable[[str], None]) -> Patches:
    """What is compiled runs as it is written, and the report says so."""

    from torch._dynamo import eval_frame

    def eager(callback):
        if not callback:
            return callback
        suppose(f"what {place()} has compiled runs eagerly, which usually needs more memory")
        compiled = sys._getframe(1).f_locals.get("fn")
        if getattr(compiled, "__name__", "") == MASKS:
            suppose(f"{MASKS} in {place()} makes dense masks, which the compiled one does not")
        return None

    return {(eval_frame, "_callback_from_stance"): eager}


def no_launches(tracker: StepTracker) -> Awaited:
    """A kernel of Triton writes into tensors that are there, and allocates none: its launch does
    nothing, and the values that it may have written are no longer known.
    """
    if tracker.target != "cuda" or importlib.util.find_spec("triton") is None:
        return {}

    def launched(kernel, *args, **kwargs) -> None:
        for value in tree_iter((args, kwargs)):
            if is_fake(value):
                setattr(value.untyped_storage(), TWIN, NO_TWIN)

    def replaced(*names: str) -> Callable:
        return lambda module: {(getattr(module, name), "run"): launched for name in names}

    return {
        "triton.runtime.jit": replaced("JITFunction"),
        "triton.runtime.autotuner": replaced("Autotuner", "Heuristics"),
    }
