"""Measures every speed and memory claim of longhaul on one GPU, next to its peers, in one run of
ten minutes: `python -m benchmarks.gpu --out FOLDER`.

Parts: machine, smoke, attention, step, loss, decode, profile, exact, memory, transformers. The most
important measurements of all parts come first; those for which no time is left are listed as
skipped. Each job has a process of its own, which is killed after twice its estimated time: a kernel
that reads out of bounds or never ends costs one job. A job that crashes runs again with
CUDA_LAUNCH_BLOCKING=1, which tells the line.

FOLDER/results.json and results.md have every result as soon as it is known, with hardware, driver,
versions and clocks; errors.txt has every traceback; results.tar.gz, written last, also has what
each job printed. Code that fails its check against float64 is not timed. Without a GPU,
--toy runs everything at toy sizes on one CPU thread, and the report says so. Keep a run with
`--out benchmarks/results/NAME`, and say in docs/RESULTS.md what it found. Exit code 0: done; 1: a
part of longhaul is wrong or failed; 2: bad input, or a GPU that torch cannot use.
"""

import faulthandler
import json
import os
import re
import shutil
import signal
import sys
import tarfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from benchmarks import record
from benchmarks.gpu import (
    BEGAN,
    attention,
    decoding,
    exact,
    loss,
    machine,
    memory,
    precompile,
    profiles,
    rehearsal,
    smoke,
    step,
    transformers_memory,
)
from benchmarks.gpu.children import DEVICE_LOST, Child, End, Order, run_all
from benchmarks.gpu.jobs import Job, Place, named, processes
from benchmarks.gpu.schedule import PATIENCE, Schedule
from benchmarks.record import Run, attempt, free, nvidia_smi
from longhaul import cli, dist
from longhaul.cli import flag

PARTS: dict[str, ModuleType] = dict(
    machine=machine,
    smoke=smoke,
    attention=attention,
    step=step,
    loss=loss,
    decode=decoding,
    profile=profiles,
    exact=exact,
    memory=memory,
    transformers=transformers_memory,
)
PROGRAM = "benchmarks.gpu"
ROOT = Path(__file__).parent.parent.parent
TOY = "Toy sizes on {}: shows that everything runs, and claims nothing"
PACKING = 8  # seconds before the deadline that are kept for the last page and the archive
ARCHIVE = "results.tar.gz"
JOBS = "jobs.tmp"  # folder of what each job writes, until the archive has it


@dataclass(frozen=True)
class GpuConfig:
    """What to measure, until when, where to write."""

    out: str = flag("runs/gpu", "folder of the results", group="run")
    only: str = flag((), f"parts, of {', '.join(PARTS)}; none: all", many=True, group="run")
    deadline: float = flag(
        9.0,
        "minutes after the start of the interpreter at which everything has ended and is written; "
        "the most important jobs come first",
        group="run",
    )
    toy: bool = flag(False, "toy sizes, on a CPU too: shows that everything runs", group="run")
    job: str = flag(
        "",
        "run this one job, in this process, into its folder below --out: for a debugger or "
        "compute-sanitizer",
        group="run",
    )
    wait: bool = flag(
        False,
        "with --job: begin when a line comes on standard input; torch is loaded meanwhile",
        group="run",
    )
    rehearse: str = flag(
        "",
        "run nothing; show when each job would begin and end, with the durations of this "
        "results.json, or with the estimates if none is given",
        bare=rehearsal.ESTIMATES,
        group="without a GPU",
    )
    precompile: str = flag(
        "",
        "run nothing; compile the Triton kernels into this folder, for the machine with the GPU to "
        "use as its TRITON_CACHE_DIR",
        group="without a GPU",
    )
    capability: int = flag(
        90,
        "compute capability times ten of the GPU for --precompile: 80, 86, 89, 90, 100 or 120",
        group="without a GPU",
    )

    def __post_init__(self):
        unknown = [name for name in self.parts if name not in PARTS]
        if unknown:
            raise ValueError(f"--only {' '.join(unknown)}: choose from {', '.join(PARTS)}")
        if not 0 < self.deadline < 1e4:
            raise ValueError(f"--deadline {self.deadline} is out of range: give minutes above 0")

    @property
    def parts(self) -> list[str]:
        """Names of parts, whether commas or spaces stand between them."""
        return [name for word in self.only for name in word.split(",") if name] or list(PARTS)

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        words = [f"python -m {PROGRAM} --out {self.out}"]
        if self.only:
            words.append(f"--only {','.join(self.parts)}")
        if self.deadline != 9:
            words.append(f"--deadline {self.deadline:g}")
        if self.toy:
            words.append("--toy")
        return " ".join(words)


