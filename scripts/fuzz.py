"""Feed damaged and hostile bytes to everything that reads files from elsewhere: `python -m scripts.fuzz [--inputs N] [--only NAME ...]`.

Each input is a good file, damaged by a generator of its own seed. It must be accepted, or refused by one line that is a ValueError:
any other exception, a crash of the process, more than 10 s or 100 MB is a failure, and the seed that shows it is printed.
The readers run in a forked child, so that a crash in a C or Rust parser is counted rather than suffered. Imports scripts.faults.readers of ours.
"""

import argparse
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.faults.readers import TARGETS, Target

INPUTS = 10_000
SECONDS = 10  # for one input
LIMIT_MB = 100  # above what the process had before the first input
NAMES = ("accepted", "refused", "wrong", "crashed")


@dataclass(frozen=True)
class Result:
    """Counts over the inputs of one target, the peak above the start in MB, and what went wrong, with its seed."""

    name: str
    accepted: int
    refused: int
    wrong: int
    crashed: int
    peak_mb: float
    seconds: float
    failures: tuple[str, ...]

    @property
    def fine(self) -> bool:
        return not (self.wrong or self.crashed) and self.peak_mb < LIMIT_MB


# ----------------------------------------------------------------------------------------------------------- running


class Shared:
    """Numbers that a child leaves to its parent however it ends: the next seed, and a count for each of NAMES."""

    def __init__(self):
        self.memory = mmap.mmap(-1, 8 * (2 + len(NAMES)))

    def __getitem__(self, at: int) -> int:
        return struct.unpack_from("<q", self.memory, 8 * at)[0]

    def __setitem__(self, at: int, value: int):
        struct.pack_into("<q", self.memory, 8 * at, value)


def fuzz(target: Target, inputs: int) -> Result:
    """Run inputs 0 .. inputs - 1 of a target."""
    started, shared, failures = time.perf_counter(), Shared(), []
    with tempfile.TemporaryDirectory() as folder:
        good = target.make(Path(folder))
        target.read(Path(folder))  # the good file is accepted; imports are made before the memory counts
        log = Path(folder).with_suffix(".log")
        while shared[0] < inputs:
            status = _in_child(lambda: _inputs(target, good, Path(folder), inputs, shared, log))
            if status:
                failures.append(f"{target.name} seed {shared[0]}: the process died with status {status}")
                shared[0], shared[2 + NAMES.index("crashed")] = shared[0] + 1, shared[2 + NAMES.index("crashed")] + 1
    failures += log.read_text(encoding="utf-8").splitlines()
    log.unlink()
    counts = [shared[2 + at] for at in range(len(NAMES))]
    return Result(target.name, *counts, shared[1] / 1e6, time.perf_counter() - started, tuple(failures))


def _in_child(function) -> int:
    """The exit status of `function()` in a forked child; -N where signal N ended it."""
    child = os.fork()
    if child == 0:
        function()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _inputs(target: Target, good, folder: Path, inputs: int, shared: Shared, log: Path):
    _quiet()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    with open(log, "a", encoding="utf-8") as file:
        for seed in range(shared[0], inputs):
            shared[0] = seed
            target.damage(random.Random(seed), good, folder)
            signal.alarm(SECONDS)
            shared_at = 2 + NAMES.index(_outcome(target, folder, seed, file))
            signal.alarm(0)
            shared[shared_at] += 1
            if seed % 256 == 0:
                shared[1] = max(shared[1], _status("VmHWM") - before)
    shared[0], shared[1] = inputs, max(shared[1], _status("VmHWM") - before)


def _outcome(target: Target, folder: Path, seed: int, log) -> str:
    try:
        target.read(folder)
        return "accepted"
    except BaseException as error:
        if isinstance(error, ValueError) and not isinstance(error, (UnicodeError, json.JSONDecodeError)) and "\n" not in str(error):
            return "refused"
        log.write(f"{target.name} seed {seed}: {type(error).__name__}: {str(error)[:200]!r}\n")
        log.flush()
        return "wrong"


def _quiet():
    """What C++ parsers print of every input goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _status(key: str) -> int:
    """A field of /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def table(results: list[Result]) -> str:
    """The results, a line each."""
    lines = [f"{'reader':12} {'inputs':>8} {'accepted':>9} {'refused':>8} {'wrong':>6} {'crashed':>8} {'peak MB':>8} {'s':>6}"]
    for one in results:
        inputs = one.accepted + one.refused + one.wrong + one.crashed
        lines.append(f"{one.name:12} {inputs:8,} {one.accepted:9,} {one.refused:8,} {one.wrong:6} {one.crashed:8} {one.peak_mb:8.1f} {one.seconds:6.1f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=INPUTS, metavar="N", help=f"inputs of each reader (default {INPUTS:,})")
    parser.add_argument("--only", nargs="+", choices=[target.name for target in TARGETS], help="these readers")
    given = parser.parse_args(arguments)
    results = [fuzz(target, given.inputs) for target in TARGETS if not given.only or target.name in given.only]
    print(table(results))
    for one in results:
        print("".join(f"  {failure}\n" for failure in one.failures[:10]), end="")
    return 0 if all(one.fine for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
