"""How a run ends: the exit codes, and the exceptions that carry them.

An exception with an attribute `exit_code` ends a program with one line and that code; a ValueError
without one is bad input. Its words say what happened and, after the last ": ", what to do about it.
"""

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
