"""Says a message below the report of torchrun: `python longhaul/epilogue.py PID MESSAGE`.

torchrun ends with a report of some forty lines, which comes after everything that its ranks print
and which they cannot silence. A rank that fails starts this program, so that its words, with the
remedy, are the last ones on screen. It imports only the standard library: it must be ready before
torchrun is done.

On Linux the message comes as soon as the report is written, while torchrun still takes half a
second to end: a shell would print its prompt first otherwise.
"""

import os
import select
import sys
import time
from collections import deque

EVERY = 0.01  # seconds between two looks
QUIET = 10  # looks without writing, after which a report is over
REPORT = 1000  # bytes written within so many looks are a report
NOISE = 100  # bytes that are none: torchrun talks to its store


def say_after_report(process: int, message: str) -> None:
    """Print the message when the process has written a report, and again if more came after it."""
    counts: deque[int] = deque([written(process)], maxlen=QUIET)
    try:
        end = os.pidfd_open(process)
    except OSError:  # it has ended, or this kernel does not offer the call
        say_after_end(process, message)
        return

    is_reporting = False
    said_at = None  # what had been written when the message was said
    while not select.select([end], [], [], EVERY)[0]:
        counts.append(max(written(process), counts[-1]))
        grown = counts[-1] - counts[0]
        if grown >= REPORT:
            is_reporting = True
        elif is_reporting and grown <= NOISE:
            say(message)
            said_at = counts[-1]
            is_reporting = False

    if said_at is None or counts[-1] > said_at + NOISE:
        say(message)


def written(process: int) -> int:
    """Bytes that the process has written so far; 0 if it has just ended."""
    try:
        with open(f"/proc/{process}/io", encoding="ascii") as file:
            counts = dict(line.split(": ") for line in file)
    except OSError:
        return 0
    return int(counts["wchar"])


def say_after_end(process: int, message: str) -> None:
    """Print the message when the process has ended, which other systems than Linux only tell if
    asked.
    """
    while is_running(process):
        time.sleep(EVERY)
    say(message)


def is_running(process: int) -> bool:
    """Whether there is a process with this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def say(message: str) -> None:
    """Print the message."""
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    wait = say_after_report if hasattr(os, "pidfd_open") else say_after_end
    wait(int(sys.argv[1]), sys.argv[2])
