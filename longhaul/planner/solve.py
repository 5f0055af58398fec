"""The longest context, the cheapest levers, or the fewest ranks that fit a GPU.

`--solve levers` climbs the ladder of fit.py. If all of it is not enough it looks at more ranks
(FSDP2, and ranks that share rows) and at sparse attention, which changes the model: what fits with
the least predicted step time times number of ranks wins. The time is a roofline, good to an order
of magnitude. `--solve context` answers with the flags as asked, then with every lever.

A request fits if its device holds what the allocator reserves with expandable segments, the CUDA
context and the libraries' workspaces. Sizes are bytes of one rank.
"""

import dataclasses
import functools

import torch

from footprint.steps.search import (
    AS_ASKED,
    Bounds,
    Found,
    Lever,
    Say,
    Search,
    Tried,
    Verdict,
    placed,
    pulled,
    silent,
)
from longhaul.config import TrainConfig
from longhaul.kinds import attention_kind
from longhaul.planner import fit, reserve
from longhaul.planner.needs import PROCESS_GIB, demand
from longhaul.planner.plan import Plan, on_ranks, sizes_that_share
from longhaul.planner.simulate import MOST_TOKENS
from model import GIB

UNIT = 1024  # tokens: the longest context is a multiple
LONGER = 8  # times the context that fits as asked is what is tried first with every lever


def judged(room: int, run: Plan) -> Found:
    """What a run needs on a device of `room` bytes."""
    if run.device.type == "cpu":
        live = run.peak
        return placed(live, live + int(PROCESS_GIB * GIB), room, seconds=run.seconds)
    asked = demand(run.cfg, run.world.size)
    found = run.needs
    return Found(
        asked.classic.peak_live,
        asked.least_bytes,
        reserve.placement(asked, room),
        found.host,
        run.seconds,
        fixed=found.fixed,
    )


def solve(
    cfg: TrainConfig,
    what: str,
    gpu_gib: float,
    gpus: int,
    say: Say = silent,
    gpu: str = "cuda",
) -> Verdict:
    """Say the candidates and the command of the best one; `what` is a choice of --solve, and `gpu`
    is timed: a target of footprint.
    """
    finders = {"levers": _by_levers, "context": _by_context, "world_size": _by_ranks}
    asked = on_ranks(cfg, worlds(cfg, gpus)[0], gpu)
    room = int(gpu_gib * GIB)
    search = Search(functools.partial(judged, room), room, say, with_costs=True)
    say(
        f"{what}: {gpus} GPU(s) of {gpu_gib:g} GiB; GiB per rank, all figures predicted for torch "
        f"{torch.__version__}"
    )
    say(search.head())

    best = finders[what](search, asked, gpus)
    if best is None:
        say("nothing fits")
        return Verdict.NOTHING
    propose(best, say)
    # of contexts the one as asked counts: the longest is always another one
    return search.verdict(search.tried[0] if what == "context" else best)


def propose(best: Tried, say: Say) -> None:
    """Say what a proposal takes, and its command."""
    say(best.request.costs())
    say(best.request.command())


# ---- candidates


def lever_of_plan(lever: Lever) -> Lever:
    """A lever of the trainer on a plan."""
    return Lever(lever.name, lambda run: run.other(pulled(lever, run.cfg)))


LEVERS = tuple(lever_of_plan(lever) for lever in fit.LEVERS)


def with_every_lever(run: Plan) -> Plan:
    return functools.reduce(lambda request, lever: pulled(lever, request), LEVERS, run)


def wider(run: Plan, gpus: int) -> list[tuple[str, Plan]]:
    """A run on more ranks, then with sparse attention on every number of ranks."""
    cfg = run.cfg
    numbers = worlds(cfg, gpus)
    found = []
    for ranks in numbers[1:]:
        found.append((f"every lever, {ranks} ranks", run.other(cfg, ranks)))
        if ranks in sizes_that_share(cfg, cfg.context_length, ranks):
            found.append((f"every lever, {ranks} ranks that share rows", sharing(run, ranks)))

    cheaper = attention_kind(cfg).cheaper
    if cheaper and not cfg.SAMPLES:  # whose prompts sparse attention cannot share
        sparse = dataclasses.replace(cfg, attention_type=cheaper)
        for ranks in numbers:
            found.append(
                (f"every lever, {ranks} rank(s), sparse attention", run.other(sparse, ranks))
            )
    return found


def sharing(run: Plan, ranks: int) -> Plan:
    """All ranks share each row."""
    shared = dict(context_parallel_size=ranks, attention_head_groups=1)
    return run.other(dataclasses.replace(run.cfg, **shared), ranks)


