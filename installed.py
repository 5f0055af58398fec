"""Says in one line that longhaul is not installed for the Python that runs a command.

Every command imports this module first, before torch, so that a shell in which .venv is not active
gets a remedy instead of a traceback.
"""

import importlib.util
import os
import sys

LOWEST_PYTHON = (3, 11)
NEEDED = ("torch", "numpy", "sentencepiece", "safetensors", "tqdm")
ROOT = os.path.dirname(os.path.abspath(__file__))


def problem():
    """What this Python lacks; None if nothing is missing."""
    if sys.version_info < LOWEST_PYTHON:
        major, minor = sys.version_info[:2]
        return f"{sys.executable} is Python {major}.{minor}, and longhaul needs 3.11 or newer"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)}"
    return None


def remedy():
    """The two ways to run a command with everything that it needs."""
    venv = os.path.join(ROOT, ".venv")
    if os.path.exists(os.path.join(venv, "bin", "python")) and sys.prefix != venv:
        return (
            "give `source .venv/bin/activate` and the same command again, or run it with "
            ".venv/bin/python"
        )
    return (
        "bash scripts/quickstart.sh installs everything into .venv, and "
        "pip install -r requirements.txt into a Python of your own"
    )


def require():
    """End the program with one line and exit code 2 if something is missing."""
    found = problem()
    if found:
        sys.stderr.write(f"error: {found}: {remedy()}\n")
        sys.exit(2)


require()