def main(
    args: list[str] | None = None,
    parts: Mapping[str, ModuleType] = PARTS,
    program: str = PROGRAM,
    began: float = BEGAN,
) -> int:
    """The command line; returns the exit code.

    `parts` have the jobs; `program` is the module whose main this is, which is started again for
    each of them; `began` is when, on time.monotonic's clock.
    """
    try:
        cfg = cli.parse(GpuConfig, args, __doc__)
        if cfg.rehearse:
            return rehearsal.rehearse(cfg.rehearse, jobs_of(cfg, parts, rehearsal.A_GPU), end(cfg))
        if cfg.precompile:
            return precompile.into(Path(cfg.precompile), cfg.capability)
        if cfg.job:
            job = named(jobs_of(cfg, parts, place(cfg)), cfg.job)
            if cfg.wait and not sys.stdin.readline():
                return 0  # nobody is left to say so
            return ended_here(run_here(job, Path(cfg.out), place(cfg)))
    except ValueError as error:
        print(f"benchmarks.gpu: error: {error}", file=sys.stderr)
        return 2
    return measure(cfg, parts, program, began)


def jobs_of(cfg: GpuConfig, parts: Mapping[str, ModuleType], place: Place) -> list[Job]:
    """All jobs that are asked for."""
    found = []
    for name, part in parts.items():
        if not cfg.only or name in cfg.parts:
            found += part.jobs(place)
    return found


def end(cfg: GpuConfig) -> float:
    """When the last job must have ended, in seconds since the interpreter started."""
    return max(60 * cfg.deadline - PACKING, 0.0)


def place(cfg: GpuConfig) -> Place:
    """This machine's first GPU, or its CPU. It creates no CUDA context."""
    device = dist.choose_device("auto", dist.World())
    return Place(device, cfg.toy or device.type == "cpu")


# ---- the whole run


def measure(cfg: GpuConfig, parts: Mapping[str, ModuleType], program: str, began: float) -> int:
    """All jobs that the time allows, in the order of their importance; the exit code."""
    where = place(cfg)
    refused = machine.refusal(where.device, cfg.toy)
    if refused:
        print(f"benchmarks.gpu: error: {refused}", file=sys.stderr)
        return 2

    session = Session(cfg, where, jobs_of(cfg, parts, where), program, began)
    signal.signal(signal.SIGTERM, stop)
    try:
        session.run_all()
    finally:
        session.drop_ahead()
        session.write()
        pack(session.folder)
        remove_jobs(session.folder)
    for words in session.data["failures"]:
        print(f"FAILED: {words}")
    names = ", ".join(sorted(path.name for path in session.folder.iterdir() if path.is_file()))
    print(f"written to {session.folder}: {names}")
    return 1 if session.data["failures"] else 0


def stop(number: int, frame) -> None:
    """End the run as Ctrl-C does, with what has been found."""
    raise KeyboardInterrupt


