"""What work costs, counted: the same on every machine, however busy it is."""

import sys
import tracemalloc
from collections.abc import Callable

import torch

from footprint.measure import peak_bytes


def calls(work: Callable[[], object]) -> int:
    """Calls of Python and C functions while `work()` runs."""
    counted = 0

    def count(frame, event: str, argument: object):
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counted


def python_bytes(work: Callable[[], object]) -> int:
    """Most bytes that Python and numpy held at one time while `work()` ran, above those before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def allocated_bytes(work: Callable[[], object]) -> int:
    """Most bytes that `work()` held, of tensors and of Python together: at most the sum of the two
    peaks. Mapped files are not allocated.
    """
    held = 0

    def traced():
        nonlocal held
        held = python_bytes(work)

    return peak_bytes(traced, torch.device("cpu")) + held
