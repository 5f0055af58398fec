"""Do the tests notice a fault? `python -m selfcheck.mutations [--only NAMES] [--list]`.

Each fault of `selfcheck.faulty_lines` is a small edit of the source. The runner copies the tree to
a temporary folder, applies one fault at a time, runs the tests that should notice it, and
prints a line for each. Then it runs the tests that failed once more without any fault: one that
fails then too has noticed nothing.

The exit code is 0 if the tests noticed every fault except those that are known to survive, 1 if
not, and 2 for bad input. All faults take about ten minutes on one core.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from flags import Parser
from selfcheck.faulty_lines import FAULTS, Fault

ROOT = Path(__file__).parent.parent
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".venv-cpu", "__pycache__", ".pytest_cache", "runs"
)
SECONDS = 600  # that the tests of one fault may take
PASSED, FAILED = 0, 1  # exit codes of pytest


@dataclass(frozen=True)
class Outcome:
    """What came of one fault."""

    fault: Fault
    verdict: str  # "caught", "survived", or what kept the tests from running
    failing_test: str = ""
    seconds: float = 0.0


def main(args: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = Parser(prog="mutations", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="parts of names, separated by commas"
    )
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    given = parser.parse_args(args)
    try:
        faults = select(given.only)
    except ValueError as error:
        parser.exit(2, f"mutations: error: {error}\n")

    if given.list:
        for fault in faults:
            print(f"{fault.name:<44} {fault.file}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
        return report(run_all(tree, faults))


def select(words: str) -> list[Fault]:
    """The faults whose names contain one of these texts, which commas separate; ValueError if there
    is none.
    """
    parts = [part.strip() for part in words.split(",")]
    chosen = [fault for fault in FAULTS if any(part in fault.name for part in parts)]
    if not chosen:
        raise ValueError(f"no fault has {words!r} in its name: see --list")
    return chosen


def run_all(tree: Path, faults: list[Fault]) -> list[Outcome]:
    """Try each fault in the copy of the tree; a test that also fails without it does not count."""
    outcomes = []
    for fault in faults:
        outcome = run(tree, fault)
        print(f"{outcome.verdict:<9} {fault.name} ({outcome.seconds:.0f} s)", flush=True)
        if outcome.failing_test:
            print(f"          by {outcome.failing_test}", flush=True)
        outcomes.append(outcome)

    caught_by = sorted({outcome.failing_test for outcome in outcomes} - {""})
    failing = failing_without_a_fault(tree, caught_by) if caught_by else []
    return [
        replace(one, verdict="fails without the fault") if one.failing_test in failing else one
        for one in outcomes
    ]


def failing_without_a_fault(tree: Path, tests: list[str]) -> list[str]:
    """Which of these tests fail on the code as it is."""
    print(f"running the {len(tests)} tests that failed, without a fault", flush=True)
    done = pytest(tree, *tests)
    if done.returncode not in (PASSED, FAILED):
        raise RuntimeError(f"pytest ended with code {done.returncode}:\n{done.stdout}")
    return failing_tests(done)


def run(tree: Path, fault: Fault) -> Outcome:
    """Apply one fault, run its tests, and take it back."""
    path = tree / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        return Outcome(fault, f"the old text occurs {text.count(fault.old)} times in {fault.file}")

    start = time.monotonic()
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        done = pytest(tree, "-x", *fault.tests)
    except subprocess.TimeoutExpired:
        return Outcome(fault, f"the tests took more than {SECONDS} s")
    finally:
        path.write_text(text, encoding="utf-8")
    return judged(fault, done, time.monotonic() - start)


def judged(fault: Fault, done: subprocess.CompletedProcess, seconds: float) -> Outcome:
    """Read the result of pytest."""
    if done.returncode == PASSED:
        return Outcome(fault, "survived", seconds=seconds)
    failing = failing_tests(done)
    if done.returncode == FAILED and failing:
        return Outcome(fault, "caught", failing[0], seconds)
    last = done.stdout.strip().splitlines()[-1:]
    return Outcome(fault, f"pytest ended with code {done.returncode}: {''.join(last)}")


def pytest(tree: Path, *args: str) -> subprocess.CompletedProcess:
    """Run tests in the copy, without bytecode: two edits may have the same time and size."""
    environment = os.environ | dict(PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *args]
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS
    )


def failing_tests(done: subprocess.CompletedProcess) -> list[str]:
    """The tests that pytest's summary names."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", done.stdout, re.M)


def report(outcomes: list[Outcome]) -> int:
    """Print the faults that no test noticed, and the count; the exit code."""
    missed = [outcome for outcome in outcomes if outcome.verdict != "caught"]
    for outcome in missed:
        reason = outcome.fault.survives or "add or sharpen a test"
        print(f"{outcome.fault.name}: {outcome.verdict} ({reason})")
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} faults are caught")

    unexpected = [one for one in missed if one.verdict != "survived" or not one.fault.survives]
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
