"""What each storage of a trace is: a parameter, a gradient, an optimizer state, an activation."""

import bisect
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from footprint.pretend.places import (
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    RECOMPUTE,
    Places,
    StepTracker,
    named_parts,
)
from footprint.record.trace import Trace, phase_of

DEEPEST = 6  # levels of lists, dictionaries and objects in which models are looked for
PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device)


# ---- what the user's state holds


def holdings(state: object) -> Iterator[object]:
    """Everything that a state holds: the items of lists and dictionaries and the attributes of
    objects, down to models, optimizers and tensors.
    """
    for _, value in named_holdings(state):
        yield value


def named_holdings(state: object) -> Iterator[tuple[str, object]]:
    """The same, the outermost first, each with the name of the attribute or the key that it is
    found by; "" if there is none.
    """
    seen: set[int] = set()
    waiting = [("", state, 0)]
    for name, value, depth in waiting:  # which grows
        if id(value) in seen or isinstance(value, PLAIN):
            continue
        seen.add(id(value))
        yield name, value
        if depth < DEEPEST and not isinstance(value, nn.Module | Optimizer | Tensor):
            waiting += [(key, inner, depth + 1) for key, inner in _inside(name, value)]


def _inside(name: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, list | tuple | set | frozenset):
        return [(name, inner) for inner in value]
    named = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return [(str(key), inner) for key, inner in named.items()]


def adopt(tracker: StepTracker, state: object) -> None:
    """Tell the tracker the models and the optimizers of a state."""
    adopt_models(tracker, state)
    for value in holdings(state):
        if isinstance(value, Optimizer):
            tracker.optimizers[value] = None


def adopt_models(places: Places, state: object) -> None:
    """Name the modules of a state's models: those of the first one as it names them, others also by
    their model.
    """
    held = named_holdings(state)
    models = [(name, value) for name, value in held if isinstance(value, nn.Module)]
    for index, (name, model) in enumerate(models):
        places.adopt(model, (name or type(model).__name__) if index else "")


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
    owned = dict(_owned(tracker, state)) | tracker.called
    kept, inputs = _kept_and_inputs(tracker.trace)
    for identity, storage in tracker.trace.storages.items():
        if storage.category == "unsharded":
            continue
        if identity in owned:
            storage.category, storage.module = owned[identity]
        elif identity in tracker.gradients:
            storage.category = "gradient"
        elif origins.get(identity) == OPTIMIZER:
            storage.category = "optimizer"
        elif identity in inputs or identity in origins:
            storage.category = "input"
        else:
            storage.category = "activation" if identity in kept else "temporary"


def _kept_and_inputs(trace: Trace) -> tuple[set[int], set[int]]:
    """Storages that are made outside of the backward and are alive when the next backward starts,
    or that outlive the recomputation that made them; and those that are made before a forward,
    outside of it, and are alive when it starts.
    """
    born = {event.storage: event.time for event in trace.events if event.bytes > 0}
    died = {event.storage: event.time for event in trace.events if event.bytes < 0}
    phases = trace.phases
    ends = [time for time, _ in phases]
    backwards = [time for time, phase in phases if phase == BACKWARD]
    forwards = [time for time, phase in phases if phase == FORWARD]

    kept, inputs = set(), set()
    for identity, storage in trace.storages.items():
        life = born.get(identity, 0), died.get(identity, math.inf)
        made = phase_of(storage.stage)
        until_backward = made in (FORWARD, LOSS) and _reaches(*life, backwards)
        if until_backward or (made == RECOMPUTE and _reaches(*life, ends)):
            kept.add(identity)
        elif made not in (BACKWARD, OPTIMIZER) and _reaches(*life, forwards):
            inputs.add(identity)
    return kept, inputs


def _reaches(
    born: int,
    died: float,
    marks: list[int],
) -> bool:
    """Whether what is made and freed at these times is alive at the next of the marks."""
    following = bisect.bisect_right(marks, born)
    return following < len(marks) and died >= marks[following]


def _owned(tracker: StepTracker, state: object) -> Iterator[tuple[int, tuple[str, str]]]:
    """(id, (category, name)) of the storages of optimizer states, buffers and parameters; what
    belongs to several is what comes last.
    """
    names: dict[Tensor, str] = {}
    buffers: dict[Tensor, str] = {}
    for model in tracker.roots:
        for place, part in named_parts(model, tracker.names[model]):
            for name, tensor in part.named_parameters(place, recurse=False):
                names.setdefault(tensor, name)
            for name, tensor in part.named_buffers(place, recurse=False):
                buffers.setdefault(tensor, name)

    for value in holdings(state):
        if is_optimizer(value):
            for inner in holdings(vars(value)):
                if isinstance(inner, Tensor) and inner not in names:
                    yield tracker.own(inner, "optimizer"), ("optimizer", "")
    for optimizer in tracker.optimizers:
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    owner = f"{names.get(parameter, '')} {key}".strip()
                    yield tracker.own(value, "optimizer"), ("optimizer", owner)

    for buffer, name in buffers.items():
        yield tracker.own(buffer, "buffer"), ("buffer", name)
    for parameter, name in names.items():
        yield tracker.own(parameter, "parameter"), ("parameter", name)


def is_optimizer(value: object) -> bool:
    """Whether an object that is not PyTorch's looks like an optimizer."""
    if isinstance(value, Optimizer | nn.Module | type) or not hasattr(value, "__dict__"):
        return False
    return callable(getattr(value, "step", None)) and callable(getattr(value, "zero_grad", None))
