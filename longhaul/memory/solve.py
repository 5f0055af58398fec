"""The longest context, the cheapest levers, or the fewest ranks that fit.

The closed form says in a tenth of a millisecond what a step needs at least; the simulator says in
seconds what the allocator reserves for it. So candidates that the closed form excludes are not
simulated, nor are those that could not be the answer; the answer always is.

`--solve levers` climbs the ladder of fit.py up to the first rung that fits, then looks at more
ranks (FSDP2, and ranks that share rows) and at sparse attention, which changes the model. The
candidate that fits with the least predicted step time times number of ranks wins. The time is a
roofline, good to an order of magnitude. A candidate fits if its device holds what the allocator
reserves with expandable segments, the CUDA context and the libraries' workspaces. Sizes are
GiB = 2^30 bytes per rank.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from footprint.device import EXPANDABLE_SEGMENTS, Demand, Placement, beyond_the_allocator
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.flops import run_words, step_seconds, warm_up_seconds
from longhaul.kinds import attention_kind, unfit_exchanges
from longhaul.memory import fit
from longhaul.memory.estimate import Estimate, estimate
from longhaul.memory.fit import Verdict
from longhaul.memory.needs import needs, resident
from longhaul.memory.plan import command, flag_of, shutdown_timeout
from longhaul.memory.reserve import demand
from longhaul.memory.simulate import MOST_TOKENS
from longhaul.parallel.context import allowed_sizes
from longhaul.posttrain.config import PolicyConfig
from model import GIB

SMALLEST = 1024  # tokens: no shorter context is an answer
HEAD = (
    f"{'levers':<58}{'context':>12}{'live GiB':>10}{'device GiB':>12}{'host GiB':>10}{'step s':>10}"
)
AIMS = 4  # of `longest` at what the closed form predicts, before it halves the distance
RESERVED = 1.02  # times live memory: what the allocator reserves, for the first aim
NEARLY_ALL = 0.995  # of the device: no longer context is looked for
# The closed form exceeds the simulation by no more than this: with sparse attention in a few
# settings, otherwise by a thousandth.
SURE = {"standard": 0.995}
SURE_OF_OTHERS = 0.96

Say = Callable[[str], object]  # shows a line as soon as it is known


@dataclass(frozen=True)
class Candidate:
    """A request on a number of ranks, and what the closed form says about it."""

    cfg: TrainConfig
    ranks: int
    name: str

    @cached_property
    def closed(self) -> Estimate:
        if isinstance(self.cfg, PolicyConfig):
            return needs(self.cfg, self.cfg.model(), self.ranks)
        return estimate(self.cfg, self.cfg.model(), self.ranks, inside=False)

    @property
    def context(self) -> int:
        return self.cfg.context_length

    @property
    def seconds(self) -> float:
        """Predicted time of a step, all ranks working in parallel."""
        return step_seconds(self.cfg, self.cfg.model(), self.ranks, "cuda")

    @property
    def warm_up_seconds(self) -> float:
        """The same of a step of an indexer's dense warm-up; 0 for a run without one."""
        return warm_up_seconds(self.cfg, self.cfg.model(), self.ranks, "cuda")

    @property
    def least_bytes(self) -> int:
        """What the device must hold without doubt: the allocator reserves more than is live."""
        sure = SURE.get(self.cfg.attention_type, SURE_OF_OTHERS)
        return int(self.closed.peak * sure) + beyond(self.ranks)

    @property
    def resident(self) -> int:
        """What the device of a policy holds all the time, which needs no simulation."""
        if not isinstance(self.cfg, PolicyConfig):
            return 0
        return resident(self.cfg, self.cfg.model(), self.ranks) + beyond(self.ranks)

    def at(self, context: int) -> "Candidate":
        """The same with another context."""
        cfg = dataclasses.replace(self.cfg, context_length=context)
        return Candidate(cfg, self.ranks, self.name)

    def cost(self, asked: TrainConfig) -> tuple[bool, float, int]:
        """By what `levers` chooses: the attention as asked, then the time of all ranks."""
        other_attention = attention_kind(self.cfg) is not attention_kind(asked)
        return other_attention, self.seconds * self.ranks, self.ranks

    def short_row(self, words: str) -> str:
        """A line of the table for what every stage holds."""
        device = f">{self.resident / GIB:.2f}"
        return (
            f"{self.name:<58}{self.context:>12,}{'':>10}{device:>12}{'':>10}{self.seconds:>10.3g}  "
            f"{words}"
        )

    def row(self, needs: Demand | None, words: str) -> str:
        """A line of the table; without a simulation, sizes are those of the closed form."""
        live = self.closed.peak
        device = f">{self.least_bytes / GIB:.2f}"
        if needs is not None:
            live = needs.classic.peak_live
            device = f"{needs.least_bytes / GIB:.2f}"
        return (
            f"{self.name:<58}{self.context:>12,}{live / GIB:>10.2f}{device:>12}"
            f"{self.closed.host / GIB:>10.2f}{self.seconds:>10.3g}  {words}"
        )


