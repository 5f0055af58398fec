"""The memory of a program's step, predicted by footprint: the real `step.build` and
`step.train_step` run on fake tensors, so nothing is allocated.

The trace is that of the second step, which is like all that follow: the first one has no optimizer
states.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from base.machine import deterministic, few_rounds
from footprint.cards.device import target_card
from footprint.kernels.attention import Attention
from footprint.pretend.places import StepTracker
from footprint.pretend.ranks import as_rank
from footprint.pretend.values import KnownValues
from footprint.record.timeline import Sizes, stages_at_peak
from footprint.record.trace import Trace
from footprint.record.unroll import LAYERS, unroll
from footprint.steps.prediction import (
    fake_process_group,
    on_fake_tensors,
    start_fake_group,
    trace_two_steps,
)
from longhaul import dist, step
from longhaul.config import TrainConfig
from longhaul.planner.program import Program, program_of
from longhaul.planner.workspace import Usual, Workspaces, as_there

MOST_TOKENS = 2**31 - 1  # of a micro-batch: the bounds of documents are 32-bit numbers


def simulate(
    cfg: TrainConfig,
    ranks: int = 1,
    target: str = "cuda",
    layers: int = 0,
    every_tile: bool = False,
) -> Trace:
    """The trace of the second step of one rank; with two steps of an indexer's dense warm-up it is
    one of these.

    layers: replaces the model's number of layers. every_tile: runs all rounds of a loop, which are
    alike, instead of a few (base.machine.rounds), and all micro-batches.
    ValueError if a micro-batch has more tokens than 32-bit positions count.
    """
    if cfg.batch_size * cfg.row_tokens > MOST_TOKENS:
        raise ValueError(
            f"--context_length {cfg.context_length} with --batch_size {cfg.batch_size}: a "
            f"micro-batch has at most {MOST_TOKENS:,} tokens: give a shorter context"
        )
    return trace(program_of(cfg, ranks, layers, every_tile, device=target), target, every_tile)


@dataclass(frozen=True)
class Profile:
    """One rank's step, all layers of it."""

    trace: Trace

    @functools.cached_property
    def stages(self) -> dict[str, Sizes]:
        """Of each stage, the bytes by category at its peak, the workspace included."""
        return stages_at_peak(self.trace)

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
) -> Profile:
    """The step's profile. `full` simulates every layer and every tile, and must agree with what a
    shallow model gives.
    """
    layers = cfg.model().num_layers
    if full or layers <= LAYERS:
        return Profile(simulate(cfg, ranks, target, every_tile=full))
    return Profile(unroll(simulate(cfg, ranks, target, LAYERS), layers))


def trace(program: Program, target: str = "cuda", every_tile: bool = False) -> Trace:
    """The trace of a program's step on the target."""
    with (
        deterministic(program.cfg.deterministic and target == "cuda"),
        on_target(program.ranks, target, every_tile) as program.tracker,
    ):
        trace_two_steps(program.tracker, program.build, program.step, program.first)
    return program.tracker.trace


def trace_really(program: Program) -> Trace:
    """The trace of a real step on this machine's CPU."""
    program.tracker = StepTracker(Workspaces("cpu"), False, KnownValues())
    with program.tracker:
        trace_two_steps(program.tracker, program.build, program.step, program.first)
    return program.tracker.trace


@contextlib.contextmanager
def on_target(
    ranks: int = 1,
    target: str = "cuda",
    every_tile: bool = False,
) -> Iterator[StepTracker]:
    """A tracker: operators inside the `with` block allocate nothing, as if on the target."""
    card = target_card(target)
    attention = Attention(card) if card else None
    workspaces = Workspaces(target)
    tracker = StepTracker(workspaces, True, KnownValues(), attention=attention)
    workspaces.tracker = tracker
    with (
        fake_process_group(ranks),
        as_rank(ranks, start_fake_group),
        on_fake_tensors(tracker, card, {}, ranks, as_there(target), Usual),
        few_rounds(not every_tile),
    ):
        yield tracker


def trace_real_run(cfg: TrainConfig, world: dist.World = step.ONE_PROCESS) -> Trace:
    """The trace of a real step of these settings on this machine's CPU."""
    program = program_of(cfg, world.size, every=True, real=True)
    program.world = world
    return trace_really(program)
