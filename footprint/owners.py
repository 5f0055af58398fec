"""What each storage of a trace is: a parameter, a gradient, an optimizer state, an activation."""

import bisect
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from footprint.places import (
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    RECOMPUTE,
    StepTracker,
    local,
)

DEEPEST = 6  # levels of lists, dictionaries and objects in which models are looked for
PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device)


# ---- what the user's state holds


def holdings(state: object) -> Iterator[object]:
    """Everything that a state holds: the items of lists and dictionaries and the attributes of
    objects, down to models, optimizers and tensors.
    """
    seen: set[int] = set()
    waiting = [(state, 0)]
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen or isinstance(value, PLAIN):
            continue
        seen.add(id(value))
        yield value
        if depth < DEEPEST and not isinstance(value, nn.Module | Optimizer | Tensor):
            waiting += [(inner, depth + 1) for inner in _inside(value)]


def _inside(value: object) -> list:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())


def adopt(tracker: StepTracker, state: object) -> None:
    """Tell the tracker the models and the optimizers of a state."""
    held = list(holdings(state))
    models = [value for value in held if isinstance(value, nn.Module)]
    for index, model in enumerate(models):
        tracker.adopt(model, "" if index == 0 else type(model).__name__)
    for value in held:
        if isinstance(value, Optimizer):
            tracker.optimizers[value] = None


def move_data(tracker: StepTracker, state: object) -> None:
    """What the loaders of a state hold is in host memory, also if a GPU runs the step."""
    moved = set()
    for value in holdings(state):
        if not isinstance(value, DataLoader | _BaseDataLoaderIter):
            continue
        for held in holdings(value):
            if isinstance(held, Tensor) and not isinstance(held, nn.Parameter):
                moved.add(tracker.identity(held))
    tracker.move_to_host(moved)


# ---- categories


def label(
    tracker: StepTracker,
    state: object,
    origins: dict[int, str],
) -> None:
    """Give every storage of the tracker's trace its category, and what is owned its name.

    origins: id of a storage that was alive before the step -> the phase that made it.
    """
    trace = tracker.trace
    owned = dict(_owned(tracker, state))
    kept, inputs = _kept_and_inputs(tracker)
    for identity, storage in trace.storages.items():
        if identity in owned:
            storage.category, storage.module = owned[identity]
        elif identity in tracker.gradients:
            storage.category = "gradient"
        elif storage.category:  # FSDP2's whole parameters have theirs from the tracker
            continue
        elif origins.get(identity) == OPTIMIZER:
            storage.category = "optimizer"
        elif identity in inputs or identity in origins:
            storage.category = "input"
        else:
            storage.category = "activation" if identity in kept else "temporary"


def _owned(tracker: StepTracker, state: object) -> Iterator[tuple[int, tuple[str, str]]]:
    """(id, (category, name)) of the storages of optimizer states, buffers and parameters; what
    belongs to several is what comes last.
    """
    names: dict[Tensor, str] = {}
    for model in tracker.roots:
        prefix = tracker.names[model]
        names |= {tensor: name for name, tensor in model.named_parameters(prefix=prefix)}

    for value in holdings(state):
        if is_optimizer(value):
            for inner in holdings(vars(value)):
                if isinstance(inner, Tensor) and inner not in names:
                    yield tracker.register(local(inner), "optimizer"), ("optimizer", "")
    for optimizer in tracker.optimizers:
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    owner = f"{names.get(parameter, '')} {key}".strip()
                    yield tracker.register(local(value), "optimizer"), ("optimizer", owner)

    for model in tracker.roots:
        for name, buffer in model.named_buffers(prefix=tracker.names[model]):
            yield tracker.register(local(buffer), "buffer"), ("buffer", name)
    for parameter, name in names.items():
        yield tracker.register(local(parameter), "parameter"), ("parameter", name)


def is_optimizer(value: object) -> bool:
    """Whether an object that is not PyTorch's looks like an optimizer."""
    if isinstance(value, Optimizer | nn.Module | type) or not hasattr(value, "__dict__"):
        return False
    return callable(getattr(value, "step", None)) and callable(getattr(value, "zero_grad", None))


def _kept_and_inputs(tracker: StepTracker) -> tuple[set[int], set[int]]:
    """Storages that are made outside of the backward and are alive when the next backward starts,
    or that outlive the recomputation that made them; and those that are made before a forward,
    outside of it, and are alive when it starts.
    """
    trace = tracker.trace
    born: dict[int, int] = {}
    died: dict[int, int] = {}
    for event in trace.events:
        times = born if event.bytes > 0 else died
        times[event.storage] = event.time

    ends = [time for time, _ in trace.phases]
    backwards = [time for time, phase in trace.phases if phase == BACKWARD]
    forwards = [time for time, phase in trace.phases if phase == FORWARD]
    kept, inputs = set(), set()
    for identity in trace.storages:
        time = born.get(identity, 0)
        last = died.get(identity, math.inf)
        phase = trace.phase_at(time)
        until_backward = phase in (FORWARD, LOSS) and _reaches(last, backwards, time)
        if until_backward or (phase == RECOMPUTE and _reaches(last, ends, time)):
            kept.add(identity)
        elif phase not in (BACKWARD, OPTIMIZER) and _reaches(last, forwards, time):
            inputs.add(identity)
    return kept, inputs


def _reaches(
    last: float,
    marks: list[int],
    time: int,
) -> bool:
    """Whether what is made at `time` and freed at `last` is alive at the next of the marks."""
    following = bisect.bisect_right(marks, time)
    return following < len(marks) and last >= marks[following]
