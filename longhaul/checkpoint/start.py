"""What --init_from names: a Hugging Face folder, or a checkpoint of longhaul, which is a
step-* folder or a run's folder with its newest one.

Only the weights are taken: the run begins at step 0, with a new optimizer and its own identity. The
model is the folder's, so `completed` gives the command line its geometry, its vocabulary and its
rotary positions. Flags may change the positions, the context and the kind of attention; a flag that
contradicts the geometry is refused. Of a checkpoint that --resume names, it gives the command line
what every resume keeps.
"""

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.tensors import Later
from base.untrusted import refuse_pickle
from data import origin
from data.dataset import Dataset
from data.load_tokenizer import Ids
from longhaul import lengths, qwen3
from longhaul.checkpoint import format, load, resume
from longhaul.checkpoint.format import Checkpoint
from longhaul.cli import read_pairs
from longhaul.config import TrainConfig, model_fields, rope_fields
from longhaul.kinds import attention_kind
from model import PRESETS, Decoder, ModelConfig

# The settings of a run that `completed` may set.
COMPLETED = {
    "model_size",
    "model_overrides",
    "vocab_size",
    "rope_theta",
    "rope_scaling",
    "attention_type",
    "blocks",
    "context_length",
}

# max_position_embeddings of Qwen3 is the 32,768 tokens that it was trained at and room for an
# answer; its own instructions for yarn take the former.
QWEN3_CONTEXTS = {40_960: 32_768}


@dataclass(frozen=True)
class Start:
    """The folder of --init_from, as its config.json or its manifest describes it.

    `config.rope_original_context` is the context that the weights were trained at before any
    scaling of their positions.
    """

    folder: Path  # a Hugging Face folder or a step-* folder
    config: ModelConfig
    context: int  # tokens of a row, for a run that does not say
    checkpoint: Checkpoint | None  # None for a Hugging Face folder

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer of the weights is, if it is anywhere."""
        return self.folder if self.checkpoint is None else self.folder.parent

    @property
    def origin(self) -> Path:
        """The folder with what a Hugging Face folder says besides its weights."""
        return self.folder if self.checkpoint is None else origin.kept(self.folder.parent)


def digest(folder: Path) -> str:
    """SHA-256 of what decides a model: the manifest of a checkpoint, which has the hashes of its
    files, or the configuration and the weights of another folder.
    """
    files = [folder / format.MANIFEST]
    if not files[0].exists():
        files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as opened:
            total.update(hashlib.file_digest(opened, "sha256").digest())
    return total.hexdigest()


# ---- reading


def read(named: str) -> Start:
    """What the folder says of its model; no weight is read.

    ValueError if it holds neither a model of Hugging Face nor a checkpoint.
    """
    folder = Path(named)
    refuse_pickle(folder)
    if qwen3.is_folder(folder):
        return _of_hugging_face(folder)
    if (folder / format.MANIFEST).is_file() or any(folder.glob("step-????????")):
        return _of_checkpoint(folder)
    raise ValueError(
        f"--init_from {folder} holds neither config.json nor a checkpoint: name a folder with a "
        "Hugging Face model, or a run or step-* folder of longhaul"
    )


def _of_hugging_face(folder: Path) -> Start:
    config = ModelConfig(**qwen3.read_config(folder))
    reach = config.rope_reach
    return Start(folder, config, min(reach, TrainConfig.context_length), None)


def _of_checkpoint(folder: Path) -> Start:
    checkpoint = load.described(load.newest(folder))
    with format.checkpoint_errors(checkpoint.folder):
        config = format.model_config(checkpoint)

    context = trained_context(checkpoint)
    if config.rope_scaling == "none":
        config = dataclasses.replace(config, rope_original_context=context)
    if config.rope_scaling == "llama3" and context > config.rope_reach:
        config = dataclasses.replace(config, rope_context=context)
    return Start(checkpoint.folder, config, _row(checkpoint), checkpoint)


def trained_context(checkpoint: Checkpoint) -> int:
    """Tokens that the positions of the weights reach: the length of the run's rows, or the context
    of the model that it started from, whichever is longer.
    """
    if not checkpoint.config.get("init_from"):
        return _row(checkpoint)
    config = format.model_config(checkpoint)
    return max(_row(checkpoint), config.rope_reach)


def _row(checkpoint: Checkpoint) -> int:
    """The run's --context_length; CheckpointError if the manifest has none."""
    length = checkpoint.config.get("context_length")
    if type(length) is not int or length < 1:
        raise format.CheckpointError(
            f"{checkpoint.folder}: the manifest's context_length is {str(length)[:80]}: "
            "use another checkpoint"
        )
    return length


