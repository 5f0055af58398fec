"""How a run ends: the exit codes, and the exceptions that carry them.

An exception with an attribute `exit_code` ends a program with one line and that code; a ValueError
without one is bad input. Its words say what happened and, after the last ": ", what to do about it.
"""

import contextlib
import errno
import json
import os
import sys
import time
from typing import Any, TextIO

from base.durable import StorageError as StorageError

DONE = 0
BAD_INPUT = 2  # found before the first step
DATA = 3  # damaged data
NO_CHECKPOINT = 4  # none that can be used
NUMERICS = 5
STORAGE = 6  # StorageError's
WORLD = 7  # ranks: a wrong number of them, or one that was lost
PREEMPTED = 75  # asked to stop, and saved


class Halt(Exception):
    """The end of a run that is under way, for a reason that a user can act on."""

    def __init__(self, words: str, exit_code: int):
        super().__init__(words)
        self.exit_code = exit_code


class NumericalHalt(Halt):
    """The numbers went wrong, and the run must not go on as it is."""

    def __init__(self, words: str):
        super().__init__(words, NUMERICS)


class WorldError(ValueError):
    """The number of ranks does not suit the run."""

    exit_code = WORLD


def cause_and_remedy(words: str) -> tuple[str, str]:
    """The words before and after the last ": "; without one, all of them are the cause."""
    cause, _, remedy = words.rpartition(": ")
    return (cause, remedy) if cause else (words, "")


# ---- the last line on screen


def last_words(message: str) -> None:
    """Print `message` on standard error, and have torchrun repeat it in its report."""
    print(message, file=sys.stderr, flush=True)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    # what only repeats the message may fail, as on a full disk: the exit code must not change
    with contextlib.suppress(OSError):
        _write_error_file(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull), message)


def _write_error_file(path: str, message: str) -> None:
    """Give torchrun's report the message, which it prints in place of "To enable traceback see"."""
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    content = {"message": {"message": message, "extraInfo": extra}}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)


# ---- screens that go away


class Screens:
    """Standard output and error of a run that goes on when nobody reads them any more.

    In `train.py | tee log`, Ctrl-C ends both programs: a print must not end the run before it has
    saved.
    """

    def guard(self):
        """From now on, what cannot be written is dropped."""
        self.before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Screen(sys.stdout), _Screen(sys.stderr)

    def restore(self):
        """The streams as they were."""
        sys.stdout, sys.stderr = self.before


class _Screen:
    """A stream of text that drops what its file refuses; everything else is the stream's own."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write the text, if that is possible."""
        try:
            return self.stream.write(text)
        except OSError as error:
            self._refused(error)
            return len(text)

    def flush(self):
        """Flush the stream, if that is possible."""
        try:
            self.stream.flush()
        except OSError as error:
            self._refused(error)

    def _refused(self, error: OSError):
        # nobody will read this pipe or terminal again; a full disk may have room later
        if error.errno in (errno.EPIPE, errno.EIO):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
