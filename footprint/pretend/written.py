"""Steps as they are written for a GPU, on a machine that has none: where a step says "cuda", the
simulated device is meant.

Fake tensors cannot lie on a CUDA device that does not exist, so they lie on the CPU, and the step
is told otherwise. PyTorch's own files are told the truth.
"""

import collections
import contextlib
import os
import sys
import types
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import autocast
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._pytree import tree_map

from footprint.cards.allocator import GIB
from footprint.cards.device import Card, cublas_size, multiplying_threads
from footprint.kernels.operators import is_fake
from footprint.pretend.memories import DEVICE, HOST, Memories, Moved
from footprint.pretend.places import StepTracker, local
from footprint.pretend.values import is_question
from footprint.python.patches import Patches, patched
from footprint.python.refusal import HERE, TORCH
from footprint.record.tracker import tensors_in

MODULES = torch.nn.modules.module.__file__  # where Module.to moves tensors for the step
DEFAULT_DEVICE = "_get_device_with_index"  # where torch.get_default_device makes a tensor
MESHES = "distributed/device_mesh.py"  # makes tensors for the host, whatever device they span
CUDA = torch.device("cuda", 0)
MOVES = (Tensor.to, Tensor.cuda, Tensor.cpu, Tensor.pin_memory)
ANSWERS = {
    Tensor.is_cuda.__get__: True,
    Tensor.is_cpu.__get__: False,
    Tensor.get_device: 0,
}


def is_torchs(frame: types.FrameType) -> bool:
    """Whether the running function is PyTorch's or ours, and not for the step."""
    file = frame.f_code.co_filename
    is_for_the_step = file == MODULES or frame.f_code.co_name == DEFAULT_DEVICE
    return file.startswith((TORCH, HERE)) and not is_for_the_step


def _caller() -> types.FrameType:
    """What called the function of PyTorch that a mode sees; `with torch.device(...)` is a mode that
    calls it again.
    """
    frame = sys._getframe(2)
    return frame.f_back if frame.f_code.co_filename == _device.__file__ else frame


def kind(device: object) -> str:
    """The type of a device as a step gives it; a number is that of a GPU; "" if there is none."""
    if isinstance(device, int) and not isinstance(device, bool):
        return "cuda"
    if isinstance(device, str | torch.device):
        return str(device).partition(":")[0]
    return ""


def _numbered(value: object) -> object:
    """The GPU of a number; anything else as it is."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return CUDA if is_number else value


class AsWritten(TorchFunctionMode):
    """Functions of PyTorch that are given or asked for a device."""

    def __init__(self, memories: Memories):
        super().__init__()
        self.memories = memories

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_question(func) and func not in ANSWERS:
            return func(*args, **kwargs)
        caller = _caller()
        is_steps = not is_torchs(caller) or caller.f_code.co_filename.endswith(MESHES)
        if func in ANSWERS and is_steps and self._is_on_device(args[0]):
            return ANSWERS[func]
        if func in MOVES:
            return self._move(func, args, kwargs, is_steps)
        if func is torch._C._nn._parse_to:  # of Module.to, which asks what a number means
            args, kwargs = tree_map(_numbered, (args, kwargs))
            return func(*args, **kwargs)
        if func is torch.device:
            return func(*map(_numbered, args[:1]), *args[1:], **kwargs)
        if "device" in kwargs or "pin_memory" in kwargs or func in _device._device_constructors():
            return self._make(func, args, kwargs, is_steps)
        return func(*args, **kwargs)

    def _is_on_device(self, tensor: Tensor) -> bool:
        tensor = local(tensor)
        is_real = tensor.device.type != "meta"
        return self.memories.are_two and is_real and not self.memories.is_on_host(tensor)

    def _make(self, func, args, kwargs, is_steps: bool):
        """A factory: what is made without a device, and not by PyTorch, is in host memory."""
        device = kwargs.get("device")
        if device is None and func in _device._device_constructors():
            device = _device.CURRENT_DEVICE
        name = kind(device)
        if name == "meta":
            return func(*args, **kwargs)

        memory = HOST if is_steps or not name else ""
        if name == "cuda":
            self.memories.begin_two()
            memory = DEVICE
        kwargs = kwargs | ({"device": "cpu"} if name else {})
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        is_hosts = name == "cpu" and memory == HOST and self.memories.are_two
        made = self.memories.tracker.on_host() if is_hosts else self.memories.make(memory)
        with made:
            return func(*args, **kwargs)

    def _move(self, func, args, kwargs, is_steps: bool):
        """The tensor, or a copy if it is not in the memory that is asked for."""
        tensor, *rest = args
        wanted = self._wanted(func, rest, kwargs)
        if wanted == "cuda":
            self.memories.begin_two()
        if func is Tensor.to:
            rest = ["cpu" if kind(value) == "cuda" else value for value in rest]
            if "device" in kwargs:
                kwargs = kwargs | {"device": "cpu"}
            tensor = func(tensor, *rest, **kwargs)
        if not self.memories.are_two or wanted not in ("cuda", "cpu"):
            return tensor
        if wanted == "cpu" and not (is_steps or func is Tensor.cpu):
            return tensor
        memory = DEVICE if wanted == "cuda" else HOST
        is_there = self.memories.is_on_host(local(tensor)) == (memory == HOST)
        if (is_there and func is not Tensor.pin_memory) or tensor is not local(tensor):
            return tensor
        return Moved.apply(tensor, self.memories, memory)

    def _wanted(self, func, rest: list, kwargs) -> str:
        if func is not Tensor.to:
            return "cuda" if func is Tensor.cuda else "cpu"
        given = [*rest, kwargs.get("device"), kwargs.get("other")]
        for value in given:
            if isinstance(value, Tensor):
                return "cpu" if self.memories.is_on_host(local(value)) else "cuda"
            if kind(value):
                return kind(value)
        return ""


# ---- what is asked about the device


class Idle:
    """A stream, an event, or a context: whatever it is told, it has done."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self

    def __enter__(self) -> "Idle":
        return self

    def __exit__(self, *_) -> None:
        pass

    def elapsed_time(self, _) -> float:
        return 1.0


