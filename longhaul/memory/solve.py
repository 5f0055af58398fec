"""What fits: the longest context, the cheapest levers, or the fewest ranks, each found with the
simulator itself.

A rung is a set of levers: those of plan.ladder one after the other, then the first that fits on
more ranks (FSDP2, and sharing rows)
and with sparse attention, which changes the model. Among what fits the shortest predicted step on
the fewest ranks wins: FLOP over what a GPU reaches (a roofline; order of
magnitude). What must fit is what the allocator reserves with expandable segments, and what the
device holds beside it. Sizes are
GiB = 2^30 bytes per rank; host: what levers keep there. Imports longhaul (config, context, dist),
longhaul.memory (device, estimate,
extrapolate, plan) and model.py of ours.
"""

import dataclasses
from dataclasses import dataclass

from tqdm import tqdm

from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.memory.device import EXPANDABLE, TOO_SMALL, Demand
from longhaul.memory.estimate import estimate, step_flops
from longhaul.memory.extrapolate import profile
from longhaul.memory.plan import command, ladder
from longhaul.parallel.context import allowed_sizes
from model import GIB

FITS, CHANGED, NOTHING = 0, 2, 3  # exit codes
GPU_FLOPS = (
    400e12  # what a dense bf16 step reaches on an H100, about 40% of its peak; fp32 half of it
)
SMALLEST = 1024  # tokens: a shorter context is no answer
EXPANDABLE_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "  # in front of a command


@dataclass(frozen=True)
class Rung:
    """One candidate."""

    cfg: TrainConfig
    ranks: int
    levers: str
    demand: Demand

    @property
    def live_gib(self) -> float:
        return self.demand.classic.peak_live / GIB

    @property
    def device_gib(self) -> float:
        return self.demand.least_bytes / GIB

    @property
    def host_gib(self) -> float:
        return (
            max(self.demand.trace.host_peak, estimate(self.cfg, self.cfg.model(), self.ranks).host)
            / GIB
        )

    @property
    def seconds(self) -> float:
        """Predicted time of a step, all ranks working in parallel."""
        speed = GPU_FLOPS * (1 if self.cfg.dtype == "bf16" else 0.5)
        return step_flops(self.cfg, self.cfg.model(), self.ranks) / self.ranks / speed


@dataclass(frozen=True)
class Answer:
    text: str
    code: int


def demand(cfg: TrainConfig, ranks: int) -> Demand:
    """What one rank's step asks of its device."""
    return Demand.of(profile(cfg, ranks).trace, ranks)


def levers(cfg: TrainConfig, ranks: int) -> list[tuple[TrainConfig, int, str]]:
    """As asked, then one lever more at a time; a lever that is on already gives no rung of its own."""
    return [
        (cfg, ranks, "as asked"),
        *((changed, ranks, f"+ {names.split(' + ')[-1]}") for names, changed in ladder(cfg)),
    ]


def wider(cfg: TrainConfig, gpus: int, name: str) -> list[tuple[TrainConfig, int, str]]:
    """The rung `name` on more ranks, then with sparse attention."""
    rungs, upto = [], f"up to {name.removeprefix('+ ')}"
    for ranks in worlds(cfg, gpus)[1:]:
        rungs.append((cfg, ranks, f"{upto}, {ranks} ranks"))
        if ranks in allowed_sizes(
            cfg.context_parallel_mode,
            cfg.attention_type,
            cfg.model().num_kv_heads,
            cfg.context_length,
            ranks,
        ):
            shared = dict(context_parallel_size=ranks, attention_head_groups=1)
            rungs.append(
                (
                    dataclasses.replace(cfg, **shared),
                    ranks,
                    f"{upto}, {ranks} ranks that share rows",
                )
            )
    if cfg.attention_type != "nsa":
        sparse = dataclasses.replace(cfg, attention_type="nsa")
        rungs += [
            (sparse, ranks, f"{upto}, {ranks} rank(s), sparse attention")
            for ranks in worlds(cfg, gpus)
        ]
    return rungs


def worlds(cfg: TrainConfig, gpus: int) -> list[int]:
    """Numbers of ranks to try: those that replicas, and ranks that share a row, divide."""
    least = cfg.dp_replicate * cfg.context_ranks
    found = [ranks for ranks in powers(gpus) if ranks % least == 0]
    if not found:
        raise ValueError(
            f"--gpus {gpus}: {least} ranks hold one batch with these settings (--dp_replicate {cfg.dp_replicate}, "
            f"--context_parallel_size {cfg.context_ranks}): use --gpus {least}, or drop them"
        )
    return found


def powers(gpus: int) -> list[int]:
    """1, 2, 4, ... and `gpus` itself."""
    return sorted({1 << n for n in range(gpus.bit_length()) if 1 << n <= gpus} | {gpus})


