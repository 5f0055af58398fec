"""Processes of jobs: started in sessions of their own, watched, and killed with all that they
started.

A kernel that reads out of bounds leaves its whole process without its device, and a kernel that
never ends cannot be stopped from inside. So no job shares a process with another, and only the
death of a process ends a job for certain. A process may be started before its turn: loading torch
takes seconds, and a job that waits for its line on standard input has them behind it.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

TICK = 0.1  # seconds between two looks
LAST_WORDS = 1.0  # seconds for the traceback of a process that will be killed
BURIAL = 10.0  # seconds for the driver to end a process that was killed
DEVICE_LOST = 3  # the exit code of a job whose CUDA context was lost


@dataclass(frozen=True)
class Order:
    """What to start: `limit` is in seconds; standard output and error go to `log`."""

    name: str
    command: list[str]
    log: Path
    limit: float
    environment: Mapping[str, str]


@dataclass(frozen=True)
class End:
    """How a process ended. `words` is empty if it went well; `crashed`: a repetition may tell at
    which line; `timed_out`: it was killed when its time was over.
    """

    name: str
    seconds: float
    words: str
    crashed: bool = False
    timed_out: bool = False


class Child:
    """A process; its time begins with `go`."""

    def __init__(self, order: Order):
        self.order = order
        self.began = time.monotonic()
        self.limit = order.limit
        order.log.parent.mkdir(parents=True, exist_ok=True)
        with order.log.open("wb") as log:
            self.process = subprocess.Popen(
                order.command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **order.environment},
                start_new_session=True,  # its number is then that of its group, too
            )

    def go(self, until: float) -> None:
        """Send the line that a waiting process begins with; `until` is its end at the latest."""
        self.began = time.monotonic()
        self.limit = min(self.order.limit, until - self.began)
        with contextlib.suppress(BrokenPipeError):  # it has ended already, as `look` will say
            self.process.stdin.write(b"go\n")
            self.process.stdin.close()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def look(self) -> End | None:
        """How it ended, None while it runs; it is killed when its time is over."""
        code = self.process.poll()
        if code is not None:
            self.kill()  # what it started and left behind
            words = words_of(code)
            return self._end(words, crashed=code == DEVICE_LOST or is_crash(code))
        if self.seconds < self.limit:
            return None

        words = f"killed after {self.seconds:,.0f} s"
        self._ask_for_a_traceback()
        if not self.kill():
            words += f", and still there {BURIAL:.0f} s later"
        return self._end(words, timed_out=True)

    def kill(self) -> bool:
        """End the whole group; whether the process itself is gone."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return True
        try:
            self.process.wait(BURIAL)
        except subprocess.TimeoutExpired:  # the driver holds on to it: a kernel that never ends
            return False
        return True

    def _ask_for_a_traceback(self) -> None:
        """A job writes where it is into its log when it gets this signal."""
        try:
            self.process.send_signal(signal.SIGUSR1)
            self.process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:
            return

    def _end(self, words: str, **how: bool) -> End:
        return End(self.order.name, self.seconds, words, **how)


def words_of(code: int) -> str:
    """An exit code in words, empty for 0."""
    if code == 0:
        return ""
    if code == DEVICE_LOST:
        return "lost its device"
    if code > 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    if name == "SIGKILL":
        return "ended by SIGKILL (by hand, or by the system if host memory ran out)"
    return f"ended by {name}"


def is_crash(code: int) -> bool:
    """Whether a fault of the program's own ended it, and not somebody outside."""
    outside = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return code < 0 and -code not in outside


def run_all(
    orders: list[Order],
    at_once: int,
    until: float,
    tick: Callable[[], None],
    ready: Child | None = None,
) -> list[End]:
    """Run the processes, `at_once` at a time, and call `tick` every now and then.

    `ready` is the first of them if it has been started before. At `until`, on time.monotonic's
    clock, those that still run are killed, and those that wait are not started. Whatever ends this
    function, none of them is left.
    """
    waiting = list(orders)
    running: list[Child] = []
    ends = []
    try:
        while running or waiting:
            while waiting and len(running) < at_once and time.monotonic() < until:
                order = waiting.pop(0)
                child = ready or Child(order)
                ready = None
                running.append(child)
                child.go(until)
            if not running:
                ends += [End(order.name, 0.0, "no time was left") for order in waiting]
                break

            time.sleep(TICK)
            for child in list(running):
                end = child.look()
                if end:
                    ends.append(end)
                    running.remove(child)
            tick()
    finally:
        for child in running:
            child.kill()
    return ends