@dataclass(frozen=True)
class Answer:
    """What was printed, and the verdict."""

    text: str
    verdict: Verdict


def beyond(ranks: int) -> int:
    """Bytes on the device that the allocator does not reserve."""
    return sum(beyond_the_allocator(ranks).values())


class Search:
    """Looks at candidates and says what it finds; `room` is what a device holds, in bytes."""

    def __init__(self, room: int, say: Say):
        self.room = room
        self.lines: list[str] = []
        self._say = say
        self.placement = Placement.TOO_SMALL  # of the candidate that was simulated last

    def say(self, line: str) -> None:
        self.lines.append(line)
        self._say(line)

    def holds(self, one: Candidate) -> bool:
        """Whether the device holds the candidate; simulated unless it is far too large."""
        needs = None
        self.placement = Placement.TOO_SMALL
        if one.resident > self.room:
            self.say(one.short_row(self.placement))
            return False
        if one.least_bytes <= self.room:
            needs = demand(one.cfg, one.ranks)
            self.placement = needs.placement(self.room)
        self.say(one.row(needs, self.placement))
        return self.placement is not Placement.TOO_SMALL

    def leave(self, others: Iterable[Candidate]) -> None:
        """Show candidates that need not be simulated, if a closed form knows their sizes."""
        for one in others:
            if isinstance(one.cfg, PolicyConfig):
                continue
            too_large = one.least_bytes > self.room
            self.say(one.row(None, Placement.TOO_SMALL if too_large else "not simulated"))


def solve(
    cfg: TrainConfig, what: str, gpu_gib: float, gpus: int, say: Say = lambda line: None
) -> Answer:
    """The candidates and the command of the best one; `what` is a choice of --solve."""
    finders = {"levers": _by_levers, "context": _by_context, "world_size": _by_ranks}
    least = worlds(cfg, gpus)[0]
    search = Search(int(gpu_gib * GIB), say)
    search.say(
        f"{what}: {gpus} GPU(s) of {gpu_gib:g} GiB; sizes per rank, all figures predicted; "
        "device: reserved memory, CUDA context, workspaces (>: at least, by the closed form)"
    )
    search.say(HEAD)

    best = finders[what](search, cfg, gpus)
    if best is None:
        search.say("nothing fits")
        return Answer("\n".join(search.lines), Verdict.NOTHING)

    unchanged = (best.cfg, best.ranks) == (cfg, least) and search.placement is Placement.FITS
    verdict = Verdict.FITS if unchanged else Verdict.AFTER_CHANGES
    search.say(f"time: {run_words(best.cfg, best.seconds, best.warm_up_seconds, 'cuda')}")
    search.say(_command(best, search.placement))
    return Answer("\n".join(search.lines), verdict)


def _command(best: Candidate, placement: Placement) -> str:
    """The command that trains it."""
    step = max(best.seconds, best.warm_up_seconds)
    timeout = shutdown_timeout(best.cfg, best.ranks, step)
    line = command(best.cfg, World(size=best.ranks, local_size=best.ranks), timeout)
    return EXPANDABLE_SEGMENTS + line if placement is Placement.EXPANDABLE else line


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
    if cheaper and not isinstance(cfg, PolicyConfig):  # whose prompts sparse attention cannot share
        sparse = dataclasses.replace(cfg, attention_type=cheaper)
        for ranks in numbers:
            found.append(Candidate(sparse, ranks, f"{name}, {ranks} rank(s), sparse attention"))
    return found


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