class Session:
    """The processes of a run, and what they have found so far."""

    def __init__(self, cfg: GpuConfig, place: Place, jobs: list[Job], program: str, began: float):
        self.cfg = cfg
        self.place = place
        self.program = program
        self.began = began
        self.folder = Path(cfg.out)
        self.schedule = Schedule(jobs, end(cfg))
        self.folders: list[Path] = []  # of the jobs that have begun, in their order
        self.seen: dict[Path, int] = {}  # when their results were last read
        self.ahead: Child | None = None  # the process that probably comes next, torch loaded

        device = "GPU" if place.cuda else "CPU"
        label = TOY.format(device) if place.toy else device
        self.data = dict(label=label, toy=place.toy, command=cfg.command, where={})
        self.data |= dict(tables={}, notes=[], skipped=[], failures=[], jobs=[])
        remove_jobs(self.folder)  # of an earlier run
        (self.folder / "errors.txt").unlink(missing_ok=True)
        self.own = self.data  # without what the jobs wrote
        self.write()

    @property
    def now(self) -> float:
        """Seconds since the interpreter started."""
        return time.monotonic() - self.began

    def run_all(self) -> None:
        """Every job for which there is time."""
        while True:
            job = self.schedule.next(self.now)
            self.own["skipped"] = list(self.schedule.skipped)
            if job is None:
                return
            self.run(job)

    def run(self, job: Job) -> None:
        """One job in its process, or its children in theirs."""
        begins = self.now
        limit = self.schedule.limit(job, begins)
        print(f"---- {begins:,.0f} s: {job.name}, at most {limit:,.0f} s", flush=True)
        parts = processes([job])
        if not job.is_repetition:  # its times mean nothing
            self.folders += [self.folder / JOBS / part.folder for part in parts]
        orders = [self.order(part) for part in parts]
        until = self.began + begins + limit
        ready = self.take_ahead(orders[0])
        self.start_ahead()

        at_once = smoke.at_once() if job.children else 1
        whole = True  # its time tells how long others will take
        for ended in run_all(orders, at_once, until, self.write_if_new, ready):
            part = next(part for part in parts if part.name == ended.name)
            self.take(part, ended)
            whole = whole and self.is_whole(part, ended)
        taken = self.now - begins
        if job.children:
            self.note_time(job, taken, "see its children", {})
        if whole:
            self.schedule.done(job, taken)
        self.write()

    def is_whole(self, job: Job, ended: End) -> bool:
        """Whether a job ended well, or was killed when its time was over; one that failed was
        short.
        """
        return ended.timed_out or not (ended.words or failed(self.folder / JOBS / job.folder))

    def take_ahead(self, order: Order) -> Child | None:
        """The process that was started ahead if it is the one that is needed now."""
        if self.ahead and self.ahead.order != order:
            self.drop_ahead()
        ready = self.ahead
        self.ahead = None
        return ready

    def start_ahead(self) -> None:
        """Start the process that comes next if all goes as planned."""
        if self.schedule.waiting:
            first, *_ = processes(self.schedule.waiting[:1])
            self.ahead = Child(self.order(first))

    def drop_ahead(self) -> None:
        """End the process that was started ahead."""
        if self.ahead:
            self.ahead.kill()
            self.ahead = None

    def order(self, job: Job) -> Order:
        """The process of a job."""
        command = [sys.executable, "-m", self.program, "--wait"]
        command += ["--job", job.name, "--out", str(self.folder)]
        if self.cfg.toy:
            command.append("--toy")
        log = self.folder / JOBS / job.folder / "log.txt"
        # what a job printed before it is killed must be in its log
        environment = {"PYTHONUNBUFFERED": "1"} | job.environment
        return Order(job.name, command, log, PATIENCE * job.seconds, environment)

    def take(self, job: Job, ended: End) -> None:
        """Note how a job ended, keep its errors, and repeat it if it crashed."""
        folder = self.folder / JOBS / job.folder
        self.note_time(job, ended.seconds, ended.words or "well", clocks_of(folder))
        keep_errors_of(folder, ended, self.folder / "errors.txt")
        if ended.words:
            cause = cause_of(folder)
            self.own["failures"].append(f"{job.name}: {ended.words}{f': {cause}' if cause else ''}")
        if ended.crashed and not job.is_repetition:
            self.schedule.add(job.again())
        if job.gate and (ended.words or failed(folder)):
            self.schedule.close(f"{job.name} did not end well")

    def note_time(self, job: Job, seconds: float, ended: str, clocks: dict) -> None:
        """How long a job took, next to its estimate."""
        line = {"job": job.name, "estimate": job.seconds, "seconds": round(seconds, 1)}
        self.own["jobs"].append(clocks | line | {"ended": ended})
        print(f"     {seconds:,.0f} s: {job.name}: {ended}", flush=True)

    def write_if_new(self) -> None:
        """Write all results if a job has written some."""
        paths = [folder / "results.json" for folder in self.folders]
        seen = {path: path.stat().st_mtime_ns for path in paths if path.exists()}
        if seen != self.seen:
            self.seen = seen
            self.write()

    def write(self) -> None:
        """All results so far, merged."""
        pieces = []
        for folder in self.folders:
            path = folder / "results.json"
            if path.exists():
                pieces.append(json.loads(path.read_text(encoding="utf-8")))
        self.data = record.merged(self.own, pieces)
        for piece in pieces:
            self.data["where"] = self.data["where"] | piece["where"]
        device = self.data["where"].get("device")
        if device:
            self.data["label"] = TOY.format(device) if self.place.toy else device
        record.write(self.folder, self.data)


