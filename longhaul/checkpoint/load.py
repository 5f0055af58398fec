"""Finding a checkpoint, checking every byte of it, and filling a model or a training state from it.

`verified(folder)` is how to open one: what it returns has a sound manifest and files with the
hashes that were written. A checkpoint that fails this check is renamed `.corrupt`, never deleted.
"""

import functools
import hashlib
from pathlib import Path

import torch

from base import durable
from base.tensors import WEIGHTS, Later, opened
from base.untrusted import parse_json, refuse_pickle
from data.load_tokenizer import find_tokenizer, hash_of_ids
from data.tokenizer import SENTENCEPIECE
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
from model import Decoder

# ---- checking


def verified(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, once its manifest and the presence, size and hashes of every file
    were checked; CheckpointError names the file and the block that are wrong.
    """
    checkpoint = described(folder)
    for name, recorded in checkpoint.files.items():
        _verify_file(folder / name, recorded)
    return checkpoint


def described(folder: Path) -> Checkpoint:
    """The checkpoint as its manifest describes it, for a rank that leaves the hashes to rank 0;
    CheckpointError names what is wrong with the manifest.
    """
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


def tokenizer_beside(checkpoint: Checkpoint) -> Path:
    """The tokenizer next to the checkpoints of a run."""
    run = checkpoint.folder.parent
    return find_tokenizer(run) or run / "tokenizer.model"


def has_other_ids(checkpoint: Checkpoint, sha256: str | None, tokenizer: Path | None) -> bool:
    """Whether a tokenizer, of this hash and in this file, is not the one that the model was trained
    with. A sentencepiece model and the tokenizer.json that an export makes of it are the same.

    A converted checkpoint knows its tokenizer only by the file next to it, if there is one.
    """
    known = _known_hashes(checkpoint)
    if not known or sha256 in known:
        return False
    return tokenizer is None or hash_of_ids(tokenizer) not in known


def _known_hashes(checkpoint: Checkpoint) -> set[str]:
    """The hashes that say which ids the model was trained on; none if nothing says it."""
    beside = find_tokenizer(checkpoint.folder.parent)
    if not checkpoint.identity:
        return {hash_of_ids(beside)} if beside else set()

    trained_with = checkpoint.identity.get("tokenizer")
    if trained_with is None:
        return set()
    model = checkpoint.folder.parent / SENTENCEPIECE
    if model.is_file() and hashlib.sha256(model.read_bytes()).hexdigest() == trained_with:
        return {trained_with, hash_of_ids(model)}
    return {trained_with}


def check_tokenizer(checkpoint: Checkpoint, sha256: str | None, tokenizer: Path | None, given: str):
    """CheckpointError if a tokenizer, of this hash and in this file, is not the one that the model
    was trained with; `given` names it.
    """
    if has_other_ids(checkpoint, sha256, tokenizer):
        raise CheckpointError(
            f"{given} has a different tokenizer from the data that {checkpoint.folder} was trained "
            f"on: prepare or generate text with --tokenizer {tokenizer_beside(checkpoint)}"
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
    model = _skeleton(checkpoint, **{name: value for name, value in given.items() if value})
    if weights is not None:
        model.to(weights)
    model.to_empty(device=device)
    model.tie_weights()
    _read_into(named_shards(model), checkpoint)
    return model


def _skeleton(checkpoint: Checkpoint, **overrides) -> Decoder:
    """The checkpoint's model on meta; CheckpointError unless the files hold all of it."""
    with checkpoint_errors(checkpoint.folder), torch.device("meta"):
        model = decoder(model_config(checkpoint, **overrides))
        check_held(checkpoint, named_shards(model))
    return model


def stored_weights(checkpoint: Checkpoint) -> dict[str, Later]:
    """The checkpoint's parameters by their names in a model, whole and in the dtype in which they
    are stored, whatever number of ranks wrote them; each is read when it is asked for.

    CheckpointError unless the files hold all of them.
    """
    weights = {}
    dtypes = _stored_dtypes(checkpoint)
    for name, parameter in _skeleton(checkpoint).named_parameters():
        stored = f"model.{name}"
        read = functools.partial(_read_whole, checkpoint, stored, dtypes[stored])
        weights[name] = Later(tuple(parameter.shape), dtypes[stored], read)
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


def check_weights(checkpoint: Checkpoint, model: Decoder):
    """ValueError unless the files hold the model's parameters whole, in their shapes."""
    check_held(checkpoint, _stored_shards(checkpoint, model))


def load_weights(model: Decoder, checkpoint: Checkpoint):
    """Overwrite the parameters of a built model, sharded or whole, whatever number of ranks wrote
    the checkpoint. What its attention does not have keeps its values.
    """
    _read_into(_stored_shards(checkpoint, model), checkpoint)


def _stored_shards(checkpoint: Checkpoint, model: Decoder) -> dict[str, Shard]:
    """The model's parameters without those that only its kind of attention has, if the checkpoint
    is of another kind.
    """
    added = set(attention_kind(model.config).starts_fresh)
    stored = checkpoint.tensors()
    return {
        name: shard
        for name, shard in named_shards(model).items()
        if name in stored or added.isdisjoint(name.split("."))
    }


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
