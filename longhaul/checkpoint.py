"""Checkpoints: atomic, hashed, pickle-free, and readable by any number of processes.

    step-00000100/                      appears whole, by a rename, or not at all
        rank-00000-of-00002.safetensors  the rows of each tensor that this rank owns
        manifest.json                    written last: step, data position, configuration, and per file size, SHA-256 and rows

Parameters and optimizer states are sharded on their first dimension, so a shard is a range of rows and resharding is slicing.
A save builds `.tmp-step-*`, fsyncs files and folder, and renames. A folder that fails its check is renamed `.corrupt`, never
deleted. Imports longhaul.dist, longhaul.parallel and model.py of ours.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longhaul import dist, parallel
from model import Decoder, ModelConfig, NSAConfig

FORMAT, VERSION = "longhaul-checkpoint", 1
BLOCK = 64 * 2**20  # bytes hashed at a time, each with a digest of its own: damage is located to 64 MiB


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another run."""


# ------------------------------------------------------------------------------------------------- tensors and rows


@dataclass(frozen=True)
class Rows:
    """The rows [start, end) of a tensor that this process holds."""

    local: torch.Tensor
    start: int
    shape: tuple[int, ...]  # of the whole tensor

    @property
    def end(self) -> int:
        return self.start + len(self.local)


