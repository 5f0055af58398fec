"""Saving: a checkpoint appears whole or not at all, reads back before older ones go, and may be
written in the background.

A save builds `.tmp-step-*`: each rank writes its shards, rank 0 the manifest, all forced to the
disk; one rename then makes the folder visible. Nothing that was saved before is ever overwritten.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from base import durable, tensors
from base.durable import StorageError
from base.tensors import Later
from longhaul import dist, step
from longhaul.checkpoint.format import (
    FORMAT,
    MANIFEST,
    VERSION,
    CheckpointError,
    Shard,
    checksum,
    fresh_state,
    last_taken,
    shards_of,
)
from longhaul.checkpoint.load import set_aside, verified
from longhaul.config import TrainConfig
from longhaul.kinds import recorded
from longhaul.parallel import apply
from longhaul.staging import Staging
from longhaul.step import TrainState
from model import ModelConfig

# ---- what a save writes


@dataclass(frozen=True)
class Snapshot:
    """This rank's shards, and what the manifest says."""

    step: int
    shards: dict[str, Shard]
    manifest: dict
    world: dist.World
    writes: bool  # one rank of those that hold the same shards writes them

    @property
    def bytes(self) -> int:
        """What this rank writes, without headers."""
        return sum(shard.local.nbytes for shard in self.shards.values())


def snapshot(state: TrainState, extra: dict, copied: bool = False) -> Snapshot:
    """A Snapshot of `state`; `extra` joins the manifest. `copied`: the shards are copied to host
    memory, so that training may go on while they are written.
    """
    apply.reshard(state.model)
    shot = snapshot_of(state, list(state.model.named_parameters()), extra)
    if not copied:
        return shot

    copies = {}
    staging = Staging()
    for name, shard in shot.shards.items():
        host = staging.on_host(shard.local)
        copies[name] = dataclasses.replace(shard, local=host)
    return dataclasses.replace(shot, shards=copies)


def snapshot_of(
    state: TrainState, parameters: list[tuple[str, torch.Tensor]], extra: dict
) -> Snapshot:
    """A Snapshot of `state` with these parameters, which are sharded if there is a mesh."""
    assert state.mesh is None or all(hasattr(p, "device_mesh") for _, p in parameters), (
        "a parameter is not sharded"
    )
    replicated = state.mesh is not None and state.mesh.ndim > 1
    writes = not replicated or state.mesh.get_local_rank("replicate") == 0

    shards = {}
    if writes:
        held = shards_of(parameters, state.optimizer)
        shards = {name: shard for name, shard in held.items() if len(shard.local)}

    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": state.step,
        "tokens": state.tokens,
        "data": dict(state.data),
        "world_size": state.world.size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "config": dataclasses.asdict(state.cfg),
        "model_config": recorded(state.model.config),
        **extra,
    }
    return Snapshot(state.step, shards, manifest, state.world, writes)


def size_of(cfg: TrainConfig, model_config: ModelConfig) -> int:
    """Bytes of a checkpoint of these settings without headers and manifest."""
    alone = dataclasses.replace(cfg, context_parallel_size=1, compile=False, dp_replicate=1)
    state = step.build(alone, model_config, "meta")
    total = 0
    for parameter in state.model.parameters():
        states = fresh_state(state.optimizer, parameter).values()
        total += parameter.nbytes + sum(value.nbytes for value in states)
    return total


# ---- writing


def save(state: TrainState, folder: Path, extra: dict) -> Path:
    """Write step-NNNNNNNN of `state` into `folder` by all ranks; returns its path."""
    return write(snapshot(state, extra), folder)


def save_weights(
    state: TrainState, weights: Mapping[str, Later], folder: Path, extra: dict
) -> Path:
    """The same by one process, with these weights instead of the state's: one at a time is in
    memory, and the model may be on meta.
    """
    shards = {f"model.{name}": Shard(weight, 0, weight.shape) for name, weight in weights.items()}
    shot = dataclasses.replace(snapshot(state, extra), shards=shards)
    return write(shot, folder)


def write(shot: Snapshot, folder: Path, group: ProcessGroup | None = None) -> Path:
    """Write a Snapshot by all ranks, which synchronise in `group`. If the disk is full or fails,
    the write is tried once more; then StorageError.

    Whatever happens, what `folder` held before is untouched.
    """
    final = folder / f"step-{shot.step:08d}"
    if final.exists():
        raise CheckpointError(
            f"{final} already exists, and a checkpoint is never overwritten: move it away"
        )
    for _ in range(2):
        try:
            _write_files(shot, folder, final, group)
            return final
        except OSError as error:  # on all ranks
            failure = error
    raise StorageError(
        f"{final} cannot be written ({failure}; tried twice): this rank's part has {shot.bytes:,} "
        f"bytes and {durable.free_bytes(folder):,} are free; older checkpoints are intact: free "
        "space, then run the same command again"
    )


def _write_files(shot: Snapshot, folder: Path, final: Path, group: ProcessGroup | None):
    """Each rank writes its shards, then rank 0 writes the manifest and renames. If one rank has an
    OSError, so have all, and nothing is left behind.
    """
    temporary = folder / f".tmp-{final.name}"
    first = shot.world.rank == 0

    def clear():
        durable.remove(temporary)
        durable.make_folder(temporary)

    _on_some_ranks(first, clear, group)
    try:
        _on_some_ranks(shot.writes, lambda: _write_shards(shot, temporary), group)
        _on_some_ranks(first, lambda: _commit(shot, temporary, final, folder), group)
    except OSError:
        if first:
            if final.exists():  # it was renamed, and then its folder could not be forced to disk
                durable.rename(final, temporary)
            durable.remove(temporary)
        raise


