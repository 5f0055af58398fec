"""Which run a folder or a checkpoint belongs to, and what has changed since it was written.

A run is identified by what decides its results: the model's geometry, the context length, the seed,
the data and the tokenizer. Settings of the groups `optimisation` and `policy` may
change only if --resume names the checkpoint; all others may, and each change is printed.
"""

import dataclasses
import json
from pathlib import Path

import torch

from data import order
from data.loader import Order
from longhaul import optim
from longhaul.checkpoint.format import MANIFEST, Checkpoint, CheckpointError
from longhaul.config import TrainConfig
from longhaul.kinds import attention_kind, recorded, settings_names
from model import ModelConfig

# fields of ModelConfig that a resume may change
NUMERICAL_FIELDS = {"loss", "logits_threshold_gib", "loss_chunk_size", "compute_dtype", "kernels"}

# settings that belong to the command, not to the run
COMMAND_SETTINGS = {
    "output_dir",
    "resume",
    "plan",
    "fit",
    "config",
    "global_batch_size",
    "gradient_accumulation_steps",
    "skip_rows",
}

# groups of settings that decide what a step does to the weights
FIXED_GROUPS = ("optimisation", "policy")

# files of a job that was killed before it had written run.json
LEFTOVERS = (".lock", ".tmp-run.json")


def fixed_settings(cfg: TrainConfig) -> set[str]:
    """The settings that a resume may change only from a checkpoint that --resume names."""
    return {
        spec.name
        for spec in dataclasses.fields(cfg)
        if spec.metadata["group"] in FIXED_GROUPS and spec.name != "max_steps"
    }


def names_checkpoint(named: str) -> bool:
    """Whether --resume names a checkpoint, from which a run may go on with other settings."""
    return named not in ("auto", "none")


# ---- the run that a folder holds


def identity(cfg: TrainConfig, model_config: ModelConfig) -> dict:
    """What makes a run this run, next to the hashes of its data and tokenizer: a folder or
    checkpoint that differs in it belongs to another.
    """
    fields = recorded(model_config)
    left_out = NUMERICAL_FIELDS | settings_names()
    found = {name: value for name, value in fields.items() if name not in left_out}
    found |= attention_kind(model_config).identity(model_config)
    return found | {
        "context_length": cfg.context_length,
        "seed": cfg.seed,
        "init_from": cfg.init_from,
        "length_schedule": cfg.length_schedule,
        "short_fraction": cfg.short_fraction,
        "whole_documents": cfg.whole_documents,
        "program": cfg.PROGRAM,
    }


def check_folder(cfg: TrainConfig):
    """ValueError if --output_dir holds something else than a run of these settings."""
    record = read_record(Path(cfg.output_dir))
    if record is not None:
        where = f"--output_dir {cfg.output_dir}"
        current = identity(cfg, cfg.model())
        check_same_run(record["identity"], current, where, (cfg.data, cfg.data))


def check_same_run(recorded: dict, current: dict, where: str, folders: tuple[str, str]):
    """ValueError naming every field in which the two identities differ.

    `folders`: --data as recorded and now, which say more than the hashes of their contents.
    """
    different = [
        _difference(name, recorded.get(name), value, folders)
        for name, value in current.items()
        if recorded.get(name) != value
    ]
    if not different:
        return
    longer = ""
    if recorded.get("context_length") != current["context_length"]:
        longer = (
            "; to train its weights at another context, give --init_from and a new --output_dir"
        )
    raise ValueError(
        f"{where} holds another run ({'; '.join(different)}): name another folder, or give that "
        f"run's settings{longer}"
    )


def _difference(name: str, recorded: object, current: object, folders: tuple[str, str]) -> str:
    if name not in ("dataset", "tokenizer"):
        return f"{name}: recorded {recorded or repr(recorded)}, now {current or repr(current)}"
    before, now = (folder or "the embedded corpus" for folder in folders)
    if before == now:
        return f"{name}: that of {now} has changed"
    return f"{name}: recorded that of {before}, now that of {now}"


