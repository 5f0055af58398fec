"""What work costs, counted: the same on every machine, however busy it is."""

import sys
import tracemalloc
from collections.abc import Callable


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
