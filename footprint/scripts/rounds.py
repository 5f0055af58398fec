"""Where a training step of a script begins and ends, which nobody has marked.

A step is what lies between two steps of the optimizer that is the last one to take its first: the
states of all optimizers are there then. A script that updates its parameters by hand has no
optimizer; its step is what lies between two new gradients of the first parameter that got one.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from footprint.python.patches import patched
from footprint.python.refusal import place

MOST_WAITED = 8  # steps of one optimizer while another one that was made has not stepped
SETTLED = 4  # new gradients of a parameter, after which a step by hand is like those that follow


class Rounds:
    """Calls `begin` where a step begins and `end` where it ends; `begin` again if it did not."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]):
        self.begin = begin
        self.end = end
        self.made = weakref.WeakKeyDictionary()  # optimizer -> the line that made it
        self.steps = weakref.WeakKeyDictionary()  # optimizer -> its steps so far
        self.count = 0  # steps of the one that has stepped most
        self.last: weakref.ref | None = None  # the optimizer whose steps are the ends
        self.missing: list[str] = []  # lines of optimizers that were not waited for
        self.parameter: weakref.ref | None = None  # of a script without optimizers
        self.gradient: weakref.ref | None = None  # its storage, of the last gradient
        self.gradients = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Steps are counted inside the `with` block."""
        start = Optimizer.__init__

        def started(optimizer: Optimizer, *args, **kwargs) -> None:
            self.made[optimizer] = place()
            start(optimizer, *args, **kwargs)

        handle = register_optimizer_step_post_hook(self.stepped)
        try:
            with patched({(Optimizer, "__init__"): started}):
                yield
        finally:
            handle.remove()

    def stepped(self, optimizer: Optimizer, args, kwargs) -> None:
        """An optimizer has stepped."""
        count = self.steps.get(optimizer, 0) + 1
        self.steps[optimizer] = count
        self.count = max(self.count, count)
        if self.last is not None and self.last() is optimizer:
            self.end()
            return

        waits = [line for other, line in self.made.items() if other not in self.steps]
        is_first = count == 1 and not waits
        if is_first or (self.last is None and count == MOST_WAITED):
            self.missing = waits
            self.last = weakref.ref(optimizer)
            self.begin()

    def got_gradient(self, parameter: Tensor) -> None:
        """A parameter has a gradient, of which no optimizer may ever hear."""
        if self.made or self.steps or parameter.grad is None:
            return
        if self.parameter is None:
            self.parameter = weakref.ref(parameter)
        if self.parameter() is not parameter or not self._is_new(parameter.grad):
            return
        self.gradients += 1
        if self.gradients == SETTLED:
            self.begin()
        elif self.gradients > SETTLED:
            self.end()

    def _is_new(self, gradient: Tensor) -> bool:
        storage = getattr(gradient, "_local_tensor", gradient).untyped_storage()
        if self.gradient is not None and self.gradient() is storage:
            return False
        self.gradient = weakref.ref(storage)
        return True
