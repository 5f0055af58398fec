"""How a run ends: the exit codes, and the exceptions that carry them.

An exception with an attribute `exit_code` ends a program with one line and that code; a ValueError
without one is bad input. Its words say what happened and, after the last ": ", what to do about it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from files.durable import StorageError as StorageError

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


def code_of(error: BaseException, otherwise: int = 1) -> int:
    """The exit code that `error` carries, or `otherwise`."""
    return getattr(error, "exit_code", otherwise)


def cause_and_remedy(words: str) -> tuple[str, str]:
    """The words before and after the last ": "; without one, all of them are the cause."""
    cause, _, remedy = words.rpartition(": ")
    return (cause, remedy) if cause else (words, "")


# ---- the last line on screen


def last_words(message: str) -> None:
    """Print `message` on standard error, where nothing comes after it, under torchrun either."""
    print(message, file=sys.stderr, flush=True)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        _write_error_file(report, message)
    if not _will_restart():
        _say_after_torchrun(message)


def _write_error_file(path: str, message: str) -> None:
    """Give torchrun's report the message, which it prints in place of "To enable traceback see"."""
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    content = {"message": {"message": message, "extraInfo": extra}}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)


def _will_restart() -> bool:
    """Whether torchrun will start its ranks again (--max_restarts), so that it does not end now."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return restarts < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def _say_after_torchrun(message: str) -> None:
    """Have the message printed below the report of torchrun, the parent of this rank.

    In a session of its own, the process outlives the group of this rank, which torchrun kills.
    """
    program = str(Path(__file__).with_name("epilogue.py"))
    subprocess.Popen(
        [sys.executable, "-I", "-S", program, str(os.getppid()), message],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
