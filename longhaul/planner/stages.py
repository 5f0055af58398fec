"""The peak of each stage of real steps, as somebody else reads it: an allocator, or the kernel."""

import contextlib
from collections.abc import Callable, Iterator

from footprint.pretend.owners import adopt_models
from footprint.pretend.places import START, Places
from longhaul.step import TrainState


class StagePeaks(Places):
    """Asks read() for the peak whenever a stage ends, and keeps the largest answer of each."""

    def __init__(self, read: Callable[[], float]):
        super().__init__()
        self.read = read
        self.stage = START
        self.module = ""
        self.peaks: dict[str, float] = {}

    def enter(self, stage: str, module: str = "") -> None:
        if stage != self.stage:
            self.note()
        self.stage = stage
        self.module = module

    def note(self) -> None:
        """The stage that is running has taken this much."""
        self.peaks[self.stage] = max(self.peaks.get(self.stage, 0), self.read())

    @contextlib.contextmanager
    def of_step(self, state: TrainState) -> Iterator[None]:
        """Steps of `state` inside the `with` block tell where they are."""
        adopt_models(self, state)
        self.announce(START)
        state.listeners.append(self.announce)
        try:
            with self.watching():
                yield
        finally:
            state.listeners.remove(self.announce)
