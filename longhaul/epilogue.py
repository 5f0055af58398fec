"""Says a message after a process has ended: `python longhaul/epilogue.py PID MESSAGE`.

torchrun ends with a report of some forty lines, which comes after everything that its ranks print
and which they cannot silence. A rank that fails starts this program, so that its words, with the
remedy, are the last ones on screen. It imports only the standard library: it must be ready before
torchrun is done.
"""

import os
import select
import sys
import time


def wait_for_end(process: int) -> None:
    """Return as soon as the process has ended."""
    if hasattr(os, "pidfd_open"):
        try:
            select.select([os.pidfd_open(process)], [], [])
        except ProcessLookupError:
            return
        return

    # Other systems than Linux: ask now and then.
    while is_running(process):
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """Whether there is a process with this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    wait_for_end(int(sys.argv[1]))
    print(sys.argv[2], file=sys.stderr, flush=True)
