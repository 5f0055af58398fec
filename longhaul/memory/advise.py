"""What to change so that a task fits a card, the smallest loss of quality first.

Each change adds to those before it: logits in chunks, half precision, smaller micro-batches, the
ladder of fit.py (checkpointing, tiles, the host), no autoencoder, fewer layers, the CPU. The
figures are the profiler's own: for training the simulated step and its replay through the
allocator, for analysis the highest peak of its simulated parts.
`empty_cache` is never advised, because the allocator gives back free memory
before it fails. Sizes are bytes unless a name says GiB; GiB = 2^30 bytes.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from base.flags import PRECISIONS
from footprint.device import HALF_SINCE, Card
from longhaul.memory import analysis, solve
from longhaul.memory.analysis import Analysed
from longhaul.memory.plan import Plan
from longhaul.memory.search import Found, Lever, Say, Search, Verdict, placed
from model import GIB

Request = Plan | Analysed
VERDICTS = {
    Verdict.FITS: "fits",
    Verdict.AFTER_CHANGES: "fits after these changes",
    Verdict.NOTHING: "does not fit",
}


def judged(card: Card, host_gib: float, asked: Request) -> Found:
    """What the request needs, and whether the card, or the host for one on the CPU, holds it."""
    gib = host_gib if str(asked.device) == "cpu" else card.gib
    room = int(gib * GIB)
    if isinstance(asked, Plan):
        return solve.judged(room, asked)
    found = analysis.planned(asked)
    return placed(found.peaks[found.largest], int(found.gib * GIB), room)


# ---- what to change


def ladder(asked: Request, card: Card) -> Iterator[Lever]:
    """The changes, the smallest loss of quality first."""
    analysed = isinstance(asked, Analysed)
    first, *others = solve.LEVERS
    if not analysed:
        yield first
    if asked.config.compute_dtype == "float32" and (not analysed or not asked.measures.compare):
        # what is compared begins with the model in float32, and training has no loss scaler
        if card.cc >= HALF_SINCE:
            yield Lever("bf16 instead of fp32", functools.partial(in_precision, name="bf16"))
        elif analysed:
            yield Lever("fp16 instead of fp32", functools.partial(in_precision, name="fp16"))

    for rows in smaller_batches(asked.batch_size if analysed else asked.cfg.batch_size):
        yield Lever(f"micro-batches of {rows}", functools.partial(in_batches, rows=rows))
    yield from analysis.levers(asked) if analysed else others
    yield Lever("the CPU", on_cpu)


def in_precision(asked: Request, name: str) -> Request:
    if isinstance(asked, Analysed):
        config = dataclasses.replace(asked.config, compute_dtype=PRECISIONS[name])
        return dataclasses.replace(asked, config=config)
    return asked.change(dtype=name)


def in_batches(asked: Request, rows: int) -> Request:
    """Micro-batches of so many rows; accumulation keeps the rows of a training step."""
    if isinstance(asked, Analysed):
        return dataclasses.replace(asked, batch_size=rows)
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


def on_cpu(asked: Request) -> Request:
    if isinstance(asked, Analysed):
        return dataclasses.replace(asked, device="cpu")
    return asked.change(device="cpu")


# ---- the answer


class Advice(NamedTuple):
    """The verdict, and all that was found as plain values; sizes in bytes."""

    verdict: Verdict
    as_json: dict


def advise(task: str, asked: Request, card: Card, host_gib: float, say: Say) -> Advice:
    """Add changes until the request fits; `host_gib` is what the last one, the CPU, may use."""
    is_run = isinstance(asked, Plan)
    cards = f"{asked.world.size} x " if is_run and asked.world.size > 1 else ""
    breakdown = asked.breakdown()
    say(f"{task}: {asked.words()}")
    say(f"on {cards}{card.name} ({card.gib:g} GiB, capability {card.cc / 10})")
    for name, size in breakdown.items():
        say(f"  {name:<34}{size / GIB:>9.2f} GiB")
    say(f"changes, each added to those above it; GiB, predicted for torch {torch.__version__}:")

    judge = functools.partial(judged, card, host_gib)
    search = Search(judge, int(card.gib * GIB), say, with_costs=is_run)
    say(search.head())
    best = search.climb(asked, list(ladder(asked, card))).best
    notes = _notes(asked, card)
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
        "task": task,
        "torch": torch.__version__,
        "gpu": dataclasses.asdict(card),
        "code": verdict.exit_code,
        "breakdown": breakdown,
        "command": command,
        "tried": [one.as_json() for one in search.tried],
        "notes": notes,
    }
    return Advice(verdict, found)


def _notes(asked: Request, card: Card) -> list[str]:
    if card.cc >= HALF_SINCE or isinstance(asked, Plan):
        return []
    return [
        "in fp16 the figures assume FlashAttention, which needs capability 8.0: the kernel of "
        "this card also holds keys and values for each query head"
    ]
