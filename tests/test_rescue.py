"""A run that is asked to stop in a micro-batch for which its launcher would not wait, and saves by
the clock. tests/faults/test_kill.py stops whole runs of 1, 2 and 4 ranks.
"""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from longhaul import dist
from longhaul.config import TrainConfig
from longhaul.planner import plan as planner
from longhaul.run import heartbeat
from longhaul.run.guard import Guard
from longhaul.run.rescue import (
    BUSY,
    LEAVING,
    Rescue,
    slow_stop,
)
from tests.ranks import run_ranks

UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "x"}
STATE = SimpleNamespace(step=7)


@pytest.fixture
def guard(tmp_path):
    with Guard("train.py", dist.World()) as guard:
        guard.begin(tmp_path, 7)
        yield guard


@pytest.fixture
def rescue(guard, monkeypatch):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    rescue = Rescue(guard, SimpleNamespace(seconds=None), torch.nn.Linear(1, 1), lambda: None)
    yield rescue
    rescue.close()


# ---- how long a launcher waits


@pytest.mark.parametrize(
    "environment, seconds",
    [
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "240"}, 240),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "240"} | UNDER_TORCHRUN, 240),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "0"}, 0),
        (UNDER_TORCHRUN, 30),
    ],
)
def test_a_launcher_waits_as_long_as_it_was_told(environment, seconds):
    assert dist.launcher_patience(environment) == seconds


@pytest.mark.parametrize("micro_batch, save", [(60, 0), (61, 5), (5, 100), (0.1, 0)])
def test_the_timeout_that_is_named_lets_the_micro_batch_end(micro_batch, save):
    seconds = dist.enough_seconds(micro_batch, save)
    assert dist.patience(seconds, save) >= micro_batch
    assert dist.patience(seconds - 10, save) < micro_batch


def test_a_micro_batch_for_which_torchrun_would_not_wait_is_warned_of():
    assert slow_stop(60, 0, "a step", {}) is None
    assert slow_stop(9, 0, "a step", UNDER_TORCHRUN) is None
    said = slow_stop(60, 0, "a step", UNDER_TORCHRUN)
    assert "so a stop loses a step: put TORCH_ELASTIC_SHUTDOWN_TIMEOUT=180 in front" in said
    said = slow_stop(0.1, 31, "a step", UNDER_TORCHRUN)
    assert "a save of 31.0 s" in said and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=70 in front" in said


@pytest.mark.parametrize(
    "ranks, seconds, told, timeout",
    [
        (1, 60, "", 0),  # no torchrun
        (2, 10, "", 0),
        (2, 60, "", 90),  # two micro-batches of 30 s
        (2, 60, "240", 240),
        (2, 600, "240", 900),
    ],
)
def test_a_printed_command_has_the_timeout_that_its_micro_batches_need(
    monkeypatch, ranks, seconds, told, timeout
):
    monkeypatch.setenv(dist.TIMEOUT, told or "0")
    cfg = TrainConfig(gradient_accumulation_steps=2)
    world = dist.World(size=ranks, local_size=ranks)
    assert planner.shutdown_timeout(cfg, ranks, seconds) == timeout
    said = planner.command(cfg, world, timeout)
    assert said.startswith(f"{dist.TIMEOUT}={timeout} torchrun --nproc_per_node=2") == bool(timeout)


# ---- the rescue


def test_the_state_can_be_read_only_while_it_is_unchanged(rescue):
    assert not rescue.reading.acquire(blocking=False)
    with rescue.over(STATE, {}):
        assert rescue.reading.acquire(blocking=False)
        rescue.reading.release()
        rescue.forbid()
        assert not rescue.reading.acquire(blocking=False) and rescue.state is None
    assert not rescue.reading.acquire(blocking=False)


def test_whoever_changes_the_state_waits_for_a_rescue_that_has_begun(rescue):
    def changing():
        with rescue.over(STATE, {}):
            inside.set()
            may_end.wait(5)
        ended.set()

    inside = threading.Event()
    may_end = threading.Event()
    ended = threading.Event()
    threading.Thread(target=changing, daemon=True).start()
    assert inside.wait(5) and rescue.reading.acquire(timeout=5)
    may_end.set()
    assert not ended.wait(0.1)
    rescue.reading.release()
    assert ended.wait(5)


