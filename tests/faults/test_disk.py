"""Disks that lose power, are full or fail. tests/test_checkpoint.py has damaged files."""

import errno
import io
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch

from base import durable
from data.writer import write_dataset
from longhaul import dist, qwen3, step
from longhaul.checkpoint import load, save
from longhaul.checkpoint.format import CheckpointError
from longhaul.checkpoint.save import Saver
from longhaul.config import TrainConfig
from longhaul.exits import StorageError
from longhaul.run import log
from model import Decoder
from tests import kit
from tests.faults.disk import Disk, forced, watch

SHAPE = "num_layers=1 hidden_size=16 num_heads=1 num_kv_heads=1 head_dim=16 ffn_size=16"
CFG = TrainConfig(
    model_size="tiny",
    vocab_size=32,
    context_length=8,
    dtype="fp32",
    model_overrides=tuple(SHAPE.split()),
)


@pytest.fixture
def state() -> step.TrainState:
    return step.build(CFG, CFG.model(), "cpu")


def train(state: step.TrainState):
    tokens_BT = torch.arange(8)[None]
    step.train_step(state, [dict(tokens_BT=tokens_BT, labels_BT=tokens_BT)])


# ---- power loss

# What a disk keeps of what was not forced to it: (only the forced names, only the forced bytes).
LOSSES = [(False, False), (False, True), (True, True), (True, False)]


@pytest.fixture
def recorded(state, tmp_path, monkeypatch):
    """(the calls of three saves and of their prunings, with ("saved", step) after each save; the
    bytes of each step).
    """
    calls = []
    shards = {0: b""}

    def note(name: str, first, second=None):
        if name == "write":
            calls.append((name, Path(first.name), bytes(second)))
        else:
            calls.append((name, first, second))

    watch(lambda name, function: monkeypatch.setattr(durable, name, function), note)
    for _ in range(3):
        train(state)
        path = save.save(state, tmp_path, {})
        calls.append(("saved", state.step, None))
        shards[state.step] = next(path.glob("rank-*")).read_bytes()
        save.prune(tmp_path, 2)
    monkeypatch.undo()
    return calls, shards


def test_a_checkpoint_survives_the_loss_of_power_at_any_moment(recorded, tmp_path):
    calls, shards = recorded
    assert list(lost(tmp_path, calls, shards)) == []
    without_fsync = [call for call in calls if call[0] != "fsync"]
    assert next(lost(tmp_path, without_fsync, shards), None), "the replay sees nothing"


def lost(root: Path, calls: list[tuple], shards: dict[int, bytes]) -> Iterator[tuple]:
    """(calls that were made, what the disk kept, what is wrong) of each disk that has lost a
    checkpoint.
    """
    disk = Disk(root)
    saved = 0
    seen = []
    for length, (name, path, value) in enumerate(calls, 1):
        if name == "saved":
            saved = path
        else:
            disk.apply(name, path, value)
        for kept in LOSSES:
            files = disk.files(*kept)
            if (saved, files) in seen:
                continue
            seen.append((saved, files))
            wrong = fault(files, root / "again", saved, shards)
            if wrong:
                yield length, kept, wrong


