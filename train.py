"""Train a decoder: `torchrun --nproc_per_node=2 train.py --context_length 131072`, or `python
train.py` for one process.

The order of a run: read the flags, plan (what is needed, what is here), open the data, look for a
checkpoint, build, train. Whatever is wrong is said in one line before anything is allocated or
overwritten. Imports longhaul, data and model.py of ours.
"""

import dataclasses
import os
import shutil
import sys
import time
from pathlib import Path

import torch

from data import order
from files import durable, untrusted
from longhaul import cli, dist, exits
from longhaul.checkpoint import load, resume
from longhaul.checkpoint.save import Saver, size_of
from longhaul.config import TrainConfig
from longhaul.memory import fit
from longhaul.memory import plan as planner
from longhaul.memory.watch import STEPS, Watch, comparison, out_of_memory, report
from longhaul.run.guard import Guard
from model import attention_kind, choose_kernels

ROPE_SCALING = ["rope_scaling", "rope_factor", "rope_original_context"]


def main(args: list[str] | None = None):
    """The command line; whatever a user can mend ends in one line and an exit code of
    longhaul/exits.py.
    """
    world = dist.World.from_environment()
    with Guard("train.py", world) as guard:
        cfg = cli.parse(TrainConfig, args, __doc__.splitlines()[0])
        device = dist.choose_device(cfg.device, world)
        if cfg.audit_every:
            os.environ.setdefault(
                "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
            )  # cuBLAS repeats its bits with that alone; read when CUDA starts
        dist.start(world, device)
        guard.watch_peers(cfg.timeout)
        plan = plan_or_refuse(cfg, world, device)
        run = Run(plan, guard)
        run.prepare()
        try:
            run.train()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise exits.Halt(report(plan, run.watch, error), 1) from None


def plan_or_refuse(cfg: TrainConfig, world: dist.World, device: torch.device) -> planner.Plan:
    """Print the plan and return it; stop where it was asked for, or where the request cannot fit.

    Nothing smaller is ever trained instead: --fit auto pulls levers that leave model, context and
    batch as they are.
    """
    config = cfg.model()
    if cfg.kernels == "triton":
        choose_kernels(
            "triton", torch.empty(0, device=device, dtype=config.dtype)
        )  # raises where they cannot run
    attention_kind(config).check(config)  # raises if the sizes do not fit the kernels
    plan = dist.on_rank0(lambda: fitting(planner.plan(cfg, config, world, device)), world)
    plan = dataclasses.replace(plan, world=world, device=device)
    plan.cfg.accumulation(world.size)  # raises where the ranks do not divide the batch
    dist.print0(plan.table(), world=world)
    if cfg.plan:
        sys.exit(0)
    return plan


def fitting(plan: planner.Plan) -> planner.Plan:
    """The plan, or with --fit auto the one that the fewest levers make fit; ValueError where none
    fits here.
    """
    fitted = fit.fitted(plan).plan if plan.cfg.fit == "auto" else plan if plan.fits else None
    if fitted is not None:
        if fitted != plan:
            print(
                f"--fit auto: {plan.shortage()}; training\n"
                f"{planner.command(fitted.asked, plan.world)}",
                flush=True,
            )
        return fitted
    print(plan.table(), flush=True)
    nearest = fit.closest(plan)
    words = "nothing of longhaul fits here" if nearest is None else fit.proposal(nearest, plan)
    raise ValueError(f"{plan.shortage()}; {words}")


