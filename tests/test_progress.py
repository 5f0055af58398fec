"""The progress line of scripts/test.sh."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import progress

ROOT = Path(__file__).parent.parent
EXAMPLE = """
import pytest

def test_good(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.skip
def test_skipped(): pass

def test_bad(): raise AssertionError("this is why")
"""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def started(stream, total: int, slow: int = 0):
    """A Progress, and the list that holds its clock."""
    now = [0.0]
    counter = progress.Progress(stream, lambda: now[0])
    counter.total = total
    counter.slow = slow
    return counter, now


def test_the_time_left_is_that_of_the_other_tests_at_the_speed_so_far():
    counter, now = started(io.StringIO(), total=1200)
    for _ in range(400):
        counter.finish("test", is_slow=False, has_failed=False)
    now[0] = 65.0
    assert counter.line() == "400 of 1,200 tests done; 1:05 elapsed, about 2:10 left"


def test_a_slow_test_counts_as_many():
    counter, now = started(io.StringIO(), total=progress.SLOW_WEIGHT + 1, slow=1)
    counter.finish("test", is_slow=True, has_failed=False)
    now[0] = 60.0
    assert counter.line().endswith("1:00 elapsed, about 1:00 left")


def test_a_file_gets_a_line_every_half_minute_and_the_name_of_what_fails():
    stream = io.StringIO()
    counter, now = started(stream, total=100)
    for index in range(100):
        now[0] += 1.0
        counter.finish(f"test {index}", is_slow=False, has_failed=index == 40)
    assert stream.getvalue().splitlines() == [
        "30 of 100 tests done; 0:30 elapsed, about 1:10 left",
        "FAILED test 40",
        "60 of 100 tests done, 1 failed; 1:00 elapsed, about 0:40 left",
        "90 of 100 tests done, 1 failed; 1:30 elapsed, about 0:10 left",
        "100 of 100 tests done, 1 failed; 1:40 elapsed",
    ]


def test_a_terminal_shows_one_line_that_is_rewritten():
    stream = Terminal()
    counter, _ = started(stream, total=3)
    for index in range(3):
        counter.finish(f"test {index}", is_slow=False, has_failed=False)
    shown = stream.getvalue()
    assert shown.count("\n") == 1 and shown.count("\r") == 3
    assert shown.endswith("3 of 3 tests done; 0:00 elapsed\n")


@pytest.mark.slow
def test_pytest_prints_it_with_workers_and_without(tmp_path):
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.progress",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
    for workers in ([], ["-n", "2", "--dist", "loadfile"]):
        done = subprocess.run([*command, *workers], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        assert "FAILED test_example.py::test_bad" in lines
        assert any(
            re.fullmatch(r"4 of 4 tests done, 1 failed; 0:\d\d elapsed", one) for one in lines
        )
        assert "this is why" in done.stdout and "2 passed, 1 skipped" in done.stdout
