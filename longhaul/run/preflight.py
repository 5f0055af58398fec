"""Preflight: everything that is checked before a run allocates or overwrites anything.

The order: open the data, settle the model, find the checkpoint to continue, compare it with the
settings, find the rows, hash the data, ask the disk for space, take the folder. Whatever is wrong
ends the program with one line that names the remedy. What only one rank may do, or all must agree
on, is done by rank 0 for all (`dist.on_rank0`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from base import durable
from data import corpus, mixture, order, origin, staged
from data.dataset import Dataset, check_vocab, open_dataset
from data.load_tokenizer import require_usable
from data.loader import Order
from data.mixture import Corpus
from longhaul import config_checks, dist
from longhaul.checkpoint import load, resume, start
from longhaul.checkpoint.format import Checkpoint
from longhaul.checkpoint.save import size_of
from longhaul.config import Stage, TrainConfig
from longhaul.evals.measures import Asked, Measures
from longhaul.kernels import chosen_in_words
from longhaul.kinds import VERIFIED, attention_kind
from longhaul.planner import plan as planner
from longhaul.planner.plan import Plan
from longhaul.run.guard import Guard
from model import ModelConfig

Command = Callable[..., str]  # the shell command of the run, with these settings changed
# the rows of a run, in their order
Rows = Callable[[TrainConfig, Sequence[Corpus], dist.World], Order]

# below this share of the model's vocabulary the data's tokenizer is probably another one
SAME_TOKENIZER = 0.9


@dataclass(frozen=True)
class Ready:
    """A run that may begin."""

    cfg: TrainConfig  # as planned, with the batch and the skipped rows of the checkpoint
    config: ModelConfig
    world: dist.World
    device: torch.device
    folder: Path
    corpora: tuple[Corpus, ...]
    dataset: Dataset  # the first corpus, with whose tokenizer all were made
    loader: Order
    checkpoint: Checkpoint | None  # that the run continues; None for a new run
    weights: start.Start | None  # that a new run takes; None for random ones
    identity: dict
    command: Command
    last_step: int  # of the run; of a stage, once `at` has chosen one
    rows_per_step: int  # at the longest length

    @property
    def stages_left(self) -> list[Stage]:
        """The stages of the length schedule that have steps left; without a schedule, the run."""
        step = self.checkpoint.step if self.checkpoint else 0
        return [stage for stage in self.cfg.stages() if stage.last_step > step]

    def at(self, stage: Stage) -> "Ready":
        """The same run at a stage, with the stage's settings."""
        return dataclasses.replace(
            self,
            cfg=stage.cfg,
            config=stage.cfg.model(),
            last_step=stage.last_step,
        )

    def after(self, step: int) -> "Ready":
        """The same run when it has saved this step, from which the next stage goes on."""
        checkpoint = load.described(self.folder / f"step-{step:08d}")
        resume.check_continued(checkpoint, self.cfg)
        return dataclasses.replace(self, checkpoint=checkpoint, weights=None)


def preflight(
    plan: Plan,
    guard: Guard,
    rows: Rows,
) -> Ready:
    """Check everything, take the run's folder, and return what training needs."""
    cfg, world = plan.cfg, plan.world
    folder = Path(cfg.output_dir)
    corpora = open_data(cfg, world)
    dataset = corpora[0].dataset
    config = model_config(cfg, dataset, world)
    hashes = {"dataset": mixture.fingerprint(corpora), "tokenizer": dataset.tokenizer_sha256}
    identity = resume.identity(cfg, config) | hashes
    record = resume.read_record(folder)

    # one rank verifies hashes and may rename what is damaged
    checkpoint = dist.on_rank0(lambda: find_checkpoint(cfg, identity, record, guard), world)
    weights = None
    if checkpoint is not None:
        cfg = with_recorded_batch(cfg, checkpoint, world)
    elif cfg.init_from:
        weights = starting_weights(cfg, config, dataset, world)

    loader = rows(cfg, corpora, world)
    if checkpoint is not None:
        cfg = resume.with_skips(checkpoint, cfg, loader)
        resume.check_position(checkpoint, loader, cfg)
    loader = loader.without(order.parse_ranges(cfg.skip_rows))
    if cfg.eval_every and checkpoint is None:  # a resumed run leaves out what it cannot measure
        dist.on_rank0(lambda: check_evals(cfg, config, corpora), world)
    stamps = dist.on_rank0(lambda: verify_data(corpora, record), world)

    timeout = dist.on_rank0(lambda: plan.shutdown_timeout, world)

    def command(**changes) -> str:
        return planner.command(dataclasses.replace(cfg, **changes), world, timeout)

    ready = Ready(
        cfg=cfg,
        config=config,
        world=world,
        device=plan.device,
        folder=folder,
        corpora=corpora,
        dataset=dataset,
        loader=loader,
        checkpoint=checkpoint,
        weights=weights,
        identity=identity,
        command=command,
        last_step=cfg.max_steps,
        rows_per_step=cfg.rows_per_step(world.size),
    )
    if checkpoint is not None and checkpoint.step >= cfg.max_steps:  # nothing is left to do
        dist.print0(
            f"{checkpoint.folder} has {checkpoint.step} of {cfg.max_steps} steps: nothing to do",
            world=world,
        )
        return ready

    def begin():
        durable.require_space(folder, size_of(cfg, config), cfg.keep_last)
        announce(ready)
        # nothing was written so far; from here on the folder belongs to this run
        take_folder(ready, record, stamps, guard)

    dist.on_rank0(begin, world)
    return ready