def _on_some_ranks(mine: bool, function: Callable[[], None], group: ProcessGroup | None):
    """Call `function()` on the ranks where `mine` is true; all ranks wait, and all raise OSError if
    one did.
    """
    failure = None
    try:
        if mine:
            function()
    except OSError as error:
        failure = error
    if dist.any_rank(failure is not None, group):
        raise failure or OSError("on another rank")


def _write_shards(shot: Snapshot, folder: Path):
    """This rank's safetensors file, and next to it what the manifest will say of it."""
    name = f"rank-{shot.world.rank:05d}-of-{shot.world.size:05d}"
    parts = {tensor: shard.local for tensor, shard in shot.shards.items()}
    entry = tensors.write_tensors(folder / f"{name}.safetensors", parts)
    entry["rows"] = {tensor: [shard.start, shard.end] for tensor, shard in shot.shards.items()}
    entry["shapes"] = {tensor: shard.shape for tensor, shard in shot.shards.items()}
    durable.write_bytes(folder / f"{name}.json", json.dumps(entry).encode())


def _commit(shot: Snapshot, temporary: Path, final: Path, folder: Path):
    """Merge the ranks' entries into the manifest, then make all of it visible at once."""
    files = {}
    for entry in sorted(temporary.glob("rank-*.json")):
        files[f"{entry.stem}.safetensors"] = json.loads(durable.read_text(entry))
        durable.remove(entry)
    manifest = shot.manifest | {"files": files}
    manifest["checksum"] = checksum(manifest)
    durable.write_json(temporary / MANIFEST, manifest)
    durable.rename(temporary, final)
    durable.fsync(folder)


def prune(folder: Path, keep: int, say: Callable[[str], None] = print):
    """Once the newest checkpoint re-verifies, delete all but the newest `keep` and the newest good
    one, and what killed saves left behind.

    What cannot be deleted stays, with a warning: the next save tries again.
    """
    steps = sorted(folder.glob("step-????????"))
    good = []
    if steps:
        newest = verified(steps[-1])
        taken = last_taken(newest.step, newest.skipped)
        good = [path for path in steps if int(path.name[5:]) < taken]
    try:
        _delete_old(folder, [path for path in steps[:-keep] if path not in good[-1:]])
    except (OSError, StorageError) as error:
        say(f"warning: an old checkpoint could not be deleted ({error}): delete it by hand")


def _delete_old(folder: Path, steps: list[Path]):
    for old in steps:
        # renamed first, because a half-deleted folder must not look like a checkpoint
        doomed = old.with_name(f".tmp-{old.name}")
        durable.rename(old, doomed)
        durable.remove(doomed)
    for left in folder.glob(".tmp-step-*"):
        durable.remove(left)


# ---- the saves of a run


class Saver:
    """The checkpoints of a run: one save at a time, `keep` of them kept.

    In the background (`--async_save`) the state is copied to host memory and a thread writes it
    through the same rename while training goes on; `wait` ends that save and raises what went
    wrong. The ranks' threads have their own process group.
    """

    def __init__(
        self,
        folder: Path,
        world: dist.World,
        keep: int,
        background: bool,
        saved: int,
        say: Callable[[str], None],
    ):
        self.folder = folder
        self.world = world
        self.keep = keep
        self.say = say
        self.saved = saved  # the step of the last save
        self.seconds: float | None = None  # how long the first save took
        self.group = dist.host_group(world)
        self.pool = ThreadPoolExecutor(1, "save") if background else None
        self.under_way: Future | None = None

    def save(self, state: TrainState, extra: dict):
        """Save `state`; in the background, return as soon as it is copied."""
        self.wait()
        start = time.monotonic()
        self.saved = state.step
        shot = snapshot(state, extra, copied=self.pool is not None)
        if self.pool is None:
            self._write(shot, start)
        else:
            self.under_way = self.pool.submit(self._write, shot, start)

    def save_now(self, shot: Snapshot):
        """Write a Snapshot before returning, unless its step is saved already."""
        self.wait()
        if self.saved != shot.step:
            self.saved = shot.step
            self._write(shot, time.monotonic())

    def wait(self):
        """Return once nothing is being written; raises what went wrong."""
        under_way = self.under_way
        self.under_way = None
        if under_way is not None:
            under_way.result()

    def end(self):
        """Return once nothing is being written. If a run ends for another reason, a save that
        failed meanwhile is reported, not raised.
        """
        if self.under_way is not None:
            error = self.under_way.exception()
            if error is not None:
                self.say(f"warning: the save that was under way failed: {error}")
        self.under_way = None

    def _write(self, shot: Snapshot, start: float):
        for _ in range(2):
            path = write(shot, self.folder, self.group)
            if self._reads_back(path):
                break
        else:
            raise StorageError(
                f"{path} was written twice and did not read back correctly either time; it was "
                "renamed .corrupt: check the disk"
            )
        if self.seconds is None:
            self.seconds = time.monotonic() - start
        self.say(f"saved {path}")

    def _reads_back(self, path: Path) -> bool:
        """Whether the new checkpoint verifies, the same on all ranks. If so, older ones are pruned,
        else it is set aside.
        """
        damaged = False
        if self.world.rank == 0:
            try:
                prune(self.folder, self.keep, self.say)
            except CheckpointError as error:
                damaged = True
                set_aside(path, error)
        return not dist.any_rank(damaged, self.group)