def _by_levers(search: Search, cfg: TrainConfig, gpus: int) -> Candidate | None:
    """The first rung that fits, or what is cheaper than it on more ranks."""
    climbed = rungs(cfg, worlds(cfg, gpus)[0])
    first = _first_that_fits(search, climbed)
    start = first or climbed[-1]
    higher = climbed[climbed.index(start) + 1 :]
    others = sorted(higher + wider(start, gpus), key=lambda one: one.cost(cfg))
    if first is None:
        return _first_that_fits(search, others)

    placement = search.placement
    cheaper = [one for one in others if one.cost(cfg) < first.cost(cfg)]
    better = _first_that_fits(search, cheaper)
    search.leave(others[len(cheaper) :])
    if better is None:
        search.placement = placement
    return better or first


def _first_that_fits(search: Search, candidates: list[Candidate]) -> Candidate | None:
    return next((one for one in candidates if search.holds(one)), None)


# ---- the fewest ranks


def _by_ranks(search: Search, cfg: TrainConfig, gpus: int) -> Candidate | None:
    """The request on the fewest ranks that hold it; if none do, with the fewest levers."""
    numbers = worlds(cfg, gpus)
    for rung in fit.ladder(cfg):
        levers = "" if rung.lever == fit.AS_ASKED else f", up to {rung.lever}"
        candidates = []
        for ranks in numbers:
            candidates.append(Candidate(rung.request, ranks, f"{ranks} rank(s){levers}"))

        best = _first_that_fits(search, candidates)
        if best is not None:
            search.leave(candidates[candidates.index(best) + 1 :])
            if best.cfg != cfg:
                search.say(f"as asked, {gpus} GPU(s) are too few; {_with_levers(best, cfg)}")
            return best
    return None


def _with_levers(best: Candidate, asked: TrainConfig) -> str:
    """The settings that a candidate changes, and its ranks."""
    changed = []
    for spec in dataclasses.fields(asked):
        value = getattr(best.cfg, spec.name)
        if value != getattr(asked, spec.name):
            changed.append(flag_of(spec, value))
    return f"with {' '.join(changed)}, {best.ranks} rank(s) are enough"


# ---- the longest context


def _by_context(search: Search, cfg: TrainConfig, gpus: int) -> Candidate | None:
    """The candidate with the longest context; of equal ones the fastest.

    The closed form bounds every candidate's context. The longest is found by simulation; others are
    simulated only if their bound is longer than what was found. A policy has no closed form: the
    candidate with all levers on all GPUs has its longest context.
    """
    if isinstance(cfg, PolicyConfig):
        all_levers = rungs(cfg, worlds(cfg, gpus)[-1])[-1]
        return _longest_of(search, all_levers)

    shortest = dataclasses.replace(cfg, context_length=SMALLEST)
    climbed = rungs(shortest, worlds(cfg, gpus)[0])
    bounds = []
    for one in climbed + wider(climbed[-1], gpus):
        most = bound(one, lambda found: found.least_bytes, search.room)
        search.say(one.at(most).row(None, "at most"))
        bounds.append(one.at(most))

    best = None
    possible = [one for one in bounds if one.least_bytes <= search.room]
    for one in sorted(possible, key=lambda one: _promise(one, cfg), reverse=True):
        if best is None or _beats(one, best, search.room):
            best = _longest_of(search, one) or best
    return best


def _promise(one: Candidate, asked: TrainConfig) -> tuple[bool, int, float]:
    """In which order to simulate: the attention as asked first, then the longest bound."""
    same_attention = attention_kind(one.cfg) is attention_kind(asked)
    return same_attention, one.context, -one.seconds


def _beats(one: Candidate, best: Candidate, room: int) -> bool:
    """Whether a candidate has a longer context than the best so far, or the same in less time.

    Another attention that needs more than the best by the closed form is not simulated.
    """
    same = one.at(best.context)
    aim = same if same.seconds < best.seconds else one.at(best.context + SMALLEST)
    if aim.context > one.context:
        return False
    other_attention = attention_kind(one.cfg) is not attention_kind(best.cfg)
    if other_attention and same.closed.peak >= best.closed.peak:
        return False
    return demand(aim.cfg, aim.ranks).least_bytes <= room


def _longest_of(search: Search, one: Candidate) -> Candidate | None:
    """The candidate with the longest context that fits; None if not even the shortest does."""
    context, needs = longest(one.cfg, one.ranks, search.room / GIB)
    found = one.at(context)
    placement = needs.placement(search.room)
    search.say(found.row(needs, placement))
    if placement is Placement.TOO_SMALL:
        return None
    search.placement = placement
    return found


