"""Which run a folder or checkpoint belongs to, and what has changed since. Imports data.order,
longhaul.checkpoint.store, longhaul.config and model.py of ours.
"""

import dataclasses
import json
from pathlib import Path

import torch

from data import order
from longhaul.checkpoint.store import CheckpointError
from longhaul.config import TrainConfig
from model import ModelConfig

NUMERICS = {
    "loss",
    "logits_threshold_gib",
    "loss_chunk_size",
    "compute_dtype",
    "kernels",
}  # fields of ModelConfig that a resume may change
FREE = {
    "output_dir",
    "resume",
    "plan",
    "fit",
    "config",
    "global_batch_size",
    "gradient_accumulation_steps",
    "override_settings",
    "skip_rows",
}  # follow the call
OPTIMISATION = {
    spec.name
    for spec in dataclasses.fields(TrainConfig)
    if spec.metadata["group"] == "optimisation"
} - {"max_steps"}
BEGUN = (".lock", ".tmp-run.json")  # what a job that was killed before run.json stood leaves
WANTED = (
    "identity",
    "rows_per_step",
    "threads",
    "torch",
)  # of a manifest, beside what checkpoint.py needs itself


def identity(cfg: TrainConfig, model_config: ModelConfig, dataset) -> dict:
    """What makes a run this run: a folder or checkpoint that differs here belongs to another."""
    geometry = {
        name: value
        for name, value in dataclasses.asdict(model_config).items()
        if name not in NUMERICS
    }
    sparse = geometry.pop("nsa")
    if cfg.attention_type == "nsa":
        geometry |= {f"nsa.{name}": value for name, value in sparse.items()}
    return geometry | dict(
        context_length=cfg.context_length,
        seed=cfg.seed,
        init_from=cfg.init_from,
        dataset=dataset.fingerprint,
        tokenizer=dataset.tokenizer_sha256,
    )


def check_same_run(recorded: dict, here: dict, where: str):
    """ValueError naming every field in which they differ."""
    different = [
        f"{key}: {recorded.get(key)} there, {value} here"
        for key, value in here.items()
        if recorded.get(key) != value
    ]
    if different:
        raise ValueError(
            f"{where} holds another run ({'; '.join(different)}): name another folder, or give that run's settings"
        )


def read_record(folder: Path) -> dict | None:
    """run.json of a run's folder, None for a new or empty folder; ValueError where it holds
    anything else.
    """
    record = folder / "run.json"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file: name a folder")
    if not record.exists():
        if folder.exists() and any(path.name not in BEGUN for path in folder.iterdir()):
            raise ValueError(
                f"--output_dir {folder} holds other files and no run: choose an empty or new folder"
            )
        return None
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
        return content | dict(identity=dict(content["identity"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{record} is damaged ({error!r}): restore it, or choose another --output_dir"
        ) from None


def changed_settings(manifest: dict | None, cfg: TrainConfig) -> dict:
    """{name: (the checkpoint's, now)} of the settings that are not as they were."""
    before = manifest["config"] if manifest else {}
    now = json.loads(
        json.dumps(dataclasses.asdict(cfg))
    )  # tuples as lists, as the manifest has them
    return {
        name: (before[name], value)
        for name, value in now.items()
        if name in before.keys() - FREE and before[name] != value
    }


def changes(manifest: dict | None, cfg: TrainConfig) -> list[str]:
    """A line for everything that is not as it was when the checkpoint was written."""
    here = dict(threads=torch.get_num_threads(), torch=torch.__version__)
    other = [
        f"warning: the checkpoint was written with {name} {manifest[name]}, here it is {value}: the last bits may differ from here on"
        for name, value in here.items()
        if manifest and manifest[name] != value
    ]
    return other + [
        f"changed since the checkpoint: {name} {old} -> {new}"
        for name, (old, new) in changed_settings(manifest, cfg).items()
    ]


def check_settings(manifest: dict | None, cfg: TrainConfig):
    """ValueError where a resume would change how weights are updated and --override_settings is not
    given.
    """
    changed = {
        name: pair for name, pair in changed_settings(manifest, cfg).items() if name in OPTIMISATION
    }
    if changed and not cfg.override_settings and manifest["step"] < cfg.max_steps:
        words = ", ".join(
            f"--{name} {old} there, {new} here" for name, (old, new) in changed.items()
        )
        raise ValueError(
            f"the checkpoint was trained with other settings ({words}): give its settings, or add --override_settings to change them"
        )


def recorded_skips(manifest: dict) -> order.Ranges:
    """The rows that had been left out of the order when the checkpoint was written."""
    return order.merged(manifest["data"].get("skip", ()))


def with_skips(manifest: dict | None, cfg: TrainConfig) -> TrainConfig:
    """Rows that were left out before the checkpoint stay left out; ValueError for one that it was
    trained on, which cannot be taken back.
    """
    if manifest is None:
        return cfg
    recorded = recorded_skips(manifest)
    both = order.merged([*recorded, *order.parse_ranges(cfg.skip_rows)])
    trained = order.around(manifest["step"] * manifest["rows_per_step"], recorded)
    if order.before(both, trained) != order.before(recorded, trained):
        raise ValueError(
            f"--skip_rows {' '.join(cfg.skip_rows)}: the checkpoint of step {manifest['step']} was trained on the rows before {trained}: "
            "resume an earlier one with --resume and a new --output_dir, or name later rows"
        )
    return dataclasses.replace(cfg, skip_rows=order.words_of(both))


def check_position(manifest: dict, loader):
    """CheckpointError where the data position is not where the checkpoint's step begins: neither is
    ever made up.
    """
    expected = loader.state(manifest["step"], recorded_skips(manifest))
    if manifest["data"] != expected:
        raise CheckpointError(
            f"the checkpoint of step {manifest['step']} has the data position {manifest['data']}, not {expected}: use another checkpoint"
        )


def check_complete(manifest: dict, folder: Path):
    """CheckpointError where a manifest lacks what a resume needs; the learning rate and every
    random draw are functions of step and settings.
    """
    lacking = [name for name in WANTED if name not in manifest] + sorted(
        (OPTIMISATION | {"seed"}) - manifest["config"].keys()
    )
    if lacking:
        raise CheckpointError(
            f"{folder}/manifest.json lacks {', '.join(lacking)}: use another checkpoint"
        )
