"""Rows of one length after the other: the order of a run with a --length_schedule.

Each stage has its own context length, packing and order, and begins at the first position of its
first epoch. So that a position still names one row of the run, those of stage k are numbered from
k * 10^12 on; `--skip_rows` and the log use these numbers. Everything is a function of the step, as
in data/loader.py.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from data.loader import Batch, Order
from data.order import Ranges, ranges_within

APART = 10**12  # positions between the beginnings of two stages


class Stage(NamedTuple):
    """The order of a stage, and the step at which it begins."""

    first_step: int
    order: Order


def within(skip: Ranges, number: int) -> Ranges:
    """What is skipped of a stage, in its own positions."""
    return ranges_within(skip, number * APART, (number + 1) * APART)


class Staged(Order):
    """The rows of all stages; the last one goes on after its end.

    `context_length` and `global_batch_rows` are those of the last stage, whose rows are longest.
    """

    def __init__(self, stages: Sequence[Stage]):
        last = stages[-1].order
        super().__init__(last.context_length, last.global_batch_rows, last.seed, last.fingerprint)
        self.stages = stages

    def without(self, skip: Ranges) -> "Staged":
        """The same order without the positions in `skip`, instead of those in its own."""
        other = super().without(skip)
        other.stages = [
            Stage(first_step, order.without(within(skip, number)))
            for number, (first_step, order) in enumerate(self.stages)
        ]
        return other

    def stage_of(self, step: int) -> int:
        """The number of the stage that a step belongs to."""
        begun = [number for number, stage in enumerate(self.stages) if stage.first_step <= step]
        return begun[-1]

    def first_position(self, step: int) -> int:
        """The position at which a step begins."""
        number = self.stage_of(step)
        first_step, order = self.stages[number]
        return number * APART + order.first_position(step - first_step)

    def place(self, position: int) -> dict:
        """As its stage has it, with the number of the stage."""
        number, own = divmod(position, APART)
        return self.stages[number].order.place(own) | {"stage": number}

    def positions(
        self,
        step: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> Sequence[int]:
        """The positions of one rank in one step.

        Raises ValueError unless world_size divides the global batch of its stage.
        """
        number = self.stage_of(step)
        first_step, order = self.stages[number]
        own = order.positions(step - first_step, rank, world_size)
        return [number * APART + position for position in own]

    def row_index(self, position: int) -> int | tuple[str, int]:
        """The row of its stage's plan at a position."""
        number, own = divmod(position, APART)
        return self.stages[number].order.row_index(own)

    def tokens_seen(self, step: int) -> dict[str, int]:
        """Tokens of each corpus before a step, padding included; empty if there is only one."""
        seen: dict[str, int] = {}
        for stage, steps in zip(self.stages, self._steps_before(step), strict=True):
            for name, tokens in stage.order.tokens_seen(steps).items():
                seen[name] = seen.get(name, 0) + tokens
        return seen

    def _steps_before(self, step: int) -> list[int]:
        """How many of the steps before this one each stage has."""
        begins = [min(stage.first_step, step) for stage in self.stages]
        return [end - begin for begin, end in pairwise([*begins, step])]

    def rows(self, positions: Sequence[int]) -> Batch:
        """The rows at these positions, which are of one stage."""
        number = positions[0] // APART
        return self.stages[number].order.rows([own - number * APART for own in positions])

    def fill(self, row: Batch, position: int) -> None:
        """Write the row at a position into the arrays of `row`, as long as its stage's rows."""
        number, own = divmod(position, APART)
        self.stages[number].order.fill(row, own)

    def summary(self, steps: int) -> list[str]:
        """The lines of each stage, with what its own steps read."""
        lines = []
        for number, own in enumerate(self._steps_before(steps)):
            first_step, order = self.stages[number]
            lines.append(f"stage {number + 1}: {own:,} steps from step {first_step:,} on")
            lines += [f"  {line}" for line in order.summary(own)]
        return lines

    def warnings(self) -> list[str]:
        """Those of all stages."""
        return [words for stage in self.stages for words in stage.order.warnings()]


def require_longer_documents(
    lengths: np.ndarray,
    before: int,
    tokens: int,
) -> None:
    """Raise ValueError if no document of `lengths` is longer than the stage of `before` tokens, so
    that one of more `tokens` would teach nothing new.
    """
    longest = int(lengths.max(initial=0))
    if longest <= before:
        raise ValueError(
            f"--length_schedule goes to {tokens} tokens, but the longest document has {longest}, "
            f"which the stage of {before} already holds: use longer documents (data.prepare "
            "--documents directory joins files), or end the schedule there"
        )
