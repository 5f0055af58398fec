"""A step of many equal layers from the record of a few: one simulation of five layers, whose trace
is unrolled to all.

The trace falls into runs, from one layer's start to the next one's. Of five layers, layers 1, 2
and 3 each have a neighbour like themselves on either side, so a deeper model's trace repeats the
run of layer 2, and each copy has storages of its own. This leaves out how the scratch memory of a
gradient norm, a few KiB after the peak, grows with the number of parameters. Layers are the modules
of a list named `layers`.
"""

import bisect
import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from footprint.record.trace import Event, Storage, Trace, first_of_each
from footprint.record.tracker import NO_STORAGE

LAYERS = 5  # that are simulated
MIDDLE = 2  # the layer of that trace that is repeated

Name = tuple  # what a storage shares with its twins in the other layers


class Run(NamedTuple):
    """What happens from one layer's start to the next one's."""

    layer: int  # -1 before the first
    visit: int  # how often the layer ran before: forward, backward, forward of the next micro-batch
    is_forward: bool  # whether the layer before it ran last
    begin: int
    end: float
    events: list[Event]


def runs_of(trace: Trace) -> Iterator[Run]:
    """The runs of a trace that allocate or free, without what is alive before the step."""
    marks = [
        (time, re.match(r"(?:\w+\.)*?layers\.(\d+)", module)) for time, module in trace.modules
    ]
    in_layers = [(time, int(layer[1])) for time, layer in marks if layer]
    starts = [(0, -1), *first_of_each(in_layers)]
    times = [time for time, _ in starts] + [math.inf]
    layers = [layer for _, layer in starts]

    def number(event: Event) -> int:
        return bisect.bisect_right(times, event.time) - 1

    for run, events in groupby((event for event in trace.events if event.time), number):
        layer = layers[run]
        visit = layers[:run].count(layer)
        is_forward = layers[run - 1] < layer
        yield Run(layer, visit, is_forward, times[run], times[run + 1], list(events))


def unroll(trace: Trace, layers: int) -> Trace:
    """The trace of `layers` layers; `trace` has LAYERS."""
    return _Unrolling(trace, layers - LAYERS).whole()


class _Unrolling:
    """A trace of five layers in which `more` copies of the middle layer follow it.

    A place is a layer's number in the new trace.
    """

    def __init__(self, old: Trace, more: int):
        self.old = old
        self.more = more
        self.middle = range(MIDDLE, MIDDLE + more + 1)  # places of the middle layer and its copies
        self.runs = list(runs_of(old))
        self.workspaces = {time: (size, op) for time, size, op in old.workspaces}
        self.families: dict[int, tuple[int, Name]] = {}  # storage -> its layer and its name
        self.twins: dict[tuple[int, Name], int] = {}  # the other way round
        self._find_families()

        self.new = Trace()
        self.ids: dict[tuple[int, int], int] = {}  # (storage, place) -> id in the new trace
        self.time = 0  # of the last event in the new trace

    def _find_families(self) -> None:
        """Give each storage its layer, and a name that its twins in the other layers share."""
        made_in: dict[int, tuple[int, int]] = {}  # storage -> layer and visit
        for run in self.runs:
            for event in run.events:
                if event.bytes > 0:
                    made_in.setdefault(event.storage, (run.layer, run.visit))

        before = {event.storage for event in self.old.events if not event.time}
        made: Counter[tuple[int, int]] = Counter()
        owned: Counter[Name] = Counter()
        for identity, storage in self.old.storages.items():
            owner = re.match(r"((?:\w+\.)*?)layers\.(\d+)\.(.*)", storage.module)
            lasting = storage.category in ("parameter", "optimizer", "buffer")
            if owner and (lasting or identity in before):
                layer = int(owner[2])
                name = (owner[1], owner[3], storage.category)
                owned[layer, name] += 1
                name += (owned[layer, name],)
            else:
                layer, visit = made_in.get(identity, (-1, 0))
                made[layer, visit] += 1
                name = (visit, made[layer, visit])
                if storage.category == "unsharded":
                    layer += 1  # FSDP2 gathers a layer just before its run
            self.families[identity] = layer, name
            self.twins[layer, name] = identity

    def whole(self) -> Trace:
        """The new trace."""
        before = [event for event in self.old.events if not event.time]
        for layer, events in groupby(before, key=lambda event: self.families[event.storage][0]):
            self._copy(Run(layer, 0, True, 0, 0, list(events)))
        for run in self.runs:
            self._copy(run)
        return self.new

    def _copy(self, run: Run) -> None:
        """A run at its place; the middle layer's at every place of a copy."""
        places = [self._place(run.layer)]
        if run.layer == MIDDLE:
            places = self.middle if run.is_forward else self.middle[::-1]
        for place in places:
            self._copy_to(run, place)

    def _place(self, layer: int) -> int:
        return layer + self.more if layer > MIDDLE else layer

    def _copy_to(self, run: Run, place: int) -> None:
        """The events of a run, with its marks of stages and modules."""
        shift = self.time - run.events[0].time + 1 if self.time else 0
        for new, old in (
            (self.new.stages, self.old.stages),
            (self.new.modules, self.old.modules),
        ):
            within = [mark for mark in old if run.begin <= mark[0] < run.end]
            new += [(time + shift, _renamed(name, place)) for time, name in within]

        for event in run.events:
            self.time = event.time + shift
            if event.storage == NO_STORAGE:
                self.new.events.append(Event(self.time, event.bytes, NO_STORAGE))
                self.new.workspaces.append((self.time, *self.workspaces[event.time]))
                continue
            for storage in self._seen_from(run.layer, place, event.storage):
                self.new.events.append(Event(self.time, event.bytes, storage))

    def _seen_from(self, running: int, place: int, storage: int) -> list[int]:
        """Ids in the new trace of what a storage is to the layer that runs at a place."""
        layer, _ = self.families[storage]
        if abs(layer - running) <= 1:  # of a copy, the neighbour may be a copy
            return [self._id(storage, place + layer - running)]
        if layer == MIDDLE:  # from further away all copies
            return [self._id(storage, each) for each in self.middle]
        return [self._id(storage, self._place(layer))]

    def _id(self, storage: int, place: int) -> int:
        """The id of the storage, or of its twin in the middle layer, at a place."""
        layer, name = self.families[storage]
        if place in self.middle and layer != MIDDLE:
            storage = self.twins[MIDDLE, name]
        key = storage, place
        if key not in self.ids:
            identity = len(self.ids)
            self.ids[key] = identity
            old = self.old.storages[storage]
            own = vars(old) | {"id": identity, "module": _renamed(old.module, place)}
            self.new.storages[identity] = Storage(**own)  # `replace` takes three times as long
        return self.ids[key]


def _renamed(module: str, place: int) -> str:
    """The module's name with its layer's number in the new trace."""
    return re.sub(r"^((?:\w+\.)*?)layers\.\d+", rf"\g<1>layers.{place}", module)
