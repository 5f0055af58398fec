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
from dataclasses import dataclass
from typing import NamedTuple

from footprint.device import EXPANDABLE_SEGMENTS, Placement
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.flops import run_words, step_seconds, warm_up_seconds
from longhaul.kinds import attention_kind, unfit_exchanges
from longhaul.memory import fit
from longhaul.memory.needs import PROCESS_GIB, Needs, demand, needs
from longhaul.memory.plan import command, cost_words, flag_of, shutdown_timeout
from longhaul.memory.search import (
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
    verdict,
)
from longhaul.memory.simulate import MOST_TOKENS
from longhaul.parallel.context import allowed_sizes
from longhaul.posttrain.config import PolicyConfig
from model import GIB

UNIT = 1024  # tokens: the longest context is a multiple
LONGER = 8  # times the context that fits as asked is what is tried first with every lever


class Run(NamedTuple):
    """A request on a number of ranks."""

    cfg: TrainConfig
    ranks: int = 1

    @property
    def device(self) -> str:
        return "cpu" if self.cfg.device == "cpu" else "cuda"

    @property
    def dtype(self) -> str:
        return self.cfg.model().compute_dtype

    @property
    def batch_size(self) -> int:
        return self.cfg.batch_size

    def words(self) -> str:
        """The request in words."""
        cfg = self.cfg
        return (
            f"{cfg.model_size} ({cfg.model().num_params():,} parameters), "
            f"{cfg.batch_size} x {cfg.row_tokens:,} tokens, {cfg.dtype}"
        )

    def breakdown(self) -> dict[str, int]:
        """What the peak is made of; the sum is the live peak."""
        found = self.needs
        name = found.peak_stage
        return {"parameters and optimizer": found.static, name: found.peak - found.static}

    @property
    def needs(self) -> Needs:
        """What one rank needs."""
        return needs(dataclasses.replace(self.cfg, device=self.device), self.ranks)

    def step_seconds(self) -> tuple[float, float]:
        """Predicted time of a step, all ranks working in parallel, and of one of an indexer's dense
        warm-up; 0 for a run without one.
        """
        request = self.cfg, self.cfg.model(), self.ranks, self.device
        return step_seconds(*request), warm_up_seconds(*request)

    def change(self, **settings) -> "Run":
        """The same with other settings."""
        return self._replace(cfg=dataclasses.replace(self.cfg, **settings))

    def cost(self, asked: TrainConfig) -> tuple[bool, float, int]:
        """By what more ranks are chosen: the attention as asked, then the time of all ranks."""
        other_attention = attention_kind(self.cfg) is not attention_kind(asked)
        seconds, _ = self.step_seconds()
        return other_attention, seconds * self.ranks, self.ranks

    def command(self, placement: Placement) -> str:
        """What trains it."""
        timeout = shutdown_timeout(self.cfg, self.ranks, max(self.step_seconds()))
        line = command(self.cfg, World(size=self.ranks, local_size=self.ranks), timeout)
        return EXPANDABLE_SEGMENTS + line if placement is Placement.EXPANDABLE else line

    def costs(self, found: Found) -> str:
        """The time of a step and of the run, and the host memory that levers use, in words."""
        return cost_words(run_words(self.cfg, *self.step_seconds(), self.device), found.host)


@dataclass(frozen=True)
class Answer:
    """What was printed, and the verdict."""

    text: str
    verdict: Verdict


def judged(room: int, run: Run) -> Found:
    """What a run needs on a device of `room` bytes."""
    seconds, _ = run.step_seconds()
    if run.device == "cpu":
        live = run.needs.peak
        return placed(live, live + int(PROCESS_GIB * GIB), room, seconds=seconds)
    asked = demand(run.cfg, run.ranks)
    found = run.needs
    return Found(
        asked.classic.peak_live,
        asked.least_bytes,
        asked.placement(room),
        found.host,
        seconds,
        fixed=found.fixed,
    )


def solve(
    cfg: TrainConfig, what: str, gpu_gib: float, gpus: int, say: Say = lambda line: None
) -> Answer:
    """The candidates and the command of the best one; `what` is a choice of --solve."""
    lines: list[str] = []

    def said(line: str) -> None:
        lines.append(line)
        say(line)

    finders = {"levers": _by_levers, "context": _by_context, "world_size": _by_ranks}
    asked = Run(cfg, worlds(cfg, gpus)[0])
    room = int(gpu_gib * GIB)
    search = Search(functools.partial(judged, room), room, said, with_costs=True)
    said(f"{what}: {gpus} GPU(s) of {gpu_gib:g} GiB; GiB per rank, all figures predicted")
    said(search.head())

    best = finders[what](search, asked, gpus)
    if best is None:
        said("nothing fits")
        return Answer("\n".join(lines), Verdict.NOTHING)
    propose(best, said)
    # the first that is tried is as asked, and the longest context is always another one
    plain = search.tried[0] if what == "context" else best
    unchanged = what == "context" or best.request == asked
    return Answer("\n".join(lines), verdict(plain, unchanged))


def propose(best: Tried, say: Say) -> None:
    """Say what a proposal takes, and its command."""
    say(best.request.costs(best.found))
    say(best.request.command(best.found.placement))


# ---- candidates


def on_ranks(lever: Lever) -> Lever:
    """A lever of the trainer on a run."""
    return Lever(lever.name, lambda run: run._replace(cfg=pulled(lever, run.cfg)))


