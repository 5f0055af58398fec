"""The batches of a DataLoader: the pipeline of data runs as it is, and what comes out is imagined.

Samplers draw seeds and permutations, and datasets decide by what they read. No memory of a step
depends on them but that of the batch. Workers are other processes: neither their memory is counted
nor the batches that wait in the memory shared with them.
"""

import copy

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Sampler, Subset, WeightedRandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from footprint.patches import Patches
from footprint.places import StepTracker
from footprint.values import KnownValues

DEEPEST = 3  # levels of objects in which a batch's tensors are looked for


def real_batches(tracker: StepTracker) -> Patches:
    """Loaders read real data in this process, and give fake batches."""
    start = DataLoader.__iter__
    read = _BaseDataLoaderIter.__next__
    choose = DataLoader._get_iterator

    def started(loader: DataLoader):
        with _disable_current_modes():
            return start(loader)

    def imagined(batches: _BaseDataLoaderIter):
        with _disable_current_modes():
            batch = read(batches)
        return _imagined(batch, tracker, DEEPEST)

    return {
        (DataLoader, "__iter__"): started,
        (_BaseDataLoaderIter, "__next__"): imagined,
        (DataLoader, "_get_iterator"): lambda loader: choose(
            _without_workers(loader, tracker.known)
        ),
    }


def _without_workers(loader: DataLoader, known: KnownValues) -> DataLoader:
    alone = _with_values(loader, known)
    alone.num_workers = 0
    alone.timeout = 0
    return alone


def _with_values(holder: DataLoader | Sampler | Subset, known: KnownValues):
    """A copy whose indices, weights and so on, made in `build`, have values where they are known.

    Weights that are not known are equal: no memory depends on how often an index is drawn.
    """
    alone = copy.copy(holder)
    for name, held in vars(holder).items():
        if isinstance(held, Sampler | Subset):
            vars(alone)[name] = _with_values(held, known)
        elif isinstance(held, FakeTensor):
            value = known.of(held)
            if value is None and isinstance(holder, WeightedRandomSampler):
                value = torch.ones(held.shape, dtype=held.dtype)
            vars(alone)[name] = held if value is None else value
    return alone


def _imagined(batch: object, tracker: StepTracker, depth: int) -> object:
    """The batch with fake tensors, which the tracker knows; the same object if it has none."""

    def leaf(value: object) -> object:
        if isinstance(value, FakeTensor):  # of a dataset that `build` has made
            tracker.locate()
            if tracker.is_on_host(value):
                return torch.empty_like(value)
            tracker.register(value, "DataLoader")
            return value
        if isinstance(value, Tensor):
            return torch.empty_like(value)
        if depth and not isinstance(value, type):
            return _imagined_object(value, tracker, depth - 1)
        return value

    leaves, form = tree_flatten(batch)
    found = [leaf(value) for value in leaves]
    if all(one is other for one, other in zip(found, leaves, strict=True)):
        return batch
    return tree_unflatten(found, form)


def _imagined_object(value: object, tracker: StepTracker, depth: int) -> object:
    """The same of the attributes, in a copy: the object belongs to the user's dataset."""
    changed = {}
    for name, held in _attributes(value).items():
        imagined = _imagined(held, tracker, depth)
        if imagined is not held:
            changed[name] = imagined
    if not changed:
        return value

    alone = copy.copy(value)
    for name, imagined in changed.items():
        object.__setattr__(alone, name, imagined)  # of a frozen dataclass, too
    return alone


def _attributes(value: object) -> dict[str, object]:
    slots = [slot for kind in type(value).__mro__ for slot in _slots(kind)]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return held | getattr(value, "__dict__", {})


def _slots(kind: type) -> tuple[str, ...]:
    """The names that a dataclass, for instance, keeps outside of `__dict__`."""
    names = vars(kind).get("__slots__", ())
    names = (names,) if isinstance(names, str) else tuple(names)
    return tuple(name for name in names if not name.startswith("__"))
