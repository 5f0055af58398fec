"""Checkpoints: atomic, hashed, pickle-free, and readable by any number of processes.

    step-00000100/                      appears whole, by a rename, or not at all
        rank-00000-of-00002.safetensors  the rows of each tensor that this rank owns
        manifest.json                    written last: step, data position, configuration, and per file size, rows and SHA-256 of each 64 MiB

Parameters and optimizer states are sharded on their first dimension, so a shard is a range of rows
and resharding is slicing. A save builds `.tmp-step-*`, fsyncs files and folder, and renames. A
folder that fails its check is renamed `.corrupt`, never deleted. Imports
longhaul.checkpoint.contents, longhaul.dist, longhaul.exits, longhaul.parallel.apply,
longhaul.optimizers, files.durable, files.tensors, files.untrusted and model.py of ours.
"""

import dataclasses
import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from files import durable, tensors
from files.tensors import opened
from files.untrusted import parse_json, refuse_pickle
from longhaul import dist, exits, optimizers
from longhaul.checkpoint import contents
from longhaul.exits import StorageError
from longhaul.parallel import apply
from model import Decoder

FORMAT, VERSION = "longhaul-checkpoint", 1
NEEDED = ("step", "tokens", "data", "world_size", "config", "model_config", "files")


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another run."""

    exit_code = exits.NO_CHECKPOINT


class OtherSettings(CheckpointError):
    """A good checkpoint that these settings cannot continue."""

    exit_code = exits.BAD_INPUT


class FutureVersion(CheckpointError):
    """A checkpoint that a newer longhaul wrote: nothing is wrong with it, so it is not set aside."""


# --------------------------------------------------------------------------------- tensors and rows


@dataclass(frozen=True)
class Rows:
    """The rows [start, end) of a tensor that this process holds."""

    local: torch.Tensor
    start: int
    shape: tuple[int, ...]  # of the whole tensor

    @property
    def end(self) -> int:
        return self.start + len(self.local)


def rows_of(tensor: torch.Tensor, like: torch.Tensor | None = None) -> Rows:
    """A plain tensor whole, or the rows of a DTensor that is sharded on dimension 0 as torch.chunk
    cuts it.

    `like`: the parameter whose state `tensor` is; a plain tensor is then what this rank holds of
    it.
    """
    like = tensor if like is None else like
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    if not hasattr(like, "device_mesh"):
        return Rows(local, 0, tuple(local.shape))
    sharded = [dim for dim, placement in enumerate(like.placements) if placement.is_shard()]
    assert len(sharded) == 1 and like.placements[sharded[0]].dim == 0, like.placements
    ranks, rank = like.device_mesh.size(sharded[0]), like.device_mesh.get_local_rank(sharded[0])
    size = -(-like.shape[0] // ranks)
    start = min(rank * size, like.shape[0])
    assert len(local) == min(size, like.shape[0] - start), (like.shape, rank, local.shape)
    return Rows(local, start, (like.shape[0], *local.shape[1:]))


def named_rows(model: Decoder, optimizer=None) -> dict[str, Rows]:
    """`model.<parameter>` and `optim.<parameter>.<state>`, a tied weight once. Step counters are in
    the manifest.
    """
    rows = {f"model.{name}": rows_of(parameter) for name, parameter in model.named_parameters()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state[parameter].items():
                if value.ndim:
                    rows[f"optim.{name}.{key}"] = rows_of(value, parameter)
    return rows


# ------------------------------------------------------------------------------------------- saving


@dataclass(frozen=True)
class Snapshot:
    """What a save writes: this rank's rows, and what the manifest says."""

    step: int
    rows: dict[str, Rows]
    manifest: dict
    world: dist.World
    writes: bool  # one rank of each set of replicas does


