"""Whether a step's memory depends on a number that it reads and that has no value.

What `float(loss)` returns is a number like any other, and nothing tells that an `if` compares it.
So the step runs again with other numbers in its place. A step that then allocates something else
decides by the number, and is refused; of any other the report says what was tried.
"""

import contextlib
import io
from collections.abc import Callable

from footprint.places import StepTracker
from footprint.trace import Trace
from footprint.unknown import OTHERS, USUAL, branches


def settle(tracker: StepTracker, step: Callable[[], object]) -> None:
    """Run the step that the tracker has recorded again, if it has read plain numbers.

    Refused, with the line that reads, if its memory depends on them.
    """
    places = list(tracker.known.reads.places)
    if not places:
        return
    recorded = tracker.trace
    _compare(places, _memory(recorded), tracker, step)
    tracker.trace = recorded


def not_settled(tracker: StepTracker) -> None:
    """Say which numbers were read by a step that cannot run again as it was."""
    _suppose(tracker, list(tracker.known.reads.places), f"is taken as {USUAL:g}")


def _compare(places: list[str], usual, tracker: StepTracker, step: Callable[[], object]) -> None:
    if _with(USUAL, "", tracker, step) != usual:  # there is no further batch, for instance
        _suppose(tracker, places, f"is taken as {USUAL:g}")
        return
    for number in OTHERS:
        if _with(number, "", tracker, step) != usual:
            raise branches(_guilty(places, number, usual, tracker, step))
    low, high = OTHERS
    same = f"the step takes the same memory if it is {low:g}, {USUAL:g} or {high:g}"
    _suppose(tracker, places, f"may be any: {same}")


def _suppose(tracker: StepTracker, places: list[str], words: str) -> None:
    for place in places:
        tracker.known.suppose(f"the number that {place} reads {words}")


def _guilty(places: list[str], number: float, usual, tracker, step) -> str:
    """The place whose number alone changes the memory; the last one if none does."""
    for place in places[:-1]:
        if _with(number, place, tracker, step) != usual:
            return place
    return places[-1]


def _with(number: float, only: str, tracker: StepTracker, step: Callable[[], object]):
    """The memory of the step with that number; None if the step then fails."""
    tracker.begin({})
    silent = contextlib.redirect_stdout(io.StringIO())
    with tracker.known.reads.other(number, only), silent:
        try:
            step()
        except (Exception, SystemExit):  # whatever the step raises, it did not before
            return None
    return _memory(tracker.trace)


def _memory(trace: Trace) -> tuple[list[int], int]:
    """What is allocated, in its order, and the most bytes alive above those at the start. The order
    of releases is that of addresses, which two runs do not share.
    """
    sizes = [event.bytes for event in trace.events if event.time and event.bytes > 0]
    before = sum(event.bytes for event in trace.events if not event.time)
    return sizes, trace.peak()[0] - before