class Meter:
    """torch.cuda's counters, answered from the tracker's record."""

    def __init__(self, tracker: StepTracker, card: Card):
        self.tracker = tracker
        self.cublas = cublas_size(card.cc)
        self.total = int(card.gib * GIB)
        self.since = 0  # the time from which peaks count

    def workspaces(self) -> int:
        tracker = self.tracker
        return self.cublas * len(tracker.multiplied | multiplying_threads(tracker.trace))

    def allocated(self, *_, **__) -> int:
        return sum(self.tracker.held.values()) + self.workspaces()

    def peak(self, *_, **__) -> int:
        if self.since > self.tracker.time:  # another record has begun
            self.since = 0
        levels = self.tracker.trace.levels()
        sizes = [size for time, size in levels if time > self.since]
        return max(sizes) + self.workspaces() if sizes else self.allocated()

    def reset(self, *_, **__) -> None:
        self.since = self.tracker.time

    def free(self, *_, **__) -> tuple[int, int]:
        return self.total - self.allocated(), self.total

    def stats(self, *_, **__) -> dict[str, int]:
        found = collections.defaultdict(int)
        for name in ("allocated_bytes", "reserved_bytes", "active_bytes"):
            found[f"{name}.all.current"] = self.allocated()
            found[f"{name}.all.peak"] = self.peak()
        return found


# KiB of shared memory that a block may ask for, by compute capability x 10 (CUDA's programming
# guide, technical specifications per capability)
SHARED_MEMORY = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}
OLDEST_SHARED_MEMORY = 48


def properties(card: Card) -> types.SimpleNamespace:
    major, minor = divmod(card.cc, 10)
    shared = SHARED_MEMORY.get(card.cc, OLDEST_SHARED_MEMORY)
    return types.SimpleNamespace(
        name=f"NVIDIA {card.name}",
        major=major,
        minor=minor,
        total_memory=int(card.gib * GIB),
        multi_processor_count=132,
        warp_size=32,
        shared_memory_per_block_optin=shared * 1024,
    )


def constant(value: object, original: object = None):
    """A function that answers the step; PyTorch's own files get the original's answer."""

    def answer(*args, **kwargs):
        if callable(original) and is_torchs(sys._getframe(1)):
            return original(*args, **kwargs)
        return value

    return answer


DOES_NOTHING = (
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "init",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_device",
    "set_device_index",
    "set_rng_state",
    "set_rng_state_all",
)
IDLE = ("Stream", "Event", "stream", "device", "current_stream", "default_stream")


