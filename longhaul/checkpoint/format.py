"""What a checkpoint is on disk, and how its manifest is checked.

    step-00000100/                       appears whole, by a rename, or not at all
        rank-00000-of-00002.safetensors  the shard of each tensor that this rank owns
        manifest.json                    written last: step, data position, configuration, and for
                                         each file its size, its shards and a SHA-256 per 64 MiB

Parameters and optimizer states are sharded along their first dimension, so a shard is a range
[start, end) of that dimension and resharding is slicing. (The manifest calls these ranges "rows".)
Step counters, data position and configuration are in the manifest; there is no pickle.

Hashes prove only that nothing has changed since somebody wrote the folder. Whoever it was, no code
in it is run, and no file outside of it is opened; otherwise a manifest whose checksum fits is
believed.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from base.tensors import Later
from longhaul import dist, exits, optimizers
from longhaul.kinds import KINDS
from model import Decoder, ModelConfig

FORMAT = "longhaul-checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
REQUIRED = ("step", "tokens", "data", "world_size", "config", "model_config", "files")

FILE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another run."""

    exit_code = exits.NO_CHECKPOINT


class OtherSettings(CheckpointError):
    """A good checkpoint that these settings cannot continue."""

    exit_code = exits.BAD_INPUT


class OtherVersion(CheckpointError):
    """A checkpoint that another longhaul wrote: it is not damaged, so it is not set aside."""


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
        raise OtherVersion(
            f"{folder} has version {manifest.get('version')}, and this longhaul reads version "
            f"{VERSION}: read it with the longhaul that wrote it"
        )
    missing = sorted(set(REQUIRED) - manifest.keys())
    if missing or not manifest["files"]:
        raise CheckpointError(f"{path} lacks {missing or 'files'}: use another checkpoint")
    with checkpoint_errors(folder):
        return _described(manifest, folder)


def _described(manifest: dict, folder: Path) -> Checkpoint:
    only_of_a_run = ("identity", "rows_per_step", "threads", "torch", "source")
    return Checkpoint(
        folder=folder,
        step=manifest["step"],
        tokens=manifest["tokens"],
        data=manifest["data"],
        config=manifest["config"],
        model_config=manifest["model_config"],
        files={name: _stored_file(name, entry) for name, entry in manifest["files"].items()},
        skipped=tuple(manifest.get("skipped", [])),
        **{name: manifest[name] for name in only_of_a_run if name in manifest},
    )


def _stored_file(name: str, entry: dict) -> StoredFile:
    """ValueError for a file that is not in the folder itself."""
    if not re.fullmatch(FILE_NAME, name):
        raise ValueError(f"it names {name[:80]!r}, which is not a plain file of this folder")
    return StoredFile(entry["bytes"], entry["blocks"], entry["rows"], entry["shapes"])


# ---- the model that a checkpoint is of


def check_held(checkpoint: Checkpoint, shards: dict[str, Shard]):
    """ValueError unless the files hold all of these shards, of tensors of their shapes."""
    for file in checkpoint.files.values():
        for name in file.ranges.keys() & shards.keys():
            if tuple(file.shapes[name]) != shards[name].shape:
                raise ValueError(
                    f"{name} has shape {file.shapes[name]}, but the model needs "
                    f"{list(shards[name].shape)}"
                )

    lacking = [
        name for name, shard in shards.items() if not checkpoint.holds(name, shard.start, shard.end)
    ]
    if lacking:
        raise ValueError(f"it lacks parts of {len(lacking)} tensor(s), such as {lacking[0]}")


def model_config(checkpoint: Checkpoint, **overrides) -> ModelConfig:
    """The configuration of the checkpoint's model; ValueError if it is not one."""
    fields = dict(checkpoint.model_config)
    fields["attention"] = _attention(fields)
    return ModelConfig(**_fields(ModelConfig, fields) | overrides)


def _attention(fields: dict):
    """The settings of the recorded kind of attention, which leave `fields`."""
    name = fields.pop("attention_type", None)
    if name not in KINDS:
        raise ValueError(f"model_config.attention_type is {name!r}")
    kind = KINDS[name]
    return kind.config(**_fields(kind.config, fields.pop(kind.settings or name, {})))


def _fields(cls: type, values: dict) -> dict:
    """`values` as arguments of the dataclass `cls`; ValueError unless they are all that it has."""
    names = {spec.name for spec in dataclasses.fields(cls)}
    for name in values.keys() - names:
        raise ValueError(f"model_config.{name[:40]} is unknown to this version of longhaul")
    for name in sorted(names - values.keys()):
        raise ValueError(f"model_config lacks {name}, so another version of longhaul wrote it")
    return dict(values)
