"""The batches of a DataLoader: the pipeline of data runs as it is, and what comes out is imagined.

Samplers draw seeds and permutations, and datasets decide by what they read. No memory of a step
depends on them but that of the batch. Workers are other processes: neither their memory is counted
nor the batches that wait in the memory shared with them.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import (
    DataLoader,
    Sampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from footprint.kernels.operators import is_fake
from footprint.pretend.places import StepTracker
from footprint.pretend.values import MOST_KNOWN, KnownValues, is_alike
from footprint.python.patches import Patches

FIRST_BATCHES = "whole numbers and masks of a batch are those that its loader has read"


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
        with Imagining(tracker):  # what the batch holds belongs to the user's dataset
            return copy.deepcopy(batch)

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
    if loader.collate_fn not in (default_collate, default_convert):
        alone.collate_fn = _of_known_rows(loader.collate_fn, known)
    return alone


def _of_known_rows(collate: Callable, known: KnownValues) -> Callable:
    @functools.wraps(collate)
    def collated(rows):
        return collate(known_rows(rows, known))

    return collated


def known_rows(rows: Any, known: KnownValues) -> Any:
    """Rows that the script has made outside of a data set, with their values where those are known:
    a function that pads them makes a real tensor, which would have zeros instead.
    """

    def value(tensor: Tensor) -> Tensor:
        found = known.of(tensor)
        return tensor if found is None else found

    return tree_map_only(Tensor, value, rows)


def _with_values(holder: DataLoader | Sampler | Subset, known: KnownValues):
    """A copy whose indices, weights and so on, made in `build`, have values where they are known.

    Weights that are not known are equal: no memory depends on how often an index is drawn.
    """
    alone = copy.copy(holder)
    for name, held in vars(holder).items():
        if isinstance(held, Sampler | Subset):
            vars(alone)[name] = _with_values(held, known)
        elif is_fake(held):
            value = known.of(held)
            if value is None and isinstance(holder, WeightedRandomSampler):
                value = torch.ones(held.shape, dtype=held.dtype, device="cpu")
            vars(alone)[name] = held if value is None else value
    return alone


class Imagining(TorchFunctionMode):
    """copy.deepcopy inside the `with` block makes fake tensors, which the tracker knows."""

    def __init__(self, tracker: StepTracker):
        super().__init__()
        self.tracker = tracker

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, _ = args
        is_made = is_fake(tensor)  # of a dataset that `build` has made
        if not is_made:
            return self._with_numbers(tensor)
        if self.tracker.is_on_host(tensor):
            return torch.empty_like(tensor)
        self.tracker.locate()
        self.tracker.register(tensor, "DataLoader")
        return tensor

    def _with_numbers(self, real: Tensor) -> Tensor:
        """A fake tensor for one that the loader has read; whole numbers and masks are known."""
        known = self.tracker.known
        fake = torch.empty_like(real)
        if real.is_floating_point() or real.is_complex() or real.numel() > MOST_KNOWN:
            return fake
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            copy = torch.empty_like(real)  # alone in its storage
            copy.copy_(real)
        if is_alike(fake, copy):
            known.give(fake, copy)
            known.suppose(FIRST_BATCHES)
        return fake
