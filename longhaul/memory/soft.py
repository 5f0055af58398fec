"""The memory of a GRADE step with a long response, from simulations of short ones: a simulation of
every token takes longer than a plan may.

At a given moment of a given token, memory is that of the parameters, of the tokens before it and of
the tokens of the whole response, which are all alike. So every byte is a polynomial in the number
of tokens: affine if what is kept of a token does not depend on its place, and else, where each
token keeps a copy of the row before it, of the second degree. Peaks lie in the first tokens or in
the last ones.

Two things are no polynomial. Rotary tables double in length (`rehearsal.table_bytes`): their bytes
are taken out and put back. Tiles of a long row are capped: of responses of thousands of tokens, the
reward's forward takes less than what this says.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from footprint.trace import Trace
from longhaul.config import TrainConfig
from longhaul.memory.deep import EDGES, Profile, Sizes, layer_of, profile
from longhaul.memory.rehearsal import MICRO_BATCHES, table_bytes
from longhaul.posttrain.config import GradeConfig

SHORT = (5, 6, 7)  # tokens of the responses that are simulated: the first two if bytes are affine
Moment = tuple  # what peaks of responses of several lengths have in common


def profiles(cfg: GradeConfig, ranks: int, target: str) -> list[tuple[GradeConfig, Profile]]:
    """The short responses to prompts of the same length, with their profiles."""
    copies = cfg.gradient_checkpointing == "none" or cfg.method.endswith("_legacy")
    found = []
    for tokens in SHORT if copies else SHORT[:2]:
        short = shortened(cfg, tokens)
        found.append((short, _profile(short, ranks, target)))
    return found


# what `profiles` has simulated is then replayed through the allocator
_profile = functools.lru_cache(maxsize=len(SHORT))(profile)


def shortened(cfg: GradeConfig, tokens: int) -> GradeConfig:
    """The step with responses of so many tokens to prompts as long as before."""
    context = cfg.longest_prompt + tokens
    return dataclasses.replace(cfg, max_new_tokens=tokens, context_length=context)


def is_long(cfg: TrainConfig) -> bool:
    """Whether the step has soft responses that are longer than those that are simulated."""
    return isinstance(cfg, GradeConfig) and cfg.max_new_tokens > SHORT[-1]


def stages(cfg: GradeConfig, ranks: int, target: str) -> tuple[dict[str, Sizes], int]:
    """(of each stage the bytes by category at its peak, host bytes of levers) of responses that
    are long.
    """
    shorts = profiles(cfg, ranks, target)
    series = [moments(short, found.trace, ranks) for short, found in shorts]
    more = cfg.max_new_tokens - shorts[0][0].max_new_tokens

    found: dict[str, Sizes] = {}
    for moment in _lasting(series):
        stage = moment[0]
        sizes = _extended([one[moment] for one in series], more)
        sizes["buffer"] += table_bytes(cfg)
        if sum(sizes.values()) > sum(found.get(stage, {}).values()):
            found[stage] = sizes
    host = _polynomial([found.trace.host_peak for _, found in shorts], more)
    return {stage: found[stage] for stage in shorts[-1][1].stages if stage in found}, host


def _lasting(series: Sequence[dict[Moment, Sizes]]) -> Iterator[Moment]:
    """The moments of all lengths, without those that seem to bend upwards more than the peak does,
    or downwards: they were another moment of the same place in one of the lengths.
    """
    *_, last = series

    def bend(moment: Moment) -> int:
        sizes = [sum(one[moment].values()) for one in series]
        return sizes[0] - 2 * sizes[1] + sizes[-1] if len(sizes) > 2 else 0

    common = set.intersection(*(set(one) for one in series))
    most = bend(max(common, key=lambda moment: sum(last[moment].values())))
    for moment in common:
        if 0 <= bend(moment) <= most:
            yield moment


def _extended(values: Sequence[Sizes], more: int) -> Sizes:
    """Sizes of consecutive numbers of tokens, continued to `more` tokens than the first one's."""
    names = values[-1]
    return {name: _polynomial([one.get(name, 0) for one in values], more) for name in names}


def _polynomial(values: Sequence[int], at: int) -> int:
    """The value at `at` of the polynomial that has these values at 0, 1, 2 (Newton's formula)."""
    total = 0
    for order in range(len(values)):
        total += math.comb(at, order) * values[0]
        values = [after - before for before, after in itertools.pairwise(values)]
    return total


def moments(cfg: GradeConfig, trace: Trace, ranks: int) -> dict[Moment, Sizes]:
    """Of each stage, micro-batch, edge of the response, layer at an edge and operator the largest
    bytes by category, without the rotary tables.
    """
    workspaces = {time: size for time, size, _ in trace.workspaces}
    places = _Places(trace, min(cfg.accumulation(ranks), MICRO_BATCHES))
    sizes: Sizes = defaultdict(int)
    sizes["buffer"] = -table_bytes(cfg)
    total = -table_bytes(cfg)
    largest: dict[Moment, tuple[int, Sizes]] = {}

    for time, events in itertools.groupby(trace.events, key=lambda event: event.time):
        op = ""
        for event in events:
            if event.storage >= 0:
                storage = trace.storages[event.storage]
                sizes[storage.category] += event.bytes
                total += event.bytes
                op = storage.op
        workspace = workspaces.get(time, 0)
        moment = (*places.at(time), op)
        if moment not in largest or total + workspace > largest[moment][0]:
            largest[moment] = total + workspace, sizes | {"workspace": workspace}
    return {moment: dict(at_peak) for moment, (_, at_peak) in largest.items()}


class _Places:
    """Where the times of a trace lie."""

    def __init__(self, trace: Trace, micro_batches: int):
        self.trace = trace
        self.reads = [time for time, stage in _runs(trace.stages) if stage == "embedding"]
        self.tokens = len(self.reads) // micro_batches  # that the policy reads one after another
        self.layers = trace.config["layers"]

    def at(self, time: int) -> Moment:
        """(stage, micro-batch, edge of the response, edge of the layers)"""
        read = bisect.bisect_right(self.reads, time)
        micro, token = divmod(max(read - 1, 0), self.tokens)
        layer = layer_of(self.trace.module_at(time))
        place = "" if layer is None else _edge(layer, self.layers)
        return self.trace.stage_at(time), micro, _edge(token, self.tokens), place


def _runs(marks: Sequence[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Marks that differ from the one before."""
    for _, same in itertools.groupby(marks, key=lambda mark: mark[1]):
        yield next(same)


def _edge(index: int, number: int) -> int | str:
    """The index from the first or from the last one, or "middle"."""
    return next((place for place in EDGES if place % number == index), "middle")
