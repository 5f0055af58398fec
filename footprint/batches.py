"""The batches of a DataLoader: the pipeline of data runs as it is, and what comes out is imagined.

Samplers draw seeds and permutations, and datasets decide by what they read. No memory of a step
depends on them but that of the batch. Workers are other processes: neither their memory is counted
nor the batches that wait in the memory shared with them.
"""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from footprint.tracker import Tracker

DEEPEST = 3  # levels of objects in which a batch's tensors are looked for


@contextlib.contextmanager
def real_batches(tracker: Tracker) -> Iterator[None]:
    """Loaders inside the `with` block read real data in this process, and give fake batches."""
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

    DataLoader.__iter__ = started
    _BaseDataLoaderIter.__next__ = imagined
    DataLoader._get_iterator = lambda loader: choose(_without_workers(loader))
    try:
        yield
    finally:
        DataLoader.__iter__ = start
        _BaseDataLoaderIter.__next__ = read
        DataLoader._get_iterator = choose


def _without_workers(loader: DataLoader) -> DataLoader:
    alone = copy.copy(loader)
    alone.num_workers = 0
    alone.timeout = 0
    return alone


def _imagined(batch: object, tracker: Tracker, depth: int) -> object:
    """The batch with fake tensors, which the tracker knows."""

    def leaf(value: object) -> object:
        if isinstance(value, FakeTensor):  # of a dataset that `build` has made
            tracker.locate()
            tracker.register(value, "DataLoader")
            return value
        if isinstance(value, Tensor):
            return torch.empty_like(value)
        if depth and not isinstance(value, type) and hasattr(value, "__dict__"):
            inner = vars(value)
            inner |= {name: _imagined(held, tracker, depth - 1) for name, held in inner.items()}
        return value

    return tree_map(leaf, batch)
