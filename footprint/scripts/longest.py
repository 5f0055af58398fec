"""`--lengths`: batches whose rows are the longest that one batch can have.

A script that pads each batch to its longest row has its peak in the batch of the longest rows,
which the first steps seldom draw. Each row is given one of the longest lengths before the script's
own collate function sees it, which then pads, cuts and rounds as ever.
"""

import importlib.util
import inspect
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import _DatasetKind, default_collate

from footprint.kernels.operators import is_fake
from footprint.pretend.batches import known_rows
from footprint.pretend.values import KnownValues
from footprint.python.patches import Patches
from footprint.python.refusal import Refused, place

MOST = 2**31 - 1
FORMS = "give a number, or a file with one a line, a list as .json, or .npy"
IDS = "input_ids"  # the entry of a row that has its length, if there is one


class Longest:
    """Gives the rows of all loaders the longest of `lengths`; () leaves them as they are."""

    def __init__(self, lengths: tuple[int, ...], known: KnownValues):
        self.lengths = sorted(lengths, reverse=True)
        self.known = known
        self.is_used = False

    def patches(self) -> Patches:
        if not self.lengths:
            return {}
        create = _DatasetKind.create_fetcher

        def created(kind, dataset, is_batched: bool, collate: Callable, drop_last: bool):
            if not is_batched:
                raise Refused(f"{place()}: --lengths: this loader gives no single rows: drop it")
            if inspect.unwrap(collate) is default_collate:
                raise Refused(
                    f"{place()}: --lengths: this loader pads no rows, all have one length: drop it"
                )
            return create(kind, dataset, is_batched, self._lengthened(collate), drop_last)

        return {(_DatasetKind, "create_fetcher"): staticmethod(created)}

    def _lengthened(self, collate: Callable) -> Callable:
        def collated(rows: list) -> Any:
            self.is_used = True
            longest = f"the rows of a loader are the longest of --lengths: {self.lengths[0]:,}"
            self.known.suppose(longest)
            pairs = zip(known_rows(rows, self.known), itertools.cycle(self.lengths), strict=False)
            with _disable_current_modes():
                longer = [resized(row, length) for row, length in pairs]
            return collate(longer)

        return collated


# ---- a row


def resized(row: Any, length: int) -> Any:
    """The row with `length` tokens: what is as long as its ids is repeated, or cut. Refused if
    nothing in it tells how long it is.
    """
    tokens = _tokens(row)
    if not tokens:
        raise Refused(
            f"{place()}: --lengths: no list and no tensor of whole numbers tells how long a row of "
            "this loader is: drop it, or make the ids in the data set instead of the collate "
            "function"
        )
    return _map(row, lambda value: _repeated(value, length) if _size(value) == tokens else value)


def _tokens(row: Any) -> int:
    """The length of a row; 0 if nothing tells it."""
    values = [row[IDS]] if isinstance(row, Mapping) and IDS in row else _values(row)
    return next((_size(value) for value in values if _is_ids(value)), 0)


def _values(row: Any) -> Iterator[Any]:
    """What a row holds."""
    if isinstance(row, Mapping):
        for value in row.values():
            yield from _values(value)
    elif _is_several(row):
        for value in row:
            yield from _values(value)
    else:
        yield row


def _map(row: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(row, Mapping):
        return {name: _map(value, change) for name, value in row.items()}
    if not _is_several(row):
        return change(row)
    values = [_map(value, change) for value in row]
    return type(row)(*values) if hasattr(row, "_fields") else type(row)(values)


def _is_several(row: Any) -> bool:
    """Whether it is a tuple, or a list that is not one of numbers."""
    if isinstance(row, tuple):
        return True
    return isinstance(row, list) and not _is_numbers(row)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int | float) for one in value)


def _is_ids(value: Any) -> bool:
    """Whether its values may be those of tokens."""
    if not _size(value):
        return False
    if isinstance(value, list):
        return isinstance(value[0], int)
    return len(value.shape) == 1 and "int" in str(value.dtype)


def _size(value: Any) -> int:
    """How long it is in its first dimension; 0 for what has none."""
    if isinstance(value, list):
        return len(value)
    shape = getattr(value, "shape", ())
    return int(shape[0]) if shape else 0


def _repeated(value: Any, length: int) -> Any:
    """The value, again and again, up to that length; a count, such as of positions, goes on."""
    size = _size(value)
    if isinstance(value, list):
        return _repeated(torch.tensor(value), length).tolist()
    if not isinstance(value, Tensor):  # of numpy
        return _repeated(torch.as_tensor(value), length).numpy()
    if value.dim() == 1 and not is_fake(value):
        count = torch.arange(length)
        if torch.equal(value.long(), count[:size]):
            return count.to(value.dtype)
    times = -(-length // size)
    return value.repeat(times, *[1] * (value.dim() - 1))[:length]


# ---- the file


def read_lengths(words: str) -> tuple[int, ...]:
    """The lengths that --lengths gives. Refused if they are none."""
    if not words:
        return ()
    found = [int(words)] if words.isdecimal() else _read(Path(words))
    if not isinstance(found, list) or not found:
        raise Refused(f"--lengths {words} has no list of lengths: {FORMS}")
    for length in found:
        if not isinstance(length, int) or not 0 < length <= MOST:
            raise Refused(f"--lengths {words}: {str(length)[:40]} is no length: give 1 to {MOST}")
    return tuple(found)


def _read(file: Path) -> Any:
    if not file.is_file():
        raise Refused(f"--lengths {file}: there is no such file: {FORMS}")
    if file.suffix == ".npy" and importlib.util.find_spec("numpy") is None:
        raise Refused(f"--lengths {file}: numpy is not installed: give a list as .json")
    try:
        return _numbers(file)
    except (ValueError, EOFError, RecursionError):
        raise Refused(f"--lengths {file} cannot be read: {FORMS}") from None


def _numbers(file: Path) -> Any:
    if file.suffix == ".npy":
        return importlib.import_module("numpy").load(file, allow_pickle=False).tolist()
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        return json.loads(text)
    return [int(word) for word in text.split()]
