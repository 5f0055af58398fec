"""Which job of `python -m benchmarks.gpu` runs next and how long it may take; and the same without
running anything.

All times are seconds since the interpreter started.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.gpu.jobs import Job

PACES = (0.5, 2.0)  # how far finished jobs correct the estimates of those to come
PATIENCE = 2.0  # a job is killed after its estimate times this


class Schedule:
    """The jobs that wait, the most important one first.

    Durations are estimates. Finished jobs correct those to come: if all jobs so far took 1.5 times
    their estimates, a job begins only if 1.5 times its estimate is left.
    """

    def __init__(self, jobs: Iterable[Job], end: float):
        self.waiting = sorted(jobs, key=lambda job: job.importance)
        self.end = end
        self.skipped: list[str] = []
        self.estimated = 0.0
        self.taken = 0.0

    @property
    def pace(self) -> float:
        """Time taken over time estimated, of the jobs so far."""
        if self.estimated == 0:
            return 1.0
        least, most = PACES
        return min(max(self.taken / self.estimated, least), most)

    def next(self, now: float) -> Job | None:
        """The most important job that ends in time; those that do not are skipped for good."""
        while self.waiting:
            job = self.waiting.pop(0)
            left = max(self.end - now, 0.0)
            expected = self.pace * job.seconds
            if expected <= left:
                return job
            self.skipped.append(
                f"{job.name}: may take {expected:,.0f} s, {left:,.0f} s were left: "
                "run it again with --job or --only"
            )
        return None

    def limit(self, job: Job, now: float) -> float:
        """Seconds after which the job is killed."""
        return min(PATIENCE * job.seconds, self.end - now)

    def done(self, job: Job, taken: float) -> None:
        """Let the duration of a job correct the estimates of the others. It ended well, or was
        killed when its time was over.
        """
        self.estimated += job.seconds
        self.taken += taken

    def add(self, job: Job) -> None:
        """One more job, in its place."""
        self.waiting = sorted([*self.waiting, job], key=lambda job: job.importance)

    def close(self, why: str) -> None:
        """Skip everything that waits."""
        self.skipped += [f"{job.name}: {why}" for job in self.waiting]
        self.waiting = []


# ---- a rehearsal


@dataclass(frozen=True)
class Turn:
    """A job's time in a rehearsal."""

    job: Job
    begins: float
    ends: float
    killed: bool


def replay(
    jobs: Iterable[Job], end: float, begin: float, seconds: Mapping[str, float]
) -> tuple[list[Turn], list[str]]:
    """The turns of a run whose jobs take `seconds[their name]`, and what it skips."""
    schedule = Schedule(jobs, end)
    turns = []
    now = begin
    while True:
        job = schedule.next(now)
        if job is None:
            return turns, schedule.skipped
        limit = schedule.limit(job, now)
        taken = min(seconds[job.name], limit)
        turns.append(Turn(job, now, now + taken, killed=seconds[job.name] > limit))
        schedule.done(job, taken)
        now += taken