class Run:
    """One training run: its folder, data, state and log."""

    def __init__(self, plan: planner.Plan, guard: Guard):
        cfg, world = plan.cfg, plan.world
        self.guard, self.plan, self.world, self.device, self.folder = (
            guard,
            plan,
            world,
            plan.device,
            Path(cfg.output_dir),
        )
        self.watch = Watch(plan.device)
        self.dataset = self._open_data(cfg)
        self.config = self._model_config(cfg)
        self.identity = resume.identity(cfg, self.config, self.dataset)
        self.record = resume.read_record(self.folder)  # run.json, None where the run is new
        found = dist.on_rank0(
            lambda: self._find_checkpoint(cfg), world
        )  # one rank looks, so that all decide alike
        self.checkpoint = resume.continued(Path(found), cfg) if found else None
        self.cfg = resume.with_skips(self.checkpoint, self._with_the_checkpoints_batch(cfg))
        self.loader = self._loader("train", self.cfg.rows_per_step(world.size))
        if self.checkpoint is not None:
            resume.check_position(self.checkpoint, self.loader)
        self.stamps = dist.on_rank0(self._verify_data, world)
        self.data_rank, self.data_ranks = (
            world.rank // self.cfg.context_ranks,
            world.size // self.cfg.context_ranks,
        )  # ranks with other rows

    # ---- what is checked before anything is built

    def _open_data(self, cfg: TrainConfig):
        """The dataset of --data, or the embedded corpus: rank 0 makes its cache, the others find it
        there.
        """
        from data.corpus import prepare_embedded
        from data.dataset import open_dataset

        if cfg.data:
            return open_dataset(cfg.data)
        path = dist.on_rank0(
            lambda: str(prepare_embedded(documents=cfg.documents).path), self.world
        )
        return open_dataset(path)

    def _model_config(self, cfg: TrainConfig):
        from data.dataset import check_vocab

        config = cfg.model()
        check_vocab(self.dataset, config.vocab_size)
        if not cfg.init_from:
            return config
        from longhaul import qwen3

        theirs = qwen3.read_config(
            Path(cfg.init_from)
        )  # positions mean what the weights were trained with, unless flags extend them
        kept = (
            ["norm_eps"]
            + ["rope_theta"] * (not cfg.rope_theta)
            + ROPE_SCALING * (cfg.rope_scaling == "none")
        )
        config = dataclasses.replace(config, **{name: theirs[name] for name in kept})
        qwen3.check_geometry(config, Path(cfg.init_from))
        if self.dataset.vocab_size < 0.9 * config.vocab_size:
            dist.print0(
                f"warning: the data's tokenizer has {self.dataset.vocab_size:,} tokens and --init_from's model {config.vocab_size:,}: "
                "weights mean nothing on another tokenizer's ids",
                world=self.world,
            )
        return config

    def _find_checkpoint(self, cfg: TrainConfig) -> str | None:
        """The checkpoint to continue from; ValueError where the output folder is not this run's to
        write.
        """
        if self.record is not None:
            resume.check_same_run(
                self.record["identity"], self.identity, f"--output_dir {self.folder}"
            )
            self._lock()
        if cfg.resume == "auto":
            found = load.latest(self.folder) if self.record else None
            return str(found.folder) if found else None
        if cfg.resume == "none":
            if self.record:
                raise ValueError(
                    f"--output_dir {self.folder} holds a run: choose another folder, or continue it with --resume auto"
                )
            return None
        return self._named_checkpoint(cfg)

    def _named_checkpoint(self, cfg: TrainConfig) -> str:
        untrusted.refuse_pickle(Path(cfg.resume))
        if not Path(cfg.resume).is_dir():
            raise ValueError(
                f"--resume {cfg.resume} is not a readable checkpoint: there is no such folder; name a step-* folder"
            )
        checkpoint = load.verified(Path(cfg.resume))
        resume.check_complete(checkpoint)
        resume.check_same_run(checkpoint.identity, self.identity, f"--resume {cfg.resume}")
        newer = [
            step.name
            for step in self.folder.glob("step-????????")
            if int(step.name[5:]) > checkpoint.step
        ]
        if (
            newer and self.record and self.record["config"]["resume"] == cfg.resume
        ):  # the same command again
            return str(load.latest(self.folder).folder)
        if newer:
            raise ValueError(
                f"--output_dir {self.folder} holds {newer[0]}, which is newer than {cfg.resume}: choose another --output_dir"
            )
        return cfg.resume

    def _verify_data(self) -> dict:
        """Hash the data's files, but for those that have not been touched since this run last did."""
        known = self.record.get("data_stamps") if self.record else None
        return durable.retried(lambda: self.dataset.verify(known), self.dataset.path)

    def _lock(self):
        try:
            self.guard.take(self.folder)
        except OSError as error:
            raise ValueError(
                f"--output_dir {self.folder} cannot be written ({error}): choose another folder"
            ) from None

    def _with_the_checkpoints_batch(self, cfg: TrainConfig) -> TrainConfig:
        """On a resume the global batch stays what it was, whatever the number of ranks: the rows
        keep their order.
        """
        if self.checkpoint is None:
            return cfg
        rows = self.checkpoint.rows_per_step
        if rows == cfg.rows_per_step(self.world.size):
            return cfg
        if cfg.global_batch_size:
            raise ValueError(
                f"--global_batch_size {cfg.global_batch_size}, but the checkpoint's steps have {rows} rows: use {rows}"
            )
        cfg = dataclasses.replace(cfg, global_batch_size=rows)
        dist.print0(
            f"resuming with the checkpoint's global batch of {rows} rows: {cfg.accumulation(self.world.size)} micro-batches "
            f"of {cfg.batch_size} on {self.world.size} rank(s)",
            world=self.world,
        )
        return cfg

    def _loader(self, split: str, rows: int):
        from data.loader import Loader

        skip = order.parse_ranges(self.cfg.skip_rows) if split == "train" else ()
        return Loader(
            self.dataset, self.cfg.context_length, rows, seed=self.cfg.seed, split=split, skip=skip
        )

    # ---- building

    def prepare(self):
        """Say what will run, take the folder, and build the state; `self.state` stays None where
        there is nothing to do.
        """
        self.state = None
        if self.checkpoint and self.checkpoint.step >= self.cfg.max_steps:
            dist.print0(
                f"{self.checkpoint.folder} has {self.checkpoint.step} of {self.cfg.max_steps} steps: nothing to do",
                world=self.world,
            )
            return
        dist.on_rank0(
            lambda: durable.require_space(
                self.folder, size_of(self.cfg, self.config), self.cfg.keep_last
            ),
            self.world,
        )
        dist.on_rank0(self._say, self.world)
        dist.on_rank0(self._take_folder, self.world)
        self.state = self._build()
        self.guard.begin(self.folder, self.state.step)

    def _say(self):
        """The settings, what was changed since the checkpoint, the loss that runs, the data."""
        rows, context = (
            (self.cfg.batch_size, self.cfg.context_length // self.cfg.context_ranks),
            self.loader.effective_context(),
        )
        print(f"settings:\n{self.cfg.table()}\ncommand: {planner.command(self.cfg, self.world)}")
        for line in resume.changes(self.checkpoint, self.cfg):
            print(line)
        for name in self.cfg.without_effect():
            print(
                f"warning: --{name} {getattr(self.cfg, name)} has no effect beside the other settings"
            )
        if context.warning:
            print(f"warning: {context.warning}")
        print(
            f"loss: {self.config.loss_path(*rows)} (full logits would be {self.config.logits_gib(*rows):.2f} GiB per rank and micro-batch; "
            f"threshold {self.config.logits_threshold_gib:g} GiB)"
        )
        print(
            f"data: {self.loader.split.num_tokens:,} tokens, {self.loader.rows_per_epoch:,} rows of {self.cfg.context_length:,}, half of the "
            f"tokens in pieces of {context.p50:,} or more; unigram entropy {self.loader.split.unigram_entropy:.3f} nats",
            flush=True,
        )

    def _take_folder(self):
        """run.json (identity and settings) and the tokenizer stand beside the checkpoints."""
        self._lock()
        if self.record is None and (self.folder / "run.json").exists():
            raise ValueError(
                f"--output_dir {self.folder} was begun by another job meanwhile: give the same command again"
            )
        try:
            record = dict(
                identity=self.identity,
                config=dataclasses.asdict(self.cfg),
                world_size=self.world.size,
                data_stamps=self.stamps,
            )
            durable.write_json(self.folder / "run.json", record)
            if self.dataset.tokenizer_path and not (self.folder / "tokenizer.model").exists():
                temporary = shutil.copyfile(
                    self.dataset.tokenizer_path, self.folder / ".tmp-tokenizer"
                )
                temporary.rename(self.folder / "tokenizer.model")
        except OSError as error:
            raise ValueError(
                f"--output_dir {self.folder} cannot be written ({error}): choose another folder"
            ) from None

    def _build(self):
        from longhaul import step

        mesh = dist.data_mesh(self.world, self.device, self.cfg.dp_replicate)
        state = step.build(self.cfg, self.config, self.device, self.world, mesh)
        if self.checkpoint is not None:
            load.load_state(state, self.checkpoint)
            dist.print0(f"resumed {self.checkpoint.folder} at step {state.step}", world=self.world)
        elif self.cfg.init_from:
            from longhaul import qwen3

            qwen3.load_into(state.model, Path(self.cfg.init_from))
        return state

    # ---- training

    def train(self):
        """Train to max_steps, validating and saving on the way."""
        if self.state is None:
            return
        from longhaul.run.health import Numerics
        from longhaul.run.log import Logger

        self.numerics = Numerics(
            self.state,
            self.loader,
            self.folder,
            lambda cfg: planner.command(cfg, self.world),
            self.checkpoint.skipped if self.checkpoint else (),
        )
        log = Logger(
            self.folder,
            self.state.step,
            self.cfg.max_steps,
            self.world.rank == 0,
            self.cfg.log_every,
            self.cfg.table(),
        )
        saver = Saver(
            self.folder,
            self.world,
            self.cfg.keep_last,
            self.cfg.async_save,
            self.state.step,
            log.say,
        )
        log.text(self.state.step, "changes", "\n".join(resume.changes(self.checkpoint, self.cfg)))
        try:
            self._steps(log, saver)
            saver.wait()
        finally:
            saver.end()
            log.close()

    def _steps(self, log, saver: Saver):
        state, cfg = self.state, self.cfg
        validation = self._validation_batches(log)
        while state.step < cfg.max_steps:
            if self.guard.must_stop():
                self._save(saver)
                saver.wait()
                raise self.guard.preempted()
            if not self._one_step(log):
                continue
            self.guard.step, last = state.step, state.step == cfg.max_steps
            if cfg.eval_every and (state.step % cfg.eval_every == 0 or last):
                self._validate(validation, log)
            if state.step % cfg.save_every == 0 or last:
                self._save(saver)

    def _one_step(self, log) -> bool:
        """Whether the step was done: one that is asked to stop is given up between two
        micro-batches.
        """
        from longhaul import step
        from longhaul.run import audit
        from longhaul.run.log import peak_memory_gib

        state, start = self.state, time.perf_counter()
        audited = self.cfg.audit_every and (state.step + 1) % self.cfg.audit_every == 0
        rows = self.loader.batch(state.step, self.data_rank, self.data_ranks)
        with self.watch.over(state):
            result = (audit.audited_step if audited else step.train_step)(
                state,
                step.micro_batches(rows, self.cfg.batch_size, self.device),
                self.guard.must_stop,
            )
        if result is None:
            return False
        loss, norm = float(result.loss), float(result.grad_norm)
        seconds = time.perf_counter() - start
        state.data = self.loader.state(state.step)
        watched = self.numerics.after(result, log.say)
        if state.step == STEPS:
            log.say(f"step {state.step}: {comparison(self.plan)}")
        tokens = self.cfg.rows_per_step(self.world.size) * self.cfg.context_length
        log.step(
            dict(
                step=state.step,
                loss=loss,
                perplexity=_exp(loss),
                grad_norm=norm,
                lr=result.lr,
                tokens=state.tokens,
                tokens_per_s=tokens / seconds,
                mfu=self._mfu(rows, seconds),
                mem_gib=peak_memory_gib(self.device),
                time=time.time(),
                **watched,
            )
        )
        return True

    def _mfu(self, rows, seconds: float) -> float | None:
        """Useful FLOP/s over the devices' peak, counting only the keys that a query meets in its
        document; None where no peak is known.
        """
        from longhaul.flops import keys_met, train_flops
        from longhaul.run.log import peak_flops

        peak = peak_flops(self.device)
        if peak is None:
            return None
        pairs = float(keys_met(self.config, torch.from_numpy(rows.positions)).sum())
        return (
            train_flops(self.config, rows.tokens.size, pairs)
            / self.cfg.context_ranks
            / seconds
            / peak
        )

    def _validation_batches(self, log) -> list:
        """The first `eval_rows` rows of the validation split, this rank's share, one row at a time."""
        from longhaul import step

        rows = (
            min(self.cfg.eval_rows, self._validation_rows()) // self.data_ranks
            if self.cfg.eval_every
            else 0
        )
        if not rows:
            log.say(
                "no validation: it is off, or the validation split has fewer rows than ranks that read rows of their own"
            )
            return []
        loader, first = self._loader("val", 1), self.data_rank * rows
        return [step.micro_batches(loader.rows(range(first, first + rows)), 1, self.device)]

    def _validation_rows(self) -> int:
        return self._loader("val", 1).rows_per_epoch if "val" in self.dataset.splits else 0

    def _validate(self, batches, log):
        from longhaul import step

        state = self.state
        if batches:
            measured = step.evaluate(state, batches, self.guard.must_stop)
            if measured is None:  # asked to stop
                return
            loss, count = measured
            log.scalars(state.step, {"validation/loss": loss, "validation/perplexity": _exp(loss)})
            log.say(f"step {state.step}: validation loss {loss:.4f} nats over {count:,} tokens")
        if self.dataset.tokenizer_path:
            log.text(state.step, "sample", self._sample())

    def _sample(self) -> str:
        """64 tokens from the start of a document; every rank makes the same number of calls,
        whatever it draws.
        """
        from data.tokenizer import Tokenizer
        from longhaul.generate import generate

        tokenizer = Tokenizer(self.dataset.tokenizer_path)
        ids = list(
            generate(self.state.model, [tokenizer.eod_id], 64, vocab_size=tokenizer.vocab_size)
        )
        return tokenizer.decode(
            ids[: ids.index(tokenizer.eod_id)] if tokenizer.eod_id in ids else ids
        )

    def _save(self, saver: Saver):
        if saver.saved != self.state.step:
            extra = dict(
                identity=self.identity,
                rows_per_step=self.cfg.rows_per_step(self.world.size),
                skipped=list(self.numerics.skipped),
            )
            saver.save(self.state, extra)


def _exp(loss: float) -> float:
    """Perplexity, infinite where the loss is beyond a float's exponent."""
    return float(torch.tensor(loss, dtype=torch.float64).exp())


if __name__ == "__main__":
    main()
