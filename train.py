"""Train a decoder: `python train.py`, or `torchrun --nproc_per_node=2 train.py` on two ranks.

The order of a run: read the flags; plan, which compares what the run needs with what this machine
has; preflight, which checks the data, the checkpoint and the folder; build; train. Whatever is
wrong is reported in one line before anything is allocated or overwritten.
"""

import installed  # noqa: F401  (first: a missing package is answered in one line)

import contextlib
import dataclasses
import functools
import gc
import os
import sys
import time
from collections.abc import Callable

import torch

from data.load_tokenizer import load_tokenizer
from data.loader import Batch, Loader
from data.mixture import Corpus
from longhaul import cli, dist, exits, step
from longhaul.checkpoint import load, resume
from longhaul.checkpoint.save import Saver
from longhaul.config import TrainConfig
from longhaul.generate import generate
from longhaul.memory import fit
from longhaul.memory import plan as planner
from longhaul.memory.watch import STEPS, Watch, comparison, out_of_memory, report
from longhaul.run import start
from longhaul.run.guard import Guard
from longhaul.run.health import Health, audited_step, deterministic
from longhaul.run.log import Logger, Validation, mfu, peak_memory_gib, perplexity
from longhaul.run.preflight import Ready, preflight
from longhaul.run.rescue import Rescue, slow_micro_batch
from longhaul.step import MicroBatch, StepResult, TrainState
from model import attention_kind, choose_kernels

SAMPLE_TOKENS = 64


def main(args: list[str] | None = None):
    """The command line. Whatever a user can mend ends with one line and an exit code of
    longhaul/exits.py.
    """
    world = dist.World.from_environment()
    with Guard("train.py", world) as guard:
        cfg = cli.parse(TrainConfig, args, __doc__.splitlines()[0], start.completed)
        device = dist.choose_device(cfg.device, world)
        if cfg.audit_every or cfg.deterministic:
            # cuBLAS repeats its bits only with this setting, which it reads when CUDA starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        dist.start(world, device)
        guard.watch(cfg.timeout)

        plan = plan_or_refuse(cfg, world, device)
        timeout = dist.on_rank0(lambda: plan.shutdown_timeout, world)
        command = functools.partial(planner.command, world=world, timeout=timeout)
        ready = preflight(plan.cfg, world, device, command, guard)
        if ready.finished:
            return

        for stage in ready.stages_left:
            if cfg.length_schedule:
                dist.print0(stage.in_words(), world=world)
            train_stage(ready.at(stage), plan.at(stage.number), guard)
            if stage.last_step < ready.last_step:
                ready = ready.after(stage.last_step)
                free_memory()


