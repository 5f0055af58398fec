"""The peaks of a deep model from those of shallow ones: every byte of a step is affine in the
number of layers.

At a given moment of a given layer the memory is that of the static part, of the layers before and
of the layers after, each alike; so it is affine both in the number of layers and in the layer's
place, and a peak lies in one of the first or last two layers (their neighbours differ: FSDP2
gathers the next layer early). Four- and five-layer simulations give both coefficients. Imports
longhaul.config, longhaul.memory (simulate, trace, unroll) of ours.
"""

import dataclasses
import math
import re
from dataclasses import dataclass

from longhaul.config import TrainConfig
from longhaul.memory.simulate import simulate
from longhaul.memory.trace import CATEGORIES, Trace
from longhaul.memory.unroll import LAYERS, unroll

SHALLOW = (
    LAYERS - 1,
    LAYERS,
)  # layers that are simulated: in four, first, second, last but one and last stand apart


@dataclass(frozen=True)
class Profile:
    """Peaks of one rank's step in bytes: by stage, and at each stage's peak by category."""

    stages: dict[
        str, dict[str, int]
    ]  # stage -> category -> bytes at the stage's peak, the workspace included
    trace: Trace  # of the whole model: simulated with `full`, else unrolled
    layers: int

    @property
    def peak_stage(self) -> str:
        return max(self.stages, key=lambda stage: sum(self.stages[stage].values()))

    @property
    def peak(self) -> int:
        """Live bytes at the peak."""
        return sum(self.stages[self.peak_stage].values())


def profile(cfg: TrainConfig, ranks: int = 1, target: str = "cuda", full: bool = False) -> Profile:
    """The step's profile; `full` simulates every layer and part, and must agree with what shallow
    models extrapolate to.
    """
    layers = cfg.model().num_layers
    if full or layers <= SHALLOW[1]:
        trace = simulate(cfg, ranks, target, every_part=full)
        return Profile(_largest(_by_place(trace, layers)), trace, layers)
    traces = [simulate(cfg, ranks, target, count) for count in SHALLOW]
    low, high = (_by_place(trace, count) for trace, count in zip(traces, SHALLOW))
    return Profile(
        _largest({place: _line(low[place], high[place], layers) for place in low}),
        _deep(traces, layers),
        layers,
    )


def _deep(traces: list[Trace], layers: int) -> Trace:
    return dataclasses.replace(
        unroll(traces[1], layers), host_peaks=_line(*(trace.host_peaks for trace in traces), layers)
    )


def _line(low: dict, high: dict, layers: int) -> dict[str, int]:
    steps = (layers - SHALLOW[0]) // (SHALLOW[1] - SHALLOW[0])
    return {
        name: low.get(name, 0) + steps * (high.get(name, 0) - low.get(name, 0))
        for name in high | low
    }


def _largest(places: dict[tuple, dict]) -> dict[str, dict[str, int]]:
    """Of each stage the place whose peak is largest."""
    best: dict[str, dict[str, int]] = {}
    for (stage, _), sizes in places.items():
        if sum(sizes.values()) > sum(best.get(stage, {}).values()):
            best[stage] = sizes
    return best


def _by_place(trace: Trace, layers: int) -> dict[tuple, dict[str, int]]:
    """(stage, place) -> bytes by category at the largest moment there; places: 0, 1, -2 and -1 of
    the layers, "" outside them.
    """
    sizes, peaks = dict.fromkeys(CATEGORIES, 0), {}
    inside = {time: size for time, size, _ in trace.workspaces}
    times = [event.time for event in trace.events]
    for event, following in zip(trace.events, times[1:] + [math.inf]):
        if event.bytes:
            sizes[trace.storages[event.storage].category] += event.bytes
        if event.time == following:
            continue
        total = sum(sizes.values()) + inside.get(event.time, 0)
        for place in _places(trace.module_at(event.time), layers):
            key = trace.stage_at(event.time), place
            if key not in peaks or total > peaks[key][0]:
                peaks[key] = total, sizes | dict(workspace=inside.get(event.time, 0))
    return {key: found for key, (_, found) in peaks.items()}


def _places(module: str, layers: int) -> list:
    found = re.match(r"layers\.(\d+)", module)
    if not found:
        return [""]
    index = int(found[1])
    return [place for place in (0, 1, -2, -1) if place % layers == index] or ["middle"]
