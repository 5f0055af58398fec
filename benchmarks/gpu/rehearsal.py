"""The schedule of a run without the run: `python -m benchmarks.gpu --rehearse`.

Durations are those of an earlier run's results.json, or estimates. The first jobs must end within
the deadline also if everything takes twice as long.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.jobs import Job, Place
from benchmarks.gpu.schedule import Turn, replay

A_GPU = Place(torch.device("cuda"), toy=False)
ESTIMATES = "estimates"
START = 10.0  # seconds until the first job begins: torch is loaded
FIRST = 5  # jobs after the gate that every run must have


def rehearse(source: str, jobs: list[Job], end: float) -> int:
    """Print when each job begins and ends; 1 if the first jobs do not fit, also at half the speed.

    ValueError if `source` is no results.json of a run.
    """
    duration = durations(source)
    fine = True
    for factor in (1, 2):
        seconds = {job.name: factor * duration(job) for job in jobs}
        turns, skipped = replay(jobs, end, START, seconds)
        print(f"{title(source, factor)}, until {end:,.0f} s:\n")
        for turn in turns:
            print(line(turn))
        if skipped:
            print(f"{len(skipped)} jobs are skipped; the first: {skipped[0]}")

        late = missing(jobs, turns)
        fine = fine and not late
        print(f"\n{verdict(turns, late)}\n")
    return 0 if fine else 1


def durations(source: str) -> Callable[[Job], float]:
    """Seconds of a job: recorded ones where `source` has them, else its estimate."""
    if source == ESTIMATES:
        return lambda job: job.seconds
    try:
        recorded = json.loads(Path(source).read_text(encoding="utf-8"))["jobs"]
        seconds = {line["job"]: line["seconds"] for line in recorded}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--rehearse {source}: {error!r}: give the results.json of a run, or no value"
        ) from error
    return lambda job: seconds.get(job.name, job.seconds)


def title(source: str, factor: int) -> str:
    """What the durations are."""
    words = "estimates" if source == ESTIMATES else f"durations of {source}, else estimates"
    return words if factor == 1 else f"{factor} x {words}"


def line(turn: Turn) -> str:
    """A job's turn."""
    killed = ", killed" if turn.killed else ""
    return f"{turn.begins:6,.0f} to {turn.ends:4,.0f} s  {turn.job.name}{killed}"


def first(jobs: list[Job]) -> list[Job]:
    """The most important jobs, without the gate."""
    ordered = sorted(jobs, key=lambda job: job.importance)
    return [job for job in ordered if not job.gate][:FIRST]


def missing(jobs: list[Job], turns: list[Turn]) -> list[str]:
    """The first jobs that do not end in time."""
    ended = {turn.job.name for turn in turns if not turn.killed}
    return [job.name for job in first(jobs) if job.name not in ended]


def verdict(turns: list[Turn], late: list[str]) -> str:
    """Whether the first jobs fit, and when the last of them ends."""
    if late:
        return f"the first {FIRST} jobs do not fit: {'; '.join(late)}"
    of_first = [turn for turn in turns if not turn.job.gate][:FIRST]
    return f"the first {FIRST} jobs fit: they end after {of_first[-1].ends:,.0f} s"