# ---- data and model


def open_data(cfg: TrainConfig, world: dist.World) -> tuple[Corpus, ...]:
    """The corpora of --data, or the embedded corpus, which rank 0 prepares for all."""
    if cfg.data:
        corpora = mixture.open_corpora(cfg.data)
        for one in corpora:
            for path in one.dataset.tokenizer_files():
                require_usable(path)
        return corpora

    def prepare() -> str:
        return str(corpus.prepare_embedded().path)

    embedded = open_dataset(dist.on_rank0(prepare, world))
    return (Corpus(mixture.EMBEDDED, embedded, Fraction(1)),)


def model_config(cfg: TrainConfig, dataset: Dataset, world: dist.World) -> ModelConfig:
    """The model that is trained; ValueError if the data's ids do not fit it.

    Most of a vocabulary that the data does not use is worth a warning: its rows cost memory and
    time and are never trained, or the data is of another tokenizer than the weights.
    """
    config = cfg.model()
    if cfg.init_from and not cfg.data and dataset.vocab_size > config.vocab_size:
        raise ValueError(
            f"--init_from {cfg.init_from} has a vocabulary of {config.vocab_size}, and the "
            f"embedded corpus, which is used without --data, has {dataset.vocab_size}: give --data "
            "with the dataset that those weights were trained on"
        )
    check_vocab(dataset, config.vocab_size)
    if dataset.vocab_size < SAME_TOKENIZER * config.vocab_size:
        dist.print0(f"warning: {_unused_vocabulary(cfg, config, dataset)}", world=world)
    return config


def _unused_vocabulary(cfg: TrainConfig, config: ModelConfig, dataset: Dataset) -> str:
    """What it means that the model's vocabulary is far above the data's."""
    if cfg.init_from:
        return (
            f"the data's tokenizer has {dataset.vocab_size:,} tokens and the model of --init_from "
            f"has {config.vocab_size:,}: weights mean nothing for the ids of another tokenizer"
        )
    unused = config.vocab_size - dataset.vocab_size
    fitting = dataclasses.replace(config, vocab_size=dataset.vocab_size)
    wasted = config.num_params() - fitting.num_params()
    return (
        f"the data has {dataset.vocab_size:,} different ids and the model {config.vocab_size:,}, "
        f"so {unused / config.vocab_size:.0%} of the vocabulary and "
        f"{wasted / config.num_params():.0%} of all parameters are never trained: "
        f"add --vocab_size {dataset.vocab_size}"
    )


def starting_weights(
    cfg: TrainConfig, config: ModelConfig, dataset: Dataset, world: dist.World
) -> start.Start:
    """The folder of --init_from, found intact and fitting.

    One rank chooses it, because the run that it belongs to may write another checkpoint meanwhile.
    """

    def intact() -> start.Start:
        found = start.read(cfg.init_from)
        start.check_tokenizer(found, dataset)
        start.check(found, config)
        return found

    return dist.on_rank0(intact, world)


