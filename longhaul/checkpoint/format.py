"""What a checkpoint is on disk, and how its manifest is checked.

    step-00000100/                       appears whole, by a rename, or not at all
        rank-00000-of-00002.safetensors  the shard of each tensor that this rank owns
        manifest.json                    written last: step, data position, configuration, and for
                                         each file its size, its shards and a SHA-256 per 64 MiB

Parameters and optimizer states are sharded along their first dimension, so a shard is a range
[start, end) of that dimension and resharding is slicing. (The manifest calls these ranges "rows".)
Step counters, data position and configuration are in the manifest; there is no pickle.

Hashes prove only that nothing has changed since somebody wrote the folder. What the manifest says
is therefore checked value by value before it is used, whoever wrote it.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from base import durable
from base.tensors import Later
from longhaul import dist, exits, optimizers
from longhaul.checkpoint.earlier import present_settings
from longhaul.kinds import KINDS, settings_names
from model import Decoder, ModelConfig, Standard

FORMAT = "longhaul-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
REQUIRED = ("step", "tokens", "data", "world_size", "config", "model_config", "files")

FILE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
LARGEST_COUNT = 2**53
LARGEST_SIZE = 2**24  # of a model's dimension


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another run."""

    exit_code = exits.NO_CHECKPOINT


class OtherSettings(CheckpointError):
    """A good checkpoint that these settings cannot continue."""

    exit_code = exits.BAD_INPUT


class FutureVersion(CheckpointError):
    """A checkpoint that a newer longhaul wrote: it is not damaged, so it is not set aside."""


@contextmanager
def checkpoint_errors(folder: Path) -> Iterator[None]:
    """Raise a ValueError about the contents of a checkpoint as a CheckpointError that names it."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(
            f"{folder} is not a sound checkpoint ({error}): use another checkpoint"
        ) from None


# ---- shards of tensors


@dataclass(frozen=True)
class Shard:
    """The range [start, end) along the first dimension of a tensor that this process holds, or
    reads when it is written.
    """

    local: torch.Tensor | Later
    start: int
    shape: tuple[int, ...]  # of the whole tensor

    @property
    def end(self) -> int:
        return self.start + self.local.shape[0]


def shard_of(tensor: torch.Tensor, like: torch.Tensor | None = None) -> Shard:
    """A plain tensor whole, or the local part of a DTensor, sharded on dimension 0 as torch.chunk
    cuts it.

    `like`: the parameter whose state `tensor` is; a plain tensor is then this rank's part of it.
    """
    like = tensor if like is None else like
    local = dist.local_shard(tensor).detach()
    if not hasattr(like, "device_mesh"):
        return Shard(local, 0, tuple(local.shape))

    sharded = [dim for dim, placement in enumerate(like.placements) if placement.is_shard()]
    assert len(sharded) == 1 and like.placements[sharded[0]].dim == 0, like.placements
    ranks = like.device_mesh.size(sharded[0])
    rank = like.device_mesh.get_local_rank(sharded[0])

    length = like.shape[0]
    size = -(-length // ranks)
    start = min(rank * size, length)
    assert len(local) == min(size, length - start), (like.shape, rank, local.shape)
    return Shard(local, start, (length, *local.shape[1:]))


def named_shards(
    model: Decoder, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Shard]:
    """`model.<parameter>` and `optim.<parameter>.<state>`; a tied weight appears once."""
    return shards_of(list(model.named_parameters()), optimizer)


def shards_of(
    parameters: list[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer | None
) -> dict[str, Shard]:
    """The same of parameters and their names, listed when they were sharded: in the middle of a
    forward or backward the model holds whole ones.
    """
    shards = {f"model.{name}": shard_of(parameter) for name, parameter in parameters}
    if optimizer is None:
        return shards

    for name, parameter in parameters:
        for key, value in optimizer.state[parameter].items():
            if value.ndim:  # step counters have no dimension and are in the manifest
                shards[f"optim.{name}.{key}"] = shard_of(value, parameter)
    return shards


def fresh_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The state tensors that the optimizer keeps for a parameter and a checkpoint stores, new."""
    if isinstance(optimizer, optimizers.AdamW):
        return {key: value for key, value in optimizer.new_state(parameter).items() if value.ndim}
    return {key: torch.empty_like(parameter) for key in ("exp_avg", "exp_avg_sq")}


