"""Where a training step is: hooks on the model and the step's own announcements tell a listener the
stage and the module; afterwards the storages of a trace get their categories.

Hooks on tensors, not on modules, mark the backward: a module's backward hooks would put identity
nodes into the graph, and those hold memory.
"""

import bisect
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch

from footprint.places import in_backward
from footprint.trace import Trace
from footprint.tracker import Tracker
from longhaul.dist import local_shard
from longhaul.step import TrainState

FORWARD = (
    "start",
    "reference forward",
    "reward forward",
    "embedding",
    "layer forward",
    "norm forward",
    "loss forward",
)
ROLLOUT, VALIDATION = "rollout", "validation"  # in which modules have no stages of their own
# parts of a layer, and the stage that begins when the backward reaches the part's output
PARTS = {
    "attention_norm": "",
    "attention": "attention backward",
    "mlp_norm": "",
    "mlp": "mlp backward",
}


class StagePeaks:
    """A listener that asks read() for the peak whenever a stage ends, and keeps the largest answer
    of each stage.
    """

    def __init__(self, read: Callable[[], float]):
        self.read = read
        self.stage = "start"
        self.module = ""
        self.peaks: dict[str, float] = {}

    def enter(self, stage: str, module: str = "") -> None:
        if stage != self.stage:
            self.note()
        self.stage = stage
        self.module = module

    def note(self) -> None:
        """The stage that is running has taken this much."""
        self.peaks[self.stage] = max(self.peaks.get(self.stage, 0), self.read())


# ---- hooks

Listener = Tracker | StagePeaks  # knows the stage and the module that run


@contextlib.contextmanager
def telling(
    listener: Listener,
    state: TrainState,
    frozen: Mapping[str, torch.nn.Module] = MappingProxyType({}),
) -> Iterator[None]:
    """Steps of `state` inside the `with` block tell the listener where they are; `frozen` are the
    models that its objective only reads, by name.
    """
    hooks = _Hooks(listener)
    handles = list(hooks.on_model(state.model))
    for name, model in frozen.items():
        handles += hooks.on_frozen(model, name)
    state.listeners.append(listener.enter)
    try:
        yield
    finally:
        state.listeners.remove(listener.enter)
        for handle in handles:
            handle.remove()


class _Hooks:
    """Hooks on modules that call `listener.enter` when a module starts and when it ends."""

    def __init__(self, listener: Listener):
        self.listener = listener
        self.outer: list[tuple[str, str]] = []  # stage and module around the modules that run now

    def on_model(self, model: torch.nn.Module) -> Iterator:
        yield from self._on(model.embed, "embed", "embedding", "embedding backward")
        for index, layer in enumerate(model.layers):
            name = f"layers.{index}"
            yield from self._on(layer, name, "layer forward", "layer backward")
            for part, backward in PARTS.items():
                module = getattr(layer, part)
                yield from self._on(module, f"{name}.{part}", "layer forward", backward)
        yield from self._on(model.norm, "norm", "norm forward", "norm backward")
        yield from self._on(model.lm_head, "lm_head", "loss forward", "loss backward")

    def on_frozen(self, model: torch.nn.Module, owner: str) -> Iterator:
        modules = {"embed": model.embed, "norm": model.norm, "lm_head": model.lm_head}
        modules |= {f"layers.{index}": layer for index, layer in enumerate(model.layers)}
        for name, module in modules.items():
            yield from self._on(module, name, f"{owner} forward", f"{owner} backward")

    def _on(self, module: torch.nn.Module, name: str, forward: str, backward: str) -> Iterator:
        def starts(*_) -> None:
            stage = self.listener.stage
            self.outer.append((stage, self.listener.module))
            if stage not in (ROLLOUT, VALIDATION):
                stage = "recompute" if in_backward() else forward
            self.listener.enter(stage, name)

        def ends(module, inputs, output) -> None:
            has_gradient = isinstance(output, torch.Tensor) and output.requires_grad
            if has_gradient and backward and not in_backward():
                output.register_hook(lambda _: self.listener.enter(backward, name))

            stage, outer_module = self.outer.pop()
            if self.outer or in_backward() or stage in (ROLLOUT, VALIDATION):
                self.listener.enter(stage, outer_module)
            else:
                self.listener.enter(forward)

        yield module.register_forward_pre_hook(starts)
        yield module.register_forward_hook(ends, always_call=True)


# ---- categories


def label(
    trace: Trace, tracker: Tracker, state: TrainState, gradients: set[int], inputs: set[int]
) -> None:
    """Give every storage of the trace its category, and parameters and optimizer states their
    names; `gradients` and `inputs` are ids of storages.
    """
    owned = dict(owners(state, tracker))
    kept = kept_for_the_backward(trace)
    for identity, storage in trace.storages.items():
        if identity in owned:
            storage.category, storage.module = owned[identity]
        elif identity in gradients:
            storage.category = "gradient"
        elif identity in inputs:
            storage.category = "input"
        elif not storage.category:  # whole parameters of FSDP2 have theirs from the tracker
            storage.category = "activation" if identity in kept else "temporary"


def kept_for_the_backward(trace: Trace) -> set[int]:
    """Storages of a forward that are alive when the loss's backward starts, and those of a
    recomputation that outlive its stage.
    """
    born, died = {}, {}
    for event in trace.events:
        times = born if event.bytes > 0 else died
        times[event.storage] = event.time

    starts = [time for time, _ in trace.stages]
    starts_of_backward = [
        time for time, stage in trace.stages if stage in ("loss backward", "reward backward")
    ]
    kept = set()
    for identity, storage in trace.storages.items():
        if storage.stage in FORWARD:
            marks = starts_of_backward
        elif storage.stage == "recompute":
            marks = starts
        else:
            continue
        following = bisect.bisect_right(marks, born.get(identity, 0))
        if following < len(marks) and died.get(identity, math.inf) >= marks[following]:
            kept.add(identity)
    return kept


def owners(state: TrainState, tracker: Tracker) -> Iterator[tuple[int, tuple[str, str]]]:
    """(id, (category, name)) of the storages of parameters, buffers and optimizer states."""
    names = {}
    for name, parameter in state.model.named_parameters():
        names[parameter] = name
        yield tracker.register(local_shard(parameter), "parameter"), ("parameter", name)
    for name, buffer in state.model.named_buffers():
        yield tracker.register(buffer, "buffer"), ("buffer", name)
    for parameter, values in state.optimizer.state.items():
        for key, value in values.items():
            owner = ("optimizer", f"{names[parameter]} {key}")
            yield tracker.register(local_shard(value), "optimizer"), owner
