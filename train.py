"""Train a decoder: `torchrun --nproc_per_node=2 train.py --context_length 131072`, or `python train.py` for one process.

The order of a run: read the flags, plan (what is needed, what is here), open the data, look for a checkpoint, build, train.
Whatever is wrong is said in one line before anything is allocated or overwritten. Imports longhaul and data of ours.
"""

import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path

import torch

from longhaul import cli, dist
from longhaul.config import TrainConfig
from longhaul.memory import plan as planner

ROPE_SCALING = ["rope_scaling", "rope_factor", "rope_original_context"]


def main(args: list[str] | None = None):
    """The command line; errors that a user can mend end in one line and exit code 2."""
    cfg, _ = cli.parse(TrainConfig, args, __doc__.splitlines()[0])
    world = dist.World.from_environment()
    try:
        device = dist.choose_device(cfg.device, world)
        plan_or_refuse(cfg, world, device)
        Run(cfg, world, device).train()
    except ValueError as error:
        dist.refuse(f"train.py: error: {error}")
    finally:
        dist.stop()


def plan_or_refuse(cfg: TrainConfig, world: dist.World, device: torch.device):
    """Print the plan; stop where it was asked for, or where the request cannot fit. Nothing smaller is ever trained instead."""
    plan = planner.plan(cfg, cfg.model(), world, device)
    cfg.accumulation(world.size)  # raises where the ranks do not divide the batch
    dist.print0(plan.table(), world=world)
    if plan.fits and cfg.plan:
        sys.exit(0)
    if not plan.fits:
        nearest = planner.closest(plan)
        words = "nothing of longhaul fits here" if nearest is None else "closest command that runs here:\n" + planner.command(nearest.cfg, world)
        dist.refuse(f"train.py: error: {plan.needed_gib:.1f} GiB per rank are needed and {plan.available_gib:.1f} GiB are here; {words}")