def failed(folder: Path) -> bool:
    """Whether a job found something wrong."""
    path = folder / "results.json"
    return path.exists() and bool(json.loads(path.read_text(encoding="utf-8"))["failures"])


def clocks_of(folder: Path) -> dict:
    """What a job noted of the device's clocks at its end; nothing if it did not come so far."""
    path = folder / "results.json"
    if not path.exists():
        return {}
    lines = json.loads(path.read_text(encoding="utf-8"))["jobs"]
    return lines[-1] if lines else {}


def keep_errors_of(folder: Path, ended: End, path: Path) -> None:
    """Append a job's tracebacks to the run's errors; its last output too if it did not end well."""
    texts = []
    errors = folder / "errors.txt"
    if errors.exists():
        texts.append(errors.read_text(encoding="utf-8"))
    if ended.words:
        output = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        texts.append("".join(output.splitlines(keepends=True)[-80:]))
    if texts:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"==== {ended.name}: {ended.words or 'ended well'}\n" + "\n".join(texts))


def cause_of(folder: Path) -> str:
    """The last error of a job, with the last line of this repository that led to it."""
    path = folder / "errors.txt"
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8").strip()
    named = [
        one for one in text.splitlines() if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", one)
    ]
    error = named[-1][:300] if named else text.splitlines()[-1][:300]
    lines = re.findall(rf'File "{re.escape(str(ROOT))}/([^"]+)", line (\d+)', text)
    own = [f"{file}:{line}" for file, line in lines if "site-packages" not in file]
    return f"{error} (at {own[-1]})" if own else error


def remove_jobs(folder: Path) -> None:
    """Remove the folders of jobs, which the archive has, so that few files are left to copy."""
    jobs = folder / JOBS
    if jobs.exists():
        shutil.rmtree(jobs)


def pack(folder: Path) -> None:
    """One archive of everything in the folder."""
    temporary = folder / f"{ARCHIVE}.tmp"
    with tarfile.open(temporary, "w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name not in (ARCHIVE, temporary.name):
                archive.add(path, arcname=str(Path(folder.name) / path.relative_to(folder)))
    temporary.replace(folder / ARCHIVE)


# ---- one job, in a process of its own


def run_here(job: Job, folder: Path, place: Place) -> int:
    """Run a job in this process and write what it finds; the exit code."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # before it is killed: where it is
    own = folder / JOBS / job.folder
    record.keep_errors(own / "errors.txt")
    if place.cuda:
        torch.cuda.set_device(place.device)
    else:
        torch.set_num_threads(1)  # process CPU time of one thread does not depend on what else runs

    earlier = tables_of(folder / "results.json")
    run = Run(own, job.name, "", {}, place.toy, earlier=earlier)
    began = time.monotonic()
    try:
        _, why = attempt(job.run, run)
        if place.cuda:
            torch.cuda.synchronize(place.device)  # a late error belongs to this job
    except torch.AcceleratorError as error:
        record.ERRORS.info("%s", traceback.format_exc())
        print(error, file=sys.stderr, flush=True)
        return DEVICE_LOST
    except Exception:  # of whatever kind, it is written down and raised again
        record.ERRORS.info("%s", traceback.format_exc())
        raise
    if why == "out of memory":
        run.note(f"{job.name}: out of memory")
    elif why:
        run.fail(f"{job.name}: {why}")
    clocks = nvidia_smi(place.device) if place.cuda else {}
    run.timing(job.name, time.monotonic() - began, clocks)
    free()
    return 0


def ended_here(code: int) -> int:
    """The exit code; a process without its device ends at once, since cleaning up may hang."""
    if code == DEVICE_LOST:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def tables_of(path: Path) -> dict:
    """The tables that earlier jobs have filled."""
    if not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))["tables"]
