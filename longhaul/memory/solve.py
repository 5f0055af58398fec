"""The longest context, the cheapest levers, or the fewest ranks that fit, found with the simulator.

`--solve levers` climbs the ladder of fit.py, then tries the first rung that fits on more ranks
(FSDP2, and ranks that share rows) and with sparse attention, which changes the model. The
candidate that fits with the least predicted step time times number of ranks wins. The time is the
step's FLOPs over what a GPU reaches: a roofline, good to an order of magnitude. A candidate fits if
its device holds what the allocator reserves with expandable segments, the CUDA context and the
libraries' workspaces. Sizes are GiB = 2^30 bytes per rank.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from tqdm import tqdm

from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.memory import fit
from longhaul.memory.deep import profile
from longhaul.memory.device import EXPANDABLE_SEGMENTS, Demand, Placement
from longhaul.memory.estimate import estimate, step_flops
from longhaul.memory.fit import Verdict
from longhaul.memory.plan import command
from longhaul.parallel.context import allowed_sizes
from model import GIB, attention_kind

# What a dense bf16 step reaches on an H100, about 40% of its peak; fp32 reaches half of it.
GPU_FLOPS = 400e12
SMALLEST = 1024  # tokens: no shorter context is an answer
HEAD = (
    f"{'levers':<58}{'context':>10}{'live GiB':>10}{'device GiB':>12}{'host GiB':>10}{'step s':>10}"
)
LINES = 4  # aims of `longest` along a line, before it halves


@dataclass(frozen=True)
class Candidate:
    """A request on a number of ranks, not simulated yet."""

    cfg: TrainConfig
    ranks: int
    name: str


@dataclass(frozen=True)
class Simulated:
    """A candidate and what its step asks of each device."""

    cfg: TrainConfig
    ranks: int
    name: str
    demand: Demand
    placement: Placement

    @property
    def live_gib(self) -> float:
        """Live memory at the peak."""
        return self.demand.classic.peak_live / GIB

    @property
    def device_gib(self) -> float:
        """What the device must hold at least."""
        return self.demand.least_bytes / GIB

    @property
    def host_gib(self) -> float:
        """Host memory that levers use."""
        estimated = estimate(self.cfg, self.cfg.model(), self.ranks).host
        return max(self.demand.trace.host_peak, estimated) / GIB

    @property
    def seconds(self) -> float:
        """Predicted time of a step, all ranks working in parallel."""
        speed = GPU_FLOPS if self.cfg.dtype == "bf16" else GPU_FLOPS * 0.5
        flops = step_flops(self.cfg, self.cfg.model(), self.ranks)
        return flops / self.ranks / speed

    @property
    def fits(self) -> bool:
        return self.placement is not Placement.TOO_SMALL

    def row(self) -> str:
        """A line of the table."""
        return (
            f"{self.name:<58}{self.cfg.context_length:>10,}{self.live_gib:>10.2f}"
            f"{self.device_gib:>12.2f}{self.host_gib:>10.2f}{self.seconds:>10.3g}  {self.placement}"
        )

    def command(self) -> str:
        """The command that trains it."""
        world = World(size=self.ranks, local_size=self.ranks)
        line = command(self.cfg, world)
        if self.placement is Placement.EXPANDABLE:
            return EXPANDABLE_SEGMENTS + line
        return line


@dataclass(frozen=True)
class Answer:
    """What is printed, and the verdict."""

    text: str
    verdict: Verdict


def demand(cfg: TrainConfig, ranks: int) -> Demand:
    """What one rank's step asks of its device."""
    return Demand.of(profile(cfg, ranks).trace, ranks)


def solve(cfg: TrainConfig, what: str, gpu_gib: float, gpus: int) -> Answer:
    """The simulated candidates and the command of the best one; `what` is a choice of --solve."""
    finders = {"levers": _by_levers, "context": _by_context, "world_size": _by_ranks}
    simulated = finders[what](cfg, gpu_gib, gpus)
    title = (
        f"{what}: {gpus} GPU(s) of {gpu_gib:g} GiB; sizes per rank, all figures predicted; "
        "device: reserved memory, CUDA context, workspaces"
    )
    rows = [title, HEAD, *(one.row() for one in simulated)]

    fitting = [one for one in simulated if one.fits]
    if not fitting:
        return Answer("\n".join([*rows, "nothing fits"]), Verdict.NOTHING)

    best = _best(what, fitting, cfg)
    as_asked = best.cfg == cfg and best.ranks == worlds(cfg, gpus)[0]
    unchanged = as_asked and best.placement is Placement.FITS
    verdict = Verdict.FITS if unchanged else Verdict.AFTER_CHANGES
    return Answer("\n".join([*rows, best.command()]), verdict)


def _best(what: str, fitting: list[Simulated], asked: TrainConfig) -> Simulated:
    if what == "context":
        return max(fitting, key=lambda one: (one.cfg.context_length, -one.seconds))
    if what == "world_size":
        return min(fitting, key=lambda one: one.ranks)

    def cost(one: Simulated) -> tuple[bool, float, int]:
        other_attention = attention_kind(one.cfg) is not attention_kind(asked)
        return other_attention, one.seconds * one.ranks, one.ranks

    return min(fitting, key=cost)


# ---- candidates


def rungs(cfg: TrainConfig, ranks: int) -> list[Candidate]:
    """The ladder on a number of ranks."""
    first, *changed = fit.ladder(cfg)
    found = [Candidate(first.request, ranks, first.lever)]
    found += [Candidate(rung.request, ranks, f"+ {rung.lever}") for rung in changed]
    return found


