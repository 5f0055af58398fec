"""A run of training, from its flags to its last step: train.py and post-training do the same.

The order: read the flags; plan, which compares what the run needs with what this machine has;
preflight, which checks the data, the checkpoint and the folder; build; train. Whatever is wrong is
reported in one line before anything is allocated or overwritten.
"""

import contextlib
import dataclasses
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from base.machine import deterministic, peak_memory_gib
from longhaul import cli, dist, exits, step
from longhaul.checkpoint import load, resume, start
from longhaul.checkpoint.save import Saver
from longhaul.config import TrainConfig
from longhaul.planner import plan as planner
from longhaul.planner.watch import (
    Watch,
    compared_at,
    comparison,
    out_of_memory,
    report,
    warning,
)
from longhaul.run import planning
from longhaul.run.guard import Guard
from longhaul.run.health import Health
from longhaul.run.log import Logger
from longhaul.run.preflight import Ready, Rows, preflight, training_rows
from longhaul.run.pretraining import Source
from longhaul.run.rescue import Rescue, slow_stop
from longhaul.step import MustStop, StepResult, TrainState


@dataclasses.dataclass(frozen=True)
class Program:
    """A command that trains, and what is its own: its settings, its rows, its batches."""

    config: type[TrainConfig]
    description: str  # the first line of --help
    source: Callable[[Ready, TrainState, MustStop], Source]
    rows: Rows = training_rows
    # called by rank 0 when the folder has the last step
    finished: Callable[[TrainConfig], None] | None = None


def main(program: Program, args: list[str] | None = None, complete: Callable[[dict], dict] = dict):
    """The command line, whose settings `complete` may change. Whatever a user can mend ends with
    one line and an exit code of longhaul/exits.py.
    """
    world = dist.World.from_environment()
    with Guard(program.config.PROGRAM.removeprefix("-m "), world) as guard:
        given = complete(cli.given(program.config, args, program.description))
        cfg = program.config(**start.completed(given))
        if cfg.plan:
            sys.exit(planning.answer(cfg, world) if world.rank == 0 else exits.DONE)
        device = dist.choose_device(cfg.device, world)
        if cfg.deterministic:
            # cuBLAS repeats its bits only with this setting, which it reads when CUDA starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        planning.check_kernels(cfg, device)
        planned = planning.ahead(cfg, world, device)
        dist.start(world, device)
        guard.watch()

        plan = planning.shared(planned, world, device)
        ready = preflight(plan, guard, program.rows)
        for stage in ready.stages_left:
            if cfg.length_schedule:
                dist.print0(stage.in_words(), world=world)
            train_stage(program, ready.at(stage), plan.at(stage.number), guard)
            if stage.last_step < ready.last_step:
                ready = ready.after(stage.last_step)
                free_memory()
        if program.finished is not None and world.rank == 0:
            program.finished(plan.cfg)


