"""The parts of `python -m benchmarks.gpu`: each is a list of jobs, and each job runs in a process
of its own.

machine.py    what is here and what is missing, before anything else
smoke.py      each Triton kernel once, each in its own process, and a step of one layer
attention.py  dense and sparse attention against their peers: forward, training, decoding
step.py       whole training steps, and those of transformers next to them
loss.py       the vocabulary loss against its peers
decoding.py   tokens per second after a long prompt, with CUDA graphs and without
profiles.py   kernel by kernel, where the time goes
exact.py      the tests marked gpu, and the Triton tile bodies
memory.py     predicted against measured: stages, workspaces, the allocator's replay
transformers_memory.py  the same for models of transformers

A job's importance says what comes first. The first five jobs after machine.py answer what only a
GPU can answer, so that a run that ends early still has them.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from benchmarks.record import Run

AGAIN = ", again with CUDA_LAUNCH_BLOCKING=1"
ESSENTIAL = 6  # jobs that are more important than this come before any repetition


@dataclass(frozen=True)
class Place:
    """Where the jobs run and at which sizes; toy sizes show that everything runs, and claim
    nothing.
    """

    device: torch.device
    toy: bool

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def kernels(self, attention: str) -> str:
        """What computes this kind of attention: on a GPU only the Triton kernels, where there are
        some, so that without them a job fails instead of taking minutes.
        """
        return "triton" if self.cuda and attention != "standard" else "auto"


@dataclass(frozen=True)
class Job:
    """One line of a part. Importance orders all jobs, 0 first; `seconds` is what it takes on a GPU,
    by estimate: its rounds end with it, and it is killed after twice as many.

    `children` run in its place, several at a time, each in a process of its own. After a `gate`
    that did not end well, nothing else runs.
    """

    name: str
    importance: float
    seconds: float
    run: Callable[[Run], None] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    children: tuple["Job", ...] = ()
    gate: bool = False

    @property
    def folder(self) -> str:
        """The folder of its results, log and errors below the run's jobs/."""
        return re.sub(r"[^a-z0-9_.]+", "-", self.name.lower()).strip("-")

    @property
    def is_repetition(self) -> bool:
        """Whether it runs only to find the line that crashed."""
        return self.name.endswith(AGAIN)

    def again(self) -> "Job":
        """The same with every launch waited for, so that an error is raised at its own line."""
        return replace(
            self,
            name=self.name + AGAIN,
            importance=max(self.importance, ESSENTIAL) + 0.5,
            environment=self.environment | {"CUDA_LAUNCH_BLOCKING": "1"},
        )


def processes(jobs: Iterable[Job]) -> list[Job]:
    """The jobs that run in a process: children stand for their parent."""
    found = []
    for job in jobs:
        found += job.children or (job,)
    return found


def named(jobs: Iterable[Job], name: str) -> Job:
    """The job of that name; ValueError if there is none."""
    known = {job.name: job for job in processes(jobs)}
    plain = name.removesuffix(AGAIN)
    if plain not in known:
        raise ValueError(f"--job {name!r} is unknown: choose one of {'; '.join(known)}")
    return known[plain].again() if name.endswith(AGAIN) else known[plain]