def bound(one: Candidate, size: Callable[[Candidate], float], room: float) -> int:
    """The longest context, a multiple of 1,024 tokens, whose size(candidate) is within `room`.

    1,024 if even that is too long. `size` must grow with the context.
    """
    fits = 1
    exceeds = MOST_TOKENS // one.cfg.batch_size // SMALLEST + 1
    while exceeds > fits + 1:
        middle = (fits + exceeds) // 2
        if size(one.at(middle * SMALLEST)) <= room:
            fits = middle
        else:
            exceeds = middle
    return fits * SMALLEST


def longest(cfg: TrainConfig, ranks: int, room: float) -> tuple[int, Demand]:
    """(tokens, demand) of the longest context whose device GiB are within `room`, up to half a
    percent of `room`.

    A multiple of 1,024 tokens; the smallest that has room for a prompt if even that is too long.
    Every aim is simulated. After four aims the distance is halved, because the allocator reserves
    in steps; while everything has fit, the next aim is a sixteenth longer. ValueError if a batch of
    rows of 1,024 tokens has more tokens than can be simulated.
    """
    if cfg.batch_size * SMALLEST > MOST_TOKENS:
        raise ValueError(
            f"--batch_size {cfg.batch_size}: rows of {SMALLEST:,} tokens, the shortest that are "
            f"looked for, would make more than {MOST_TOKENS:,} tokens: give a smaller --batch_size"
        )
    one = Candidate(cfg, ranks, "")
    room_bytes = room * GIB
    known: dict[int, Demand] = {}
    # of a policy a prompt and its longest response are a context, and other responses more tokens
    shortest = SMALLEST
    if isinstance(cfg, PolicyConfig):
        shortest += cfg.longest_response // SMALLEST * SMALLEST
    most = MOST_TOKENS // cfg.batch_size - (cfg.row_tokens - cfg.context_length)
    fits = shortest - SMALLEST
    exceeds = most // SMALLEST * SMALLEST + SMALLEST
    while exceeds > fits + SMALLEST:
        aim = (fits + exceeds) // 2
        if len(known) < AIMS:
            aim = _aim(one, known, room_bytes)
        elif exceeds not in known:
            aim = min(aim, fits + fits // 16)
        aim = min(max(aim // SMALLEST * SMALLEST, fits + SMALLEST), exceeds - SMALLEST)

        known[aim] = demand(one.at(aim).cfg, ranks)
        least = known[aim].least_bytes
        if least > room_bytes:
            exceeds = aim
            continue
        fits = aim
        if least >= NEARLY_ALL * room_bytes:
            break
    return max(fits, shortest), known[max(fits, shortest)]


def _aim(one: Candidate, known: dict[int, Demand], room: float) -> int:
    """The context that should fill `room`: between what fits and what does not, on a straight line;
    before both are known, where the closed form says if the allocator reserves as much more as in
    the last simulation.
    """
    sizes = {context: needs.least_bytes for context, needs in known.items()}
    fits = max((context for context, size in sizes.items() if size <= room), default=None)
    exceeds = min((context for context, size in sizes.items() if size > room), default=None)
    if fits is not None and exceeds is not None:
        share = (room - sizes[fits]) / (sizes[exceeds] - sizes[fits])
        return int(fits + share * (exceeds - fits))
    if isinstance(one.cfg, PolicyConfig):
        return _aim_of_policy(one, sizes, room)

    reserved = RESERVED
    if known:
        last = list(known)[-1]
        reserved = (sizes[last] - beyond(one.ranks)) / one.at(last).closed.peak
    return bound(one, _with_reserved(reserved), room)


def _aim_of_policy(one: Candidate, sizes: dict[int, int], room: float) -> int:
    """The context that should fill `room`: on the straight line through the last two simulations,
    or through the only one and zero.
    """
    if not sizes:
        return one.context
    *before, (context, size) = sizes.items()
    start, least = before[-1] if before else (0, 0)
    growth = (size - least) / (context - start)
    if growth <= 0:
        return 2 * context
    return int(context + (room - size) / growth)


def _with_reserved(times_live: float) -> Callable[[Candidate], float]:
    """Bytes of a device if the allocator reserves so much of what the closed form says is live."""

    def size(one: Candidate) -> float:
        return times_live * one.closed.peak + beyond(one.ranks)

    return size
