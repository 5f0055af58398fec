"""What no operator on fake tensors of a CPU shows: memory that Python saves, what a GPU's step
keeps in host memory, and files.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from footprint.memories import DEVICE
from footprint.patches import patched
from footprint.places import StepTracker
from footprint.tracker import Tracker


@contextlib.contextmanager
def random_states(tracker: Tracker) -> Iterator[None]:
    """The tracker sees the states of random numbers that are saved inside the `with` block.

    Every checkpoint saves one and holds it until it is recomputed (torch/utils/checkpoint.py). It
    is a real tensor even among fake ones: 5,056 bytes of a CPU's memory. Those of a GPU's generator
    are in host memory, too, so a prediction for CUDA does without this.
    """
    get_state = torch.get_rng_state

    def seen() -> Tensor:
        state = get_state()
        tracker.locate()
        tracker.register(state, "torch.get_rng_state")
        return state

    places = (torch, "get_rng_state"), (torch.random, "get_rng_state")
    with patched(dict.fromkeys(places, seen)):
        yield


@contextlib.contextmanager
def arrays(tracker: Tracker) -> Iterator[None]:
    """Inside the `with` block `torch.from_numpy` gives tensors whose memory is numpy's: PyTorch's
    allocator for the CPU does not count it. What a step for a GPU reads so is the GPU's in the end.
    """
    from_numpy = torch.from_numpy

    def shared(array) -> Tensor:
        with tracker.on_host():
            return from_numpy(array)

    with patched({(torch, "from_numpy"): shared}):
        yield


@contextlib.contextmanager
def offloading(tracker: StepTracker) -> Iterator[None]:
    """Inside the `with` block `torch.autograd.graph.save_on_cpu` keeps tensors in host memory, as
    on a GPU: among tensors of a CPU it copies nothing.
    """

    def pack(tensor: Tensor) -> Tensor:
        with tracker.on_host():
            return tensor.detach().clone()

    def unpack(tensor: Tensor) -> Tensor:
        with tracker.memories.make(DEVICE):
            return tensor.clone()

    def started(hooks: save_on_cpu, *_, **__) -> None:
        saved_tensors_hooks.__init__(hooks, pack, unpack)

    with patched({(save_on_cpu, "__init__"): started}):
        yield


@contextlib.contextmanager
def gpu_scalers() -> Iterator[None]:
    """A GradScaler for CUDA scales the tensors of a CPU inside the `with` block; without a CUDA
    device it would be disabled.
    """
    start = GradScaler.__init__

    def started(scaler: GradScaler, device: str = "cuda", *args, **kwargs) -> None:
        start(scaler, "cpu", *args, **kwargs)

    with patched({(GradScaler, "__init__"): started}):
        yield


@contextlib.contextmanager
def saving_nothing() -> Iterator[None]:
    """torch.save inside the `with` block writes nothing, and leaves a file as it is: fake tensors
    have no values. A program may have imported it by name, so what it calls is left out, too.
    """
    places = [(torch, "save"), (torch.serialization, "save"), (torch.serialization, "_save")]
    places += [(torch.serialization, "_open_zipfile_writer")]
    with patched(dict.fromkeys(places, _nothing)):
        yield


def _nothing(*_, **__) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()