def test_a_main_thread_that_other_ranks_need_is_let_through(rescue, monkeypatch):
    def exchange(attempt, answer):
        time.sleep(0.05)
        return {answer, "of another rank"}

    def pass_through():
        with rescue.over(STATE, {}):
            rescue.asked.set()
            time.sleep(0.1)
        ended.set()

    saves = []
    monkeypatch.setattr(rescue, "_exchange", exchange)
    monkeypatch.setattr(rescue, "_save", lambda: saves.append(rescue.state.step))
    rescue.guard.allowed = 0
    ended = threading.Event()
    threading.Thread(target=pass_through, daemon=True).start()
    assert ended.wait(2)
    assert not saves


def test_a_rescue_is_left_to_the_main_thread_that_stops_between_two_micro_batches(rescue):
    rescue.asked.set()
    rescue.close()
    rescue.thread.join(5)
    assert not rescue.thread.is_alive()


@pytest.fixture
def second_of_two(rescue, monkeypatch):
    """The rescue of rank 1, with the store of a job of two ranks."""
    monkeypatch.setattr("longhaul.run.rescue.ANSWERED", 0.1)
    rescue.world = dist.World(rank=1, size=2)
    rescue.store = torch.distributed.HashStore()
    return rescue


def test_ranks_save_only_the_step_that_all_of_them_hold(second_of_two):
    second_of_two.store.set("longhaul/rescue/0/0/0", "7")
    second_of_two.store.set("longhaul/rescue/0/1/0", "8")
    assert second_of_two._exchange(0, "7") == {"7"}
    assert second_of_two._exchange(1, "7") == {"7", "8"}


def test_no_rank_waits_long_for_one_that_is_gone_and_all_give_the_attempt_up(second_of_two):
    assert second_of_two._exchange(0, "7") == {"7", BUSY}
    first = second_of_two
    first.world = dist.World(rank=0, size=2)  # answers too late, but finds both answers
    assert first._exchange(0, "7") == {"7", BUSY}
    assert first.store.get("longhaul/rescue/0/0/verdict") == b"given up"


def test_a_store_that_ended_means_that_the_job_leaves(second_of_two, monkeypatch):
    def ended(*_):
        raise RuntimeError("connection reset")

    monkeypatch.setattr(second_of_two, "_answers", ended)
    assert LEAVING in second_of_two._exchange(0, "7")


def test_a_rank_tries_again_until_all_hold_one_step(rescue, monkeypatch):
    saves = []
    answers = iter([{"6", "7"}, {"7", "busy"}, {"7"}, {"7", LEAVING}])
    monkeypatch.setattr(rescue, "_exchange", lambda attempt, answer: next(answers))
    monkeypatch.setattr(rescue, "_save", lambda: saves.append(rescue.state.step))
    with rescue.over(STATE, {}):
        rescue._save_or_leave()
    assert saves == [7] and not list(answers)


# ---- saves by the clock


def test_a_save_is_due_after_the_minutes_since_the_last_one(guard):
    assert not guard.must_stop() and not guard.save_due
    guard.saved_at -= 1801
    assert not guard.must_stop() and guard.save_due


def votes(world: dist.World) -> list[bool]:
    """What a rank is told if a save is due on rank 1, on rank 0, and if rank 1 must stop too."""
    guard = Guard("train.py", world)
    told = []
    guard.asked_to_stop = lambda: None
    for late in (1, 0):
        guard.saved_at = time.monotonic() - (1801 if world.rank == late else 0)
        told += [guard.must_stop(), guard.save_due]
    guard.asked_to_stop = lambda: "SIGTERM" if world.rank else None
    return [*told, guard.must_stop(), guard.save_due]


def test_all_ranks_save_by_the_clock_of_rank_0_and_stop_for_any_rank():
    expected = [False, False, False, True, True, True]
    assert run_ranks(votes, 2) == [expected, expected]


def test_with_nccl_the_hosts_decide_in_a_group_of_their_own(monkeypatch):
    """A collective of NCCL would wait for all that is queued on the GPU, in every micro-batch."""
    world = dist.World(rank=1, size=2)
    asked = []
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend, **_: f"{backend} group")
    monkeypatch.setattr(heartbeat, "Heartbeat", lambda *_: None)
    monkeypatch.setattr(dist, "sum_over_ranks", lambda votes, group: asked.append(group) or votes)

    guard = Guard("train.py", world)
    guard.watch()
    assert not guard.must_stop()
    assert asked == ["gloo group"]

    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    assert dist.decision_group(world) is None