def snapshot(state, extra: dict, copied: bool = False) -> Snapshot:
    """A Snapshot of `state` (TrainState); `copied`: of host memory of its own, so that training may
    go on. `extra` joins the manifest.
    """
    apply.reshard(state.model)
    writes = (
        state.mesh is None or state.mesh.ndim == 1 or state.mesh.get_local_rank("replicate") == 0
    )
    assert state.mesh is None or all(hasattr(p, "device_mesh") for p in state.model.parameters()), (
        "a parameter is not sharded"
    )
    rows = (
        {
            name: part
            for name, part in named_rows(state.model, state.optimizer).items()
            if len(part.local)
        }
        if writes
        else {}
    )
    if copied:
        rows = {
            name: dataclasses.replace(part, local=part.local.to("cpu", copy=True))
            for name, part in rows.items()
        }
    manifest = dict(
        format=FORMAT,
        version=VERSION,
        step=state.step,
        tokens=state.tokens,
        data=dict(state.data),
        world_size=state.world.size,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        config=dataclasses.asdict(state.cfg),
        model_config=dataclasses.asdict(state.model.config),
        **extra,
    )
    return Snapshot(state.step, rows, manifest, state.world, writes)


def save(state, folder: Path, extra: dict) -> Path:
    """Write step-NNNNNNNN of `state` (TrainState) into `folder` by all ranks; returns its path."""
    return write(snapshot(state, extra), folder)


def write(shot: Snapshot, folder: Path, group=None) -> Path:
    """Write a Snapshot by all ranks, who meet in `group`. A disk that is full or fails is tried
    once more, then StorageError.

    Whatever happens, what `folder` held before is untouched.
    """
    final, failure = folder / f"step-{shot.step:08d}", None
    if final.exists():
        raise CheckpointError(
            f"{final} exists already: a checkpoint is never overwritten; move it away"
        )
    for _ in range(2):
        try:
            failure = None
            _write_files(shot, folder, final, group)
        except OSError as error:
            failure = error
        if not dist.any_rank(failure is not None, group):
            return final
    raise StorageError(
        f"{final} cannot be written ({failure}; tried twice): this rank's part has {bytes_of(shot):,} bytes and "
        f"{durable.free_bytes(folder):,} are free; older checkpoints are whole: free space, then give the same command again"
    )


def bytes_of(shot: Snapshot) -> int:
    """What a rank writes of a Snapshot, but for the headers."""
    return sum(part.local.nbytes for part in shot.rows.values())


def _write_files(shot: Snapshot, folder: Path, final: Path, group):
    """Each rank its shard, rank 0 the manifest and the rename; OSError on every rank where one had
    it, and nothing is left.
    """
    temporary, first = folder / f".tmp-{final.name}", shot.world.rank == 0
    _together(group, first, lambda: (durable.remove(temporary), durable.make_folder(temporary)))
    try:
        _together(group, shot.writes, lambda: _write_shard(shot, temporary))
        _together(group, first, lambda: _commit(shot, temporary, final, folder))
    except OSError:
        if first:
            if final.exists():  # renamed, and then its folder could not be forced to the disk
                durable.rename(final, temporary)
            durable.remove(temporary)
        raise


def _together(group, mine: bool, function):
    """`function()` on the ranks whose it is; all wait, and OSError on all where one had it."""
    failure = None
    try:
        if mine:
            function()
    except OSError as error:
        failure = error
    if dist.any_rank(failure is not None, group):
        raise failure or OSError("on another rank")


def _write_shard(shot: Snapshot, folder: Path):
    path = folder / f"rank-{shot.world.rank:05d}-of-{shot.world.size:05d}.safetensors"
    written = tensors.write_tensors(path, {name: part.local for name, part in shot.rows.items()})
    sidecar = written | {
        "rows": {name: [part.start, part.end] for name, part in shot.rows.items()},
        "shapes": {name: part.shape for name, part in shot.rows.items()},
    }
    durable.write_bytes(path.with_suffix(".json"), json.dumps(sidecar).encode())


def _commit(shot: Snapshot, temporary: Path, final: Path, folder: Path):
    """Merge the ranks' sidecars into the manifest, then make all of it visible at once."""
    files = {}
    for sidecar in sorted(temporary.glob("rank-*.json")):
        files[sidecar.with_suffix(".safetensors").name] = json.loads(durable.read_text(sidecar))
        durable.remove(sidecar)
    manifest = shot.manifest | dict(files=files)
    durable.write_json(temporary / "manifest.json", manifest | {"checksum": checksum(manifest)})
    durable.rename(temporary, final)
    durable.fsync(folder)


