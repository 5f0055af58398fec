"""How OpenMP's threads wait in every command: asleep, unless the user says otherwise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from base import installed

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="GNU's OpenMP library, which says how its threads wait"
)


def turns_of_waiting(command: str, **environment: str) -> int:
    """How often a thread of a command looks, by its OpenMP library, before it sleeps."""
    clean = {name: value for name, value in os.environ.items() if name not in installed.WAITING}
    done = subprocess.run(
        [sys.executable, *command.split(), "--help"],
        cwd=ROOT,
        env=clean | {"OMP_DISPLAY_ENV": "verbose"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)[1])


def test_threads_of_a_command_sleep_while_they_wait_unless_the_user_says_otherwise():
    assert turns_of_waiting("train.py") == 0
    assert turns_of_waiting("train.py", OMP_WAIT_POLICY="active") > 0