def worlds(cfg: TrainConfig, gpus: int) -> list[int]:
    """Numbers of ranks to try: of 1, 2, 4, ... and `gpus` the multiples of the ranks that hold one
    batch.
    """
    least = cfg.dp_replicate * cfg.context_ranks
    numbers = {gpus} | {1 << power for power in range(gpus.bit_length())}
    found = [ranks for ranks in sorted(numbers) if ranks % least == 0]
    if not found:
        raise ValueError(
            f"--gpus {gpus} is too few: --dp_replicate {cfg.dp_replicate} and "
            f"--context_parallel_size {cfg.context_ranks} need a multiple of {least} ranks: "
            f"use --gpus {least}, or drop these flags"
        )
    return found


# ---- the cheapest levers


def _by_levers(search: Search, asked: Plan, gpus: int) -> Tried | None:
    """The ladder up to the first rung that fits; if none does, what costs least on more ranks."""
    climbed = search.climb(asked, LEVERS)
    if climbed.best.fits:
        return climbed.best
    others = wider(with_every_lever(asked), gpus)
    return search.first(sorted(others, key=lambda one: _price(one[1], asked)))


def _price(run: Plan, asked: Plan) -> tuple[bool, float, int]:
    """By what more ranks are chosen: the attention as asked, then the time of all ranks."""
    other_attention = attention_kind(run.cfg) is not attention_kind(asked.cfg)
    return other_attention, run.seconds * run.world.size, run.world.size


# ---- the fewest ranks


def _by_ranks(search: Search, asked: Plan, gpus: int) -> Tried | None:
    """The fewest ranks that hold the request; if none do, with levers on the most ranks, or on the
    fewest: what ranks exchange takes memory, too.
    """
    numbers = worlds(asked.cfg, gpus)
    plain = search.first(_on_each(asked, numbers))
    if plain:
        return plain
    for ranks in dict.fromkeys((numbers[-1], numbers[0])):
        best = search.climb(asked.other(asked.cfg, ranks), LEVERS).best
        if best.fits:
            fewer = [number for number in numbers if number < ranks]
            best = search.first(_on_each(best.request, fewer)) or best
            enough = f"with the settings below {best.request.world.size} are enough"
            search.say(f"as asked, {gpus} GPU(s) are too few; {enough}")
            return best
    return None


def _on_each(run: Plan, numbers: list[int]) -> list[tuple[str, Plan]]:
    return [(f"{ranks} rank(s)", run.other(run.cfg, ranks)) for ranks in numbers]


# ---- the longest context


def _by_context(search: Search, asked: Plan, gpus: int) -> Tried | None:
    """The longest context with the flags as asked, then with every lever, which is the answer if it
    is longer.
    """
    most = worlds(asked.cfg, gpus)[-1]
    asked = asked.other(asked.cfg, most)
    plain = longest(search, AS_ASKED, asked)
    if plain:
        search.say(
            f"{AS_ASKED}, the longest --context_length is {plain.request.cfg.context_length:,}"
        )
        propose(plain, search.say)

    every = with_every_lever(asked)
    if most > 1 and most in sizes_that_share(every.cfg, UNIT, most):
        every = sharing(every, most)
    reached = plain.request.cfg.context_length if plain else 0
    best = longest(search, "every lever", every, LONGER * reached)
    if best is None or best.request.cfg.context_length <= reached:
        return plain
    search.say(f"with every lever it is {best.request.cfg.context_length:,}")
    return best


def longest(search: Search, name: str, run: Plan, start: int = 0) -> Tried | None:
    """The run with the longest context that fits, a multiple of 1,024 tokens unless it is the one
    that was asked for; None if not even the shortest that has room for a prompt does.

    ValueError if a batch of rows of 1,024 tokens has more tokens than can be simulated.
    """
    cfg = run.cfg
    if cfg.batch_size * UNIT > MOST_TOKENS:
        raise ValueError(
            f"--batch_size {cfg.batch_size}: rows of {UNIT:,} tokens, the shortest that are looked "
            f"for, would make more than {MOST_TOKENS:,} tokens: give a smaller --batch_size"
        )
    # of a policy a prompt and its longest response are a context, and other responses more tokens
    least = UNIT
    if cfg.SAMPLES:
        least += cfg.longest_response // UNIT * UNIT
    most = MOST_TOKENS // cfg.batch_size - (cfg.row_tokens - cfg.context_length)
    bounds = Bounds(UNIT, nearly=True, least=least, most=most // UNIT * UNIT)
    label = f"{name}, --context_length"

    def at(context: int) -> Plan:
        return run.change(context_length=context)

    return search.largest(label, min(start or cfg.context_length, bounds.most), at, bounds)