def wider(rung: Candidate, gpus: int) -> list[Candidate]:
    """A rung on more ranks, then with sparse attention on every number of ranks."""
    cfg = rung.cfg
    name = f"up to {rung.name.removeprefix('+ ')}"
    numbers = worlds(cfg, gpus)
    found = []
    for ranks in numbers[1:]:
        found.append(Candidate(cfg, ranks, f"{name}, {ranks} ranks"))
        if _may_share_rows(cfg, ranks):
            shared = dataclasses.replace(cfg, context_parallel_size=ranks, attention_head_groups=1)
            found.append(Candidate(shared, ranks, f"{name}, {ranks} ranks that share rows"))

    cheaper = attention_kind(cfg).cheaper
    if cheaper:
        sparse = dataclasses.replace(cfg, attention_type=cheaper)
        for ranks in numbers:
            found.append(Candidate(sparse, ranks, f"{name}, {ranks} rank(s), sparse attention"))
    return found


def _may_share_rows(cfg: TrainConfig, ranks: int) -> bool:
    sizes = allowed_sizes(
        cfg.context_parallel_mode,
        cfg.attention_type,
        cfg.model().num_kv_heads,
        cfg.context_length,
        ranks,
    )
    return ranks in sizes


def worlds(cfg: TrainConfig, gpus: int) -> list[int]:
    """Numbers of ranks to try: multiples of the ranks that hold one batch."""
    least = cfg.dp_replicate * cfg.context_ranks
    found = [ranks for ranks in powers(gpus) if ranks % least == 0]
    if not found:
        raise ValueError(
            f"--gpus {gpus} is too few: --dp_replicate {cfg.dp_replicate} and "
            f"--context_parallel_size {cfg.context_ranks} need a multiple of {least} ranks: "
            f"use --gpus {least}, or drop these flags"
        )
    return found


def powers(gpus: int) -> list[int]:
    """1, 2, 4, ... and `gpus` itself."""
    numbers = {gpus}
    power = 1
    while power < gpus:
        numbers.add(power)
        power *= 2
    return sorted(numbers)


# ---- what is simulated


def _by_levers(cfg: TrainConfig, room: float, gpus: int) -> list[Simulated]:
    climbed = rungs(cfg, worlds(cfg, gpus)[0])
    simulated = [_simulated(one, room) for one in _progress(climbed)]

    start = climbed[-1]
    for candidate, result in zip(climbed, simulated, strict=True):
        if result.fits:
            start = candidate
            break
    more = wider(start, gpus)
    return simulated + [_simulated(one, room) for one in _progress(more)]


def _by_ranks(cfg: TrainConfig, room: float, gpus: int) -> list[Simulated]:
    candidates = [Candidate(cfg, ranks, f"{ranks} rank(s)") for ranks in worlds(cfg, gpus)]
    return [_simulated(one, room) for one in _progress(candidates)]


def _by_context(cfg: TrainConfig, room: float, gpus: int) -> list[Simulated]:
    """Every candidate at its longest context."""
    shortest = dataclasses.replace(cfg, context_length=SMALLEST)
    climbed = rungs(shortest, worlds(cfg, gpus)[0])

    found = []
    candidates = climbed + wider(climbed[-1], gpus)
    for one in _progress(candidates):
        context, needs = longest(one.cfg, one.ranks, room)
        stretched = dataclasses.replace(one.cfg, context_length=context)
        placement = needs.placement(int(room * GIB))
        found.append(Simulated(stretched, one.ranks, one.name, needs, placement))
    return found


def _simulated(one: Candidate, room: float) -> Simulated:
    needs = demand(one.cfg, one.ranks)
    placement = needs.placement(int(room * GIB))
    return Simulated(one.cfg, one.ranks, one.name, needs, placement)


def _progress(candidates: list[Candidate]) -> tqdm:
    """The candidates, with a bar on a terminal: simulating one takes seconds."""
    return tqdm(candidates, unit="rung", leave=False, disable=None)


# ---- the longest context


def longest(cfg: TrainConfig, ranks: int, room: float) -> tuple[int, Demand]:
    """(tokens, demand) of the longest context whose device GiB are within `room`.

    A multiple of 1,024 tokens; 1,024 if even that is too long. Memory is close to affine in the
    context, except for the steps of the allocator: the search aims along a line between a context
    that fits and one that does not, four times, then halves the distance. Every aim is simulated.
    """
    known: dict[int, Demand] = {}

    def size(context: int) -> float:
        if context not in known:
            changed = dataclasses.replace(cfg, context_length=context)
            known[context] = demand(changed, ranks)
        return known[context].least_bytes / GIB

    fits = SMALLEST
    exceeds = 32 * SMALLEST
    if size(fits) > room:
        return fits, known[fits]

    while size(exceeds) <= room:
        fits = exceeds
        exceeds = max(2 * exceeds, _on_the_line(size, SMALLEST, exceeds, room))

    aims = 0
    while exceeds > fits + SMALLEST:
        if aims < LINES:
            aim = _on_the_line(size, fits, exceeds, room)
        else:
            aim = (fits + exceeds) // 2 // SMALLEST * SMALLEST
        aim = min(max(aim, fits + SMALLEST), exceeds - SMALLEST)
        aims += 1
        if size(aim) <= room:
            fits = aim
        else:
            exceeds = aim
    return fits, known[fits]


def _on_the_line(size: Callable[[int], float], one: int, other: int, room: float) -> int:
    """The context at which a line through two sizes reaches `room`; `other` if it is flat."""
    slope = (size(other) - size(one)) / (other - one)
    if slope <= 0:
        return other
    reached = one + (room - size(one)) / slope
    return int(reached // SMALLEST * SMALLEST)
