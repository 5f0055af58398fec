"""How a run ends: the exit codes, and the exceptions that carry them. StorageError is the disk's.

An exception with an attribute `exit_code` ends a program in one line and that code; a ValueError
without one is bad input, 2. Its words name what happened and, behind the last ": ", the remedy.
"""

from files.durable import StorageError as StorageError

DONE, BAD_INPUT, DATA, NO_CHECKPOINT, NUMERICS, STORAGE, WORLD, PREEMPTED = 0, 2, 3, 4, 5, 6, 7, 75


class Halt(Exception):
    """The end of a run that is under way, for a reason that a user can act on."""

    def __init__(self, words: str, exit_code: int):
        super().__init__(words)
        self.exit_code = exit_code


class NumericalHalt(Halt):
    """The numbers went wrong: the run must not go on as it is."""

    def __init__(self, words: str):
        super().__init__(words, NUMERICS)


class WorldError(ValueError):
    """The number of ranks does not suit the run."""

    exit_code = WORLD


def code_of(error: BaseException, otherwise: int = 1) -> int:
    """The exit code that `error` carries; `otherwise` where it carries none."""
    return getattr(error, "exit_code", otherwise)


def cause_and_remedy(words: str) -> tuple[str, str]:
    """Cut at the last ": "; without one, all is the cause."""
    cause, _, remedy = words.rpartition(": ")
    return (cause, remedy) if cause else (words, "")