def free_memory():
    """Give back what the stage before has left, whose objects know each other in circles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def train_stage(program: Program, ready: Ready, plan: planner.Plan, guard: Guard):
    """Train to the end of a stage of the length schedule, or of a run that has none.

    A stage is a run of its own, which resumes from the checkpoint at the end of the one before it.
    So going on to the next stage is the same as being killed there and started again.
    """
    run = Run(program, ready, plan, guard)
    try:
        run.train()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise exits.Halt(report(plan, run.watch, error), 1) from None


def build(ready: Ready) -> TrainState:
    """Model and optimizer, with the weights of the checkpoint or of --init_from."""
    cfg = ready.cfg
    mesh = dist.data_mesh(ready.world, ready.device, cfg.dp_replicate)
    state = step.build(cfg, ready.config, ready.device, ready.world, mesh)
    if ready.checkpoint is not None:
        load.load_state(state, ready.checkpoint)
        dist.print0(f"resumed {ready.checkpoint.folder} at step {state.step}", world=ready.world)
    elif ready.weights is not None:
        start.load_into(state.model, ready.weights)
    return state


class Step(NamedTuple):
    """What a step gave, for its record."""

    result: StepResult
    loss: float | None  # None without any target
    loaded: object  # the batch, as its source wants it
    tokens: int  # of all ranks
    seconds: float


class Run:
    """A run that preflight found ready: its state, and what surrounds each step."""

    def __init__(
        self,
        program: Program,
        ready: Ready,
        plan: planner.Plan,
        guard: Guard,
    ):
        self.ready = ready
        self.plan = plan
        self.guard = guard
        self.cfg = ready.cfg
        self.world = ready.world
        self.device = ready.device
        self.watch = Watch(ready.device)
        self.state = build(ready)
        self.warned_of_stops = False
        # a source may read more folders: what is wrong with them is the user's to mend, and from
        # `guard.begin` on a ValueError counts as a fault of longhaul
        self.source = program.source(ready, self.state, guard.must_stop)
        guard.begin(ready.folder, self.state.step)

    def train(self):
        """Train to the last step, validating and saving on the way."""
        self._open()
        try:
            self._loop()
            self.saver.wait()
        finally:
            self.rescue.close()
            self.saver.end()
            self.log.close()

    def _open(self):
        """The log, the saver and the watch over the numbers."""
        ready = self.ready
        skipped = ready.checkpoint.skipped if ready.checkpoint else ()
        self.health = Health(self.state, ready.loader, ready.folder, ready.command, skipped)
        self.log = Logger(
            ready.folder,
            first_step=self.state.step,
            last_step=self.cfg.max_steps,
            active=self.world.rank == 0,
            config_text=self.cfg.table(),
        )
        self.saver = Saver(
            ready.folder,
            self.world,
            keep=self.cfg.keep_last,
            background=self.cfg.async_save,
            saved=self.state.step,
            say=self.log.say,
        )
        self.rescue = Rescue(self.guard, self.saver, self.state.model, self.log.flush)
        self.state.listeners.append(self._before_change)
        if ready.checkpoint is not None:
            changes = resume.changes(ready.checkpoint, self.cfg)
            self.log.text(self.state.step, "changes", "\n".join(changes))
        self.source.open(self.log)

    def _loop(self):
        """Steps, validations and saves, until the last step or until the run is asked to stop."""
        cfg = self.cfg
        state = self.state
        while state.step < self.ready.last_step:
            if self.guard.must_stop():
                self.rescue.close()
                self._save()
                self.saver.wait()
                raise self.guard.preempted()
            if self.guard.save_due and self.saver.saved != state.step:
                self._save()
                continue
            if not self._step():
                continue

            self.guard.step = state.step
            last = state.step == self.ready.last_step
            if cfg.eval_every and (last or state.step % cfg.eval_every == 0):
                with self._unchanged():
                    self.source.evaluate()
            if last or state.step % cfg.save_every == 0:
                self._save()

    def _save(self):
        """Save this step, unless it is saved already."""
        if self.saver.saved != self.state.step:
            self.saver.save(self.state, self._manifest())
        self.guard.saved_at = time.monotonic()

    def _manifest(self) -> dict:
        """What a checkpoint says of the run, next to its state."""
        words = {
            "identity": self.ready.identity,
            "rows_per_step": self.ready.rows_per_step,
            "skipped": list(self.health.skipped),
        }
        kept = self.source.kept()
        return words | {"source": kept} if kept else words

    def _unchanged(self) -> contextlib.AbstractContextManager:
        """Inside, weights and optimizer states stay as they are, so a rescue may save them."""
        if self.cfg.optimizer_in_backward:
            return contextlib.nullcontext()
        return self.rescue.over(self.state, self._manifest())

    def _before_change(self, stage: str):
        """The end of what `_unchanged` promises: the optimizer is going to change the state."""
        if stage == "optimizer":
            self.rescue.forbid()

    # ---- one step

    def _step(self) -> bool:
        """Whether a step was done: if the run is asked to stop, the step is given up between two
        micro-batches.
        """
        state = self.state
        start = time.perf_counter()
        tokens = state.tokens
        with self._unchanged():
            loaded, batch = self.source.load(state.step)
            computing = time.perf_counter()
            with self._kernels(), self.watch.over(state):
                result = step.train_step(state, batch, self.guard.must_stop)
        if result is None:
            return False

        loss = None if result.loss is None else float(result.loss)
        end = time.perf_counter()
        state.data = self.ready.loader.state(state.step)
        seen = Step(result, loss, loaded, state.tokens - tokens, end - start)
        self._report(seen)
        self._warn_of_stops((end - computing) / len(batch))
        return True

    def _kernels(self) -> contextlib.AbstractContextManager:
        """The kernels of a step: with --deterministic only those that repeat their bits."""
        return deterministic(self.cfg.deterministic and self.device.type == "cuda")

    def _warn_of_stops(self, seconds: float):
        """Warn once if a launcher would not wait for the end of a micro-batch of so many seconds
        and, from the first save on, for another save.
        """
        if self.warned_of_stops:
            return
        lost = "the step under way"
        if self.cfg.optimizer_in_backward:
            lost = "all steps since the last save"
        warning = slow_stop(seconds, self.saver.seconds or 0.0, lost, os.environ)
        if warning:
            self.log.say(warning)
            self.warned_of_stops = True

    def _report(self, seen: Step):
        """The step's record in the log; the run halts here if its numbers are wrong."""
        state = self.state
        record = {
            "step": state.step,
            "loss": seen.loss,
            "grad_norm": float(seen.result.grad_norm),
            "lr": seen.result.lr,
            "tokens": state.tokens,
            "tokens_per_s": seen.tokens / seen.seconds,
            "mem_gib": peak_memory_gib(self.device),
            "time": time.time(),
        }
        record |= {
            name: float(figure)
            for name, figure in seen.result.figures.items()
            if not figure.isnan()  # no query had a choice
        }
        try:
            self.source.record(record, seen.loaded, seen.result, seen.seconds)
            record |= self.health.after(seen.result, self.log.say)
        finally:  # the record of a step that halts the run is the one that will be looked for
            self.log.step(record)
        if self.world.rank == 0 and state.step in compared_at(state.cfg):
            self.log.say(f"step {state.step}: {comparison(self.plan, state.step)}")
            surprise = warning(self.plan, state.step, self.watch)
            if surprise:
                self.log.say(surprise)
