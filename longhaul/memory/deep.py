"""The memory of a step: one simulation of at most five layers, whose trace is unrolled to all.

The trace falls into runs, from one layer's start to the next one's. Of five layers, layers 1, 2
and 3 each have a neighbour like themselves on either side, so a deeper model's trace repeats the
run of layer 2, and each copy has storages of its own. This leaves out how the scratch memory of the
gradient norm, a few KiB after the peak, grows with the number of parameters, and what levers keep
in host memory, which needs.py counts.
"""

import bisect
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from footprint.trace import CATEGORIES, Event, Storage, Trace
from longhaul.config import TrainConfig
from longhaul.memory.simulate import simulate

LAYERS = 5  # that are simulated
MIDDLE = 2  # the layer of that trace that is repeated

Sizes = dict[str, int]  # category -> bytes
Moment = tuple[str, str]  # stage, and the operator whose result is new
Name = tuple  # what a storage shares with its twins in the other layers


@dataclass(frozen=True)
class Profile:
    """One rank's step: its trace, and the bytes by category at the largest of its moments."""

    trace: Trace  # of the whole model
    moments: dict[Moment, Sizes]  # the workspace included

    @cached_property
    def stages(self) -> dict[str, Sizes]:
        """Of each stage, the sizes at its peak."""
        return stage_sizes(self.moments)

    @property
    def peak_stage(self) -> str:
        return max(self.stages, key=lambda stage: sum(self.stages[stage].values()))

    @property
    def peak(self) -> int:
        """Live bytes at the peak."""
        return sum(self.stages[self.peak_stage].values())


def profile(
    cfg: TrainConfig,
    ranks: int = 1,
    target: str = "cuda",
    full: bool = False,
    tokens: int = 0,
) -> Profile:
    """The step's profile. `full` simulates every layer and every tile, and must agree with what a
    shallow model gives; `tokens` as for `simulate`.
    """
    layers = cfg.model().num_layers
    if full or layers <= LAYERS:
        trace = simulate(cfg, ranks, target, every_tile=full, tokens=tokens)
    else:
        trace = unroll(simulate(cfg, ranks, target, LAYERS, tokens=tokens), layers)
    return Profile(trace, largest_moments(trace))


def stage_sizes(moments: dict[Moment, Sizes]) -> dict[str, Sizes]:
    """Of each stage, the sizes at its largest moment."""
    found: dict[str, Sizes] = {}
    for (stage, _), sizes in moments.items():
        if sum(sizes.values()) > sum(found.get(stage, {}).values()):
            found[stage] = sizes
    return found


def largest_moments(trace: Trace) -> dict[Moment, Sizes]:
    """Of each stage and operator, the bytes by category when most are alive."""
    workspaces = {time: size for time, size, _ in trace.workspaces}
    sizes = dict.fromkeys(CATEGORIES, 0)
    found: dict[Moment, tuple[int, Sizes]] = {}
    for time, events in groupby(trace.events, key=lambda event: event.time):
        op = ""
        for event in events:
            if event.bytes:
                storage = trace.storages[event.storage]
                sizes[storage.category] += event.bytes
                op = storage.op
        workspace = workspaces.get(time, 0)
        total = sum(sizes.values()) + workspace
        moment = trace.stage_at(time), op
        if moment not in found or total > found[moment][0]:
            found[moment] = total, sizes | {"workspace": workspace}
    return {moment: at_peak for moment, (_, at_peak) in found.items()}


def layer_of(module: str) -> int | None:
    """The layer that a module belongs to; None outside of the layers."""
    found = re.match(r"layers\.(\d+)", module)
    return int(found[1]) if found else None


# ---- the trace


def unroll(trace: Trace, layers: int) -> Trace:
    """The trace of `layers` layers; `trace` has LAYERS."""
    return _Unrolling(trace, layers - LAYERS).whole()


class _Runs:
    """The runs of a trace by number: each lasts until another layer starts."""

    def __init__(self, trace: Trace):
        marks = [(time, layer_of(module)) for time, module in trace.modules]
        in_layers = [mark for mark in marks if mark[1] is not None]
        self.starts = [(0, -1)]  # (time, layer); layer -1 before the first
        for _, same_layer in groupby(in_layers, key=lambda mark: mark[1]):
            self.starts.append(next(same_layer))

    def at(self, time: int) -> int:
        """The run in which `time` lies."""
        return bisect.bisect_right(self.starts, time, key=lambda start: start[0]) - 1

    def layer(self, run: int) -> int:
        return self.starts[run][1]

    def begin(self, run: int) -> int:
        return self.starts[run][0]

    def end(self, run: int) -> float:
        return self.starts[run + 1][0] if run + 1 < len(self.starts) else float("inf")

    def visits_before(self, run: int) -> int:
        """How often the run's layer ran before: forward, backward, forward of the next micro-batch,
        and so on.
        """
        return sum(1 for earlier in range(run) if self.layer(earlier) == self.layer(run))


