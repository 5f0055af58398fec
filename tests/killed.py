"""A run of several ranks that is killed in its third step and started again. The ranks are forked,
which is safe only before a thread has begun, so they have a process of their own:

    python -m tests.killed scripts.grade 2 FOLDER --flag ...
"""

import importlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from longhaul import step
from selfcheck.faults import process, runs
from selfcheck.faults.rows import require

ROOT = Path(__file__).parent.parent


def killed_and_resumed(module: str, words: Sequence[str], ranks: int, out: Path):
    """Run a program with these flags, which save each step, on so many ranks; kill -9 all of them
    and give the same command again. Its --output_dir is `out`.
    """
    command = [sys.executable, "-m", "tests.killed", module, str(ranks), str(out), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def main():
    """Both runs; Failed if the second one does not end, or does not go on from the first."""
    module, size, folder, *words = sys.argv[1:]
    out = Path(folder)
    marker = out.with_suffix(".marker")
    words += ["--output_dir", folder]
    start = partial(
        runs.start_ranks, words, size=int(size), main=importlib.import_module(module).main
    )

    first = start(log=out.with_suffix(".first"), before=partial(hold, marker))
    runs.wait_for(lambda: marker.exists() and (out / "step-00000002").exists())
    for rank in first:
        rank.signal(signal.SIGKILL)
    codes = [rank.wait() for rank in first]
    require(set(codes) == {-signal.SIGKILL}, f"{codes}: {first[0].words()[-2000:]}")

    second = start(log=out.with_suffix(".second"))
    codes = [rank.wait() for rank in second]
    said = second[0].words()
    require(set(codes) == {0} and "resumed" in said, f"{codes}: {said[-2000:]}")


def hold(marker: Path):
    """In a child: the third step leaves `marker` and waits, to be killed there."""
    process.held(step, "gradients", marker, seconds=60, call=3)


if __name__ == "__main__":
    main()
