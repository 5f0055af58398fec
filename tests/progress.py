"""A pytest plugin that says how far the tests are, instead of printing a letter for each.

    812 of 2,304 tests done, 1 failed; 1:40 elapsed

`scripts/test.sh` loads it with `-p tests.progress`. On a terminal it rewrites the line in place; in
a log file it adds a line every half minute. It names a test that fails at once.
"""

import sys
import time

import pytest

SECONDS_BETWEEN_LINES = 30  # if the output is a file


class Progress:
    """Counts the tests that are done."""

    def __init__(self):
        self.stream = sys.stdout
        self.start = time.monotonic()
        self.last_line = self.start
        self.total = 0
        self.done = 0
        self.failed = 0

    def finish(self, name: str, has_failed: bool):
        """Count a test that is done and say where the run is."""
        self.done += 1
        if has_failed:
            self.failed += 1
            self._print(f"FAILED {name}", end="\n")

        is_last = self.done == self.total
        if self.stream.isatty():
            self._print(self.line(), end="\n" if is_last else "")
        elif is_last or time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            self._print(self.line(), end="\n")

    def line(self) -> str:
        """How many tests are done, and the time."""
        text = f"{self.done:,} of {self.total:,} tests done"
        if self.failed:
            text += f", {self.failed} failed"
        return f"{text}; {minutes(time.monotonic() - self.start)} elapsed"

    def _print(self, text: str, end: str):
        if self.stream.isatty():
            text = f"\r\x1b[K{text}"  # over the line that is there
        print(text, end=end, file=self.stream, flush=True)


def minutes(seconds: float) -> str:
    """2:05 for 125 seconds."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}"


# ---- the hooks of pytest


class Reports:
    """Feeds a Progress in the process that prints; with pytest-xdist others run the tests."""

    def __init__(self):
        self.progress = Progress()
        self.failed: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session):
        """Without workers."""
        self.progress.total = len(session.items)

    def pytest_xdist_node_collection_finished(self, node, ids: list[str]):
        """A worker has found the tests; every worker finds the same ones."""
        self.progress.total = len(ids)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self):
        """No letter for a test."""
        category, _, _ = yield
        return category, "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport):
        """A phase of a test: setup, call or teardown, which is always the last; of a test that
        ended its worker there is one report, without a phase.
        """
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when not in ("setup", "call"):
            self.progress.finish(report.nodeid, report.nodeid in self.failed)


def pytest_configure(config: pytest.Config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reports())
