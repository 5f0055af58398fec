"""What no operator on fake tensors of a CPU shows: memory that Python saves, what a GPU's step
keeps in host memory, files, and what is refused because nothing can know its memory.

Each function returns attributes of PyTorch, and what they are while memory is predicted.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import GradScaler
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from footprint.pretend.given import RANDOM_STATE
from footprint.pretend.memories import DEVICE
from footprint.pretend.places import StepTracker
from footprint.python.patches import Patches
from footprint.python.refusal import Refused, Stopped, place
from footprint.record.tracker import Tracker, taken_apart

LOCAL = ("localhost", "127.", "::1", "0.0.0.0")


def all_patches(tracker: StepTracker) -> Patches:
    """All of them that a prediction for the tracker's target needs."""
    found = no_network() | refusing_compiled() | refusing_linearized()
    found |= saving_nothing() | inference_mode() | parameters_by_class()
    if tracker.target == "cuda":
        return found | gpu_scalers() | offloading(tracker)
    return found | random_states(tracker) | arrays(tracker)


def inference_mode() -> Patches:
    """The tracker also sees what operators make inside of inference mode."""
    begin = torch._C._InferenceMode

    @contextlib.contextmanager
    def seen(enabled: bool) -> Iterator[None]:
        with begin(enabled), taken_apart():
            yield

    return {(torch._C, "_InferenceMode"): seen}


def parameters_by_class() -> Patches:
    """type(parameter)(tensor, requires_grad=...), as loaders set weights, makes a parameter, though
    the class of a fake one is FakeTensor.
    """
    make = FakeTensor.__new__

    def made(kind, *args, **kwargs):
        if kwargs.keys() - {"requires_grad"} or len(args) > 2:
            return make(kind, *args, **kwargs)
        return nn.Parameter(*args, **kwargs)

    def started(tensor, *args, **kwargs) -> None:
        """Nothing: a fake tensor is ready."""

    return {(FakeTensor, "__new__"): staticmethod(made), (FakeTensor, "__init__"): started}


def random_states(tracker: Tracker) -> Patches:
    """The tracker sees the states of random numbers that are saved.

    Every checkpoint saves one and holds it until it is recomputed (torch/utils/checkpoint.py). It
    is a real tensor even among fake ones: 5,056 bytes of a CPU's memory. Those of a GPU's generator
    are in host memory, too, so a prediction for CUDA does without this.
    """
    get_state = torch.get_rng_state

    def seen() -> Tensor:
        state = get_state()
        tracker.locate()
        tracker.register(state, RANDOM_STATE)
        return state

    places = (torch, "get_rng_state"), (torch.random, "get_rng_state")
    return dict.fromkeys(places, seen)


def arrays(tracker: Tracker) -> Patches:
    """`torch.from_numpy` gives tensors whose memory is numpy's: PyTorch's allocator for the CPU
    does not count it. What a step for a GPU reads so is the GPU's in the end.
    """
    from_numpy = torch.from_numpy

    def shared(array) -> Tensor:
        with tracker.on_host():
            return from_numpy(array)

    return {(torch, "from_numpy"): shared}


def offloading(tracker: StepTracker) -> Patches:
    """`torch.autograd.graph.save_on_cpu` keeps tensors in host memory, as on a GPU: among tensors
    of a CPU it copies nothing.
    """

    def pack(tensor: Tensor) -> Tensor:
        with tracker.on_host():
            return tensor.detach().clone()

    def unpack(tensor: Tensor) -> Tensor:
        with tracker.memories.make(DEVICE):
            return tensor.clone()

    def started(hooks: save_on_cpu, *_, **__) -> None:
        saved_tensors_hooks.__init__(hooks, pack, unpack)

    return {(save_on_cpu, "__init__"): started}


def gpu_scalers() -> Patches:
    """A GradScaler for CUDA scales the tensors of a CPU; without a CUDA
    device it would be disabled.
    """
    start = GradScaler.__init__

    def started(scaler: GradScaler, device: str = "cuda", *args, **kwargs) -> None:
        start(scaler, "cpu", *args, **kwargs)

    return {(GradScaler, "__init__"): started}


def saving_nothing() -> Patches:
    """torch.save writes nothing, and leaves a file as it is: fake tensors
    have no values. A program may have imported it by name, so what it calls is left out, too.
    """
    places = [(torch, "save"), (torch.serialization, "save"), (torch.serialization, "_save")]
    places += [(torch.serialization, "_open_zipfile_writer")]
    return dict.fromkeys(places, _nothing)


def _nothing(*_, **__) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def bytes_read(source: object, **options) -> Tensor:
    """torch.asarray, by which safetensors reads the bytes of a file: as many, without values."""
    if isinstance(source, torch.UntypedStorage):
        return torch.empty(source.nbytes(), **options)
    return torch.asarray(source, **options)


STORED = {torch.asarray: bytes_read}  # function of PyTorch -> what runs in its place


def refusing_compiled() -> Patches:
    """Functions, modules and optimizers that are compiled: what a compiler fuses, and holds, is not
    predicted.
    """
    from torch._dynamo import config, eval_frame

    choose = eval_frame._callback_from_stance  # what compiles, at each call
    shapes = config.assume_static_by_default, config.automatic_dynamic_shapes

    def refused(callback):
        if callback in (None, False):
            return choose(callback)

        # torch.compile(dynamic=...) has set them for this call, which does not end as it expects
        config.assume_static_by_default, config.automatic_dynamic_shapes = shapes
        raise Refused(
            f"{place()}: what runs here is compiled, which is not predicted: predict it without "
            "torch.compile, which usually needs more memory"
        )

    return {(eval_frame, "_callback_from_stance"): refused}


def refusing_linearized() -> Patches:
    """torch.func.linearize, which traces a graph of constants: fake ones are held otherwise."""

    def refused(*_):
        raise Refused(
            f"{place()}: torch.func.linearize is not predicted: take torch.func.jvp, which "
            "computes the function again for every derivative"
        )

    return {(eager_transforms, "lazy_dynamo_disallow"): refused}


def no_network() -> Patches:
    """A model needs no weights for a prediction, and what came would be lost: this thread looks up
    no other machine.
    """
    thread = threading.get_ident()
    find = socket.getaddrinfo

    def refused(host: object, *args, **kwargs):
        is_local = str(host or "localhost").startswith(LOCAL)
        if is_local or threading.get_ident() != thread:
            return find(host, *args, **kwargs)
        where = place().split(" (")[0]
        raise Stopped(
            f"{where}: this connects to {host}, but nothing is downloaded during a prediction: "
            "make the model from its configuration, without weights, and the batch by "
            "torch.randint or torch.randn"
        )

    return {(socket, "getaddrinfo"): refused}
