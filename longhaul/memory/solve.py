"""What fits: the longest context, the cheapest levers, or the fewest ranks, each found with the simulator itself.

A rung is a set of levers that exist: layer checkpointing, the chunked loss, more ranks (FSDP2), sparse attention. Rungs are ordered
by predicted step time: FLOP over what a GPU reaches (a roofline; order of magnitude). Sizes are GiB = 2^30 bytes per rank.
Imports longhaul (config, dist), longhaul.memory (estimate, extrapolate, plan) and model.py of ours.
"""

import dataclasses
from dataclasses import dataclass

from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.memory.estimate import CUDA_CONTEXT_GIB, step_flops
from longhaul.memory.extrapolate import profile
from longhaul.memory.plan import command
from model import GIB

FITS, CHANGED, NOTHING = 0, 2, 3  # exit codes
GPU_FLOPS = 400e12  # what a dense bf16 step reaches on an H100, about 40% of its peak; fp32 half of it
SMALLEST = 1024  # tokens: a shorter context is no answer


@dataclass(frozen=True)
class Rung:
    """One candidate."""

    cfg: TrainConfig
    ranks: int
    levers: str
    live_gib: float

    @property
    def seconds(self) -> float:
        """Predicted time of a step, all ranks working in parallel."""
        speed = GPU_FLOPS * (1 if self.cfg.dtype == "bf16" else 0.5)
        return step_flops(self.cfg, self.cfg.model(), self.ranks) / self.ranks / speed


@dataclass(frozen=True)
class Answer:
    text: str
    code: int


def live_gib(cfg: TrainConfig, ranks: int) -> float:
    """Predicted live peak of one rank."""
    return profile(cfg, ranks).peak / GIB


def levers(cfg: TrainConfig, gpus: int) -> list[tuple[TrainConfig, int, str]]:
    """As asked, then one lever more at a time; a lever that is on already gives no rung of its own."""
    rungs, names = [(cfg, 1, "as asked")], []
    for name, changes in (("chunked loss", dict(loss="chunked")), ("checkpointing", dict(gradient_checkpointing="full"))):
        cfg = dataclasses.replace(cfg, **changes)
        names.append(name)
        if cfg != rungs[-1][0]:
            rungs.append((cfg, 1, " + ".join(names)))
    rungs += [(cfg, ranks, " + ".join([*names, f"{ranks} ranks"])) for ranks in powers(gpus) if ranks > 1]
    if cfg.attention_type != "nsa":
        sparse = dataclasses.replace(cfg, attention_type="nsa")
        rungs += [(sparse, ranks, " + ".join([*names, f"{ranks} rank(s)", "sparse attention"])) for ranks in powers(gpus)]
    return rungs


def powers(gpus: int) -> list[int]:
    """1, 2, 4, ... and `gpus` itself."""
    return sorted({1 << n for n in range(gpus.bit_length()) if 1 << n <= gpus} | {gpus})


def solve(cfg: TrainConfig, what: str, gpu_gib: float, gpus: int) -> Answer:
    """The ladder and the best rung's command; exit code 0: fits as asked, 2: after changes, 3: nothing fits."""
    room = gpu_gib - CUDA_CONTEXT_GIB
    finder = dict(levers=_by_levers, context=_by_context, world_size=_by_ranks)[what]
    rungs = finder(cfg, room, gpus)
    fitting = [rung for rung in rungs if rung.live_gib <= room]
    rows = [f"{what}: {gpus} GPU(s) of {gpu_gib:g} GiB, {CUDA_CONTEXT_GIB:g} of them for the CUDA context; sizes per rank, times predicted",
            f"{'levers':<58}{'context':>10}{'live GiB':>10}{'step s':>10}"]
    rows += [f"{rung.levers:<58}{rung.cfg.context_length:>10,}{rung.live_gib:>10.2f}{rung.seconds:>10.3g}"
             f"{'  fits' if rung in fitting else ''}" for rung in rungs]
    if not fitting:
        return Answer("\n".join([*rows, "nothing fits"]), NOTHING)
    best = _best(what, fitting)
    unchanged = best.cfg == cfg and best.ranks == 1
    return Answer("\n".join([*rows, command(best.cfg, World(size=best.ranks, local_size=best.ranks))]), FITS if unchanged else CHANGED)


def _best(what: str, fitting: list[Rung]) -> Rung:
    if what == "context":
        return max(fitting, key=lambda rung: (rung.cfg.context_length, -rung.seconds))
    if what == "world_size":
        return min(fitting, key=lambda rung: rung.ranks)
    return min(fitting, key=lambda rung: (rung.cfg.attention_type == "nsa", rung.seconds * rung.ranks, rung.ranks))


def _by_levers(cfg: TrainConfig, room: float, gpus: int) -> list[Rung]:
    return [Rung(changed, ranks, names, live_gib(changed, ranks)) for changed, ranks, names in levers(cfg, gpus)]


def _by_ranks(cfg: TrainConfig, room: float, gpus: int) -> list[Rung]:
    return [Rung(cfg, ranks, f"{ranks} rank(s)", live_gib(cfg, ranks)) for ranks in powers(gpus)]


def _by_context(cfg: TrainConfig, room: float, gpus: int) -> list[Rung]:
    rungs = []
    for changed, ranks, names in levers(cfg, gpus):
        context, size = longest(changed, ranks, room)
        rungs.append(Rung(dataclasses.replace(changed, context_length=context), ranks, names, size))
    return rungs


def longest(cfg: TrainConfig, ranks: int, room: float) -> tuple[int, float]:
    """(tokens, live GiB): the longest context, a multiple of 1024, whose live peak is within `room`; the shortest if none is.

    Memory is close to affine in the context: a line through the last two points aims, and what it aims at is simulated.
    """
    def size(context: int) -> float:
        return live_gib(dataclasses.replace(cfg, context_length=context), ranks)

    low, high = (SMALLEST, size(SMALLEST)), (32 * SMALLEST, size(32 * SMALLEST))
    if low[1] > room:
        return low
    best, above = low, None
    for _ in range(8):
        slope = (high[1] - low[1]) / (high[0] - low[0])
        aim = max(SMALLEST, int((high[0] + (room - high[1]) / slope) // SMALLEST * SMALLEST))
        aim = min(aim, above - SMALLEST) if above else aim
        found = size(aim)
        if found <= room and aim >= best[0]:
            best = aim, found
        above = aim if found > room and (above is None or aim < above) else above
        if above == best[0] + SMALLEST or aim == high[0]:
            break
        low, high = high, (aim, found)
    return best
