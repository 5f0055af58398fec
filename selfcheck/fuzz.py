"""Feed damaged and hostile bytes to everything that reads files from elsewhere: `python -m
selfcheck.fuzz [--inputs N] [--only NAME ...]`.

Each input is a good file, damaged by a generator of its own seed. It must be accepted, or refused
by one line that is a ValueError: any other exception, a crash of the process, more than 10 s or 100
MB is a failure, and the seed that shows it is printed. The readers run in a forked child, so that a
crash in a C or Rust parser is counted rather than suffered. Imports selfcheck.faults.readers of
ours.
"""

import importlib.util
import json
import mmap
import multiprocessing
import os
import random
import re
import signal
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from flags import Parser
from selfcheck.faults.readers import TARGETS, Target

INPUTS = 10_000
SECONDS = 10  # for one input
LIMIT_MB = 100  # above what the process had before the first input
NAMES = ("accepted", "refused", "wrong", "crashed")
# places in Shared
NEXT = 0
PEAK = 1
COUNTS = 2
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Result:
    """Counts over the inputs of one target, the peak above the start in MB, and what went wrong,
    with its seed.
    """

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


# ------------------------------------------------------------------------------------------ running


class Shared:
    """Numbers that a child leaves to its parent however it ends: the next seed, and a count for
    each of NAMES.
    """

    def __init__(self):
        self.memory = mmap.mmap(-1, 8 * (2 + len(NAMES)))

    def __getitem__(self, at: int) -> int:
        return struct.unpack_from("<q", self.memory, 8 * at)[0]

    def __setitem__(self, at: int, value: int):
        struct.pack_into("<q", self.memory, 8 * at, value)

    def count(self, name: str):
        self[COUNTS + NAMES.index(name)] += 1


def fuzz(target: Target, inputs: int) -> Result:
    """Run inputs 0 .. inputs - 1 of a target."""
    started = time.perf_counter()
    shared = Shared()
    failures = []
    with tempfile.TemporaryDirectory() as place:
        folder, log = Path(place, "files"), Path(place, "log")
        folder.mkdir()
        good = target.make(folder)
        target.read(folder)  # the good file is accepted; imports are made before the memory counts
        while shared[NEXT] < inputs:
            child = FORK.Process(target=_inputs, args=(target, good, folder, inputs, shared, log))
            child.start()
            child.join()
            if child.exitcode:
                failures.append(
                    f"{target.name} seed {shared[NEXT]}: {_last_words(child.exitcode, log)}"
                )
                shared.count("wrong" if child.exitcode > 0 else "crashed")
                shared[NEXT] += 1
    counts = [shared[COUNTS + at] for at in range(len(NAMES))]
    return Result(
        target.name, *counts, shared[PEAK] / 1e6, time.perf_counter() - started, tuple(failures)
    )


def _last_words(code: int, log: Path) -> str:
    """The error below the last traceback, or the signal that ended the child."""
    errors = re.findall(
        r"^\w[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*",
        log.read_text(encoding="utf-8", errors="replace"),
        re.MULTILINE,
    )
    if code > 0:
        return (errors or [f"exit code {code}"])[-1][:300]
    if -code == signal.SIGALRM:
        return "SIGALRM (it took too long)"
    return signal.Signals(-code).name


def _inputs(target: Target, good, folder: Path, inputs: int, shared: Shared, log: Path):
    """In the child: all inputs from the next one on. What is not a refusal ends it, and the parent
    starts another behind that input.
    """
    _write_to(log)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    for seed in range(shared[NEXT], inputs):
        shared[NEXT] = seed
        target.damage(random.Random(seed), good, folder)
        signal.alarm(SECONDS)
        shared.count("accepted" if _accepts(target, folder) else "refused")
        signal.alarm(0)
        if seed % 64 == 0 or seed == inputs - 1:
            shared[PEAK] = max(shared[PEAK], _status("VmHWM") - before)
    shared[NEXT] = inputs


def _accepts(target: Target, folder: Path) -> bool:
    try:
        target.read(folder)
        return True
    except ValueError as error:
        if isinstance(error, (UnicodeError, json.JSONDecodeError)) or "\n" in str(error):
            raise AssertionError(f"words that name no remedy: {error!r}") from None
        return False


def _write_to(log: Path):
    """What parsers print of every input, and a traceback, go to a file."""
    screen = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(screen, 1)
    os.dup2(screen, 2)


def _status(key: str) -> int:
    """A field of /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


HEAD = (
    f"{'reader':12} {'inputs':>8} {'accepted':>9} {'refused':>8} {'wrong':>6} {'crashed':>8} "
    f"{'peak MB':>8} {'s':>6}"
)


def line(one: Result) -> str:
    """A result, below HEAD."""
    inputs = one.accepted + one.refused + one.wrong + one.crashed
    return (
        f"{one.name:12} {inputs:8,} {one.accepted:9,} {one.refused:8,} {one.wrong:6} "
        f"{one.crashed:8} {one.peak_mb:8.1f} {one.seconds:6.1f}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m selfcheck.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--inputs",
        type=int,
        default=INPUTS,
        metavar="N",
        help="inputs of each reader",
    )
    parser.add_argument(
        "--only", nargs="+", choices=[target.name for target in TARGETS], help="these readers"
    )
    given = parser.parse_args(arguments)
    if importlib.util.find_spec("zstandard") is None:
        parser.error("the package zstandard is missing: run pip install zstandard")
    if given.inputs < 1:
        parser.error(f"--inputs {given.inputs} tests nothing: give at least 1")

    results = []
    print(HEAD, flush=True)
    for target in TARGETS:
        if not given.only or target.name in given.only:
            results.append(fuzz(target, given.inputs))
            print("\n  ".join([line(results[-1]), *results[-1].failures[:10]]), flush=True)
    return 0 if all(one.fine for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
