"""A pytest plugin that says how far the tests are, instead of printing a letter for each.

    812 of 2,304 tests done, 1 failed; 1:40 elapsed, about 2:50 left

`scripts/test.sh` loads it with `-p tests.progress`. On a terminal it rewrites the line in place; in
a log file it adds a line every half minute. It names a test that fails at once.
"""

import sys
import tempfile
import time
from pathlib import Path

import pytest

SECONDS_BETWEEN_LINES = 30  # if the output is a file
SLOW_WEIGHT = 25  # a test marked slow takes about as long as this many others


class Progress:
    """Counts the tests that are done, and prints how many are left."""

    def __init__(self, stream=None, clock=time.monotonic):
        self.stream = stream or sys.stdout
        self.clock = clock
        self.start = clock()
        self.last_line = self.start
        self.total = 0
        self.slow = 0  # of the total
        self.done = 0
        self.slow_done = 0
        self.failed = 0

    def finish(self, name: str, is_slow: bool, has_failed: bool):
        """Count a test that is done and say where the run is."""
        self.done += 1
        if is_slow:
            self.slow_done += 1
        if has_failed:
            self.failed += 1
            self._print(f"FAILED {name}", end="\n")

        is_last = self.done == self.total
        if self.stream.isatty():
            self._print(self.line(), end="\n" if is_last else "")
        elif is_last or self.clock() - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = self.clock()
            self._print(self.line(), end="\n")

    def line(self) -> str:
        """How many tests are done, and the time: the rest at the speed so far."""
        elapsed = self.clock() - self.start
        text = f"{self.done:,} of {self.total:,} tests done"
        if self.failed:
            text += f", {self.failed} failed"
        text += f"; {minutes(elapsed)} elapsed"

        work_done = work(self.done, self.slow_done)
        work_left = work(self.total, self.slow) - work_done
        if work_done and work_left > 0:
            text += f", about {minutes(elapsed * work_left / work_done)} left"
        return text

    def _print(self, text: str, end: str):
        if self.stream.isatty():
            text = f"\r\x1b[K{text}"  # over the line that is there
        print(text, end=end, file=self.stream, flush=True)


def work(tests: int, slow: int) -> int:
    """The tests, each slow one counted as SLOW_WEIGHT."""
    return tests + (SLOW_WEIGHT - 1) * slow


def minutes(seconds: float) -> str:
    """2:05 for 125 seconds."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}"


# ---- the hooks of pytest


class Reports:
    """In the process that prints: feeds a Progress. With pytest-xdist other processes, the workers,
    run the tests; each writes down how many slow ones it found, which their names do not tell.
    """

    def __init__(self):
        self.progress = Progress()
        self.failed: set[str] = set()
        self.folder = tempfile.TemporaryDirectory()

    def pytest_collection_finish(self, session: pytest.Session):
        """Without workers."""
        self.progress.total = len(session.items)
        self.progress.slow = count_slow(session)

    def pytest_configure_node(self, node):
        """Before a worker starts."""
        node.workerinput["slow_tests"] = str(Path(self.folder.name) / node.gateway.id)

    def pytest_xdist_node_collection_finished(self, node, ids: list[str]):
        """A worker has found the tests; every worker finds the same ones."""
        self.progress.total = len(ids)
        self.progress.slow = int(Path(node.workerinput["slow_tests"]).read_text())

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self):
        """No letter for a test."""
        category, _, _ = yield
        return category, "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport):
        """A phase of a test: setup, call or teardown, which is always the last."""
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when == "teardown":
            has_failed = report.nodeid in self.failed
            self.progress.finish(report.nodeid, "slow" in report.keywords, has_failed)


class SlowTests:
    """In a worker: writes down how many slow tests there are."""

    def __init__(self, path: str):
        self.path = Path(path)

    def pytest_collection_finish(self, session: pytest.Session):
        self.path.write_text(str(count_slow(session)))


def count_slow(session: pytest.Session) -> int:
    slow = [item for item in session.items if item.get_closest_marker("slow")]
    return len(slow)


def pytest_configure(config: pytest.Config):
    worker = getattr(config, "workerinput", None)
    if worker is None:
        config.pluginmanager.register(Reports())
    elif "slow_tests" in worker:
        config.pluginmanager.register(SlowTests(worker["slow_tests"]))