# ---- the manifest


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint, as the manifest describes it."""

    bytes: int
    blocks: list[str]  # SHA-256 of each 64 MiB
    ranges: dict[str, list[int]]  # [start, end) of each tensor that the file has a shard of
    shapes: dict[str, list[int]]  # of the whole tensors


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose manifest was found sound.

    What has a default here may be missing from a checkpoint that is only to be read, such as one
    that was converted; `resume` requires it.
    """

    folder: Path
    step: int
    tokens: int
    data: dict  # the loader's state
    config: dict  # TrainConfig's fields
    model_config: dict  # ModelConfig's fields
    files: dict[str, StoredFile]
    identity: dict | None = None
    rows_per_step: int | None = None
    threads: int | None = None
    torch: str | None = None
    skipped: tuple[int, ...] = ()  # steps that changed no weight
    # what the source of the batches keeps (longhaul/run/pretraining.py)
    source: dict = dataclasses.field(default_factory=dict)

    def holds(self, name: str, start: int, end: int) -> bool:
        """Whether the files have all rows from `start` to `end` of a tensor."""
        ranges = [file.ranges[name] for file in self.files.values() if name in file.ranges]
        reached = start
        for first, last in sorted(ranges):
            if first <= reached:
                reached = max(reached, last)
        return reached >= end

    def tensors(self) -> set[str]:
        """The names of all tensors that the files hold shards of."""
        return {name for file in self.files.values() for name in file.ranges}


def last_taken(step: int, skipped: Collection[int]) -> int:
    """The newest step up to `step` that had a finite gradient; those that had none are `skipped`.

    It was taken from the weights of the newest checkpoint before it, so that one is good. Of a
    newer one nobody knows: its weights may be those that make every gradient NaN.
    """
    while step in skipped:
        step -= 1
    return step