def rows_of(tensor: torch.Tensor) -> Rows:
    """A plain tensor whole, or the rows of a DTensor that is sharded on dimension 0 as torch.chunk cuts it."""
    if not hasattr(tensor, "device_mesh"):
        return Rows(tensor.detach(), 0, tuple(tensor.shape))
    sharded = [dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    assert len(sharded) == 1 and tensor.placements[sharded[0]].dim == 0, tensor.placements
    ranks, rank = tensor.device_mesh.size(sharded[0]), tensor.device_mesh.get_local_rank(sharded[0])
    size = -(-tensor.shape[0] // ranks)
    local = tensor.to_local().detach()
    start = min(rank * size, tensor.shape[0])
    assert len(local) == min(size, tensor.shape[0] - start), (tensor.shape, rank, local.shape)
    return Rows(local, start, tuple(tensor.shape))


def named_tensors(model: Decoder, optimizer=None) -> dict[str, torch.Tensor]:
    """`model.<parameter>` and `optim.<parameter>.<state>`, a tied weight once. Step counters are in the manifest."""
    tensors = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state[parameter].items():
                if value.ndim:
                    tensors[f"optim.{name}.{key}"] = value
    return tensors


# ------------------------------------------------------------------------------------------------------------ saving


def save(state, folder: Path, extra: dict) -> Path:
    """Write step-NNNNNNNN of `state` (TrainState) into `folder` by all ranks; returns its path. `extra` joins the manifest."""
    final, temporary = folder / f"step-{state.step:08d}", folder / f".tmp-step-{state.step:08d}"
    if final.exists():
        raise CheckpointError(f"{final} exists already: a checkpoint is never overwritten; move it away")
    if state.world.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    parallel.reshard(state.model)
    dist.barrier()
    if writes(state):
        _write_shard(state, temporary)
    dist.barrier()
    if state.world.rank == 0:
        _write_manifest(state, temporary, extra)
        fsync(temporary)
        os.replace(temporary, final)
        fsync(folder)
    dist.barrier()
    return final


def writes(state) -> bool:
    """One rank of each set of replicas writes."""
    return state.mesh is None or state.mesh.ndim == 1 or state.mesh.get_local_rank("replicate") == 0


def _write_shard(state, folder: Path):
    tensors = named_tensors(state.model, state.optimizer)
    assert state.mesh is None or all(hasattr(tensor, "device_mesh") for tensor in tensors.values()), "a parameter is not sharded"
    rows = {name: rows_of(tensor) for name, tensor in tensors.items()}
    rows = {name: part for name, part in rows.items() if len(part.local)}
    path = folder / f"rank-{state.world.rank:05d}-of-{state.world.size:05d}.safetensors"
    save_file({name: part.local.contiguous().cpu() for name, part in rows.items()}, path)
    fsync(path)
    sidecar = describe(path) | {"rows": {name: [part.start, part.end] for name, part in rows.items()},
                                "shapes": {name: part.shape for name, part in rows.items()}}
    path.with_suffix(".json").write_text(json.dumps(sidecar))


def _write_manifest(state, folder: Path, extra: dict):
    """Merge the ranks' sidecars; what a resume needs is all here."""
    files = {}
    for sidecar in sorted(folder.glob("rank-*.json")):
        files[sidecar.with_suffix(".safetensors").name] = json.loads(sidecar.read_text())
        sidecar.unlink()
    manifest = dict(
        format=FORMAT, version=VERSION, step=state.step, tokens=state.tokens, data=state.data, world_size=state.world.size,
        threads=torch.get_num_threads(), torch=torch.__version__, config=dataclasses.asdict(state.cfg),
        model_config=dataclasses.asdict(state.model.config), **extra, files=files)
    write_json(folder / "manifest.json", manifest | {"checksum": checksum(manifest)})


def checksum(manifest: dict) -> str:
    """SHA-256 of a manifest's content, its own checksum left out."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, content: dict):
    """Write durably and by a rename: a reader finds the old file or the new one, whole."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)


def describe(path: Path) -> dict:
    """Size in bytes, SHA-256 of the whole file and of each 64 MiB block."""
    whole, blocks = hashlib.sha256(), []
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            whole.update(block)
            blocks.append(hashlib.sha256(block).hexdigest())
    return {"bytes": path.stat().st_size, "sha256": whole.hexdigest(), "blocks": blocks}


def fsync(path: Path):
    """Force a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(folder: Path, keep: int):
    """Delete all but the newest `keep` checkpoints, and what killed saves left behind, once the newest re-verifies."""
    steps = sorted(folder.glob("step-????????"))
    if steps:
        verify(steps[-1])
    for old in steps[:-keep]:
        doomed = old.rename(old.with_name(f".tmp-{old.name}"))  # a half-deleted folder must not look like a checkpoint
        shutil.rmtree(doomed)
    for left in folder.glob(".tmp-step-*"):
        shutil.rmtree(left)


# ----------------------------------------------------------------------------------------------------------- loading


def read_manifest(folder: Path) -> dict:
    """The manifest of a checkpoint; CheckpointError names what is wrong with it."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is not a readable checkpoint ({error}): name a step-* folder with a manifest.json") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder}/manifest.json is not of format {FORMAT!r}: name a checkpoint that train.py wrote")
    if manifest.get("version") != VERSION:
        raise CheckpointError(f"{folder} has version {manifest.get('version')}; this longhaul reads {VERSION}: update longhaul")
    needed = {"step", "tokens", "data", "world_size", "config", "model_config", "files"}
    if needed - manifest.keys():
        raise CheckpointError(f"{folder}/manifest.json lacks {sorted(needed - manifest.keys())}: use another checkpoint")
    if manifest.get("checksum") != checksum(manifest) or not manifest["files"]:
        raise CheckpointError(f"{folder}/manifest.json is damaged: use another checkpoint")
    return manifest


def verify(folder: Path) -> dict:
    """Check every file's presence, size and hashes; returns the manifest, or raises CheckpointError naming file and block."""
    manifest = read_manifest(folder)
    for name, recorded in manifest["files"].items():
        if Path(name).name != name or (folder / name).is_symlink():
            raise CheckpointError(f"{folder}: the manifest names {name!r}, which is not a plain file of this folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}/{name} is missing: use another checkpoint")
        found = describe(folder / name)
        if found["bytes"] != recorded["bytes"]:
            raise CheckpointError(f"{folder}/{name} has {found['bytes']} bytes, {recorded['bytes']} were written: use another checkpoint")
        bad = [index for index, digest in enumerate(found["blocks"]) if digest != recorded["blocks"][index]]
        if bad or found["sha256"] != recorded["sha256"]:
            raise CheckpointError(f"{folder}/{name} is damaged in 64 MiB block(s) {bad}: use another checkpoint")
    return manifest