LEVERS = tuple(on_ranks(lever) for lever in fit.LEVERS)


def with_every_lever(run: Run) -> Run:
    return functools.reduce(lambda request, lever: pulled(lever, request), LEVERS, run)


def wider(run: Run, gpus: int) -> list[tuple[str, Run]]:
    """A run on more ranks, then with sparse attention on every number of ranks."""
    cfg = run.cfg
    numbers = worlds(cfg, gpus)
    found = []
    for ranks in numbers[1:]:
        found.append((f"every lever, {ranks} ranks", Run(cfg, ranks)))
        if _may_share_rows(cfg, ranks):
            found.append((f"every lever, {ranks} ranks that share rows", sharing(cfg, ranks)))

    cheaper = attention_kind(cfg).cheaper
    if cheaper and not isinstance(cfg, PolicyConfig):  # whose prompts sparse attention cannot share
        sparse = dataclasses.replace(cfg, attention_type=cheaper)
        for ranks in numbers:
            found.append((f"every lever, {ranks} rank(s), sparse attention", Run(sparse, ranks)))
    return found


def sharing(cfg: TrainConfig, ranks: int) -> Run:
    """All ranks share each row."""
    shared = dataclasses.replace(cfg, context_parallel_size=ranks, attention_head_groups=1)
    return Run(shared, ranks)


def _may_share_rows(cfg: TrainConfig, ranks: int) -> bool:
    if isinstance(cfg, PolicyConfig):
        return False
    sizes = allowed_sizes(
        cfg.context_parallel_mode,
        unfit_exchanges(cfg.attention_type),
        cfg.model().num_kv_heads,
        cfg.context_length,
        ranks,
    )
    return ranks in sizes


def _may_share_any_row(cfg: TrainConfig, ranks: int) -> bool:
    """Whether a row of any multiple of 1,024 tokens may be shared."""
    if isinstance(cfg, PolicyConfig):
        return False
    return _may_share_rows(dataclasses.replace(cfg, context_length=UNIT), ranks)


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


# ---- the cheapest levers


def _by_levers(search: Search, asked: Run, gpus: int) -> Tried | None:
    """The ladder up to the first rung that fits; if none does, what costs least on more ranks."""
    climbed = search.climb(asked, LEVERS)
    if climbed.best.fits:
        return climbed.best
    others = wider(with_every_lever(asked), gpus)
    return search.first(sorted(others, key=lambda one: one[1].cost(asked.cfg)))


# ---- the fewest ranks


def _by_ranks(search: Search, asked: Run, gpus: int) -> Tried | None:
    """The fewest ranks that hold the request; if none do, with levers on the most ranks, or on the
    fewest: what ranks exchange takes memory, too.
    """
    numbers = worlds(asked.cfg, gpus)
    plain = search.first(_on_each(asked.cfg, numbers))
    if plain:
        return plain
    for ranks in dict.fromkeys((numbers[-1], numbers[0])):
        best = search.climb(asked._replace(ranks=ranks), LEVERS).best
        if best.fits:
            cfg = best.request.cfg
            fewer = [number for number in numbers if number < ranks]
            best = search.first(_on_each(cfg, fewer)) or best
            words = _with_levers(best.request, asked.cfg)
            search.say(f"as asked, {gpus} GPU(s) are too few; {words}")
            return best
    return None


def _on_each(cfg: TrainConfig, numbers: list[int]) -> list[tuple[str, Run]]:
    return [(f"{ranks} rank(s)", Run(cfg, ranks)) for ranks in numbers]


def _with_levers(best: Run, asked: TrainConfig) -> str:
    """The settings that a run changes, and its ranks."""
    changed = []
    for spec in dataclasses.fields(asked):
        value = getattr(best.cfg, spec.name)
        if value != getattr(asked, spec.name):
            changed.append(flag_of(spec, value))
    return f"with {' '.join(changed)}, {best.ranks} rank(s) are enough"


# ---- the longest context


def _by_context(search: Search, asked: Run, gpus: int) -> Tried | None:
    """The longest context with the flags as asked, then with every lever, which is the answer if it
    is longer.
    """
    most = worlds(asked.cfg, gpus)[-1]
    plain = longest(search, AS_ASKED, asked._replace(ranks=most))
    if plain:
        search.say(
            f"{AS_ASKED}, the longest --context_length is {plain.request.cfg.context_length:,}"
        )
        propose(plain, search.say)

    every = with_every_lever(asked._replace(ranks=most))
    if most > 1 and _may_share_any_row(every.cfg, most):
        every = sharing(every.cfg, most)
    reached = plain.request.cfg.context_length if plain else 0
    best = longest(search, "every lever", every, LONGER * reached)
    if best is None or best.request.cfg.context_length <= reached:
        return plain
    search.say(f"with every lever it is {best.request.cfg.context_length:,}")
    return best


def longest(search: Search, name: str, run: Run, start: int = 0) -> Tried | None:
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
    if isinstance(cfg, PolicyConfig):
        least += cfg.longest_response // UNIT * UNIT
    most = MOST_TOKENS // cfg.batch_size - (cfg.row_tokens - cfg.context_length)
    bounds = Bounds(UNIT, nearly=True, least=least, most=most // UNIT * UNIT)
    label = f"{name}, --context_length"

    def at(context: int) -> Run:
        return run.change(context_length=context)

    return search.largest(label, min(start or cfg.context_length, bounds.most), at, bounds)
