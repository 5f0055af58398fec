"""The fault matrix at its CI trial counts."""

import subprocess
import sys
from pathlib import Path

import pytest

from selfcheck import fault_matrix

ROOT = Path(__file__).parent.parent
EVERY = [row for rows in fault_matrix.GROUPS.values() for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("group", fault_matrix.GROUPS)
def test_every_row_of_the_fault_matrix_holds(group):
    """In a process that forks before it starts a thread, which this one may have done."""
    command = [sys.executable, "-m", "selfcheck.fault_matrix", "--rows", group]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_number_stands_for_two_rows():
    assert len({row.number for row in EVERY}) == len(EVERY)