class Run:
    """One training run: its folder, data, state and log."""

    def __init__(self, cfg: TrainConfig, world: dist.World, device: torch.device):
        dist.start(world, device)
        self.world, self.device, self.folder = world, device, Path(cfg.output_dir)
        self.dataset = self._open_data(cfg)
        self.config = self._model_config(cfg)
        self.checkpoint = self._find_checkpoint(cfg)
        self.cfg = self._with_the_checkpoints_batch(cfg)
        self.loader = self._loader("train", self.cfg.rows_per_step(world.size))
        self.first_step = 0 if self.checkpoint is None else self._manifest()["step"]

    # ---- what is checked before anything is built

    def _open_data(self, cfg: TrainConfig):
        """The dataset of --data, or the embedded corpus: rank 0 makes its cache, the others find it there."""
        from data.corpus import prepare_embedded
        from data.shards import open_dataset
        if cfg.data:
            return open_dataset(cfg.data)
        if self.world.rank == 0:
            prepare_embedded(documents=cfg.documents)
        dist.barrier()
        return prepare_embedded(documents=cfg.documents, report=lambda *line: None)

    def _model_config(self, cfg: TrainConfig):
        config = cfg.model()
        if cfg.init_from:  # positions mean what the weights were trained with, unless the flags extend them
            from longhaul import qwen3
            theirs = qwen3.read_config(Path(cfg.init_from))
            kept = ["norm_eps"] + ["rope_theta"] * (not cfg.rope_theta) + ROPE_SCALING * (cfg.rope_scaling == "none")
            config = dataclasses.replace(config, **{name: theirs[name] for name in kept})
        if self.dataset.vocab_size > config.vocab_size:
            raise ValueError(f"the data's vocabulary has {self.dataset.vocab_size} tokens and the model's {config.vocab_size}: "
                             f"use --vocab_size {self.dataset.vocab_size}")
        return config

    def identity(self, cfg: TrainConfig) -> dict:
        """What makes this run this run: a folder or checkpoint that differs here belongs to another."""
        geometry = dataclasses.asdict(self.config)
        for numerics in ("loss", "logits_threshold_gib", "loss_chunk_size", "compute_dtype"):
            geometry.pop(numerics)
        return geometry | dict(context_length=cfg.context_length, seed=cfg.seed, init_from=cfg.init_from,
                               dataset=self.dataset.fingerprint, tokenizer=self.dataset.tokenizer_sha256)

    def _find_checkpoint(self, cfg: TrainConfig) -> Path | None:
        from longhaul import checkpoint
        if cfg.resume not in ("auto", "none"):
            self._check_same_run(checkpoint.verify(Path(cfg.resume)).get("identity", {}), cfg, cfg.resume)
            return Path(cfg.resume)
        record = self.folder / "run.json"
        if not record.exists():
            if self.folder.exists() and any(self.folder.iterdir()):
                raise ValueError(f"--output_dir {self.folder} holds other files and no run: choose an empty or new folder")
            return None
        if cfg.resume == "none":
            raise ValueError(f"--output_dir {self.folder} holds a run: choose another folder, or continue it with --resume auto")
        self._check_same_run(json.loads(record.read_text())["identity"], cfg, str(self.folder))
        return checkpoint.latest(self.folder, self.world)

    def _check_same_run(self, recorded: dict, cfg: TrainConfig, where: str):
        mine = self.identity(cfg)
        different = [f"{key}: {recorded.get(key)} there, {value} here" for key, value in mine.items() if recorded.get(key) != value]
        if different:
            raise ValueError(f"{where} holds another run ({'; '.join(different)}): choose another --output_dir, or that run's settings")

    def _manifest(self) -> dict:
        from longhaul import checkpoint
        return checkpoint.read_manifest(self.checkpoint)

    def _with_the_checkpoints_batch(self, cfg: TrainConfig) -> TrainConfig:
        """On a resume the global batch stays what it was, whatever the number of ranks: the rows keep their order."""
        if self.checkpoint is None:
            return cfg
        rows = self._manifest()["rows_per_step"]
        if rows == cfg.rows_per_step(self.world.size):
            return cfg
        if cfg.global_batch_size:
            raise ValueError(f"--global_batch_size {cfg.global_batch_size}, but the checkpoint's steps have {rows} rows: use {rows}")
        cfg = dataclasses.replace(cfg, global_batch_size=rows)
        dist.print0(f"resuming with the checkpoint's global batch of {rows} rows: {cfg.accumulation(self.world.size)} micro-batches "
                    f"of {cfg.batch_size} on {self.world.size} rank(s)", world=self.world)
        return cfg

    def _loader(self, split: str, rows: int):
        from data.loader import Loader
        return Loader(self.dataset, self.cfg.context_length, rows, seed=self.cfg.seed, split=split)

    # ---- the run

    def train(self):
        """Train to max_steps, validating and saving on the way."""
        if self.first_step >= self.cfg.max_steps:
            dist.print0(f"{self.checkpoint} has {self.first_step} of {self.cfg.max_steps} steps: nothing to do", world=self.world)
            return
        state = self._build()
        self._open_folder()
        log = self._open_log()
        validation = self._validation_batches(state, log)
        while state.step < self.cfg.max_steps:
            self._one_step(state, log)
            if self.cfg.eval_every and (state.step % self.cfg.eval_every == 0 or state.step == self.cfg.max_steps):
                self._validate(state, validation, log)
            if state.step % self.cfg.save_every == 0 or state.step == self.cfg.max_steps:
                self._save(state, log)
        log.close()

    def _build(self):
        from longhaul import checkpoint, step
        mesh = dist.data_mesh(self.world, self.device, self.cfg.dp_replicate)
        state = step.build(self.cfg, self.config, self.device, self.world, mesh)
        if self.checkpoint is not None:
            checkpoint.load(state, self.checkpoint)
            dist.print0(f"resumed {self.checkpoint} at step {state.step}", world=self.world)
        elif self.cfg.init_from:
            from longhaul import qwen3
            qwen3.load_into(state.model, Path(self.cfg.init_from))
        return state

    def _open_folder(self):
        """run.json (identity and settings) and the tokenizer stand beside the checkpoints."""
        if self.world.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            record = dict(identity=self.identity(self.cfg), config=dataclasses.asdict(self.cfg), world_size=self.world.size)
            (self.folder / "run.json").write_text(json.dumps(record, indent=2) + "\n")
            if self.dataset.tokenizer_path:
                shutil.copyfile(self.dataset.tokenizer_path, self.folder / "tokenizer.model")
        dist.barrier()

    def _open_log(self):
        from longhaul.metrics import Logger
        dist.print0(f"settings: {planner.command(self.cfg, self.world)}", world=self.world)
        context = self.loader.effective_context()
        if context.warning:
            dist.print0(f"warning: {context.warning}", world=self.world)
        entropy = self.loader.split.unigram_entropy
        dist.print0(f"data: {self.loader.split.num_tokens:,} tokens, {self.loader.rows_per_epoch:,} rows of {self.cfg.context_length:,}; "
                    f"unigram entropy {entropy:.3f} nats", world=self.world)
        return Logger(self.folder, self.first_step, self.cfg.max_steps, self.world.rank == 0, self.cfg.log_every, self.cfg.to_json())

    def _one_step(self, state, log):
        from longhaul import metrics, step
        start = time.perf_counter()
        rows = self.loader.batch(state.step, self.world.rank, self.world.size)
        result = step.train_step(state, step.micro_batches(rows, self.cfg.batch_size, self.device))
        loss, norm = float(result.loss), float(result.grad_norm)  # the step's one host synchronisation
        seconds = time.perf_counter() - start
        state.data = self.loader.state(state.step)
        tokens = self.cfg.rows_per_step(self.world.size) * self.cfg.context_length
        log.step(dict(
            step=state.step, loss=loss, perplexity=_exp(loss), grad_norm=norm, lr=result.lr, tokens=state.tokens,
            tokens_per_s=tokens / seconds, mfu=self._mfu(rows, seconds), mem_gib=metrics.peak_memory_gib(self.device), time=time.time()))

    def _mfu(self, rows, seconds: float) -> float | None:
        """Useful FLOP/s over the devices' peak, counting only the causal pairs inside documents; None where no peak is known."""
        from longhaul.metrics import peak_flops
        peak = peak_flops(self.device)
        if peak is None:
            return None
        pairs = float((rows.positions + 1).sum())
        return self.config.train_flops(rows.tokens.size, pairs) / seconds / peak

    def _validation_batches(self, state, log):
        from longhaul import step
        if not self.cfg.eval_every:
            return []
        rows_per_batch = self.world.size * self.cfg.batch_size
        try:
            loader = self._loader("val", rows_per_batch)
        except ValueError as error:
            log.say(f"no validation: {error}")
            return []
        count = min(self.cfg.eval_batches, loader.rows_per_epoch // rows_per_batch)
        return [step.micro_batches(loader.batch(index, self.world.rank, self.world.size), self.cfg.batch_size, self.device)
                for index in range(count)]

    def _validate(self, state, batches, log):
        from longhaul import step
        if batches:
            loss, count = step.evaluate(state, batches)
            log.scalars(state.step, {"validation/loss": loss, "validation/perplexity": _exp(loss)})
            log.say(f"step {state.step}: validation loss {loss:.4f} nats over {count:,} tokens")
        if self.dataset.tokenizer_path:
            log.text(state.step, "sample", self._sample(state))

    def _sample(self, state) -> str:
        """64 tokens after the start of a document, on all ranks together."""
        from data.tokenizer import Tokenizer
        from longhaul.generate import generate
        tokenizer = Tokenizer(self.dataset.tokenizer_path)
        return tokenizer.decode(list(generate(state.model, [self.dataset.eod_id], 64, stop_id=self.dataset.eod_id)))

    def _save(self, state, log):
        from longhaul import checkpoint
        extra = dict(identity=self.identity(self.cfg), rows_per_step=self.cfg.rows_per_step(self.world.size))
        path = checkpoint.save(state, self.folder, extra)
        if self.world.rank == 0:
            checkpoint.prune(self.folder, self.cfg.keep_last)
        log.say(f"saved {path}")


def _exp(loss: float) -> float:
    """Perplexity, infinite where the loss is beyond a float's exponent."""
    return float(torch.tensor(loss, dtype=torch.float64).exp())


if __name__ == "__main__":
    main()
