"""Tensors that are there before a prediction: those that a user's file makes at its top.

They are real. Where a step meets one, a fake tensor stands for it, one storage for each of theirs,
whose memory counts from the start of the trace. Modules that a step moves get the fake tensors
themselves, so that tied weights stay one, and get their own back when the prediction ends.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from footprint.kernels.operators import is_fake
from footprint.pretend.memories import Memories
from footprint.pretend.values import KnownValues
from footprint.python.patches import Patches
from footprint.record.trace import Event
from footprint.record.tracker import NO_STORAGE, Tracker, tensors_in

aten = torch.ops.aten
CPU = torch.device("cpu")
PLAIN = (Tensor, nn.Parameter)  # a class of the user's may hold other tensors
MADE = "made before the prediction"  # in place of an operator
RANDOM_STATE = "torch.get_rng_state"  # what it saves is real even among fake tensors
CONSTANT = "constant"  # the attribute that PyTorch has for the values of a few fake tensors
# operators that do not touch the tensor that they are given, or make a tensor of Python's numbers
UNTOUCHED = (aten.empty_like.default, aten.lift_fresh.default)


class Double(NamedTuple):
    """What stands for a real storage."""

    reference: weakref.ref  # to the real storage
    storage: torch.UntypedStorage
    views: dict[tuple, FakeTensor]  # by dtype and layout


class Moved(NamedTuple):
    """A real tensor of a module that got a fake one in its place."""

    module: weakref.ref
    name: str
    real: Tensor


class Given:
    """The real tensors that a step meets."""

    def __init__(self, tracker: Tracker, memories: Memories, known: KnownValues):
        self.tracker = tracker
        self.memories = memories
        self.known = known
        self.mode: FakeTensorMode | None = None  # of the prediction that runs
        self.doubles: dict[int, Double] = {}  # by the address of the real storage
        self.moved: list[Moved] = []
        self.held: Counter[int] = Counter()  # address of a real storage -> tensors of it in `moved`

    # ---- fake tensors for real ones

    def imagined(self, func, values):
        """The arguments of an operator, with fake tensors for the real ones."""
        if self.mode is None or func in UNTOUCHED:
            return values
        if not any(type(tensor) in PLAIN for tensor in tensors_in(values)):
            return values
        return tree_map_only(PLAIN, self.double, values)

    def double(self, tensor: Tensor) -> Tensor:
        """The fake tensor that stands for a real one; any other tensor as it is."""
        if self.mode is None or type(tensor) not in PLAIN:
            return tensor
        with torch._C.DisableTorchFunction():
            if not _has_memory(tensor):
                return tensor
            storage = tensor.untyped_storage()
            if self.tracker.made_by(tensor) == RANDOM_STATE:
                return tensor
            layout = (
                tensor.dtype,
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
            )
        double = self.doubles.get(storage._cdata) or self._begin(storage, tensor)
        if layout not in double.views:
            double.views[layout] = self._view(double.storage, *layout)
        return double.views[layout]

    def copied(self, tensor: Tensor, memo: dict) -> Tensor:
        """copy.deepcopy of a tensor: of a parameter its values, of any other its storage. PyTorch's
        own twin is not copied, as if it were fake, too.
        """
        fake = self.double(tensor)
        held = getattr(fake, CONSTANT, None)
        memo[id(held)] = held
        if is_fake(fake) and isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(fake.detach().clone(), tensor.requires_grad)
        else:
            copy = Tensor.__deepcopy__(fake, memo)
            copy.requires_grad_(tensor.requires_grad)
        if is_fake(copy):
            setattr(copy, CONSTANT, None)
        memo[id(tensor)] = copy
        return copy

    def _begin(self, storage: torch.UntypedStorage, tensor: Tensor) -> Double:
        address = storage._cdata
        reference = weakref.ref(storage, lambda _: self.doubles.pop(address, None))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
        double = Double(reference, memory.untyped_storage(), {})
        self.doubles[address] = double

        first = self.double(tensor)
        self.known.give(first, tensor)
        if not self.tracker.shares(storage, double.storage):
            self._count(first)
        return double

    def _view(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        *layout,
    ) -> FakeTensor:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            meta = torch.empty(0, dtype=dtype, device="meta")
            meta.set_(storage, *layout)
            return FakeTensor(self.mode, meta, CPU)

    def _count(self, fake: FakeTensor) -> None:
        """Its memory is taken from the start of the trace."""
        tracker = self.tracker
        before = tracker.making_host_tensors
        tracker.making_host_tensors = self.memories.are_two
        identity = tracker.register(fake, MADE)
        tracker.making_host_tensors = before
        if identity == NO_STORAGE:
            return

        self.memories.undecided.add(identity)
        tracker.trace.storages[identity].stage = "start"
        if fake.untyped_storage().nbytes():
            event = tracker.trace.events.pop()
            tracker.trace.events.insert(0, Event(0, event.bytes, identity))

    # ---- modules

    def rules(self) -> dict[Callable, Callable]:
        """Functions of PyTorch -> what runs in their place."""
        return {Tensor.__deepcopy__: self.copied}

    def patches(self) -> Patches:
        """Modules that move, or change their dtype, do so with fake tensors."""
        apply = nn.Module._apply

        def applied(module: nn.Module, function: Callable, recurse: bool = True) -> nn.Module:
            moved = self._replace(module)
            result = apply(module, function, recurse)
            self._release(moved)
            return result

        return {(nn.Module, "_apply"): applied}

    def _replace(self, module: nn.Module) -> list[Tensor]:
        """Make the module's own parameters fake, and note its buffers, which it will replace."""
        found = []
        for name, parameter in module._parameters.items():
            if parameter is not None and self.double(parameter) is not parameter:
                found.append((name, self._become_fake(parameter)))
        for name, buffer in module._buffers.items():
            if buffer is not None and self.double(buffer) is not buffer:
                with _disable_current_modes():
                    found.append((name, buffer.detach()))
        self.moved += [Moved(weakref.ref(module), name, real) for name, real in found]
        self.held.update(_storage(real)._cdata for _, real in found)
        return [real for _, real in found]

    def _become_fake(self, parameter: nn.Parameter) -> nn.Parameter:
        """The object itself becomes fake, as it is held elsewhere; returns what it was."""
        fake = nn.Parameter(self.double(parameter), parameter.requires_grad)
        if parameter.grad is not None:
            fake.grad = self.double(parameter.grad).detach()
        _exchange(parameter, fake)
        return fake

    def _release(self, moved: list[Tensor]) -> None:
        """What was in a real tensor ends when it moves, unless another one has its storage."""
        for real in moved:
            storage = _storage(real)  # which is a use of its own
            users = torch._C._storage_Use_Count(storage._cdata) - 1
            if users <= self.held[storage._cdata]:
                self.doubles.pop(storage._cdata, None)

    # ---- the end

    def restore(self, models: Iterator[nn.Module], optimizers: Iterator[Optimizer]) -> None:
        """Modules have their own tensors again, and no gradients and states that are fake."""
        self.mode = None
        for reference, name, real in reversed(self.moved):
            module = reference()
            if module is None:
                continue
            if is_fake(module._buffers.get(name)):
                module._buffers[name] = real
            elif is_fake(module._parameters.get(name)):
                _exchange(module._parameters[name], real)
        self.moved.clear()
        self.held.clear()
        self.doubles.clear()

        parameters = [parameter for model in models for parameter in model.parameters()]
        for optimizer in optimizers:
            parameters += [one for group in optimizer.param_groups for one in group["params"]]
            _forget_fakes(optimizer)
        for parameter in parameters:
            if type(parameter) in PLAIN and is_fake(parameter.grad):
                parameter.grad = None


def remade(real: Tensor) -> Tensor:
    """A fake tensor with the values of a real one, as if the step had made it of Python's numbers;
    the real one itself does not count.
    """
    with _disable_current_modes():
        copy = real.detach().clone()
    return aten.lift_fresh(copy)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def _has_memory(tensor: Tensor) -> bool:
    """Whether it is a plain tensor of the host."""
    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return is_dense and not tensor.is_quantized and not (tensor.is_conj() or tensor.is_neg())


def _exchange(one: Tensor, other: Tensor) -> None:
    """Each object becomes the other tensor (torch.utils.swap_tensors, which refuses tensors that
    have a graph).
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _forget_fakes(optimizer: Optimizer) -> None:
    for parameter, state in list(optimizer.state.items()):
        if any(is_fake(leaf) for leaf in tree_leaves(state)):
            del optimizer.state[parameter]
