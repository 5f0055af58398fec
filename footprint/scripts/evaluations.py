"""An evaluation before the first step, which may have hundreds of forwards of one shape."""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from footprint.kernels.operators import is_fake
from footprint.pretend.places import StepTracker, in_backward
from footprint.python.patches import Patches
from footprint.record.tracker import storage_address

PLAIN = (int, float, str, bool, type(None), torch.dtype)
TIMES = 2  # that a forward runs: what the first one makes may be kept


@dataclass(frozen=True)
class Like:
    """A tensor to make again."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    memory: str

    def make(self, tracker: StepTracker) -> Tensor:
        with tracker.memories.make(self.memory), torch._C.DisableTorchFunction():
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")


class Forwards:
    """A forward without gradients of the same module on the same shapes gives only its results from
    the third time on, as long as no step has begun.
    """

    def __init__(self, tracker: StepTracker):
        self.tracker = tracker
        self.may_skip = True
        self.running = 0
        self.seen: dict[tuple, int] = {}
        self.results: dict[tuple, object] = {}

    def patches(self) -> Patches:
        call = nn.Module.__call__

        def called(module: nn.Module, *args, **kwargs):
            key = self._key(module, args, kwargs)
            if key in self.results:
                return tree_map_only(Like, lambda one: one.make(self.tracker), self.results[key])
            self.running += 1
            try:
                made = call(module, *args, **kwargs)
            finally:
                self.running -= 1
            if key:
                self._note(key, module, (args, kwargs), made)
            return made

        return {(nn.Module, "__call__"): called}

    def _key(self, module: nn.Module, args, kwargs) -> tuple | None:
        """What the memory of a forward depends on; None if it always runs."""
        if self.running or torch.is_grad_enabled() or in_backward():
            return None
        if not self.may_skip or module._forward_hooks or module._forward_pre_hooks:
            return None
        leaves, form = tree_flatten((args, kwargs))
        parts = [self._part(leaf) for leaf in leaves]
        if None in parts:
            return None
        autocast = torch.is_autocast_enabled("cpu")
        return weakref.ref(module), module.training, autocast, str(form), tuple(parts)

    def _part(self, leaf: object) -> object:
        if is_fake(leaf):
            return "tensor", leaf.shape, leaf.stride(), leaf.dtype
        return (type(leaf), leaf) if isinstance(leaf, PLAIN) else None

    def _note(self, key: tuple, module: nn.Module, given: object, made: object) -> None:
        self.seen[key] = self.seen.get(key, 0) + 1
        leaves = tree_leaves(made)
        is_known = all(is_fake(leaf) or isinstance(leaf, PLAIN) for leaf in leaves)
        if self.seen[key] < TIMES or not is_known:
            return
        held = {storage_address(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
        held |= {storage_address(parameter) for parameter in module.parameters()}
        if not any(storage_address(leaf) in held for leaf in leaves if isinstance(leaf, Tensor)):
            self.results[key] = tree_map_only(Tensor, self._like, made)

    def _like(self, tensor: Tensor) -> Like:
        memory = "host" if self.tracker.memories.is_on_host(tensor) else "device"
        return Like(tensor.shape, tensor.stride(), tensor.dtype, memory)