def fault(files: dict, folder: Path, saved: int, shards: dict[int, bytes]) -> str:
    """What is wrong with the checkpoint that a run with these files goes on from, or nothing: it
    must be as new as the last one that was saved, and its bytes must be those that were written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path, content in files.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
    said = io.StringIO()
    with redirect_stdout(said):
        try:
            found = load.latest(folder)
        except CheckpointError as error:
            return str(error)
    if "DAMAGED" in said.getvalue():
        return said.getvalue()
    number = found.step if found else 0
    if number < saved:
        return f"step {saved} was saved, and {number} is found"
    if found and next(found.folder.glob("rank-*")).read_bytes() != shards[number]:
        return f"step {number} has other bytes"
    return ""


# ---- folders that appear whole or not at all


def dataset(folder: Path):
    documents = [np.arange(1, length) for length in (20, 30, 40)]
    write_dataset(documents, folder, vocab_size=64, eod_id=0, shard_tokens=50)


def export(folder: Path):
    files = {"LICENSE": b"free"}
    qwen3.to_hf(Decoder(CFG.model()), folder, shard_bytes=4000, eod_id=0, files=files)


FOLDERS = dict(dataset=dataset, export=export)


@pytest.mark.parametrize("write", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_gets_its_name_when_all_of_it_is_on_the_disk(write, tmp_path, monkeypatch):
    is_forced = forced(lambda name, function: monkeypatch.setattr(durable, name, function))
    rename = durable.rename
    folder = tmp_path / "folder"
    written = []

    def checked(old: Path, new: Path):
        if new == folder:
            written.extend([old, *old.rglob("*")])
            assert [path.name for path in written if not is_forced(path)] == []
        rename(old, new)

    monkeypatch.setattr(durable, "rename", checked)
    write(folder)
    assert len(written) > 5
    assert is_forced(tmp_path)


def test_a_file_that_is_replaced_is_on_the_disk_with_its_name(tmp_path, monkeypatch):
    is_forced = forced(lambda name, function: monkeypatch.setattr(durable, name, function))
    durable.write_json(tmp_path / "file", {})
    assert is_forced(tmp_path / "file")
    assert is_forced(tmp_path)


@pytest.mark.parametrize("write", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_whose_writing_is_interrupted_is_whole_or_not_there(write, tmp_path, monkeypatch):
    write(tmp_path / "whole")
    whole = kit.contents(tmp_path / "whole")
    left = []

    def interrupt(*call):
        if not left:
            raise KeyboardInterrupt
        left.pop()

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # it takes long
    watch(lambda name, function: monkeypatch.setattr(durable, name, function), interrupt)
    for calls in itertools.count():
        left[:] = range(calls)
        try:
            write(tmp_path / "folder")
        except KeyboardInterrupt:
            if {path.name for path in tmp_path.iterdir()} == {"whole"}:
                continue
        break
    assert kit.contents(tmp_path / "folder") == whole
    assert calls > 20


# ---- no space


def refuse(monkeypatch, name: str, times: int, only: Path | None = None):
    """No space at the first calls of a function, or at those for one path."""
    original = getattr(durable, name)
    refused = []

    def full(*args):
        if len(refused) < times and only in (None, args[0]):
            refused.append(args)
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    monkeypatch.setattr(durable, name, full)


# after the rename, the folder of all checkpoints is forced to the disk
CALLS = ["make_folder", "write", "fsync", "rename", "fsync of all"]


@pytest.mark.parametrize("call", CALLS)
def test_a_save_without_space_is_tried_again_and_costs_no_checkpoint(
    call, state, tmp_path, monkeypatch
):
    name = call.split()[0]
    only = tmp_path if "all" in call else None
    saver = Saver(tmp_path, dist.World(), 2, False, 0, lambda line: None)
    for times in (1, 1000):
        train(state)
        saver.save(state, {})
        train(state)
        with monkeypatch.context() as patch:
            refuse(patch, name, times, only)
            if times == 1:
                saver.save(state, {})
                continue
            with pytest.raises(StorageError):
                saver.save(state, {})
        assert load.latest(tmp_path).step == state.step - 1
        assert not list(tmp_path.glob(".tmp-step-*/*"))
        saver.save(state, {})
        load.verified(tmp_path / f"step-{state.step:08d}")


def test_a_run_for_which_there_is_too_little_space_writes_nothing(data, tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "free_bytes", lambda folder: 400_000)
    said = kit.run(kit.arguments(data, tmp_path / "run", "--max_steps", "2"), code=2)
    assert "3 more checkpoint(s) of this model need" in said
    assert not (tmp_path / "run").exists()


def test_a_disk_that_refuses_the_log_is_warned_of_once(data, tmp_path, monkeypatch):
    append = log._append_line
    monkeypatch.setattr(log, "_append_line", lambda _, record: append(Path("/dev/full"), record))
    said = kit.run(kit.arguments(data, tmp_path / "run", "--max_steps", "8"))
    assert said.count("warning: the log cannot be written") == 1
    assert load.latest(tmp_path / "run").step == 8


# ---- reads that fail


@pytest.mark.parametrize("times, found", [(3, 2), (1000, None)])
def test_a_checkpoint_that_cannot_be_read_is_tried_again_and_not_set_aside(
    times, found, state, tmp_path, monkeypatch
):
    for state.step in (1, 2):
        save.save(state, tmp_path, {})
    failed = []
    read = durable.read

    def failing(file, size):
        if len(failed) < times:
            failed.append(size)
            raise OSError(errno.EIO, "Input/output error")
        return read(file, size)

    monkeypatch.setattr(durable, "read", failing)
    if found:
        assert load.latest(tmp_path).step == found
    else:
        with pytest.raises(StorageError):
            load.latest(tmp_path)
    assert not list(tmp_path.glob("*.corrupt"))
