"""Whether a step's memory depends on a number that it reads and that has no value.

What `float(loss)` returns is a number like any other, and nothing tells that an `if` compares it.
So the step runs again with other numbers in its place. A step that then allocates something else
decides by the number, and is refused; of any other the report says what was tried.

A step may also differ from call to call: it evaluates every fourth time, or its data end. So a
difference counts only if the usual number undoes it and a second try repeats it.
"""

import contextlib
import dis
import io
import logging
import random
import sys
from collections.abc import Callable, Iterator

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from footprint.places import StepTracker
from footprint.refusal import Refused, place_of
from footprint.trace import Trace
from footprint.unknown import OTHERS, USUAL, branches

Memory = tuple[list[int], int]
IMPOSSIBLE = (
    Refused,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


def settle(tracker: StepTracker, step: Callable[[], object]) -> None:
    """Run the step that the tracker has recorded again, if it has read plain numbers.

    Refused, with the line that reads, if its memory depends on them.
    """
    places = list(tracker.known.reads.places)
    if not places:
        return
    recorded = tracker.trace
    _suppose(tracker, places, _Trials(tracker, step, places).verdict())
    tracker.trace = recorded


def not_settled(tracker: StepTracker) -> None:
    """Say which numbers were read by a step that cannot run again as it was."""
    _suppose(tracker, list(tracker.known.reads.places), TAKEN)


def repeatable(step: Callable[[], object]) -> Callable[[], object]:
    """The step with the random numbers of Python and NumPy that it would draw now."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")  # this package does not need it
    drawn = numpy.random.get_state() if numpy else None

    def again() -> object:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(drawn)
        return step()

    return again


TAKEN = f"is taken as {USUAL:g}"


def _suppose(tracker: StepTracker, places: list[str], words: str) -> None:
    for place in places:
        tracker.known.suppose(f"the number that {place} reads {words}")


class _Raised(str):
    """That a step raised: what, and at which line."""


class _Trials:
    """The step with other numbers at the places that read them."""

    def __init__(self, tracker: StepTracker, step: Callable[[], object], places: list[str]):
        self.tracker = tracker
        self.step = step
        self.places = places
        self.usual = _memory(tracker.trace)
        self.count = 0

    def verdict(self) -> str:
        """What is known of the numbers that were read, in words."""
        if not self._is_usual():  # there is no further batch, for instance
            return TAKEN
        same, raised = [], []
        for number in OTHERS:
            found = self._run(number)
            if found == self.usual:
                same.append(number)
            elif isinstance(found, _Raised):
                if isinstance(self._run(USUAL), _Raised):
                    return TAKEN
                raised.append(f"; if it is {number:g}, {found}")
            elif self._is_to_blame(number):
                raise branches(self._guilty(number))
            else:
                return TAKEN
        return _words(same) + "".join(raised)

    def _is_usual(self, number: float = USUAL, only: str = "") -> bool:
        return self._run(number, only) == self.usual

    def _is_to_blame(self, number: float) -> bool:
        """Whether the memory is the usual one with the usual number, and another with this one.

        The first step with the usual number may have to clear up: after one that left gradients.
        """
        undone = self._is_usual() or self._is_usual()
        return undone and not self._is_usual(self._beyond(number))

    def _guilty(self, number: float) -> str:
        """The place whose number alone changes the memory; the last one if none does."""
        for place in self.places[:-1]:
            if not self._is_usual(self._beyond(number), place):
                return place
        return self.places[-1]

    def _beyond(self, number: float) -> float:
        """Further from the usual number than before: a step may keep the best that it has seen."""
        factor = 1 + self.count / 1000
        return number * factor if number > USUAL else number / factor

    def _run(self, number: float, only: str = "") -> Memory | _Raised | None:
        """The memory of the step with that number, or what it raises, whatever that is; None if it
        then cannot be predicted.
        """
        self.count += 1
        self.tracker.begin({})
        reads = self.tracker.known.reads
        try:
            with reads.other(number, only), _unheard():
                self.step()
        except IMPOSSIBLE:
            if reads.is_endless():
                raise
            return None
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if _is_interrupted(error):
                raise
            return _Raised(f"{place_of(error.__traceback__)} raises {type(error).__name__}")
        return _memory(self.tracker.trace)


def _words(same: list[float]) -> str:
    if not same:
        return TAKEN
    numbers = [f"{number:g}" for number in sorted([USUAL, *same])]
    listed = f"{', '.join(numbers[:-1])} or {numbers[-1]}"
    return f"may be any: the step takes the same memory if it is {listed}"


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Nothing that is printed, logged or warned of inside the `with` block is seen."""
    silent = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(silent))
        stack.enter_context(contextlib.redirect_stderr(silent))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable()
        stack.enter_context(_bars_stand_still())
        yield


@contextlib.contextmanager
def _bars_stand_still() -> Iterator[None]:
    """No progress bar of tqdm is drawn: one that was made before holds the stream."""
    module = sys.modules.get("tqdm.std")
    if module is None:
        yield
        return
    display = module.tqdm.display
    module.tqdm.display = lambda *_, **__: None
    try:
        yield
    finally:
        module.tqdm.display = display


def _is_interrupted(error: BaseException) -> bool:
    """Whether it is the user who stops the program: no statement has raised the error."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    last = error.__traceback__
    while last.tb_next:
        last = last.tb_next
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] != "RAISE_VARARGS"


def _memory(trace: Trace) -> Memory:
    """What is allocated, in its order, and the most bytes alive above those at the start. The order
    of releases is that of addresses, which two runs do not share.
    """
    sizes = [event.bytes for event in trace.events if event.time and event.bytes > 0]
    before = sum(event.bytes for event in trace.events if not event.time)
    return sizes, trace.peak()[0] - before
