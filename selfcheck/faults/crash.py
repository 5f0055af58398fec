"""Crash states of a save: kill at a call, or replay a recorded write log up to any call."""

import contextlib
import io
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from base import durable
from longhaul import dist, step
from longhaul.checkpoint import load, save
from longhaul.checkpoint.format import CheckpointError
from longhaul.config import TrainConfig
from selfcheck.faults.rows import Failed, require

CALLS = (
    "write",
    "fsync",
    "rename",
    "make_folder",
    "remove",
)  # of base.durable: all that changes the disk in a save


def watch(before: Callable, *, arguments: bool = False):
    """From here on `before(index, name)`, or with `arguments` `before(index, name, *args)`,
    precedes each call that changes the disk.
    """
    count = iter(range(10**9))

    def wrapped(name, original):
        def call(*args):
            before(next(count), name, *(args if arguments else ()))
            return original(*args)

        return call

    for name in CALLS:
        setattr(durable, name, wrapped(name, getattr(durable, name)))


def kill_at(wanted: int, index: int, name: str):
    """End this process as kill -9 does at call number `wanted`."""
    if index == wanted:
        os.kill(os.getpid(), signal.SIGKILL)


# ------------------------------------------------------------------------------------------ pruning


def _at_prune(fault: Callable[[Path], None]):
    """`fault(old)` in place of the first deletion of an old checkpoint."""
    original = durable.remove

    def remove(path: Path):
        if path.name.startswith(".tmp-step-") and (path / "manifest.json").exists():
            fault(path)
        original(path)

    durable.remove = remove


def half_deleted():
    """Killed when the shard of an old checkpoint is gone and its manifest is not."""

    def fault(path: Path):
        next(path.glob("rank-*")).unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    _at_prune(fault)


def before_deleting():
    """Killed after the rename that takes an old checkpoint out of sight."""
    _at_prune(lambda path: os.kill(os.getpid(), signal.SIGKILL))


def before_pruning():
    """Killed before that rename."""
    original = durable.rename

    def rename(old: Path, new: Path):
        if old.name.startswith("step-"):
            os.kill(os.getpid(), signal.SIGKILL)
        original(old, new)

    durable.rename = rename


# --------------------------------------------------------------------------------------- power loss


@dataclass
class Node:
    """A file or folder with what a program sees of it now, and what is on the disk for certain."""

    content: bytes | None = None  # None for a folder
    entries: dict[str, "Node"] = field(default_factory=dict)
    synced: bytes = b""
    synced_entries: dict[str, "Node"] = field(default_factory=dict)

    def sync(self):
        self.synced, self.synced_entries = self.content or b"", dict(self.entries)


class Disk:
    """A file system in memory on which a write log is replayed."""

    def __init__(self, root: Path):
        self.root, self.top = root, Node()

    def find(self, path: Path) -> Node:
        node = self.top
        for part in path.relative_to(self.root).parts:
            node = node.entries[part]
        return node

    def apply(self, name: str, path: Path, value):
        parent = None if path == self.root else self.find(path.parent)
        if name == "write":
            node = parent.entries.setdefault(path.name, Node(b""))
            node.content += value
        elif name == "make_folder" and parent is not None:
            parent.entries.setdefault(path.name, Node())
        elif name == "fsync":
            self.find(path).sync()
        elif name == "rename":
            self.find(value.parent).entries[value.name] = parent.entries.pop(path.name)
        elif name == "remove":
            parent.entries.pop(path.name, None)

    def files(self, synced_names: bool, synced_bytes: bool) -> dict[Path, bytes | None]:
        """What a machine that loses power now finds: `synced_names`: entries of folders as they
        were last forced to the disk, else all that were made; `synced_bytes`: the same of what
        files hold. Folders are None.
        """
        found: dict[Path, bytes | None] = {}

        def visit(node: Node, path: Path):
            for name, child in (node.synced_entries if synced_names else node.entries).items():
                is_folder = child.content is None
                content = child.synced if synced_bytes else child.content
                found[path / name] = None if is_folder else content
                visit(child, path / name)

        visit(self.top, Path())
        return found


def record(folder: Path, saves: int) -> tuple[list[tuple], dict[int, bytes]]:
    """(the log of `saves` saves with pruning to 2: (call, path, value) and ("saved", step); the
    bytes of each step's shard).
    """
    cfg = TrainConfig(
        model_size="tiny",
        vocab_size=32,
        context_length=8,
        dtype="fp32",
        model_overrides=(
            "num_layers=1",
            "hidden_size=16",
            "num_heads=1",
            "num_kv_heads=1",
            "head_dim=16",
            "ffn_size=16",
        ),
    )
    state = step.build(cfg, cfg.model(), "cpu", dist.World())
    log = []
    shards = {}
    watch(lambda index, name, *args: log.append(_entry(name, *args)), arguments=True)
    tokens = step.torch.arange(8)[None]
    for _ in range(saves):
        step.train_step(state, [dict(tokens_BT=tokens, labels_BT=tokens)])
        path = save.save(state, folder, {})
        log.append(("saved", state.step, None))
        shards[state.step] = next(path.glob("rank-*")).read_bytes()
        save.prune(folder, 2)
    return log, shards


def _entry(name: str, first, second=None) -> tuple:
    if name == "write":
        return name, Path(first.name), bytes(second)
    return name, first, second


MODELS = {
    "all writes of the prefix": (False, False),
    "names but no unsynced bytes": (False, True),
    "nothing unsynced": (True, True),
    "bytes but no unsynced names": (True, False),
}


def power_loss(trials: int, folder: Path) -> str:
    """Row 3."""
    recorded, again = folder / "recorded", folder / "again"
    recorded.mkdir()
    log, shards = record(recorded, 3)
    states = replay(recorded, log, shards, again)
    try:
        replay(recorded, [entry for entry in log if entry[0] != "fsync"], shards, again)
    except Failed:
        return (
            f"{len(log)} prefixes x {len(MODELS)} kinds of loss, {states} different disks: no "
            "durable checkpoint lost; without fsync, one is"
        )
    raise Failed("the same log without its fsyncs loses nothing either: the check sees nothing")


def replay(root: Path, log: list[tuple], shards: dict[int, bytes], again: Path) -> int:
    """Check the crash states of every prefix of a log; the number of different ones."""
    disk = Disk(root)
    durable = 0
    seen = set()
    for length, (name, path, value) in enumerate(log, 1):
        if name == "saved":
            durable = path
        else:
            disk.apply(name, path, value)
        for words, model in MODELS.items():
            files = disk.files(*model)
            key = hash(
                (
                    durable,
                    *sorted(
                        (str(name), content)
                        for name, content in files.items()
                        if content is not None
                    ),
                )
            )
            if key not in seen:
                seen.add(key)
                _check(files, again, durable, shards, f"{words}, {length} calls in")
    return len(seen)


def _check(
    files: dict[Path, bytes | None],
    folder: Path,
    durable: int,
    shards: dict[int, bytes],
    where: str,
):
    """What is left on the disk must resume from a checkpoint that is at least as new as the last
    durable one, and is what was saved.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path, content in files.items():
        (folder / path).mkdir() if content is None else (folder / path).write_bytes(content)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            found = load.latest(folder)
        except CheckpointError as error:
            raise Failed(f"{where}: {error}") from None
    number = found.step if found else 0
    require(number >= durable, f"{where}: step {durable} was durable, {number} is what is left")
    require("DAMAGED" not in said.getvalue(), f"{where}: {said.getvalue()}")
    require(
        not found or next(found.folder.glob("rank-*")).read_bytes() == shards[number],
        f"{where}: step {number} has other bytes",
    )