class _Unrolling:
    """A trace of five layers in which copies of the middle layer follow it: copy 0 is the original,
    the next `more` are new.
    """

    def __init__(self, old: Trace, more: int):
        self.old = old
        self.more = more
        self.runs = _Runs(old)
        self.workspaces = {time: (size, op) for time, size, op in old.workspaces}
        # storage -> its layer and its name; name -> layer -> storage
        self.family: dict[int, tuple[int, Name]] = {}
        self.twins: dict[Name, dict[int, int]] = {}
        self._find_families()

        self.new = Trace(config=old.config | {"layers": LAYERS + more})
        self.ids: dict[tuple[int, int], int] = {}  # (storage, copy) -> id in the new trace
        self.time = 0  # of the last event in the new trace

    def whole(self) -> Trace:
        """The new trace."""
        before = bisect.bisect_right(self.old.events, 0, key=lambda event: event.time)
        self._copy_what_is_alive(self.old.events[:before])

        later = groupby(self.old.events[before:], key=lambda event: self.runs.at(event.time))
        for run, events in later:
            self._copy_run(run, list(events))
        return self.new

    # families

    def _find_families(self) -> None:
        """Give each storage its layer, and a name that its twins in the other layers share."""
        first_run: dict[int, int] = {}  # storage -> the run in which it is allocated
        for event in self.old.events:
            if event.time and event.bytes > 0:
                first_run.setdefault(event.storage, self.runs.at(event.time))

        allocated: dict[int, int] = {}  # run -> storages allocated in it so far
        for identity, storage in self.old.storages.items():
            owner = re.match(r"layers\.(\d+)\.(.*)", storage.module)
            if owner and storage.category in ("parameter", "optimizer", "buffer"):
                layer = int(owner[1])
                name = (owner[2], storage.category)
            else:
                run = first_run.get(identity, 0)
                allocated[run] = allocated.get(run, 0) + 1
                layer = self.runs.layer(run)
                if storage.category == "unsharded":
                    layer += 1  # FSDP2 gathers a layer just before its run
                name = (self.runs.visits_before(run), allocated[run])
            self.family[identity] = layer, name
            self.twins.setdefault(name, {})[layer] = identity

    # copies

    def _copy_what_is_alive(self, events: list[Event]) -> None:
        """What is alive before the step, layer by layer."""
        by_layer = groupby(events, key=lambda event: self.family[event.storage][0])
        for layer, same_layer in by_layer:
            block = list(same_layer)
            copies = self.more + 1 if layer == MIDDLE else 1
            for copy in range(copies):
                for event in block:
                    self.new.events.append(Event(0, event.bytes, self._id(event.storage, copy)))

    def _copy_run(self, run: int, events: list[Event]) -> None:
        if self.runs.layer(run) != MIDDLE:
            self._copy_events(run, events, None)
            return

        copies = range(self.more + 1)
        is_forward = self.runs.layer(run - 1) < MIDDLE
        for copy in copies if is_forward else reversed(copies):
            self._copy_events(run, events, copy)

    def _copy_events(
        self,
        run: int,
        events: list[Event],
        copy: int | None,
    ) -> None:
        """A run's events, of one copy of the middle layer or of another layer (None), with the
        marks of stages and modules.
        """
        shift = self.time - events[0].time + 1 if self.time else 0
        self._copy_marks(run, shift, copy or 0)
        for event in events:
            self.time = event.time + shift
            if event.storage < 0:  # a workspace
                self.new.events.append(Event(self.time, event.bytes, event.storage))
                self.new.workspaces.append((self.time, *self.workspaces[event.time]))
                continue
            for storage in self._targets(event.storage, run, copy):
                self.new.events.append(Event(self.time, event.bytes, storage))

    def _copy_marks(
        self,
        run: int,
        shift: int,
        copy: int,
    ) -> None:
        begin, end = self.runs.begin(run), self.runs.end(run)
        layer = self.runs.layer(run)
        for new, old in (
            (self.new.stages, self.old.stages),
            (self.new.modules, self.old.modules),
        ):
            for time, name in old:
                if begin <= time < end:
                    new.append((time + shift, self._renamed(name, layer, copy)))

    def _renamed(
        self,
        module: str,
        layer: int,
        copy: int,
    ) -> str:
        """The module's name with its layer's number in the new trace."""
        place = layer
        if layer == MIDDLE:
            place += copy
        elif layer > MIDDLE:
            place += self.more
        return re.sub(r"^layers\.\d+", f"layers.{place}", module)

    # storages

    def _targets(
        self,
        storage: int,
        run: int,
        copy: int | None,
    ) -> list[int]:
        """Ids in the new trace of the storages that an event on `storage` concerns."""
        layer, name = self.family[storage]

        # seen from a copy, the neighbour's storage is that of the neighbouring copy
        if copy is not None and abs(layer - MIDDLE) == 1:
            neighbour = copy + layer - MIDDLE
            if 0 <= neighbour <= self.more:
                return [self._id(self.twins[name][MIDDLE], neighbour)]

        if layer != MIDDLE:
            return [self._id(storage, 0)]
        if copy is not None:
            return [self._id(storage, copy)]

        # seen from another layer: the nearest copy, or from further away all of them
        running = self.runs.layer(run)
        if running == MIDDLE - 1:
            return [self._id(storage, 0)]
        if running == MIDDLE + 1:
            return [self._id(storage, self.more)]
        return [self._id(storage, each) for each in range(self.more + 1)]

    def _id(self, storage: int, copy: int) -> int:
        key = storage, copy
        if key not in self.ids:
            identity = len(self.ids)
            self.ids[key] = identity
            old = self.old.storages[storage]
            module = self._renamed(old.module, layer_of(old.module) or 0, copy)
            own = vars(old) | {"id": identity, "module": module}
            self.new.storages[identity] = Storage(**own)  # `replace` takes three times as long
        return self.ids[key]