def verify_data(corpora: Sequence[Corpus], record: dict | None) -> dict:
    """Hash the data's files, except those that have not changed since this run last did."""
    known = (record or {}).get("data_stamps") or {}
    stamps = {}
    for one in corpora:
        verify = functools.partial(one.dataset.verify, known.get(one.name, {}))
        stamps[one.name] = durable.retried(verify, one.dataset.path)
    return stamps


def training_rows(cfg: TrainConfig, corpora: Sequence[Corpus], world: dist.World) -> Order:
    """The rows of the training split, in their order, at each length of the schedule."""
    if not cfg.length_schedule:
        return rows_of(cfg.stages()[0], cfg, corpora, world)

    documents = np.concatenate([one.dataset.split("train").lengths for one in corpora])
    for before, after in itertools.pairwise(cfg.stages()):
        tokens = after.cfg.context_length
        read = documents[documents <= tokens] if cfg.whole_documents else documents
        staged.require_longer_documents(read, before.cfg.context_length, tokens)
    stages = []
    for stage in cfg.stages():
        rows = rows_of(stage, cfg, corpora, world)
        stages.append(staged.Stage(stage.first_step, rows))
    return staged.Staged(stages)


def rows_of(stage: Stage, cfg: TrainConfig, corpora: Sequence[Corpus], world: dist.World) -> Order:
    """The rows of a stage of the length schedule, or of a run without one."""
    return mixture.order(
        corpora,
        stage.cfg.context_length,
        stage.cfg.rows_per_step(world.size),
        seed=cfg.seed,
        split=documents_by_length(cfg, stage) if cfg.long_fraction or cfg.short_fraction else None,
        whole=cfg.whole_documents,
    )


def documents_by_length(cfg: TrainConfig, stage: Stage) -> mixture.Split | None:
    """What --long_fraction and --short_fraction ask for: documents that fill a row, and those that
    already fit into a row of the first stage, have a share of their own.
    """
    if cfg.long_fraction:
        share = 1 - Fraction(str(cfg.long_fraction))
        return mixture.Split(stage.cfg.context_length - 1, share, "--long_fraction")
    if stage.number:
        shortest = cfg.stages()[0].cfg.context_length
        share = Fraction(str(cfg.short_fraction))
        return mixture.Split(shortest, share, "--short_fraction")
    return None


def check_evals(cfg: TrainConfig, config: ModelConfig, corpora: Sequence[Corpus]):
    """ValueError if evaluations would measure at the longest context what they cannot."""
    asked = Asked.of(cfg.stages()[-1].cfg, config.vocab_size)
    costly = set(asked.names) - {"loss", "position"}
    try:
        Measures(corpora, dataclasses.replace(asked, names=tuple(costly))).require()
    except ValueError as error:
        raise ValueError(f"--evals {cfg.evals}: {error}") from None


# ---- the checkpoint to continue


def find_checkpoint(
    cfg: TrainConfig, identity: dict, record: dict | None, guard: Guard
) -> Checkpoint | None:
    """The checkpoint to continue from, None for a new run; ValueError if the output folder does not
    belong to this run, or its settings do not continue the checkpoint.
    """
    folder = Path(cfg.output_dir)
    if record is not None:
        folders = (record.get("config", {}).get("data", ""), cfg.data)
        resume.check_same_run(record["identity"], identity, f"--output_dir {folder}", folders)
        lock(folder, guard)

    found = None
    if resume.names_checkpoint(cfg.resume):
        found = named_checkpoint(cfg, identity, record)
    elif record is not None:
        if cfg.resume == "none":
            raise ValueError(
                f"--output_dir {folder} holds a run: choose another folder, or continue it with "
                "--resume auto"
            )
        found = load.latest(folder)
    if found is not None:
        resume.check_continued(found, cfg)
    return found


def named_checkpoint(cfg: TrainConfig, identity: dict, record: dict | None) -> Checkpoint:
    """The checkpoint of --resume, or the newest of this folder if the command was given before."""
    named = cfg.resume
    checkpoint = load.verified(Path(named))
    if checkpoint.identity is not None:
        folders = (checkpoint.config.get("data", ""), cfg.data)
        resume.check_same_run(checkpoint.identity, identity, f"--resume {named}", folders)

    folder = Path(cfg.output_dir)
    steps = folder.glob("step-????????")
    newer = [path.name for path in steps if int(path.name[5:]) > checkpoint.step]
    if not newer:
        return checkpoint
    if record and record["config"]["resume"] == cfg.resume:
        return load.latest(folder)
    raise ValueError(
        f"--output_dir {folder} holds {newer[0]}, which is newer than {named}: choose another "
        "--output_dir"
    )


