"""What surrounds a run: locks, signals, exit.json, retried reads, hashed writes. tests/faults has
the rest.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from base import durable, tensors
from base.tensors import Later, write_tensors
from longhaul import dist, exits, step
from longhaul.checkpoint.save import Saver, size_of
from longhaul.exits import StorageError
from longhaul.run.guard import Guard, Signals
from tests import kit

# ---- the end of a run


@pytest.mark.parametrize(
    "error, code, last",
    [
        (ValueError("no: choose another"), 2, "door: error: no: choose another"),
        (StorageError("full: free space"), 6, "door: error: full: free space"),
        (exits.WorldError("3 ranks: use 2"), 7, "door: error: 3 ranks: use 2"),
    ],
)
def test_an_error_with_a_code_ends_in_one_line_and_that_code(capsys, error, code, last):
    with pytest.raises(SystemExit) as stop, Guard("door", dist.World()):
        raise error
    assert stop.value.code == code
    assert capsys.readouterr().err == f"{last}\n"


def test_a_fault_of_the_program_keeps_its_traceback_and_is_recorded(tmp_path):
    with pytest.raises(ValueError, match="a fault"), Guard("door", dist.World()) as guard:
        guard.begin(tmp_path, 3)
        raise ValueError("a fault")
    assert json.loads((tmp_path / "exit.json").read_text())["code"] == 1


def test_exit_json_has_code_cause_remedy_and_step(tmp_path):
    with pytest.raises(SystemExit), Guard("door", dist.World()) as guard:
        guard.begin(tmp_path, 3)
        guard.step = 5
        raise StorageError("the disk is full: free space")
    assert json.loads((tmp_path / "exit.json").read_text()) == dict(
        code=6, cause="the disk is full", remedy="free space", last_step=5
    )


def test_signals_are_put_back_as_they_were():
    before = signal.getsignal(signal.SIGTERM)
    with Signals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


ROOT = Path(__file__).parent.parent
SECOND_SIGNAL = """
import os, signal, sys, time
from pathlib import Path
from longhaul import dist
from longhaul.run import guard
guard.SAME_SIGNAL = 0.05
with guard.Guard("train.py", dist.World()) as running:
    running.begin(Path(sys.argv[1]), 7)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
        time.sleep(0.2)
    time.sleep(60)
