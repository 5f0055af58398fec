"""longhaul/run/heartbeat.py with a store that stops, as when a machine or its network does."""

import threading
import time
from collections import Counter

import pytest

from longhaul import dist, exits
from longhaul.run import heartbeat


class Store:
    """A store in which rank 0 never beats; once it has stopped, nothing is answered."""

    def __init__(self):
        self.counts = Counter()
        self.stopped = threading.Event()

    def add(self, key: str, amount: int) -> int:
        self._wait()
        self.counts[key] += amount
        return self.counts[key]

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        self._wait()
        return wanted.encode()

    def _wait(self):
        if self.stopped.is_set():
            forever()


def forever():
    """Blocks its thread, which ends with the process."""
    threading.Event().wait()


class Ended(threading.Event):
    """Set once the process would have ended."""

    code: int


@pytest.fixture
def ended(monkeypatch):
    event = Ended()

    def leave(code: int):
        event.code = code
        event.set()
        forever()

    monkeypatch.setattr(heartbeat, "EVERY", 0.02)
    monkeypatch.setattr(heartbeat, "PATIENCE", 2.0)
    monkeypatch.setattr(heartbeat.os, "_exit", leave)
    monkeypatch.setattr(heartbeat.faulthandler, "dump_traceback", lambda **_: None)
    return event


@pytest.fixture
def start(ended, monkeypatch):
    """Starts the heartbeat of rank 1 of 2, and stops it after the test."""
    made = []

    def heartbeat_of(store: Store, said: list) -> heartbeat.Heartbeat:
        monkeypatch.setattr(dist, "connect_to_store", lambda: store)
        world = dist.World(rank=1, size=2, local_rank=1, local_size=2)
        beats = heartbeat.Heartbeat(world, 0.5, lambda *record: said.append(record))
        made.append(beats)
        return beats

    yield heartbeat_of
    for one in made:
        one.closed.set()
        if not ended.is_set():  # else it is blocked
            one.threads[1].join()


def test_a_rank_ends_whose_store_stops_while_it_already_waits_for_the_next_one(start, ended):
    """The next rank has then been silent for longer than the store, which cannot say who left
    first: asked without a limit, it kept the rank waiting forever.
    """
    said = []
    store = Store()
    beats = start(store, said)
    store.stopped.set()
    beats.answered += 60
    assert ended.wait(10)
    ((code, words),) = said
    assert ended.code == code == exits.WORLD
    assert f"rank {heartbeat.STORE}" in words and "of 2 was killed or does not answer" in words


def test_a_store_that_has_ended_names_nobody(start):
    store = Store()
    beats = start(store, [])

    def gone(*_):
        raise RuntimeError("the store has ended")

    store.compare_set = gone
    assert beats._first_lost(0) == f"0, or rank {heartbeat.STORE},"


def test_the_rank_that_is_silent_is_named_while_the_store_answers(start, ended):
    said = []
    start(Store(), said)
    assert ended.wait(10)
    assert ended.code == exits.WORLD
    assert said[0][1].startswith("rank 0 of 2 was killed or does not answer")


def test_a_rank_that_waits_too_long_says_in_which_line_it_is(start, monkeypatch, capsys):
    """A stuck rank goes on beating; its place differs from that of the ranks that wait for it."""
    store = Store()
    beats = start(store, [])
    beats.timeout = 60.0
    beats.micro_batch_begins()
    assert not capsys.readouterr().err

    beats.say_at = 0.0
    said = wait_for_words(capsys)
    assert said.startswith("rank 1 of 2: no micro-batch has begun")
    assert f"{__file__}:" in said and "wait_for_words" in said
    assert said.count("rank 1 of 2") == 1  # until the patience is over again
    assert beats.say_at > time.monotonic() + heartbeat.STUCK / 2

    beats.begun -= 1000
    beats.micro_batch_begins()
    assert beats.say_at > time.monotonic() + 2900


def wait_for_words(capsys) -> str:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        time.sleep(0.2)
        said = capsys.readouterr().err
        if said:
            return said
    raise AssertionError("the rank said nothing")
