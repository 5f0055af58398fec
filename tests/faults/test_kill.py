"""Runs that are killed, stopped or lose a rank: the same command goes on to the same bits.

tests/test_last_words.py interrupts ranks of torchrun, tests/test_evals_loop.py stops a run in an
evaluation, tests/test_data_resume.py kills preparations.
"""

import itertools
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from base import durable
from longhaul import step
from longhaul.checkpoint import load
from longhaul.checkpoint.save import Saver
from longhaul.run import heartbeat
from longhaul.run.guard import Guard, Lock
from tests import kit
from tests.faults.disk import watch

STEPS = ["--max_steps", "8", "--save_every", "3"]
ENDLESS = ["--max_steps", "1000000", "--save_every", "1000000", "--schedule", "constant"]


# ---- kill -9


def die_before(call: int):
    """In a child: end as kill -9 does before a call that changes the disk."""
    calls = itertools.count()

    def before(*_):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(partial(setattr, durable), before)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_with_the_bits_of_one_that_is_not(
    data, start, tmp_path
):
    """Before any call that changes the disk: of its record, of a save, of a pruning."""
    flags = ["--max_steps", "5", "--save_every", "1"]
    kit.run(kit.arguments(data, tmp_path / "whole", *flags))
    draw = random.Random(0)
    out = tmp_path / "run"
    kills = 0
    while kills < 4 or out.exists():
        # a save and its pruning are about 80 calls
        call = draw.randrange(200) if kills < 4 else -1
        (child,) = start(kit.arguments(data, out, *flags), before=partial(die_before, call))
        code = child.wait()
        if code == -signal.SIGKILL:
            kills += 1
            continue
        assert code == 0, child.words()
        assert kit.same_end(out, tmp_path / "whole"), f"after {kills} kills"
        shutil.rmtree(out)


@pytest.mark.slow
def test_two_ranks_that_are_killed_go_on_to_the_same_bits(data, start, tmp_path):
    flags = ["--max_steps", "80", "--save_every", "10", "--eval_every", "35", "--eval_rows", "2"]
    out = tmp_path / "run"
    killed = start(kit.arguments(data, out, *flags), 2)
    kit.wait_for(lambda: kit.steps_logged(out) > 12)
    for rank in killed:
        rank.signal(signal.SIGKILL)
    assert [rank.wait() for rank in killed] == [-signal.SIGKILL] * 2
    for folder in (out, tmp_path / "whole"):
        ranks = start(kit.arguments(data, folder, *flags), 2)
        assert [rank.wait() for rank in ranks] == [0, 0]
        assert ("resumed" in ranks[0].words()) == (folder == out)
    assert kit.same_end(out, tmp_path / "whole")


# ---- asked to stop


def asked(original, number: int, ask):
    """A function that first calls `ask()`, at its call of this number."""
    calls = itertools.count(1)

    def asking(*args, **kwargs):
        if next(calls) == number:
            ask()
            time.sleep(0.3)  # until a thread has read the signal
        return original(*args, **kwargs)

    return asking