def checksum(manifest: dict) -> str:
    """SHA-256 of a manifest's content, its own checksum left out."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def prune(folder: Path, keep: int):
    """Delete all but the newest `keep` checkpoints, and what killed saves left behind, once the
    newest re-verifies.
    """
    steps = sorted(folder.glob("step-????????"))
    if steps:
        verify(steps[-1])
    for old in steps[:-keep]:
        durable.rename(
            old, doomed := old.with_name(f".tmp-{old.name}")
        )  # a half-deleted folder must not look like a checkpoint
        durable.remove(doomed)
    for left in folder.glob(".tmp-step-*"):
        durable.remove(left)


def set_aside(folder: Path, error: CheckpointError):
    """Rename a damaged checkpoint `.corrupt`, with a line on screen. Nothing that was saved is ever
    deleted for being damaged.
    """
    taken = len(list(folder.parent.glob(f"{folder.name}.corrupt*")))
    aside = folder.with_name(f"{folder.name}.corrupt{f'-{taken + 1}' if taken else ''}")
    durable.rename(folder, aside)
    print(f"DAMAGED CHECKPOINT: {error}\n  renamed to {aside.name}", flush=True)


# ------------------------------------------------------------------------------------------ loading


def read_manifest(folder: Path) -> dict:
    """The manifest of a checkpoint; CheckpointError names what is wrong with it."""
    try:
        manifest = parse_json(durable.read_text(folder / "manifest.json").encode())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is not a readable checkpoint ({error}): name a step-* folder with a manifest.json"
        ) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder}/manifest.json is not of format {FORMAT!r}: name a checkpoint that train.py wrote"
        )
    if manifest.get("checksum") != checksum(manifest):
        raise CheckpointError(f"{folder}/manifest.json is damaged: use another checkpoint")
    if manifest.get("version") != VERSION:
        raise FutureVersion(
            f"{folder} has version {manifest.get('version')}; this longhaul reads {VERSION}: update longhaul"
        )
    lacking = sorted(set(NEEDED) - manifest.keys())
    if lacking or not manifest["files"]:
        raise CheckpointError(
            f"{folder}/manifest.json lacks {lacking or 'files'}: use another checkpoint"
        )
    with _named(folder):
        contents.check_manifest(manifest)
    return manifest


@contextmanager
def _named(folder: Path):
    """What is wrong with the contents of a checkpoint is a CheckpointError that names it."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(
            f"{folder} is not a sound checkpoint ({error}): use another checkpoint"
        ) from None


def verify(folder: Path) -> dict:
    """Check every file's presence, size and hashes; returns the manifest, or raises CheckpointError
    naming file and block.
    """
    manifest = read_manifest(folder)
    for name, recorded in manifest["files"].items():
        if Path(name).name != name or (folder / name).is_symlink():
            raise CheckpointError(
                f"{folder}: the manifest names {name!r}, which is not a plain file of this folder"
            )
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}/{name} is missing: use another checkpoint")
        found = durable.describe(folder / name)
        if found["bytes"] != recorded["bytes"]:
            raise CheckpointError(
                f"{folder}/{name} has {found['bytes']} bytes, {recorded['bytes']} were written: use another checkpoint"
            )
        bad = [
            index
            for index, digest in enumerate(found["blocks"])
            if digest != recorded["blocks"][index]
        ]
        if bad:
            raise CheckpointError(
                f"{folder}/{name} is damaged in 64 MiB block(s) {bad}: use another checkpoint"
            )
        with _named(folder):
            contents.check_tensors(folder / name, recorded)
    return manifest


def latest(folder: Path) -> Path | None:
    """The newest checkpoint that verifies, None where there is none; damaged ones are renamed
    `.corrupt` with a line on screen.

    CheckpointError where all there are were damaged: starting over is the user's decision. Renames,
    so one rank calls it.
    """
    for candidate in sorted(folder.glob("step-????????"), reverse=True):
        try:
            verify(candidate)
            return candidate
        except FutureVersion:
            raise
        except CheckpointError as error:
            set_aside(candidate, error)
    if any(folder.glob("step-*.corrupt*")):
        raise CheckpointError(
            f"{folder}: no checkpoint is usable, all are damaged (*.corrupt): choose a new --output_dir to start over"
        )
    return None