def read_record(folder: Path) -> dict | None:
    """run.json of a run's folder, None for a new or empty folder; ValueError if the folder holds
    anything else.
    """
    record = folder / "run.json"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file: name a folder")
    if not record.exists():
        if any(folder.glob(f"step-*/{MANIFEST}")):
            raise ValueError(
                f"--output_dir {folder} holds checkpoints and no run.json, so no run is there: "
                f"give --init_from {folder} and a new --output_dir to train on from their weights"
            )
        if folder.exists() and any(path.name not in LEFTOVERS for path in folder.iterdir()):
            raise ValueError(
                f"--output_dir {folder} holds other files and no run: choose an empty or new folder"
            )
        return None

    try:
        content = json.loads(record.read_text(encoding="utf-8"))
        config = dict(content.get("config", {}))
        return content | {"identity": dict(content["identity"]), "config": config}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{record} is damaged ({error!r}): restore it, or choose another --output_dir"
        ) from None


# ---- the checkpoint that a run continues


def check_complete(checkpoint: Checkpoint, cfg: TrainConfig):
    """CheckpointError if a manifest lacks what a resume of the program of `cfg` needs, or has a
    setting that the program does not have. Nothing is made up: the learning rate, every random draw
    and what a policy learns from are functions of the step and these settings.
    """
    needed = ("identity", "rows_per_step", "threads", "torch")
    lacking = [name for name in needed if getattr(checkpoint, name) is None]
    lacking += sorted((fixed_settings(cfg) | {"seed"}) - checkpoint.config.keys())
    if lacking:
        raise CheckpointError(
            f"{checkpoint.folder / MANIFEST} lacks {', '.join(lacking)}: use another checkpoint"
        )
    unknown = sorted(checkpoint.config.keys() - {spec.name for spec in dataclasses.fields(cfg)})
    if unknown:
        raise CheckpointError(
            f"{checkpoint.folder / MANIFEST} was written with settings that this longhaul does not "
            f"have ({', '.join(unknown)}): continue the run with the version that wrote it"
        )


def check_continued(checkpoint: Checkpoint, cfg: TrainConfig):
    """CheckpointError unless the checkpoint is complete, and ValueError if a resume would change
    how weights are updated and --resume does not name the checkpoint.
    """
    check_complete(checkpoint, cfg)
    changed = changed_settings(checkpoint, cfg)
    words = [
        f"--{name}: recorded {old}, now {new}"
        for name, (old, new) in changed.items()
        if name in fixed_settings(cfg)
    ]
    if words and not names_checkpoint(cfg.resume) and checkpoint.step < cfg.max_steps:
        raise ValueError(
            f"the checkpoint was trained with other settings ({', '.join(words)}): give its "
            f"settings, or add --resume {checkpoint.folder} to change them"
        )
    if attention_kind(cfg).learner:
        _check_warmup(checkpoint, changed)


def _check_warmup(checkpoint: Checkpoint, changed: dict[str, tuple]):
    """ValueError if another end of the indexer's warm-up lies in the past: how often the other
    parameters were updated would then be unknown.
    """
    ends = changed.get("indexer_warmup")
    if ends and checkpoint.step > min(ends):
        recorded, now = ends
        raise ValueError(
            f"--indexer_warmup {now}: the checkpoint of step {checkpoint.step} was trained with "
            f"{recorded}, and a warm-up can change only until the shorter one ends: give "
            f"--indexer_warmup {recorded}"
        )


