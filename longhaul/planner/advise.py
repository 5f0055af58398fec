"""What to change so that a task fits a card, the smallest loss of quality first.

Each change adds to those before it. Those of a run: logits in chunks, half precision, smaller
micro-batches, the ladder of fit.py (checkpointing, tiles, the host), the CPU; the figures are the
simulated step and its replay through the allocator. Another task brings a `Task` of its own.
`empty_cache` is never advised, because the allocator gives back free memory before it fails.
Sizes are bytes unless a name says GiB; GiB = 2^30 bytes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from footprint.cards.device import HALF_SINCE, Card
from footprint.steps.search import Found, Lever, Say, Search, Verdict
from longhaul.planner import solve
from longhaul.planner.plan import Plan
from model import GIB

VERDICTS = {
    Verdict.FITS: "fits",
    Verdict.AFTER_CHANGES: "fits after these changes",
    Verdict.NOTHING: "does not fit",
}


class Task(NamedTuple):
    """How the requests of a task are judged and changed. A request has a device, words(),
    breakdown() and command().
    """

    judge: Callable[[int, Any], Found]  # what a request needs, next to the bytes that there are
    changes: Callable[[Any, Card], Iterator[Lever]]  # the smallest loss of quality first
    notes: Callable[[Any, Card], list[str]]


# ---- what a run can change


def changes_of_run(asked: Plan, card: Card) -> Iterator[Lever]:
    """The changes of a training run; there is no fp16, because training has no loss scaler."""
    first, *others = solve.LEVERS
    yield first
    if asked.config.compute_dtype == "float32" and card.cc >= HALF_SINCE:
        yield Lever("bf16 instead of fp32", lambda run: run.change(dtype="bf16"))
    for rows in smaller_batches(asked.cfg.batch_size):
        yield Lever(f"micro-batches of {rows}", functools.partial(in_batches, rows=rows))
    yield from others
    yield Lever("the CPU", lambda run: run.change(device="cpu"))


def in_batches(asked: Plan, rows: int) -> Plan:
    """Micro-batches of so many rows; accumulation keeps the rows of a step."""
    more = asked.cfg.batch_size // rows
    micro_batches = asked.cfg.gradient_accumulation_steps * more
    return asked.change(batch_size=rows, gradient_accumulation_steps=micro_batches)


def smaller_batches(rows: int) -> list[int]:
    """Sizes of micro-batches down to 1: each the largest divisor of at most half the one before."""
    sizes = []
    while rows > 1:
        divisors = [size for size in range(1, rows // 2 + 1) if rows % size == 0]
        rows = divisors[-1]
        sizes.append(rows)
    return sizes


RUN = Task(solve.judged, changes_of_run, notes=lambda asked, card: [])


# ---- the answer


class Advice(NamedTuple):
    """The verdict, and all that was found as plain values; sizes in bytes."""

    verdict: Verdict
    as_json: dict


def advise(
    name: str,
    asked: Any,
    card: Card,
    host_gib: float,
    say: Say,
    task: Task = RUN,
) -> Advice:
    """Add changes until the request fits; `host_gib` is what the last one, the CPU, may use."""
    is_run = isinstance(asked, Plan)
    cards = f"{asked.world.size} x " if is_run and asked.world.size > 1 else ""
    breakdown = asked.breakdown()
    say(f"{name}: {asked.words()}")
    say(f"on {cards}{card.name} ({card.gib:g} GiB, capability {card.cc / 10})")
    for name, size in breakdown.items():
        say(f"  {name:<34}{size / GIB:>9.2f} GiB")
    say(f"changes, each added to those above it; GiB, predicted for torch {torch.__version__}:")

    def judged(request: Any) -> Found:
        gib = host_gib if str(request.device) == "cpu" else card.gib
        return task.judge(int(gib * GIB), request)

    search = Search(judged, int(card.gib * GIB), say, with_costs=is_run)
    say(search.head())
    best = search.climb(asked, list(task.changes(asked, card))).best
    notes = task.notes(asked, card)
    if not best.fits and is_run:
        notes.append("--solve world_size --gpus 64 looks for how many such GPUs are enough")

    for note in notes:
        say(f"note: {note}")
    verdict = search.verdict(best if best.fits else None)
    say(f"verdict: {VERDICTS[verdict]}")
    command = ""
    if best.fits:
        if is_run:
            say(best.request.costs())
        command = best.request.command()
        say(f"run: {command}")
    found = {
        "task": name,
        "torch": torch.__version__,
        "gpu": dataclasses.asdict(card),
        "code": verdict.exit_code,
        "breakdown": breakdown,
        "command": command,
        "tried": [one.as_json() for one in search.tried],
        "notes": notes,
    }
    return Advice(verdict, found)
