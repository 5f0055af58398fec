"""Where a training step is: hooks on the model tell a tracker its stage and module, and label
storages once the step is over.

Imports longhaul.memory (trace, tracker) and longhaul.optim of ours. Hooks on tensors, not on
modules, mark the backward: a module's backward hooks would put identity nodes into the graph, which
hold memory of their own.
"""

import bisect
import contextlib
import math

import torch

from longhaul.memory.trace import Trace
from longhaul.memory.tracker import Tracker

FORWARD = ("start", "embedding", "layer forward", "norm forward", "loss forward")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard that this rank holds of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def in_backward() -> bool:
    """Whether the autograd engine is running: a forward then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Stages:
    """Hooks that keep `tracker.stage` and `tracker.module` true while `state` (TrainState) steps."""

    def __init__(self, tracker: Tracker, state):
        self.tracker, self.state, self.stack = tracker, state, []
        self.gradients: set[int] = set()

    @contextlib.contextmanager
    def installed(self):
        """Hooks on the model and the optimizer, removed at the end."""
        handles = list(self._hooks())
        self.state.listeners.append(self._announced)
        try:
            yield self
        finally:
            self.state.listeners.remove(self._announced)
            for handle in handles:
                handle.remove()

    def _hooks(self):
        model = self.state.model
        yield from self._around(model.embed, "embed", "embedding", "embedding backward")
        for index, layer in enumerate(model.layers):
            yield from self._around(layer, f"layers.{index}", "layer forward", "layer backward")
            for name, backward in (
                ("attention_norm", ""),
                ("attention", "attention backward"),
                ("mlp_norm", ""),
                ("mlp", "mlp backward"),
            ):
                yield from self._around(
                    getattr(layer, name), f"layers.{index}.{name}", "layer forward", backward
                )
        yield from self._around(model.norm, "norm", "norm forward", "norm backward")
        yield from self._around(model.lm_head, "lm_head", "loss forward", "loss backward")

    def _around(self, module, name: str, forward: str, backward: str):
        def before(*_):
            self.stack.append((self.tracker.stage, self.tracker.module))
            self.tracker.enter("recompute" if in_backward() else forward, name)

        def after(module, inputs, output):
            if (
                isinstance(output, torch.Tensor)
                and output.requires_grad
                and backward
                and not in_backward()
            ):
                output.register_hook(lambda _: self.tracker.enter(backward, name))
            before = self.stack.pop()
            self.tracker.enter(*(before if self.stack or in_backward() else (forward, "")))

        yield module.register_forward_pre_hook(before)
        yield module.register_forward_hook(after, always_call=True)

    def _announced(self, stage: str):
        """The step itself says that a stage begins."""
        if stage == "gradient norm":
            self.gradients = {
                self.tracker.register(local(p.grad), "backward")
                for p in self.state.model.parameters()
                if p.grad is not None
            }
        self.tracker.enter(stage)


def label(trace: Trace, tracker: Tracker, stages: Stages, inputs: set[int]):
    """Give every storage of the trace its category, and parameters and optimizer states their
    names.
    """
    named = dict(owners(stages.state, tracker))
    kept = held_for_the_backward(trace)
    for identity, storage in trace.storages.items():
        if identity in named:
            storage.category, storage.module = named[identity]
        elif identity in stages.gradients:
            storage.category = "gradient"
        elif identity in inputs:
            storage.category = "input"
        elif not storage.category:  # FSDP2's whole parameters have theirs from the tracker
            storage.category = "activation" if identity in kept else "temporary"


def held_for_the_backward(trace: Trace) -> set[int]:
    """Storages born in a forward that the loss's backward finds alive, and those of a recomputation
    that outlive its stage.
    """
    born, died = {}, {}
    for event in trace.events:
        (born if event.bytes > 0 else died)[event.storage] = event.time
    starts = [time for time, _ in trace.stages]
    backward = [time for time, stage in trace.stages if stage == "loss backward"]
    kept = set()
    for identity, storage in trace.storages.items():
        marks = (
            backward if storage.stage in FORWARD else starts if storage.stage == "recompute" else ()
        )
        birth = born.get(identity, 0)
        after = bisect.bisect_right(marks, birth)
        if after < len(marks) and died.get(identity, math.inf) >= marks[after]:
            kept.add(identity)
    return kept


def owners(state, tracker: Tracker):
    """(id, (category, name)) of the storages of parameters, buffers and optimizer states."""
    names = {}
    for name, parameter in state.model.named_parameters():
        names[parameter] = name
        yield tracker.register(local(parameter), "parameter"), ("parameter", name)
    for name, buffer in state.model.named_buffers():
        yield tracker.register(buffer, "buffer"), ("buffer", name)
    for parameter, values in state.optimizer.state.items():
        for key, value in values.items():
            yield (
                tracker.register(local(value), "optimizer"),
                ("optimizer", f"{names[parameter]} {key}"),
            )