def solve(cfg: TrainConfig, what: str, gpu_gib: float, gpus: int) -> Answer:
    """The ladder and the best rung's command; exit code 0: fits as asked, 2: after changes, 3:
    nothing fits.
    """
    finder = dict(levers=_by_levers, context=_by_context, world_size=_by_ranks)[what]
    rungs = finder(cfg, gpu_gib, gpus)
    verdicts = {id(rung): rung.demand.verdict(int(gpu_gib * GIB)) for rung in rungs}
    fitting = [rung for rung in rungs if verdicts[id(rung)] != TOO_SMALL]
    rows = [
        f"{what}: {gpus} GPU(s) of {gpu_gib:g} GiB; sizes per rank, all figures predicted; device: reserved, context, workspaces",
        f"{'levers':<58}{'context':>10}{'live GiB':>10}{'device GiB':>12}{'host GiB':>10}{'step s':>10}",
    ]
    rows += [
        f"{rung.levers:<58}{rung.cfg.context_length:>10,}{rung.live_gib:>10.2f}{rung.device_gib:>12.2f}{rung.host_gib:>10.2f}{rung.seconds:>10.3g}  {verdicts[id(rung)]}"
        for rung in rungs
    ]
    if not fitting:
        return Answer("\n".join([*rows, "nothing fits"]), NOTHING)
    best = _best(what, fitting)
    unchanged = (
        best.cfg == cfg and best.ranks == worlds(cfg, gpus)[0] and verdicts[id(best)] != EXPANDABLE
    )
    line = EXPANDABLE_SEGMENTS * (verdicts[id(best)] == EXPANDABLE) + command(
        best.cfg, World(size=best.ranks, local_size=best.ranks)
    )
    return Answer("\n".join([*rows, line]), FITS if unchanged else CHANGED)


def _best(what: str, fitting: list[Rung]) -> Rung:
    if what == "context":
        return max(fitting, key=lambda rung: (rung.cfg.context_length, -rung.seconds))
    if what == "world_size":
        return min(fitting, key=lambda rung: rung.ranks)
    return min(
        fitting,
        key=lambda rung: (rung.cfg.attention_type == "nsa", rung.seconds * rung.ranks, rung.ranks),
    )


def _by_levers(cfg: TrainConfig, room: float, gpus: int) -> list[Rung]:
    rungs = [_rung(*asked) for asked in _progress(levers(cfg, worlds(cfg, gpus)[0]))]
    start = next(
        (rung for rung in rungs if rung.demand.verdict(int(room * GIB)) != TOO_SMALL), rungs[-1]
    )
    return rungs + [_rung(*asked) for asked in _progress(wider(start.cfg, gpus, start.levers))]


def _by_ranks(cfg: TrainConfig, room: float, gpus: int) -> list[Rung]:
    return [_rung(cfg, ranks, f"{ranks} rank(s)") for ranks in _progress(worlds(cfg, gpus))]


def _by_context(cfg: TrainConfig, room: float, gpus: int) -> list[Rung]:
    rungs, alone = (
        [],
        levers(dataclasses.replace(cfg, context_length=SMALLEST), worlds(cfg, gpus)[0]),
    )
    for changed, ranks, names in _progress(alone + wider(alone[-1][0], gpus, alone[-1][2])):
        context, found = longest(changed, ranks, room)
        rungs.append(
            Rung(dataclasses.replace(changed, context_length=context), ranks, names, found)
        )
    return rungs


def _rung(cfg: TrainConfig, ranks: int, names: str) -> Rung:
    return Rung(cfg, ranks, names, demand(cfg, ranks))


def _progress(rungs: list):
    """The rungs, with a bar on a terminal: each is a simulation of some seconds."""
    return tqdm(rungs, unit="rung", leave=False, disable=None)


def longest(cfg: TrainConfig, ranks: int, room: float) -> tuple[int, Demand]:
    """(tokens, demand): the longest context, a multiple of 1024, whose device GiB are within
    `room`; the shortest if none is.

    Memory is close to affine in the context, but for the allocator's steps: a line through what
    fits and what does not aims, four times, then halves narrow it down. What is aimed at is
    simulated.
    """
    known: dict[int, Demand] = {}

    def size(context: int) -> float:
        known[context] = known.get(context) or demand(
            dataclasses.replace(cfg, context_length=context), ranks
        )
        return known[context].least_bytes / GIB

    best, above = SMALLEST, 32 * SMALLEST
    if size(best) > room:
        return best, known[best]
    while size(above) <= room:
        best, above = above, max(2 * above, _on_the_line(size, SMALLEST, above, room))
    for index in range(32):
        if above == best + SMALLEST:
            break
        aim = (
            _on_the_line(size, best, above, room)
            if index < 4
            else (best + above) // 2 // SMALLEST * SMALLEST
        )
        aim = min(max(aim, best + SMALLEST), above - SMALLEST)
        best, above = (aim, above) if size(aim) <= room else (best, aim)
    return best, known[best]


def _on_the_line(size, one: int, other: int, room: float) -> int:
    """The context at which a line through two sizes meets `room`; the longer one where the line is
    flat.
    """
    slope = (size(other) - size(one)) / (other - one)
    return int((one + (room - size(one)) / slope) // SMALLEST * SMALLEST) if slope > 0 else other