def latest(folder: Path) -> Path | None:
    """The newest checkpoint that verifies, None where there is none; damaged ones are renamed `.corrupt` with a line on screen.

    CheckpointError where all there are were damaged: starting over is the user's decision. Renames, so one rank calls it.
    """
    for candidate in sorted(folder.glob("step-????????"), reverse=True):
        try:
            verify(candidate)
            return candidate
        except CheckpointError as error:
            taken = len(list(folder.glob(f"{candidate.name}.corrupt*")))
            aside = candidate.rename(candidate.with_name(f"{candidate.name}.corrupt{f'-{taken + 1}' if taken else ''}"))
            print(f"DAMAGED CHECKPOINT: {error}\n  renamed to {aside.name}; trying the one before", flush=True)
    if any(folder.glob("step-*.corrupt*")):
        raise CheckpointError(f"{folder}: no checkpoint is usable, all are damaged (*.corrupt): choose a new --output_dir to start over")
    return None


def newest(folder: Path) -> Path:
    """`folder` itself if it is a checkpoint, else the newest step-* in it; CheckpointError where there is none."""
    if (folder / "manifest.json").exists():
        return folder
    steps = sorted(folder.glob("step-????????"))
    if not steps:
        raise CheckpointError(f"{folder} is no checkpoint and holds none: name a run's folder or a step-* folder")
    return steps[-1]


def load(state, folder: Path) -> dict:
    """Fill `state` (model, optimizer, step, tokens, data position) from a checkpoint of any world size; returns the manifest."""
    manifest = read_manifest(folder)
    state.step, state.tokens, state.data = manifest["step"], manifest["tokens"], manifest["data"]
    _create_optimizer_state(state, manifest)
    _read_into(named_tensors(state.model, state.optimizer), folder, manifest)
    return manifest


def load_model(folder: Path, device="cpu", dtype: str | None = None) -> Decoder:
    """A Decoder of a checkpoint, verified, alone on `device`; `dtype` overrides its compute dtype."""
    manifest = verify(folder)
    fields = manifest["model_config"]
    config = ModelConfig(**fields | dict(nsa=NSAConfig(**fields.get("nsa", {}))) | ({"compute_dtype": dtype} if dtype else {}))
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device=device)
    model.tie_weights()
    _read_into(named_tensors(model), folder, manifest)
    return model


def _create_optimizer_state(state, manifest: dict):
    """Empty state tensors for every parameter, of the names that the checkpoint holds; the step counter is the manifest's."""
    stored = {name for file in manifest["files"].values() for name in file["rows"]}
    for name, parameter in state.model.named_parameters():
        keys = [key.rsplit(".", 1)[1] for key in stored if key.startswith(f"optim.{name}.")]
        state.optimizer.state[parameter] = {key: torch.empty_like(parameter) for key in sorted(keys)}
        if keys:
            state.optimizer.state[parameter]["step"] = torch.tensor(float(manifest["step"]), device=state.device)


@torch.no_grad()
def _read_into(tensors: dict[str, torch.Tensor], folder: Path, manifest: dict):
    """Copy the rows that each tensor holds here from whichever files have them; every row must be found."""
    missing = {name: len(rows_of(tensor).local) for name, tensor in tensors.items()}
    for file, recorded in manifest["files"].items():
        try:
            with safe_open(folder / file, framework="pt") as source:
                for name in recorded["rows"].keys() & tensors.keys():
                    missing[name] -= _copy_rows(rows_of(tensors[name]), source.get_slice(name), recorded["rows"][name])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}/{file} cannot be read ({error}): use another checkpoint") from None
    lacking = [name for name, rows in missing.items() if rows]
    if lacking:
        raise CheckpointError(f"{folder} lacks rows of {lacking[0]} and {len(lacking) - 1} more: use another checkpoint")


def _copy_rows(target: Rows, source, recorded: list[int]) -> int:
    first, last = max(target.start, recorded[0]), min(target.end, recorded[1])
    if last <= first:
        return 0
    target.local[first - target.start : last - target.start].copy_(source[first - recorded[0] : last - recorded[0]])
    return last - first