def with_recorded_batch(cfg: TrainConfig, checkpoint: Checkpoint, world: dist.World) -> TrainConfig:
    """`cfg` with the global batch of the checkpoint, whatever the number of ranks, so that rows
    keep their order.
    """
    rows = checkpoint.rows_per_step
    if rows == cfg.rows_per_step(world.size):
        return cfg
    if cfg.global_batch_size:
        raise ValueError(
            f"--global_batch_size {cfg.global_batch_size}, but the checkpoint's steps have {rows} "
            f"rows: use {rows}"
        )
    given = f"the checkpoint's steps have {rows} rows, a number that"
    cfg.micro_batches_of(rows, world.size, given)  # raises if it does not divide
    cfg = dataclasses.replace(cfg, global_batch_size=rows)
    dist.print0(
        f"resuming with the checkpoint's global batch of {rows} rows: "
        f"{cfg.accumulation(world.size)} micro-batches of {cfg.batch_size} on {world.size} rank(s)",
        world=world,
    )
    return cfg


# ---- the folder


def announce(ready: Ready):
    """Print the settings, what has changed since the checkpoint, the loss that runs, the data."""
    cfg = ready.cfg
    print("settings that differ from the defaults (run.json in the output folder has all):")
    print(cfg.table(every=False) or "  none")
    print(f"command: {ready.command()}")
    if ready.checkpoint is not None:
        for line in resume.changes(ready.checkpoint, ready.stages_left[0].cfg):
            print(line)
    if ready.weights is not None:
        print("\n".join(start.announcement(ready.weights, cfg.stages()[-1].cfg)))

    warnings = config_checks.warnings(cfg) + ready.loader.warnings()
    slow = attention_kind(ready.config).warning(ready.config, ready.device)
    if slow:
        warnings.append(slow)
    kind = ready.config.attention.name
    if kind not in VERIFIED:
        warnings.append(
            f"--attention_type {kind} is not in VERIFIED of longhaul/kinds.py: verify it with "
            "longhaul.planner.verify_kind.verify_kind"
        )
    for words in warnings:
        print(f"warning: {words}")

    notice = attention_kind(ready.config).notice(ready.config)
    if notice:
        print(f"attention: {notice}")
    print(f"loss: {cfg.loss_in_words(ready.config, ready.world.size)}")
    print(f"kernels: {chosen_in_words(ready.config, ready.device)}")
    print("\n".join(ready.loader.summary(cfg.max_steps)), flush=True)
    if cfg.whole_documents:
        for stage in cfg.stages():
            for line in mixture.left_out(ready.corpora, stage.cfg.context_length):
                print(line)


def take_folder(ready: Ready, record: dict | None, stamps: dict, guard: Guard):
    """Lock the folder, and write the run's identity, its settings and the tokenizer into it."""
    folder = ready.folder
    lock(folder, guard)
    content = {
        "identity": ready.identity,
        "config": dataclasses.asdict(ready.cfg),
        "world_size": ready.world.size,
        "data_stamps": stamps,
    }
    try:
        durable.write_json(folder / "run.json", content)
        copy_tokenizer(ready.dataset, ready.weights, folder)
    except OSError as error:
        raise unwritable(folder, error) from None


def copy_tokenizer(dataset: Dataset, weights: start.Start | None, folder: Path):
    """The tokenizer next to the checkpoints, so that they can be used without the data. What the
    folder of --init_from says besides its weights, such as a chat template, goes along.
    """
    for path in dataset.tokenizer_files():
        if not (folder / path.name).exists():
            temporary = folder / ".tmp-tokenizer"
            temporary.write_bytes(path.read_bytes())
            temporary.rename(folder / path.name)
    if weights is not None:
        origin.keep(weights.origin, folder)


def lock(folder: Path, guard: Guard):
    """Lock the folder for this job; ValueError if another job has it or it cannot be written."""
    try:
        guard.take(folder)
    except OSError as error:
        raise unwritable(folder, error) from None


def unwritable(folder: Path, error: OSError) -> ValueError:
    return ValueError(f"--output_dir {folder} cannot be written ({error}): choose another folder")