"""


def test_a_second_signal_ends_with_a_record_and_the_remedy(tmp_path):
    command = [sys.executable, "-c", SECOND_SIGNAL, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.splitlines()[-1].endswith("is intact: run the same command again")
    ended = json.loads((tmp_path / "exit.json").read_text())
    assert (ended["code"], ended["last_step"]) == (128 + signal.SIGINT, 7)


def test_a_signal_ends_a_run_that_has_not_begun():
    with Signals(), pytest.raises(exits.Halt) as halt:
        os.kill(os.getpid(), signal.SIGINT)
    assert halt.value.exit_code == 75


# ---- storage


@pytest.mark.parametrize("later", [False, True])
def test_what_is_written_by_pieces_is_safetensors_with_the_digests_of_its_bytes(
    tmp_path, monkeypatch, later
):
    monkeypatch.setattr(durable, "CHUNK", 24)
    monkeypatch.setattr(durable, "BLOCK", 64)
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(5, 7),
        "b": torch.randn(3).bfloat16(),
        "c": torch.arange(11, dtype=torch.uint8),
        "d": torch.randn(4, 6).t(),
        "e": torch.randn(2, 0),
    }
    given = tensors
    if later:
        given = {name: Later(x.shape, x.dtype, x.detach) for name, x in tensors.items()}
    written = write_tensors(tmp_path / "x.safetensors", given)
    assert written == durable.describe(tmp_path / "x.safetensors")
    assert len(written["blocks"]) == -(-written["bytes"] // 64)

    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], value) for name, value in tensors.items())


def failing(times: int, number: int):
    calls = []

    def function():
        calls.append(1)
        if len(calls) <= times:
            raise OSError(number, "no")
        return len(calls)

    return function


def test_a_missing_file_is_not_tried_again(tmp_path):
    with pytest.raises(FileNotFoundError):
        durable.retried(failing(1, errno.ENOENT), tmp_path)


def test_space_is_asked_for_what_a_run_will_hold_beyond_what_it_holds_already(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(durable, "free_bytes", lambda folder: 299)
    with pytest.raises(ValueError, match="299 bytes"):
        durable.require_space(tmp_path, 100, keep=2)
    durable.require_space(tmp_path, 99, keep=2)
    for number in (5, 10, 15):
        (tmp_path / f"step-{number:08d}").mkdir()
        durable.require_space(tmp_path, 149, keep=2)
    with pytest.raises(ValueError, match="but 1 more"):
        durable.require_space(tmp_path, 300, keep=2)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon"])
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(tmp_path, optimizer):
    state = kit.state(optimizer=optimizer, model_overrides=("num_layers=1",))
    step.train_step(state, kit.batch())
    saver = Saver(tmp_path, dist.World(), 2, False, 0, lambda line: None)
    saver.save(state, {})
    written = sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors"))
    assert 0 <= written - size_of(state.cfg, state.cfg.model()) < 8192  # the header


def test_a_background_save_has_the_bits_of_its_moment_and_raises_what_went_wrong_later(
    tmp_path, monkeypatch
):
    state = kit.state()
    said = []
    step.train_step(state, kit.batch())
    expected = {name: value.detach().clone() for name, value in state.model.named_parameters()}
    saver = Saver(tmp_path, dist.World(), 2, True, 0, said.append)
    original = tensors.write_tensors
    started = []

    def slow(*args):
        started.append(1)
        time.sleep(0.2)
        return original(*args)

    monkeypatch.setattr(tensors, "write_tensors", slow)
    saver.save(state, {})
    step.train_step(state, kit.batch())
    saver.wait()
    saved = load_file(next((tmp_path / "step-00000001").glob("*.safetensors")))
    assert started and said
    assert all(torch.equal(saved[f"model.{name}"], value) for name, value in expected.items())

    monkeypatch.setattr(durable, "rename", lambda old, new: failing(9, errno.ENOSPC)())
    saver.save(state, {})
    with pytest.raises(StorageError, match="bytes"):
        saver.wait()


def test_a_checkpoint_that_does_not_read_back_is_set_aside_and_written_again(
    tmp_path, monkeypatch, capsys
):
    from longhaul.checkpoint import load, save

    state = kit.state()
    step.train_step(state, kit.batch())
    original = save.write
    broken = []

    def write(*args):
        path = original(*args)
        if not broken:
            broken.append(path)
            next(path.glob("*.safetensors")).write_bytes(b"other")
        return path

    monkeypatch.setattr(save, "write", write)
    Saver(tmp_path, dist.World(), 2, False, 0, lambda line: None).save(state, {})
    assert load.latest(tmp_path).step == 1 and (tmp_path / "step-00000001.corrupt").exists()
    assert "DAMAGED CHECKPOINT" in capsys.readouterr().out


def test_a_time_for_the_launcher_that_is_no_number_is_refused_with_the_variable():
    for text in ("5m", "-1", "nan", "1e3"):
        with pytest.raises(ValueError, match=dist.TIMEOUT):
            dist.told_patience({dist.TIMEOUT: text})
    assert dist.told_patience({dist.TIMEOUT: ""}) is None


# ---- steps


def test_a_step_that_is_given_up_between_micro_batches_changes_nothing():
    state = kit.state()
    before = [p.detach().clone() for p in state.model.parameters()]
    answers = iter((False, True))
    assert step.train_step(state, kit.batch() * 3, lambda: next(answers)) is None
    assert state.step == state.tokens == 0
    assert all(p.grad is None for p in state.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True))