def newest(folder: Path) -> Path:
    """`folder` itself if it is a checkpoint, else the newest step-* in it; CheckpointError where
    there is none.
    """
    refuse_pickle(folder)
    if (folder / "manifest.json").exists():
        return folder
    steps = sorted(folder.glob("step-????????"))
    if not steps:
        raise CheckpointError(
            f"{folder} is no checkpoint and holds none: name a run's folder or a step-* folder"
        )
    return steps[-1]


def load(state, folder: Path) -> dict:
    """Fill `state` (model, optimizer, step, tokens, data position) from a checkpoint of any world
    size; returns the manifest.
    """
    manifest = read_manifest(folder)
    state.step, state.tokens, state.data = manifest["step"], manifest["tokens"], manifest["data"]
    _create_optimizer_state(state, manifest)
    _read_into(named_rows(state.model, state.optimizer), folder, manifest)
    return manifest


def load_model(folder: Path, device="cpu", dtype: str | None = None) -> Decoder:
    """A Decoder of a checkpoint, verified, alone on `device`; `dtype` overrides its compute dtype."""
    manifest = verify(folder)
    with _named(folder), torch.device("meta"):
        model = Decoder(
            contents.model_config(manifest, **({"compute_dtype": dtype} if dtype else {}))
        )
        contents.check_model(
            manifest,
            {
                f"model.{name}": tuple(parameter.shape)
                for name, parameter in model.named_parameters()
            },
        )
    model.to_empty(device=device)
    model.tie_weights()
    _read_into(named_rows(model), folder, manifest)
    return model


def _create_optimizer_state(state, manifest: dict):
    """Empty state tensors for every parameter, of the names that the checkpoint holds; steps that
    were skipped do not count.
    """
    taken = torch.tensor(
        float(manifest["step"] - len(manifest.get("skipped", ()))), device=_step_device(state)
    )
    stored = {name for file in manifest["files"].values() for name in file["rows"]}
    for name, parameter in state.model.named_parameters():
        keys = {key.rsplit(".", 1)[1] for key in stored if key.startswith(f"optim.{name}.")}
        fresh = _fresh_state(state.optimizer, parameter) if keys else {}
        if keys != fresh.keys():
            raise OtherSettings(
                f"the checkpoint holds {', '.join(sorted(keys))} of {name}, and this optimizer keeps "
                f"{', '.join(sorted(fresh))}: give the settings of the run that wrote it"
            )
        if keys:
            state.optimizer.state[parameter] = fresh | {"step": taken.clone()}


def size_of(model: Decoder, optimizer) -> int:
    """Bytes of a checkpoint of a whole model, which may be on meta, but for headers and manifest."""
    return sum(
        p.nbytes + sum(value.nbytes for value in _fresh_state(optimizer, p).values())
        for p in model.parameters()
    )


def _fresh_state(optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    if isinstance(optimizer, optimizers.AdamW):
        return {key: value for key, value in optimizer.new_state(parameter).items() if value.ndim}
    return {key: torch.empty_like(parameter) for key in ("exp_avg", "exp_avg_sq")}


def _step_device(state) -> torch.device:
    return torch.device("cpu") if isinstance(state.optimizer, optimizers.AdamW) else state.device


@torch.no_grad()
def _read_into(rows: dict[str, Rows], folder: Path, manifest: dict):
    """Copy the rows that are held here from whichever files have them; every row must be found."""
    missing = {name: len(part.local) for name, part in rows.items()}
    for file, recorded in manifest["files"].items():
        with _named(folder), opened(folder / file) as source:
            for name in recorded["rows"].keys() & rows.keys():
                if rows[name].shape != tuple(recorded["shapes"][name]):
                    raise ValueError(
                        f"{name} has shape {recorded['shapes'][name]}, here it has {list(rows[name].shape)}"
                    )
                missing[name] -= _copy_rows(
                    rows[name], source.get_slice(name), recorded["rows"][name]
                )
    lacking = [name for name, count in missing.items() if count]
    if lacking:
        raise CheckpointError(
            f"{folder} lacks rows of {lacking[0]} and {len(lacking) - 1} more: use another checkpoint"
        )


def _copy_rows(target: Rows, source, recorded: list[int]) -> int:
    first, last = max(target.start, recorded[0]), min(target.end, recorded[1])
    if last <= first:
        return 0
    target.local[first - target.start : last - target.start].copy_(
        source[first - recorded[0] : last - recorded[0]]
    )
    return last - first