def checksum(manifest: dict) -> str:
    """SHA-256 of a manifest's content without the checksum itself."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def checked(manifest: object, folder: Path) -> Checkpoint:
    """The Checkpoint that the JSON value of a manifest describes; CheckpointError if it is not one
    that this version can read.
    """
    path = folder / MANIFEST
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not of format {FORMAT!r}: name a checkpoint that train.py wrote"
        )
    if manifest.get("checksum") != checksum(manifest):
        raise CheckpointError(f"{path} is damaged: use another checkpoint")
    if manifest.get("version") != VERSION:
        raise FutureVersion(
            f"{folder} has version {manifest.get('version')}, and this longhaul reads version "
            f"{VERSION}: update longhaul"
        )
    missing = sorted(set(REQUIRED) - manifest.keys())
    if missing or not manifest["files"]:
        raise CheckpointError(f"{path} lacks {missing or 'files'}: use another checkpoint")
    with checkpoint_errors(folder):
        return _typed(manifest, folder)


def _typed(manifest: dict, folder: Path) -> Checkpoint:
    """ValueError unless every value that is read later has the type, and every range the bounds,
    that it must have.
    """
    for name, is_sound in SOUND.items():
        if name in manifest and not is_sound(manifest[name]):
            raise ValueError(f"{name} is {_short(manifest[name])}")
    _check_skipped_rows(manifest["data"].get("skip", []))

    only_of_a_run = ("identity", "rows_per_step", "threads", "torch", "source")
    return Checkpoint(
        folder=folder,
        step=manifest["step"],
        tokens=manifest["tokens"],
        data=manifest["data"],
        config=present_settings(manifest["config"]),
        model_config=manifest["model_config"],
        files={name: _stored_file(name, entry) for name, entry in manifest["files"].items()},
        skipped=tuple(manifest.get("skipped", [])),
        **{name: manifest[name] for name in only_of_a_run if name in manifest},
    )


def _check_skipped_rows(ranges: object):
    """ValueError unless these are [begin, end] pairs with begin < end."""
    pairs = isinstance(ranges, list) and all(_is_counts(one) and len(one) == 2 for one in ranges)
    if not pairs or any(begin >= end for begin, end in ranges):
        raise ValueError(f"the skipped rows are {_short(ranges)}")


def _stored_file(name: str, entry: object) -> StoredFile:
    """ValueError unless `entry` describes a plain file and the shards in it."""
    if not re.fullmatch(FILE_NAME, name):
        raise ValueError(f"it names {_short(name)}, which is not a plain file of this folder")

    kinds = {"bytes": int, "blocks": list, "rows": dict, "shapes": dict}
    described = isinstance(entry, dict) and all(
        isinstance(entry.get(key), kind) for key, kind in kinds.items()
    )
    if not described or not _is_count(entry["bytes"]):
        raise ValueError(f"{name} is not described by bytes, blocks, rows and shapes")

    digests = len(entry["blocks"])
    expected = -(-entry["bytes"] // durable.BLOCK)
    if digests != expected or entry["rows"].keys() != entry["shapes"].keys():
        raise ValueError(
            f"{name} has {digests} digests for {entry['bytes']} bytes, or rows and shapes of "
            "different tensors"
        )

    for tensor, span in entry["rows"].items():
        _check_range(name, span, entry["shapes"][tensor])
    return StoredFile(entry["bytes"], entry["blocks"], entry["rows"], entry["shapes"])


def _check_range(file: str, span: object, shape: object):
    counts = _is_counts(span) and _is_counts(shape)
    if not counts or len(span) != 2 or not shape or not span[0] <= span[1] <= shape[0]:
        raise ValueError(f"{file} holds rows {_short(span)} of a tensor of shape {_short(shape)}")


# ---- the model that a checkpoint is of


def check_model(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]):
    """ValueError unless the files hold these tensors whole; asked before memory is allocated."""
    for file in checkpoint.files.values():
        for name in file.ranges.keys() & shapes.keys():
            if tuple(file.shapes[name]) != shapes[name]:
                raise ValueError(
                    f"{name} has shape {file.shapes[name]}, but the model configuration says "
                    f"{list(shapes[name])}"
                )

    lacking = [name for name, shape in shapes.items() if not checkpoint.holds(name, 0, shape[0])]
    if lacking:
        raise ValueError(f"it lacks parts of {len(lacking)} tensor(s), such as {lacking[0]}")


def model_config(checkpoint: Checkpoint, **overrides) -> ModelConfig:
    """The configuration of the checkpoint's model; ValueError if it is not one, or asks for more
    tensors than the files hold.
    """
    fields = dict(checkpoint.model_config)
    attention = _attention(fields)
    fields = _fields(ModelConfig, fields)

    most_layers = sum(len(file.ranges) for file in checkpoint.files.values())
    for name, size in fields.items():
        limit = most_layers if name == "num_layers" else LARGEST_SIZE
        if type(size) is int and size > limit:
            raise ValueError(f"model_config.{name} is {size}, which the files do not hold")
    return ModelConfig(**fields | {"attention": attention} | overrides)


def _attention(fields: dict):
    """The settings of the recorded kind of attention; those of all kinds leave `fields`."""
    name = fields.pop("attention_type", Standard.name)
    if name not in KINDS:
        raise ValueError(f"model_config.attention_type is {_short(name)}")
    older = fields.pop("indexer", None)  # once recorded for every kind of attention
    if older is not None and name == "indexed":
        raise ValueError(
            "its indexed attention chooses blocks of a few tokens for all heads, a form that ended "
            "with longhaul 0.1.0: read it with the version of commit 4523af9"
        )
    kind = KINDS[name]
    found = kind.config(**_fields(kind.config, fields.get(kind.settings or name, {})))
    for settings in settings_names():
        fields.pop(settings, None)
    return found


def _fields(cls: type, values: object) -> dict:
    """`values` as arguments of the dataclass `cls`; ValueError for an unknown name or type."""
    if not isinstance(values, dict):
        raise ValueError(f"model_config.{cls.__name__} is {_short(values)}")
    kinds = {spec.name: spec.type for spec in dataclasses.fields(cls)}
    for name, value in values.items():
        if name not in kinds or not _is_of(kinds[name], value):
            raise ValueError(f"model_config.{name[:40]} is {_short(value)}")
    return dict(values)


def _is_of(kind: type, value: object) -> bool:
    """Whether a value of JSON may stand for a field of this type; its range is the model's."""
    return type(value) is kind or (kind is float and type(value) is int)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < LARGEST_COUNT


def _is_counts(values: object) -> bool:
    return isinstance(values, list) and all(_is_count(value) for value in values)


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)


def _short(value: object) -> str:
    return repr(value)[:80]


# what each entry of a manifest must be, apart from what its files hold
SOUND: dict[str, Callable[[object], bool]] = {
    "step": _is_count,
    "tokens": _is_count,
    "world_size": _is_count,
    "rows_per_step": _is_count,
    "threads": _is_count,
    "torch": lambda value: isinstance(value, str),
    "skipped": _is_counts,
    "data": _is_dict,
    "config": _is_dict,
    "model_config": _is_dict,
    "files": _is_dict,
    "identity": _is_dict,
    "source": _is_dict,
}
