"""The trace of a deep model from that of a five-layer one: the middle layer's events, repeated.

A trace falls into runs: what happens from one layer's start to the next one's. In the five-layer
trace layers 1, 2 and 3 each have a layer like themselves on either side, so a deeper model's trace
has layer 2's run as often as it has more layers, each copy with storages of its own. What is left
out is how the gradient norm's scratch, a few KiB after the peak, grows with the number of
parameters; `extrapolate` has it. Imports longhaul.memory.trace of ours.
"""

import bisect
import dataclasses
import re
from itertools import groupby

from longhaul.memory.trace import Event, Storage, Trace

LAYERS, MIDDLE = 5, 2  # of the trace that is unrolled, and which of its layers is repeated


class Runs:
    """Which layer's run a moment lies in; `starts` are (time, layer), layer -1 before the first."""

    def __init__(self, trace: Trace):
        layers = [
            (time, int(found[1]))
            for time, name in trace.modules
            if (found := re.match(r"layers\.(\d+)", name))
        ]
        self.starts = [(0, -1)] + [
            next(group) for _, group in groupby(layers, key=lambda start: start[1])
        ]

    def index(self, time: int) -> int:
        """The run's number."""
        return bisect.bisect_right(self.starts, time, key=lambda start: start[0]) - 1

    def layer(self, run: int) -> int:
        return self.starts[run][1]


def unroll(trace: Trace, layers: int) -> Trace:
    """The trace of `layers` layers; `trace` has five."""
    return _Unrolling(trace, layers - LAYERS).trace


class _Unrolling:
    """`more` copies of the middle layer beside the original: copy 0 is the original, the next
    `more` follow it.
    """

    def __init__(self, old: Trace, more: int):
        self.old, self.more, self.runs, self.time = old, more, Runs(old), 0
        self.trace = Trace(config=old.config | dict(layers=LAYERS + more))
        self.family, self.twins = (
            {},
            {},
        )  # storage -> (layer, name within the layer); name -> layer -> storage
        self._families()
        self.ids: dict[tuple[int, int], int] = {}  # (storage, copy) -> id in the new trace
        self.inside = {time: (size, op) for time, size, op in old.workspaces}
        before = bisect.bisect_right(old.events, 0, key=lambda event: event.time)
        self._start(old.events[:before])
        for run, events in groupby(
            old.events[before:], key=lambda event: self.runs.index(event.time)
        ):
            self._run(run, list(events))

    def _families(self):
        """Give each storage its layer, and a name that its twin in the next layer shares."""
        first, born = {}, {}
        for event in self.old.events:
            if event.time and event.bytes > 0:
                first.setdefault(event.storage, self.runs.index(event.time))
        for identity, storage in self.old.storages.items():
            owner = re.match(r"layers\.(\d+)\.(.*)", storage.module)
            run = first.get(identity, 0)
            if owner and storage.category in ("parameter", "optimizer", "buffer"):
                layer, name = int(owner[1]), (owner[2], storage.category)
            else:
                born[run] = born.get(run, 0) + 1
                layer = self.runs.layer(run) + (
                    storage.category == "unsharded"
                )  # FSDP2 gathers a layer just before its run
                name = self._visit(run), born[run]
            self.family[identity] = layer, name
            self.twins.setdefault(name, {})[layer] = identity

    def _visit(self, run: int) -> int:
        """How often the run's layer was visited before: forward, backward, forward of the next
        micro-batch, ...
        """
        return sum(1 for index in range(run) if self.runs.layer(index) == self.runs.layer(run))

    def _start(self, events: list[Event]):
        """What is there before the step: layer by layer."""
        for layer, block in groupby(events, key=lambda event: self.family[event.storage][0]):
            block = list(block)
            for copy in range(self.more + 1 if layer == MIDDLE else 1):
                self.trace.events += [
                    Event(0, event.bytes, self._id(event.storage, copy)) for event in block
                ]

    def _run(self, run: int, events: list[Event]):
        layer = self.runs.layer(run)
        if layer != MIDDLE:
            self._play(run, events, None)
            return
        forward = self.runs.layer(run - 1) < MIDDLE
        for copy in range(self.more + 1) if forward else range(self.more, -1, -1):
            self._play(run, events, copy)

    def _play(self, run: int, events: list[Event], copy: int | None):
        """A run's events, of one copy of the middle layer or of another layer (None); marks of
        stages and modules with them.
        """
        shift = self.time - events[0].time + 1 if self.time else 0
        self._marks(run, shift, copy)
        for event in events:
            self.time = event.time + shift
            for storage in (
                [event.storage] if event.storage < 0 else self._targets(event.storage, run, copy)
            ):
                self.trace.events.append(Event(self.time, event.bytes, storage))
            if event.storage < 0:
                self.trace.workspaces.append((self.time, *self.inside[event.time]))

    def _marks(self, run: int, shift: int, copy: int | None):
        start = self.runs.starts[run][0]
        end = self.runs.starts[run + 1][0] if run + 1 < len(self.runs.starts) else float("inf")
        for ours, theirs in (
            (self.trace.stages, self.old.stages),
            (self.trace.modules, self.old.modules),
        ):
            ours += [
                (time + shift, self._renamed(name, self.runs.layer(run), copy or 0))
                for time, name in theirs
                if start <= time < end
            ]

    def _renamed(self, module: str, layer: int, copy: int) -> str:
        place = layer + (copy if layer == MIDDLE else self.more if layer > MIDDLE else 0)
        return re.sub(r"^layers\.\d+", f"layers.{place}", module)

    def _targets(self, storage: int, run: int, copy: int | None) -> list[int]:
        """The new ids that an event on `storage` concerns."""
        layer, name = self.family[storage]
        here = self.runs.layer(run)
        # a neighbour's: among the copies the neighbour is a copy
        if copy is not None and abs(layer - MIDDLE) == 1:
            other = copy + layer - MIDDLE
            if 0 <= other <= self.more:
                return [self._id(self.twins[name][MIDDLE], other)]
        if layer != MIDDLE:
            return [self._id(storage, 0)]
        if copy is not None:
            return [self._id(storage, copy)]
        near = {MIDDLE - 1: [0], MIDDLE + 1: [self.more]}.get(here)
        return [self._id(storage, each) for each in near or range(self.more + 1)]

    def _id(self, storage: int, copy: int) -> int:
        key = storage, copy
        if key not in self.ids:
            self.ids[key] = identity = len(self.ids)
            old = self.old.storages[storage]
            self.trace.storages[identity] = dataclasses.replace(
                old, id=identity, module=self._renamed(old.module, self._layer_of(old), copy)
            )
        return self.ids[key]

    def _layer_of(self, storage: Storage) -> int:
        found = re.match(r"layers\.(\d+)", storage.module)
        return int(found[1]) if found else 0