def _answers(owner: types.ModuleType, tracker: StepTracker, ranks: int, card: Card) -> Patches:
    """What torch.cuda or torch.accelerator says to the step. Each name has a function of its own:
    the compiler of PyTorch keeps rules by function.
    """
    meter = Meter(tracker, card)
    constants = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": min(ranks, 8),
        "current_device": 0,
        "current_device_index": 0,
        "current_accelerator": torch.device("cuda"),
        "get_device_name": f"NVIDIA {card.name}",
        "get_device_capability": divmod(card.cc, 10),
        "memory_summary": "",
    }
    found = {name: constant(value, vars(owner).get(name)) for name, value in constants.items()}
    found |= {name: constant(None) for name in DOES_NOTHING} | dict.fromkeys(IDLE, Idle)
    found |= {
        "get_device_properties": lambda *_, **__: properties(card),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda *_: [torch.get_rng_state()],
        "memory_allocated": meter.allocated,
        "memory_reserved": meter.allocated,
        "max_memory_allocated": meter.peak,
        "max_memory_reserved": meter.peak,
        "reset_peak_memory_stats": meter.reset,
        "mem_get_info": meter.free,
        "memory_stats": meter.stats,
    }
    return {(owner, name): answer for name, answer in found.items() if name in vars(owner)}


def _autocast() -> Patches:
    """Autocast for CUDA is that of the CPU, in the precision that CUDA takes by itself."""
    start = autocast.__init__
    enabled = torch.is_autocast_enabled
    dtype = torch.get_autocast_dtype

    def started(self, device_type: str, given: torch.dtype | None = None, *args, **kwargs) -> None:
        given = kwargs.pop("dtype", given)
        if device_type == "cuda":
            device_type, given = "cpu", given or dtype("cuda")
        start(self, device_type, given, *args, **kwargs)

    return {
        (autocast, "__init__"): started,
        (torch, "is_autocast_enabled"): lambda *_: enabled("cpu"),
        (torch, "get_autocast_dtype"): lambda *_: dtype("cpu"),
        (torch, "get_autocast_gpu_dtype"): lambda: dtype("cpu"),
    }


def _device_of_fakes(memories: Memories) -> property:
    """A fake tensor's device, which Python code answers before a mode is asked."""
    read = FakeTensor.device.fget

    def device(tensor: FakeTensor) -> torch.device:
        if is_torchs(sys._getframe(1)) or not memories.are_two or memories.is_on_host(tensor):
            return read(tensor)
        return CUDA if read(tensor).type == "cpu" else read(tensor)

    return property(device)


def _loading(memories: Memories) -> Patches:
    """What torch.load puts on a GPU, as it is told to or was saved from there, is on the device."""
    load = torch.load

    def loaded(file, map_location=None, *args, **kwargs):
        is_for_gpu = kind(map_location) == "cuda"
        if active_fake_mode() is None:
            return load(file, map_location, *args, **kwargs)
        if not is_for_gpu:
            with memories.make(HOST):
                found = load(file, map_location, *args, **kwargs)
            if map_location is not None or not _has_gpus(found):
                return found
            if hasattr(file, "seek"):
                file.seek(0)
            del found
        memories.begin_two()
        with memories.make(DEVICE):
            return load(file, "cpu", *args, **kwargs)

    return {(torch, "load"): loaded, (torch.serialization, "load"): loaded}


def _has_gpus(values: object) -> bool:
    """Whether any tensor was saved from a GPU."""
    return any(tensor.device.type == "cuda" for tensor in tensors_in(values))


class _IsGenerator(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, GENERATOR)


class Generator(metaclass=_IsGenerator):
    """A generator of random numbers, on the CPU whatever it is asked for."""

    def __new__(cls, device: object = None):
        return Stateless("cpu")


GENERATOR = torch.Generator


class Stateless(GENERATOR):
    """A generator that keeps its state if it is given one without values, as ranks send it."""

    def set_state(self, state: Tensor) -> "Stateless":
        return self if is_fake(state) else super().set_state(state)


def _random_states() -> Patches:
    """A state without values changes nothing."""
    set_state = torch.set_rng_state

    def given(state: Tensor) -> None:
        if not is_fake(state):
            set_state(state)

    return {(torch, "set_rng_state"): given, (torch.random, "set_rng_state"): given}


@contextlib.contextmanager
def with_a_device(tracker: StepTracker, ranks: int, card: Card) -> Iterator[None]:
    """Steps inside the `with` block find a CUDA device."""
    patches = (
        _loading(tracker.memories)
        | _autocast()
        | _random_states()
        | {(torch, "Generator"): Generator}
    )
    for owner in (torch.cuda, torch.accelerator):
        patches |= _answers(owner, tracker, ranks, card)
    patches[Tensor, "record_stream"] = constant(None)
    patches[FakeTensor, "device"] = _device_of_fakes(tracker.memories)
    if ranks > 1:
        launched = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=min(ranks, 8))
        os.environ.update({name: str(value) for name, value in launched.items()})
    with patched(patches):
        yield
