"""What every other figure rests on: the tests that need a GPU, and the Triton tile bodies against
float64, both compiled and run here.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

from benchmarks import linear_ce
from benchmarks.gpu.jobs import Job, Place
from benchmarks.record import Run, Table, attempt

ROOT = Path(__file__).parent.parent.parent
SECONDS = 100
MOST_SECONDS = 190  # before the job itself is killed, so that the reason is said
TABLE = Table(
    "exact", "Exact on this device before anything is timed", {"what": "text", "result": "text"}
)


def jobs(place: Place) -> list[Job]:
    """The bodies before the losses of all lengths, the tests when the first figures are there."""
    return [
        Job("exact, Triton tile bodies", 10.5, 30, lambda run: tile_bodies(run, place)),
        Job("exact, tests marked gpu", 12.5, SECONDS, lambda run: marked_tests(run, place)),
    ]


def tile_bodies(run: Run, place: Place):
    """The loss's elementwise bodies, eager, compiled and Triton."""
    if not place.cuda:
        run.note(
            "Triton tile bodies: need a CUDA device (tests/test_fused_linear_ce.py runs "
            "them interpreted)"
        )
        return
    if not importlib.util.find_spec("triton"):
        run.note("Triton tile bodies: triton is not installed (pip install triton)")
        return
    for name, bodies in linear_ce.variants().items():
        fine, why = attempt(linear_ce.check, name, *bodies)
        run.row(
            TABLE,
            what=f"loss tile bodies, {name}",
            result="within rounding of float64" if fine else why or "fails",
        )
        if not fine:
            run.fail(f"loss tile bodies, {name}: {why or 'off float64'}")


def marked_tests(run: Run, place: Place):
    """`pytest -m gpu` in a process of its own."""
    if not place.cuda:
        run.note("tests marked gpu: need a CUDA device")
        return
    if not importlib.util.find_spec("pytest"):
        run.note("tests marked gpu: pytest is not installed (pip install -r requirements-dev.txt)")
        return
    code, last = pytest_gpu()
    run.row(TABLE, what="python -m pytest -m gpu", result=last)
    if code:
        run.fail(f"python -m pytest -m gpu: {last}")


def pytest_gpu() -> tuple[int, str]:
    """(exit code, last line) of the marked tests; code 124 where they take too long."""
    files = [
        str(path)
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    ]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 124, f"not done after {MOST_SECONDS} s: run it alone"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return done.returncode, lines[-1].strip("= ") if lines else "no output"
