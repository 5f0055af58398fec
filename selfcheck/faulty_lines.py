"""The faults of `selfcheck.mutations`: one wrong line each, and the tests that should notice it.

`old` must occur exactly once in its file. When you change that line, change it here too; when the
fault no longer makes sense, replace it with another of the same part.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A wrong line: the text `old` of `file` replaced by `new`, and arguments of pytest that select
    the tests which should notice it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""  # why no test notices it, if that is known


FAULTS: tuple[Fault, ...] = ()