def check_position(checkpoint: Checkpoint, rows: Order, cfg: TrainConfig):
    """CheckpointError unless the data position is where the checkpoint's step begins; ValueError if
    corpora have other shares than it was trained with and --resume does not name the checkpoint.
    """
    expected = rows.without(recorded_skips(checkpoint)).state(checkpoint.step)
    before = checkpoint.data.get("shares")
    now = expected.get("shares")
    if before != now:
        if not names_checkpoint(cfg.resume) and checkpoint.step < cfg.max_steps:
            raise ValueError(
                f"the checkpoint was trained with other shares of the data (recorded "
                f"{shares_in_words(before)}, now {shares_in_words(now)}): give those, or add "
                f"--resume {checkpoint.folder} to change them"
            )
        return
    if checkpoint.data != expected:
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} has the data position {checkpoint.data}, "
            f"not {expected}: use another checkpoint"
        )


def shares_in_words(shares: object) -> str:
    """The shares of a data position, as a checkpoint keeps them."""
    if not isinstance(shares, dict):
        return "one corpus"
    return ", ".join(f"{name} {share}" for name, share in shares.items())[:200]


def recorded_skips(checkpoint: Checkpoint) -> order.Ranges:
    """The ranges of rows that had been skipped when the checkpoint was written."""
    return order.merged(checkpoint.data.get("skip", ()))


def with_skips(checkpoint: Checkpoint, cfg: TrainConfig, rows: Order) -> TrainConfig:
    """`cfg` with the rows that the checkpoint had skipped; ValueError if --skip_rows names rows
    that it was already trained on.
    """
    recorded = recorded_skips(checkpoint)
    both = order.merged([*recorded, *order.parse_ranges(cfg.skip_rows)])

    trained = rows.without(recorded).first_position(checkpoint.step)
    if order.ranges_below(both, trained) != order.ranges_below(recorded, trained):
        raise ValueError(
            f"--skip_rows {' '.join(cfg.skip_rows)}: the checkpoint of step {checkpoint.step} was "
            f"trained on the rows before {trained}: resume an earlier one with --resume and a new "
            "--output_dir, or name later rows"
        )
    return dataclasses.replace(cfg, skip_rows=order.format_ranges(both))


# ---- what has changed


def changed_settings(checkpoint: Checkpoint, cfg: TrainConfig) -> dict[str, tuple]:
    """{name: (the checkpoint's, now)} of the settings that differ."""
    recorded = checkpoint.config
    # through JSON, which makes lists of tuples, as the manifest has them
    current = json.loads(json.dumps(dataclasses.asdict(cfg)))
    return {
        name: (recorded[name], value)
        for name, value in current.items()
        if name in recorded.keys() - COMMAND_SETTINGS and recorded[name] != value
    }


def changes(checkpoint: Checkpoint, cfg: TrainConfig) -> list[str]:
    """A line for everything that differs from when the checkpoint was written."""
    lines = []
    current = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    for name, value in current.items():
        recorded = getattr(checkpoint, name)
        if recorded != value:
            lines.append(
                f"warning: the checkpoint was written with {name}={recorded}, and this run has "
                f"{name}={value}: the last bits may differ from now on"
            )
    for name, (old, new) in changed_settings(checkpoint, cfg).items():
        effect = ""
        if name == "max_steps" and isinstance(old, int):
            effect = _jumps(checkpoint, cfg, old)
        lines.append(f"changed since the checkpoint: {name} {old} -> {new}{effect}")
    return lines


def _jumps(checkpoint: Checkpoint, cfg: TrainConfig, max_steps: int) -> str:
    """How the learning rate, and whatever else a schedule sets, jumps because the run was planned
    with other `max_steps`; empty if nothing does.
    """
    planned = dataclasses.replace(cfg, max_steps=max_steps)
    before = _scheduled(planned, checkpoint.step - 1)
    after = _scheduled(cfg, checkpoint.step)
    words = [
        f"{name} {before[name]} -> {after[name]}" for name in after if before[name] != after[name]
    ]
    return f" ({', '.join(words)})" if words else ""


def _scheduled(cfg: TrainConfig, step: int) -> dict[str, str]:
    """What schedules set in a step, to three digits."""
    found = {"learning rate": optim.learning_rate(step, cfg)} | cfg.scheduled(step)
    return {name: f"{value:.3g}" for name, value in found.items()}
