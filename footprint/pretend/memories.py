"""Two memories: which tensors of a step that is written for a GPU are in the host's.

All fake tensors lie on a CPU. In a step that says "cuda" anywhere, what PyTorch's functions make
without a device is in host memory, and so is what is computed from such tensors alone; the rest is
on the device. In a step that never says it, everything is on the device that is predicted.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from footprint.kernels.operators import is_fake
from footprint.record.tracker import Tracker, tensors_in

HOST = "host"
DEVICE = "device"
aten = torch.ops.aten
# operators that read one memory and write the other
COPIES = (aten.copy_.default, aten._foreach_copy_.default)


class Memories:
    """Where the storages of a tracker are."""

    def __init__(self, tracker: Tracker):
        self.tracker = tracker
        self.are_two = False  # whether the step has said "cuda"
        self.making = ""  # HOST or DEVICE: what a function makes that runs now
        self.undecided: set[int] = set()  # ids of storages made for the host before it has

    def is_on_host(self, tensor: Tensor) -> bool:
        """Also a tensor that no operator of the step has made."""
        if not is_fake(tensor):
            return True
        tracker = self.tracker
        return tracker.is_on_host(tensor) or tracker.identity(tensor) in self.undecided

    @contextlib.contextmanager
    def make(self, memory: str) -> Iterator[None]:
        """What PyTorch makes inside the `with` block is in that memory."""
        before = self.making
        self.making = memory
        try:
            yield
        finally:
            self.making = before

    def begin_two(self) -> None:
        """The step says "cuda": what it has made without a device was in host memory."""
        self.are_two = True
        if self.undecided:
            self.tracker.move_to_host(self.undecided)
        self.undecided = set()

    def choose(self, func, args) -> str:
        """The memory of what an operator returns. What the device computes with is on the device:
        PyTorch takes only numbers from host memory.
        """
        given = [tensor for tensor in tensors_in(args) if tensor.device.type != "meta"]
        on_host = [tensor for tensor in given if self.is_on_host(tensor)]
        if not given or self.making == DEVICE:
            return self.making or DEVICE
        if len(on_host) == len(given):
            return HOST
        if func not in COPIES:
            for tensor in on_host:
                if tensor.dim():
                    self._bring(tensor)
        return DEVICE

    def _bring(self, tensor: Tensor) -> None:
        tracker, storage = self.tracker, tensor.untyped_storage()
        if tracker.host.pop(storage._cdata, None):
            tracker._begin_storage(storage._cdata, storage, tensor, "from host memory")
        self.undecided.discard(tracker.identity(tensor))

    def note(self, outputs: object) -> None:
        """What was made for the host before the step has said "cuda"."""
        made = map(self.tracker.identity, tensors_in(outputs))
        self.undecided |= set(made) - {None}


class Moved(torch.autograd.Function):
    """A copy in the other memory; its gradient comes back."""

    @staticmethod
    def forward(ctx, x: Tensor, memories: Memories, memory: str) -> Tensor:
        ctx.memories = memories
        ctx.back = DEVICE if memory == HOST else HOST
        held = memories.tracker.on_host() if memory == HOST else memories.make(DEVICE)
        with held:
            return x.detach().clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return Moved.apply(grad, ctx.memories, ctx.back), None, None
