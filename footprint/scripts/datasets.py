"""Data sets of a script are made for real: they decide by what they read. Their tensors are data,
in host memory, or in that of the CPU that is predicted.
"""

import contextlib
import functools
from collections.abc import Iterator

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.data import Dataset

from footprint.kernels.operators import is_fake
from footprint.pretend.places import StepTracker
from footprint.python.patches import Patches
from footprint.record.tracker import storage_address


class RealTensors(TorchDispatchMode):
    """Records the storages that operators make of real tensors. What a tensor shares with numpy or
    with a buffer comes from no operator, and is not of PyTorch's allocator.
    """

    def __init__(self, tracker: StepTracker):
        super().__init__()
        self.tracker = tracker

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {
            storage_address(one) for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)
        }
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor) and storage_address(tensor) not in given:
                self.tracker.count_data(tensor, str(func))
        return made


@contextlib.contextmanager
def for_real(tracker: StepTracker) -> Iterator[None]:
    """Tensors inside the `with` block are real, and recorded."""
    with _disable_current_modes(), RealTensors(tracker):
        yield


def real_datasets(tracker: StepTracker) -> Patches:
    """The constructors of data sets run for real, unless they are given fake tensors."""

    def wrapped(start):
        @functools.wraps(start)
        def started(dataset: Dataset, *args, **kwargs) -> None:
            is_over = tracker.given.mode is None
            if is_over or any(map(is_fake, tree_iter((args, kwargs, vars(dataset))))):
                start(dataset, *args, **kwargs)
                return
            with for_real(tracker):
                start(dataset, *args, **kwargs)

        return started

    def subclassed(kind: type, **kwargs) -> None:
        super(Dataset, kind).__init_subclass__(**kwargs)
        if "__init__" in vars(kind):
            kind.__init__ = wrapped(kind.__init__)

    found: Patches = {
        (kind, "__init__"): wrapped(kind.__init__)
        for kind in _all_below(Dataset)
        if "__init__" in vars(kind)
    }
    found[Dataset, "__init_subclass__"] = classmethod(subclassed)
    return found


def _all_below(kind: type) -> Iterator[type]:
    for below in kind.__subclasses__():
        yield below
        yield from _all_below(below)
