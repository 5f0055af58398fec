"""Finding a checkpoint, checking every byte of it, and filling a model or a training state from it.

`verified(folder)` is how to open one: what it returns has a sound manifest and files with the
hashes that were written. A checkpoint that fails this check is renamed `.corrupt`, never deleted.
"""

import functools
from pathlib import Path

import torch

from base import durable
from base.tensors import WEIGHTS, Later, opened
from base.untrusted import parse_json, refuse_pickle
from data.hugging_face import TOKENIZER
from data.load_tokenizer import AnyTokenizer, Ids, find_tokenizer, have_same_ids
from longhaul import optimizers
from longhaul.checkpoint.format import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    OtherSettings,
    OtherVersion,
    Shard,
    StoredFile,
    check_held,
    checked,
    checkpoint_errors,
    fresh_state,
    model_config,
    named_shards,
)
from longhaul.kernels import decoder
from longhaul.kinds import attention_kind
from longhaul.step import TrainState
from model import Decoder, ModelConfig

# ---- checking


def verified(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, once its manifest and the presence, size and hashes of every file
    were checked; CheckpointError names the file and the block that are wrong.
    """
    checkpoint = described(folder)
    verify(checkpoint)
    return checkpoint


def verify(checkpoint: Checkpoint):
    """Check the files of a checkpoint whose manifest was read; CheckpointError as in `verified`."""
    for name, recorded in checkpoint.files.items():
        _verify_file(checkpoint.folder / name, recorded)


def described(folder: Path) -> Checkpoint:
    """The checkpoint as its manifest describes it; CheckpointError names what is wrong with it."""
    refuse_pickle(folder)
    try:
        manifest = parse_json(durable.read_text(folder / MANIFEST).encode())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is not a readable checkpoint ({error}): name a step-* folder with a "
            f"{MANIFEST}"
        ) from None
    return checked(manifest, folder)


def _verify_file(path: Path, recorded: StoredFile):
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(
            f"{path} is missing, or is not a plain file of this folder: use another checkpoint"
        )

    found = durable.describe(path)
    if found["bytes"] != recorded.bytes:
        raise CheckpointError(
            f"{path} has {found['bytes']} bytes, and {recorded.bytes} were written: use another "
            "checkpoint"
        )
    pairs = enumerate(zip(found["blocks"], recorded.blocks, strict=True))
    damaged = [index for index, (digest, written) in pairs if digest != written]
    if damaged:
        raise CheckpointError(
            f"{path} is damaged in 64 MiB block(s) {damaged}: use another checkpoint"
        )


# ---- finding


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint of a run that verifies, None if the run has none; damaged ones are
    renamed `.corrupt` with a line on screen. Because it renames, only one rank may call it.

    CheckpointError if there are checkpoints and all are damaged: only the user can decide to start
    over.
    """
    for candidate in sorted(folder.glob("step-????????"), reverse=True):
        try:
            return verified(candidate)
        except OtherVersion:
            raise
        except CheckpointError as error:
            set_aside(candidate, error)
    if any(folder.glob("step-*.corrupt*")):
        raise CheckpointError(
            f"{folder}: no checkpoint is usable, because all of them are damaged (*.corrupt): "
            "choose a new --output_dir to start over"
        )
    return None


def set_aside(folder: Path, error: CheckpointError):
    """Rename a damaged checkpoint `.corrupt`, with a line on screen."""
    taken = len(list(folder.parent.glob(f"{folder.name}.corrupt*")))
    suffix = f".corrupt-{taken + 1}" if taken else ".corrupt"
    aside = folder.with_name(folder.name + suffix)
    durable.rename(folder, aside)
    print(f"DAMAGED CHECKPOINT: {error}\n  renamed to {aside.name}", flush=True)


def newest(folder: Path) -> Path:
    """`folder` itself if it is a checkpoint, else the newest step-* folder in it; CheckpointError
    if it has none.
    """
    refuse_pickle(folder)
    if (folder / MANIFEST).exists():
        return folder
    steps = sorted(folder.glob("step-????????"))
    if not steps:
        raise CheckpointError(
            f"{folder} is not a checkpoint and does not contain one: name a run's folder or a "
            "step-* folder"
        )
    return steps[-1]


def check_ids(folder: Path, checkpoint: Checkpoint | None, given: Ids | AnyTokenizer, name: str):
    """ValueError if the data or the tokenizer that is called `name` has other ids than those that
    the model in a folder was trained on: by what its run recorded and the tokenizer beside its
    checkpoints, or by the tokenizer.json of a Hugging Face folder. Without any, all is allowed.
    """
    path = folder / TOKENIZER
    trained = Ids(path=path if path.is_file() else None)
    if checkpoint is not None:
        recorded = checkpoint.identity or {}
        trained = Ids(recorded.get("tokenizer"), find_tokenizer(folder.parent))
    if trained == Ids() or have_same_ids(trained, given):
        return
    raise ValueError(
        f"{name} has another tokenizer than the one that {folder} was trained with, so its ids "
        "mean other tokens: prepare the data (python -m data.prepare), or generate text, with "
        f"--tokenizer {trained.path or 'FILE, a copy of that one'}"
    )


# ---- filling


def load_state(state: TrainState, checkpoint: Checkpoint):
    """Fill model, optimizer, step, tokens and data position of `state`, whatever number of ranks
    wrote the checkpoint.
    """
    state.step = checkpoint.step
    state.tokens = checkpoint.tokens
    state.data = checkpoint.data
    _create_optimizer_state(state, checkpoint)
    _read_into(named_shards(state.model, state.optimizer), checkpoint)


def load_model(
    checkpoint: Checkpoint,
    device: torch.device | str = "cpu",
    dtype: str | None = None,
    kernels: str | None = None,
    weights: torch.dtype | None = None,
    attention: object | None = None,
) -> Decoder:
    """The checkpoint's model without its optimizer, on `device`; `dtype`, `kernels` and the
    settings `attention` override its own. The parameters are fp32, or `weights`: each is converted
    as it is read.
    """
    given = {"compute_dtype": dtype, "kernels": kernels, "attention": attention}
    overrides = {name: value for name, value in given.items() if value}
    with checkpoint_errors(checkpoint.folder), torch.device("meta"):
        model = decoder(model_config(checkpoint, **overrides))
        check_held(checkpoint, named_shards(model))
    if weights is not None:
        model.to(weights)
    model.to_empty(device=device)
    model.tie_weights()
    _read_into(named_shards(model), checkpoint)
    return model


def stored_weights(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Later]:
    """The parameters that a model of `config` takes from the checkpoint, by their names in it,
    whole and in the dtype in which they are stored, whatever number of ranks wrote them; each is
    read when it is asked for.

    CheckpointError unless the files hold all of them.
    """
    with checkpoint_errors(checkpoint.folder), torch.device("meta"):
        shards = _stored_shards(checkpoint, decoder(config))
        check_held(checkpoint, shards)
    weights = {}
    dtypes = _stored_dtypes(checkpoint)
    for name, shard in shards.items():
        read = functools.partial(_read_whole, checkpoint, name, dtypes[name])
        weights[name.removeprefix("model.")] = Later(shard.shape, dtypes[name], read)
    return weights


def _stored_dtypes(checkpoint: Checkpoint) -> dict[str, torch.dtype]:
    """The dtype of each weight, from the headers."""
    found = {}
    for file, recorded in checkpoint.files.items():
        with checkpoint_errors(checkpoint.folder), opened(checkpoint.folder / file) as source:
            for name in recorded.ranges:
                found[name] = WEIGHTS.get(source.get_slice(name).get_dtype())
    return found


def _read_whole(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    """One tensor from all files that hold a part of it. Each file is opened for this tensor only,
    because the pages of an open one stay in memory.
    """
    whole = None
    for file, recorded in checkpoint.files.items():
        if name not in recorded.ranges:
            continue
        shape = recorded.shapes[name]
        start, end = recorded.ranges[name]
        with checkpoint_errors(checkpoint.folder), opened(checkpoint.folder / file) as source:
            part = source.get_tensor(name)
        if len(part) == shape[0]:
            return part
        if whole is None:
            whole = torch.empty(shape, dtype=dtype, device="cpu")
        whole[start:end] = part
    return whole


def load_weights(model: Decoder, checkpoint: Checkpoint):
    """Overwrite the parameters of a built model, sharded or whole, whatever number of ranks wrote
    the checkpoint. What its attention does not have keeps its values.
    """
    _read_into(_stored_shards(checkpoint, model), checkpoint)


def _stored_shards(checkpoint: Checkpoint, model: Decoder) -> dict[str, Shard]:
    """The model's parameters without those that only its kind of attention has, if the checkpoint
    is of another kind.
    """
    shards = named_shards(model)
    if checkpoint.model_config.get("attention_type") == model.config.attention.name:
        return shards
    added = set(attention_kind(model.config).starts_fresh)
    return {name: shard for name, shard in shards.items() if added.isdisjoint(name.split("."))}


def _create_optimizer_state(state: TrainState, checkpoint: Checkpoint):
    """New state tensors for every parameter, with the names that the checkpoint holds."""
    on_host = isinstance(state.optimizer, optimizers.AdamW)
    device = torch.device("cpu") if on_host else state.device
    stored = checkpoint.tensors()
    for name, parameter in state.model.named_parameters():
        prefix = f"optim.{name}."
        keys = {key.rsplit(".", 1)[1] for key in stored if key.startswith(prefix)}
        if not keys:
            continue
        fresh = fresh_state(state.optimizer, parameter)
        if keys != fresh.keys():
            raise OtherSettings(
                f"the checkpoint holds {', '.join(sorted(keys))} of {name}, and this optimizer "
                f"keeps {', '.join(sorted(fresh))}: give the settings of the run that wrote it"
            )
        updates = torch.tensor(float(_updates(state, checkpoint, name)), device=device)
        state.optimizer.state[parameter] = fresh | {"step": updates}


def _updates(state: TrainState, checkpoint: Checkpoint, name: str) -> int:
    """Updates of a parameter so far. Steps that were skipped changed nothing, and those of an
    indexer's warm-up only the indexer.
    """
    first = 0 if attention_kind(state.model.config).is_learner(name) else state.cfg.dense_steps
    skipped = sum(step > first for step in checkpoint.skipped)
    return checkpoint.step - first - skipped


def _read_into(shards: dict[str, Shard], checkpoint: Checkpoint):
    """Copy what is held here from whichever files have it; CheckpointError unless all of it is
    found.
    """
    with checkpoint_errors(checkpoint.folder):
        check_held(checkpoint, shards)
    for file, recorded in checkpoint.files.items():
        with checkpoint_errors(checkpoint.folder), opened(checkpoint.folder / file) as source:
            for name in recorded.ranges.keys() & shards.keys():
                start, end = recorded.ranges[name]
                _copy(shards[name], source.get_slice(name), start, end)


def _copy(target: Shard, source, start: int, end: int):
    """Copy where `target` and the stored range [start, end) overlap."""
    first = max(target.start, start)
    last = min(target.end, end)
    if first < last:
        part = target.local[first - target.start : last - target.start]
        part.copy_(source[first - start : last - start])