PHASES = {
    "between micro-batches": (Guard, "must_stop", 18, "4"),
    "at the end of a step": (Guard, "must_stop", 21, "5"),
    "in a save": (Saver, "_write", 2, "6"),
    "in a background save": (Saver, "_write", 2, "678"),
    "by a file": (Guard, "must_stop", 18, "4"),
}


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    """A run that nothing happens to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    kit.run(kit.arguments(data, out, *STEPS, "--gradient_accumulation_steps", "4"))
    return out


@pytest.mark.parametrize("phase", PHASES)
def test_a_run_that_is_asked_to_stop_saves_once_and_goes_on(
    phase, whole, data, tmp_path, monkeypatch
):
    owner, name, number, last_steps = PHASES[phase]
    out = tmp_path / "run"
    words = kit.arguments(data, out, *STEPS, "--gradient_accumulation_steps", "4")
    if "background" in phase:
        words.append("--async_save")

    def ask():
        if "file" in phase:
            (out / "STOP").touch()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, asked(getattr(owner, name), number, ask))
        said = kit.run(words, code=75)
    saved_once(out, said)
    assert str(kit.exit_record(out)["last_step"]) in last_steps
    assert not (out / "STOP").exists()  # it would stop the next start as well
    kit.run(words)
    assert kit.same_end(out, whole)


def saved_once(out: Path, said: str):
    """The last step was saved, once, and exit.json says so."""
    record = kit.exit_record(out)
    assert record["code"] == 75
    assert "same command" in record["remedy"]
    newest = load.latest(out)
    assert newest.step == record["last_step"] > 0
    assert said.count(f"saved {newest.folder}") == 1


@pytest.mark.slow
def test_ranks_that_are_all_asked_to_stop_twice_at_once_save_once(data, start, tmp_path):
    """As by torchrun, which repeats what the whole group of processes has received."""
    out = tmp_path / "run"
    ranks = start(kit.arguments(data, out, *ENDLESS), 2)
    kit.wait_for(lambda: kit.steps_logged(out) > 3)
    for number in (signal.SIGTERM, signal.SIGINT):
        for rank in ranks:
            rank.signal(number)
    assert [rank.wait(30) for rank in ranks] == [75, 75]
    saved_once(out, ranks[0].words())


def test_a_save_that_takes_longer_than_the_launcher_waits_is_warned_of_once(
    data, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "0")
    said = kit.run(kit.arguments(data, tmp_path / "run", *STEPS))
    assert said.count("with a save") == 1
    assert said.count("so a stop loses") == 1


def test_a_folder_in_use_is_refused_and_that_of_a_killed_job_is_taken_over(data, tmp_path):
    out = tmp_path / "run"
    words = kit.arguments(data, out, "--max_steps", "2")
    kit.run(words)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    job = Lock(out)
    job.take()
    holder = f"process {os.getpid()} on {os.uname().nodename}"
    assert holder in kit.run([*words, "--max_steps", "3"], code=2)
    assert {path: path.stat().st_mtime_ns for path in before} == before

    os.close(job.descriptor)  # as the system does when a job is killed
    said = kit.run([*words, "--max_steps", "3"])
    assert f"{holder} ended without releasing {out}; its lock is taken over" in said
    assert not (out / ".lock").exists()


# ---- other ranks


def lose_sooner():
    """Declare a rank lost after 3 seconds instead of 60."""
    heartbeat.LOST = 3.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost, number",
    [(1, signal.SIGKILL), (0, signal.SIGKILL), (0, signal.SIGSTOP)],
    ids=["killed", "the one with the store", "stopped"],
)
def test_a_rank_that_is_lost_is_named_by_the_other_one(lost, number, data, start, tmp_path):
    out = tmp_path / "run"
    ranks = start(kit.arguments(data, out, *ENDLESS), 2, lose_sooner)
    kit.wait_for(lambda: kit.steps_logged(out) > 3)
    ranks[lost].signal(number)
    other = ranks[1 - lost]
    assert other.wait(60) == kit.exit_record(out)["code"] == 7
    assert f"rank {lost}" in other.last_line()
    if number == signal.SIGSTOP:
        assert "most recent call first" in other.words()  # where each of its threads was


# ---- a micro-batch that takes longer than the launcher waits

ALLOWED = 8  # seconds that a launcher waits, as a rank is told
SLOW = 12.0  # seconds of a micro-batch
IMPATIENT = {1: [], 2: ["--async_save"], 4: ["--dp_replicate", "2"]}  # numbers of ranks, and flags


def slow_steps(marker: Path):
    """In a child: each step but the first two leaves a file and computes for SLOW seconds."""
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(ALLOWED)
    original = step.gradients

    def gradients(state, *args):
        if state.step >= 2:
            marker.touch()
            end = time.monotonic() + SLOW
            while time.monotonic() < end:  # also after a signal
                time.sleep(0.01)
        return original(state, *args)

    step.gradients = gradients


@pytest.mark.slow
@pytest.mark.parametrize("size", IMPATIENT)
def test_a_stop_in_a_long_micro_batch_loses_no_whole_step(size, data, start, tmp_path):
    out = tmp_path / "run"
    words = kit.arguments(data, out, *STEPS, *IMPATIENT[size])
    ranks = start(words, size, partial(slow_steps, tmp_path / "slow"))
    kit.wait_for((tmp_path / "slow").exists)
    begun = time.monotonic()
    ranks[-1].signal(signal.SIGINT)
    assert [rank.wait(30) for rank in ranks] == [75] * size, ranks[0].words()
    assert time.monotonic() - begun < ALLOWED

    said = ranks[0].words()
    assert "asked to stop: " in said and "to leave at once" in said
    saved_once(out, said)
    assert kit.exit_record(out)["last_step"] == kit.steps_logged(out) == 2
    assert not (out / ".lock").exists()
    if size == 2:
        whole = kit.arguments(data, tmp_path / "whole", *STEPS)
        for again in (words, whole):
            assert [rank.wait() for rank in start(again, size)] == [0] * size
        assert kit.same_end(out, tmp_path / "whole")


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_by_one_that_is_asked_to_stop(data, start, tmp_path):
    """torchrun stops the other ranks when one is killed: their rescue must not wait for it."""
    out = tmp_path / "run"
    first, second = start(
        kit.arguments(data, out, *STEPS), 2, partial(slow_steps, tmp_path / "slow")
    )
    kit.wait_for((tmp_path / "slow").exists)
    second.signal(signal.SIGKILL)
    first.signal(signal.SIGTERM)
    assert first.wait(30) == 7, first.words()
    assert "rank 1 of 2 was killed" in first.last_line()
