"""What cannot be predicted, refused in one line that names the line of the user's file."""

import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import torch

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parents[1])
PACKAGES = sysconfig.get_paths()["purelib"]
LIBRARY = sysconfig.get_paths()["stdlib"]

ON_THE_CPU = (
    "the step asks for a CUDA device, which this machine does not have: build and run it on the "
    "CPU, target='cuda' says which device is predicted"
)
NO_NESTED = "nested tensors are not predicted: predict the padded batch, which needs more memory"

Entry = tuple[str, int | None]  # a file and a line


class Refused(ValueError):
    """A step that cannot be predicted: one line that says where, and what to do."""


class Stopped(BaseException):
    """The same for a script, whose `except Exception` shall not go on without it."""


def place() -> str:
    """The innermost line of the user's files that is running, as "file.py:12", and the line of an
    installed model if that is what it called.
    """
    return _place(_entries(traceback.extract_stack(sys._getframe(1))))


def place_of(raised: TracebackType | None) -> str:
    """The same for a traceback: where the error was raised."""
    return _place(_entries(traceback.extract_tb(raised)))


def lines() -> list[str]:
    """The lines that are running, innermost first, without those of PyTorch and of Python."""
    return [_line(entry) for entry in _entries(traceback.extract_stack(sys._getframe(1)))]


def _entries(stack: traceback.StackSummary) -> list[Entry]:
    """Innermost first, without PyTorch, Python and this package."""
    found = [(frame.filename, frame.lineno) for frame in reversed(stack)]
    return [entry for entry in found if not is_machinery(entry[0])]


def is_users(file: str) -> bool:
    """Whether a file is neither Python's nor of an installed package nor of this one."""
    return not file.startswith((PACKAGES, LIBRARY, TORCH, HERE, "<"))


def is_machinery(file: str) -> bool:
    if file.startswith(PACKAGES):
        return file.startswith(TORCH)
    return file.startswith((TORCH, HERE, LIBRARY, "<"))


def _place(entries: list[Entry]) -> str:
    if not entries:
        return "an unknown line"
    own = next((entry for entry in entries if not entry[0].startswith(PACKAGES)), None)
    if own is None or own == entries[0]:
        return _line(entries[0])
    return f"{_line(own)} (in {_line(entries[0])})"


def _line(entry: Entry) -> str:
    file, line = entry
    return f"{Path(file).name}:{line}"