# ---- the settings that follow


def completed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that flags and file give, with those of the model of `init_from`, or of the
    checkpoint that `resume` names.

    ValueError for a setting that contradicts the model of `init_from`, and for a checkpoint that
    cannot be read.
    """
    named = settings.get("init_from")
    if not named:
        return _as_resumed(settings)
    if not Path(named).exists():
        return _as_recorded(settings)

    start = read(named)
    _check_settings(settings, start)
    found = _model_settings(settings, start.config)
    found |= _rope_settings(settings, start.config)
    found |= _attention_settings(settings, start.config)
    if settings.get("length_schedule"):  # which has the lengths
        return settings | found
    return {"context_length": start.context} | settings | found


def _as_resumed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, and what every resume keeps from the checkpoint that `resume` names."""
    named = settings.get("resume", TrainConfig.resume)
    if not resume.names_checkpoint(named):
        return settings

    names = COMPLETED | {"data", "seed"}
    if settings.get("length_schedule"):  # the checkpoint has its stage's length and base
        names -= {"context_length", "rope_theta"}
    return _with_recorded(settings, load.described(Path(named)).config, names)


def _as_recorded(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run in output_dir, which continues although its init_from is gone."""
    record = resume.read_record(Path(settings.get("output_dir", TrainConfig.output_dir)))
    recorded = (record or {}).get("config", {})
    if recorded.get("init_from") != settings["init_from"]:
        raise ValueError(
            f"--init_from {settings['init_from']} is no folder: name a folder with a Hugging Face "
            "Qwen3 model, or a run or step-* folder of longhaul"
        )
    return _with_recorded(settings, recorded, COMPLETED)


def _with_recorded(
    settings: dict[str, Any],
    recorded: dict[str, Any],
    names: set[str],
) -> dict[str, Any]:
    """The settings, and of those names that they do not give what was recorded."""
    found = {}
    for name in names & recorded.keys():
        value = recorded[name]
        found[name] = tuple(value) if isinstance(value, list) else value
    return found | settings


def _check_settings(settings: dict[str, Any], start: Start):
    """ValueError naming both values if a setting gives the model another geometry."""
    for name, (value, flag) in _given_geometry(settings).items():
        theirs = getattr(start.config, name)
        if value != theirs:
            raise ValueError(
                f"--init_from {settings['init_from']} has {name}={theirs}, and {flag} means "
                f"{value}: drop the flag, because the folder decides"
            )

    kind = settings.get("attention_type", start.config.attention.name)
    if kind != start.config.attention.name and not attention_kind(start.config).is_qwen3:
        raise ValueError(
            f"--init_from {settings['init_from']} has attention_type={start.config.attention.name},"
            f" whose weights --attention_type {kind} does not have: drop the flag"
        )


def _given_geometry(settings: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """{field of ModelConfig: (value, flag)} of the geometry that the settings ask for."""
    given = {}
    size = settings.get("model_size")
    if size:
        preset = ModelConfig.preset(size)
        for name in qwen3.SHAPE:
            given[name] = (getattr(preset, name), f"--model_size {size}")
        del given["vocab_size"]  # a preset's vocabulary is only a default

    for name, value in _overrides(settings).items():
        if name in qwen3.SHAPE:
            given[name] = (value, f"--model_overrides {name}={value}")
    if settings.get("vocab_size"):
        size = settings["vocab_size"]
        given["vocab_size"] = (size, f"--vocab_size {size}")
    return given


def _overrides(settings: dict[str, Any]) -> dict[str, Any]:
    return model_fields(settings.get("model_overrides", ()))


def _model_settings(settings: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The preset that is nearest to the model, and what differs from it."""
    names = [*qwen3.SHAPE, "init_std"]
    if "rope_scaling" not in settings:
        names.append("rope_context")
    shape = {name: getattr(config, name) for name in names}
    vocabulary = shape.pop("vocab_size")
    given = _overrides(settings).items()
    shape |= {name: value for name, value in given if name not in qwen3.SHAPE}

    sizes = [settings["model_size"]] if settings.get("model_size") else list(PRESETS)
    overrides = {size: _differences(shape, size) for size in sizes}
    size = min(sizes, key=lambda size: len(overrides[size]))
    return dict(
        model_size=size,
        model_overrides=tuple(f"{name}={value}" for name, value in overrides[size].items()),
        vocab_size=0 if vocabulary == ModelConfig.preset(size).vocab_size else vocabulary,
    )


def _differences(shape: dict[str, Any], size: str) -> dict[str, Any]:
    preset = ModelConfig.preset(size)
    return {name: value for name, value in shape.items() if getattr(preset, name) != value}


def _rope_settings(settings: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The folder's rotary positions, changed by what is given."""
    given = rope_fields(settings["rope_scaling"]) if "rope_scaling" in settings else {}
    scaling = given.get("rope_scaling", config.rope_scaling)
    original = config.rope_original_context
    if scaling == "yarn" and config.rope_scaling == "none":
        original = QWEN3_CONTEXTS.get(original, original)
    original = given.get("rope_original_context", original)
    factor = config.rope_factor if scaling == config.rope_scaling else 1.0
    factor = given.get("rope_factor", factor)

    theta = settings.get("rope_theta") or _theta_of_schedule(settings) or config.rope_theta
    return dict(rope_theta=theta, rope_scaling=rope_words(scaling, factor, original))


def rope_words(scaling: str, factor: float, original: int) -> str:
    """--rope_scaling of these fields of ModelConfig."""
    if scaling == "none" and original == ModelConfig.rope_original_context:
        return scaling
    return f"{scaling}:{repr(factor).removesuffix('.0')}:{original}"


def _theta_of_schedule(settings: dict[str, Any]) -> float | None:
    """The rotary base that the first stage of --length_schedule names, if it does."""
    stages = lengths.parse(settings.get("length_schedule") or "")
    return stages[0].theta if stages else None


def _attention_settings(settings: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The folder's attention with its own settings, or the kind that is given."""
    kind = settings.get("attention_type", config.attention.name)
    if kind != config.attention.name or not attention_kind(config).settings:
        return dict(attention_type=kind)

    theirs = config.attention
    given = read_pairs(settings.get("blocks", ()), type(theirs), "blocks")
    defaults = dataclasses.asdict(type(theirs)())
    sizes = dataclasses.asdict(theirs)
    changed = {name: value for name, value in sizes.items() if value != defaults[name]}
    pairs = [f"{name}={value}" for name, value in (changed | given).items()]
    return {"attention_type": kind, "blocks": tuple(pairs)}


# ---- the weights


def check(start: Start, config: ModelConfig):
    """ValueError or CheckpointError unless the weights are intact, fit `config` and are numbers;
    reads every byte of them.
    """
    if start.checkpoint is None:
        qwen3.check_geometry(config, start.config, start.folder)
        weights = qwen3.stored_weights(start.folder, config)
    else:
        load.verify(start.checkpoint)
        weights = load.stored_weights(start.checkpoint, config)
    _check_finite(start.folder, weights)


def _check_finite(folder: Path, weights: dict[str, Later]):
    """ValueError naming a weight that holds NaN or infinity: no step from it would be finite."""
    for name, weight in weights.items():
        smallest, largest = weight.read().aminmax()  # both are NaN if any element is
        if not (smallest.isfinite() and largest.isfinite()):
            raise ValueError(
                f"{folder}: its weight {name} holds NaN or infinity, so no step could train it: "
                "name an older step-* folder, or get the weights again"
            )


def check_tokenizer(start: Start, dataset: Dataset):
    """ValueError if the data's ids are not those that the weights were trained on."""
    load.check_ids(
        start.folder,
        start.checkpoint,
        Ids(dataset.tokenizer_sha256, dataset.tokenizer_path),
        f"the data in {dataset.path}",
    )


def load_into(model: Decoder, start: Start):
    """Overwrite the parameters of a built model, sharded or whole, keeping their dtype."""
    if start.checkpoint is None:
        qwen3.load_into(model, start.folder)
    else:
        load.load_weights(model, start.checkpoint)


def announcement(start: Start, cfg: TrainConfig) -> list[str]:
    """What a user wants to know about the weights and the positions, in lines."""
    lines = [f"weights: {start.folder}"]
    config = cfg.model()
    for name in ("rope_theta", "rope_scaling", "rope_factor"):
        theirs = getattr(start.config, name)
        ours = getattr(config, name)
        if ours != theirs:
            lines.append(f"  {name}: {theirs} there, {ours} in this run")

    reach = config.rope_reach
    if cfg.context_length > reach and config.rope_theta == start.config.rope_theta:
        factor = cfg.context_length / config.rope_original_context
        lines.append(
            f"warning: positions reach {reach:,} tokens, and --context_length is "
            f"{cfg.context_length:,}: training has to teach the rest; --rope_scaling "
            f"yarn:{factor:g}, or a --rope_theta above {config.rope_theta:g}, helps"
        )
    return lines