def free_memory():
    """Give back what the stage before has left, whose objects know each other in circles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def train_stage(ready: Ready, plan: planner.Plan, guard: Guard):
    """Train to the end of a stage of the length schedule, or of a run that has none.

    A stage is a run of its own, which resumes from the checkpoint at the end of the one before it.
    So going on to the next stage is the same as being killed there and started again.
    """
    run = Run(ready, plan, guard)
    try:
        run.train()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise exits.Halt(report(plan, run.watch, error), 1) from None


def plan_or_refuse(cfg: TrainConfig, world: dist.World, device: torch.device) -> planner.Plan:
    """Print the plan and return it; ends the program if only the plan was asked for, or if the
    request cannot fit.

    Nothing smaller is ever trained instead: --fit auto uses memory levers that leave model, context
    and batch as they are.
    """
    config = cfg.model()
    # these two raise if the kernels that were asked for cannot run here, or not with these sizes
    if cfg.kernels == "triton":
        choose_kernels("triton", torch.empty(0, device=device, dtype=config.dtype))
    attention_kind(config).check(config, device)

    plan = dist.on_rank0(lambda: fitting(planner.plan(cfg, config, world, device)), world)
    plan = dataclasses.replace(plan, world=world, device=device)
    plan.cfg.accumulation(world.size)  # raises if the ranks do not divide the batch
    if world.rank == 0:  # a table measures how fast this machine is
        print(plan.table(), flush=True)
    if cfg.plan:
        sys.exit(0)
    return plan


def fitting(plan: planner.Plan) -> planner.Plan:
    """The plan, or with --fit auto the one that the fewest levers make fit; ValueError with the
    closest command if none fits.
    """
    if plan.fits:
        return plan
    # if a flag of the run in this folder was forgotten, that is what should be said
    resume.check_folder(plan.cfg)

    fitted = fit.fitted(plan).plan if plan.cfg.fit == "auto" else None
    if fitted is not None:
        command = planner.command(fitted.asked, plan.world, fitted.shutdown_timeout)
        print(f"--fit auto: {plan.shortage()}; training\n{command}", flush=True)
        return fitted

    print(plan.table(), flush=True)
    nearest = fit.closest(plan)
    if nearest is None:
        raise ValueError(
            f"{plan.shortage()}; nothing of longhaul fits here, or not so that it ends within "
            "minutes: give a smaller --batch_size, --context_length or --vocab_size"
        )
    raise ValueError(f"{plan.shortage()}; {fit.proposal(nearest, plan)}")


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


class Batches:
    """The rows of a step, of which those of the next one may be loaded early."""

    def __init__(self, read: Callable[[int], tuple[Batch, list[MicroBatch]]]):
        self.read = read
        self.loaded: dict[int, tuple[Batch, list[MicroBatch]]] = {}

    def load(self, index: int):
        """Read the rows of a step that comes, once."""
        if index not in self.loaded:
            self.loaded = {index: self.read(index)}

    def take(self, index: int) -> tuple[Batch, list[MicroBatch]]:
        """The rows of a step, which are not kept any longer."""
        self.load(index)
        return self.loaded.pop(index)


class Run:
    """A run that preflight found ready: its state, and what surrounds each step."""

    def __init__(self, ready: Ready, plan: planner.Plan, guard: Guard):
        self.ready = ready
        self.plan = plan
        self.guard = guard
        self.cfg = ready.cfg
        self.world = ready.world
        self.device = ready.device
        self.watch = Watch(ready.device)
        self.state = build(ready)
        self.warned_of_stops = False
        guard.save_seconds = 60 * ready.cfg.save_minutes
        guard.begin(ready.folder, self.state.step)

        # ranks that share their rows read the same ones
        self.data_rank = self.world.rank // self.cfg.context_ranks
        self.data_ranks = self.world.size // self.cfg.context_ranks
        self.batches = Batches(self._load)
        if ready.device.type == "cuda":
            self.state.meanwhile = self._load_next

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
            every=self.cfg.log_every,
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
        changes = resume.changes(ready.checkpoint, self.cfg)
        self.log.text(self.state.step, "changes", "\n".join(changes))

    def _loop(self):
        """Steps, validations and saves, until the last step or until the run is asked to stop."""
        cfg = self.cfg
        state = self.state
        validation = self._validation_batches()
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
                    self._validate(validation)
            if last or state.step % cfg.save_every == 0:
                self._save()

    def _save(self):
        """Save this step, unless it is saved already."""
        if self.saver.saved != self.state.step:
            self.saver.save(self.state, self._manifest())
        self.guard.saved_at = time.monotonic()

    def _manifest(self) -> dict:
        """What a checkpoint says of the run, next to its state."""
        return {
            "identity": self.ready.identity,
            "rows_per_step": self.ready.rows_per_step,
            "skipped": list(self.health.skipped),
        }

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
        cfg = self.cfg
        state = self.state
        start = time.perf_counter()
        rows, batch = self.batches.take(state.step)

        audited = cfg.audit_every and (state.step + 1) % cfg.audit_every == 0
        one_step = audited_step if audited else step.train_step
        with self._kernels(), self.watch.over(state), self._unchanged():
            result = one_step(state, batch, self.guard.must_stop)
        if result is None:
            return False

        loss = float(result.loss)
        seconds = time.perf_counter() - start
        state.data = self.ready.loader.state(state.step)
        self._report(result, loss, rows, seconds)
        self._time(seconds / len(batch))
        return True

    def _kernels(self) -> contextlib.AbstractContextManager:
        """The kernels of a step: with --deterministic only those that repeat their bits."""
        return deterministic(self.cfg.deterministic and self.device.type == "cuda")

    def _load(self, index: int) -> tuple[Batch, list[MicroBatch]]:
        """This rank's rows of a step, in the loader's memory and on the device."""
        rows = self.ready.loader.batch(index, self.data_rank, self.data_ranks)
        return rows, step.micro_batches(rows, self.cfg.batch_size, self.device)

    def _load_next(self):
        """Load the rows of the next step while the device works on this one."""
        if self.state.step + 1 < self.ready.last_step:
            self.batches.load(self.state.step + 1)

    def _time(self, seconds: float):
        """Note how long a micro-batch takes; warn once if a launcher would not wait for its end
        and, from the first save on, for another save.
        """
        self.guard.micro_batch_seconds = seconds
        if not self.warned_of_stops:
            self._warn_of_stops(seconds)

    def _warn_of_stops(self, seconds: float):
        lost = "the step under way"
        if self.cfg.optimizer_in_backward:
            lost = "all steps since the last save"
        warning = slow_micro_batch(seconds, self.saver.seconds or 0.0, lost, os.environ)
        if warning:
            self.log.say(warning)
            self.warned_of_stops = True

    def _report(self, result: StepResult, loss: float, rows: Batch, seconds: float):
        """The step's record in the log; the run halts here if its numbers are wrong."""
        state = self.state
        tokens = self.cfg.rows_per_step(self.world.size) * self.cfg.context_length
        used = mfu(self.ready.config, rows, self.cfg.context_ranks, seconds, self.device)
        record = {
            "step": state.step,
            "loss": loss,
            "perplexity": perplexity(loss),
            "grad_norm": float(result.grad_norm),
            "lr": result.lr,
            "tokens": state.tokens,
            "tokens_per_s": tokens / seconds,
            "mfu": used,
            "mem_gib": peak_memory_gib(self.device),
            "time": time.time(),
        }
        for name, seen in self.ready.loader.tokens_seen(state.step).items():
            record[f"tokens/{name}"] = seen
        watched = {}
        try:
            watched = self.health.after(result, self.log.say)
        finally:  # the record of a step that halts the run is the one that will be looked for
            self.log.step(record | watched)
        if state.step == STEPS:
            self.log.say(f"step {state.step}: {comparison(self.plan)}")

    # ---- validation

    def _validation_batches(self) -> dict[Corpus, list[list[MicroBatch]]]:
        """This rank's share of the first `eval_rows` rows of each corpus's validation split, in
        micro-batches of one row.
        """
        found = {}
        for corpus in self.ready.corpora:
            batch = self._validation_rows(corpus)
            if batch is not None:
                found[corpus] = [step.micro_batches(batch, 1, self.device)]
                continue
            self.log.say(
                f"no validation of {corpus.name}: it is off, or the validation split has fewer "
                "rows than there are ranks that read different rows"
            )
        return found

    def _validation_rows(self, corpus: Corpus) -> Batch | None:
        """This rank's rows of a corpus; None if there are not enough for all ranks."""
        cfg = self.cfg
        if not cfg.eval_every or "val" not in corpus.dataset.splits:
            return None
        loader = Loader(corpus.dataset, cfg.context_length, 1, seed=cfg.seed, split="val")
        rows = min(cfg.eval_rows, loader.rows_per_epoch) // self.data_ranks
        first = self.data_rank * rows
        return loader.rows(range(first, first + rows)) if rows else None

    def _validate(self, batches: dict[Corpus, list[list[MicroBatch]]]):
        """Log the validation loss of each corpus and a text sample."""
        state = self.state
        found = []
        for corpus, of_corpus in batches.items():
            measured = step.evaluate(state, of_corpus, self.guard.must_stop)
            if measured is None:  # the run was asked to stop
                return
            found.append(Validation(corpus.name, float(corpus.share), *measured))
        if found:
            self.log.validation(state.step, found)
        seen = self.ready.loader.tokens_seen(state.step)
        if seen:
            of_each = ", ".join(f"{name} {tokens:,}" for name, tokens in seen.items())
            self.log.say(f"  tokens seen: {of_each}")
        if self.ready.dataset.tokenizer_path:
            self.log.text(state.step, "sample", self._sample())

    def _sample(self) -> str:
        """A text from the start of a document. Every rank draws the same number of tokens, because
        each draw is a collective.
        """
        tokenizer = load_tokenizer(self.ready.dataset.tokenizer_path)
        end = tokenizer.eod_id
        drawn = generate(self.state.model, [end], SAMPLE_TOKENS, vocab_size=tokenizer.vocab_size)
        ids = list(drawn)
        if end in ids:
            ids = ids[: ids.index(end)]
        return tokenizer.decode(ids)


if __name__ == "__main__":
    main()
