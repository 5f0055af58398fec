"""Measures every speed and memory claim of longhaul on one GPU, next to its peers, in ten minutes:
`python -m benchmarks.gpu --out FOLDER`.

Parts: exact (the tests that need a GPU), loss, attention, step, memory. The most important
measurements of all parts come first; those for which no time is left are listed as skipped. Each
result is written to FOLDER/results.json and results.md as soon as it is known, with hardware,
driver, versions and clocks. Code that fails its check against float64 is not timed. Without a GPU
everything runs at toy sizes on one CPU thread, and the report says so. Keep a run with
`--out benchmarks/results/NAME`; `python -m benchmarks.report` then puts it into docs/BENCHMARKS.md.
Exit code 0: done; 1: a part of longhaul is wrong or failed; 2: bad input.
"""

import sys
import time
from dataclasses import dataclass
from types import ModuleType

import torch

from benchmarks.gpu import attention, exact, loss, memory, step
from benchmarks.gpu.jobs import Job, Place
from benchmarks.record import Run, attempt, free, nvidia_smi, where
from longhaul import cli, dist
from longhaul.cli import flag

PARTS: dict[str, ModuleType] = dict(
    exact=exact, loss=loss, attention=attention, step=step, memory=memory
)
TOY = "Toy sizes on {}: shows that everything runs, and claims nothing"


@dataclass(frozen=True)
class GpuConfig:
    """What to measure, for how long, where to write."""

    out: str = flag("runs/gpu", "folder for results.json and results.md", group="run")
    only: str = flag((), f"parts, of {', '.join(PARTS)}; none: all", many=True, group="run")
    minutes: float = flag(
        9.0,
        "after this time no job begins that would end later; the most important ones come first",
        group="run",
    )
    toy: bool = flag(False, "toy sizes on a GPU too: a rehearsal of about a minute", group="run")

    def __post_init__(self):
        unknown = [name for name in self.parts if name not in PARTS]
        if unknown:
            raise ValueError(f"--only {' '.join(unknown)}: choose from {', '.join(PARTS)}")
        if not 0 < self.minutes < 1e4:
            raise ValueError(f"--minutes {self.minutes} is out of range: give a number above 0")

    @property
    def parts(self) -> list[str]:
        """Names of parts, whether commas or spaces stand between them."""
        return [name for word in self.only for name in word.split(",") if name] or list(PARTS)

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        words = [f"python -m benchmarks.gpu --out {self.out}"]
        if self.only:
            words.append(f"--only {','.join(self.parts)}")
        if self.minutes != 9:
            words.append(f"--minutes {self.minutes:g}")
        if self.toy:
            words.append("--toy")
        return " ".join(words)


def main(args: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        cfg = cli.parse(GpuConfig, args, __doc__)
    except ValueError as error:
        print(f"benchmarks.gpu: error: {error}", file=sys.stderr)
        return 2
    run = measure(cfg, place(cfg))
    print(
        f"\n{(run.folder / 'results.md').read_text(encoding='utf-8')}\nwritten: "
        f"{run.folder}/results.json, results.md"
    )
    return 1 if run.data["failures"] else 0


def place(cfg: GpuConfig) -> Place:
    """This machine's first GPU, or one thread of its CPU."""
    device = dist.choose_device("auto", dist.World())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # process CPU time of one thread does not depend on what else runs
    return Place(device, cfg.toy or device.type == "cpu")


def measure(cfg: GpuConfig, place: Place) -> Run:
    """All jobs that the time allows, in the order of their importance."""
    deadline, machine = time.monotonic() + 60 * cfg.minutes, where(place.device)
    label = TOY.format(machine["device"]) if place.toy else machine["device"]
    run = Run(cfg.out, label, cfg.command, machine, place.toy)
    jobs = sorted(
        (job for name in cfg.parts for job in PARTS[name].jobs(place)),
        key=lambda job: job.importance,
    )
    for index, job in enumerate(jobs):
        left = deadline - time.monotonic()
        if job.seconds > left:
            run.skip(f"{job.name}: may take {job.seconds:,.0f} s, {max(left, 0):.0f} s were left")
        elif not survived(run, job, place):
            for other in jobs[index + 1 :]:
                run.skip(
                    f"{other.name}: the device was lost in {job.name}; run it again with --only"
                )
            break
    return run


def survived(run: Run, job: Job, place: Place) -> bool:
    """Run a job and note its clocks and what it could not do; False where the process has lost its
    device.
    """
    began = time.monotonic()
    try:
        _, why = attempt(job.run, run)
    except torch.AcceleratorError as error:
        run.fail(f"{job.name}: {' '.join(str(error).split())[:200]}")
        return False
    if why == "out of memory":
        run.note(f"{job.name}: out of memory")
    elif why:
        run.fail(f"{job.name}: {why}")
    run.timing(job.name, time.monotonic() - began, nvidia_smi(place.device) if place.cuda else {})
    free()
    return True
