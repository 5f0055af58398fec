"""Heartbeats: each rank increments a counter in the job's TCP store, so the others can name a rank
that was killed or stopped.

gloo reports a closed connection, and NCCL reports nothing for minutes; neither says which rank it
was. Each rank watches only the next one, with two small requests every half second, however many
ranks there are.

A rank that is alive but stuck goes on counting. When no micro-batch has begun for a long time, each
rank therefore says in which line it is: the one that the others wait for differs from them.
"""

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from longhaul import dist, exits

EVERY = 0.5  # seconds between beats
LOST = 60.0  # seconds without a heartbeat after which a rank is declared lost
STUCK = 600.0  # seconds without a new micro-batch after which each rank says where it is
PATIENCE = 5.0  # seconds in which the store must say which rank was lost first
ROOT = Path(__file__).parents[2]
STORE = "0 (or the launcher, which keeps the store)"


class Heartbeat:
    """The heartbeat of this rank, and a watch over the next rank: `timeout` seconds of silence end
    this process, with its stacks on screen.

    Before that, `leave(code, words)` is called to record it.
    """

    def __init__(self, world: dist.World, timeout: float, leave: Callable[[int, str], None]):
        self.world = world
        self.timeout = timeout
        self.leave = leave
        self.next_rank = (world.rank + 1) % world.size
        self.store = dist.connect_to_store()
        self.when_asked: Callable[[], None] = lambda: None  # called if any rank was asked to stop
        now = time.monotonic()
        self.answered = now  # when the store last answered
        self.heard = now  # when the next rank's counter last changed
        self.begun = now  # the last micro-batch, or this watch
        self.say_at = now + STUCK  # when this rank says where it is

        # two threads, because a store whose process was stopped never answers the first one
        self.closed = threading.Event()
        self.asked = threading.Event()
        self.threads = [
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
            threading.Thread(target=self._watch, name="heartbeat watch", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def ask_all(self):
        """This rank was asked to stop: all ranks learn it with their next beat."""
        self.asked.set()
        self.when_asked()

    def micro_batch_begins(self):
        """This rank is not stuck; it may take three times as long as the last micro-batch did."""
        now = time.monotonic()
        self.say_at = now + max(STUCK, 3 * (now - self.begun))
        self.begun = now

    def close(self):
        """Stop beating; from now on nobody should wait for this rank."""
        self.closed.set()
        for thread in self.threads:
            thread.join(2)  # a thread that waits for a silent store is left behind

    def lost(self) -> exits.Halt | None:
        """Called after a collective failed: the halt that names the rank that is gone, None if all
        ranks are beating.
        """
        try:
            before = self._counts()
            time.sleep(4 * EVERY)
            after = self._counts()
            silent = [
                rank
                for rank in range(self.world.size)
                if after[rank] == before[rank] and rank != self.world.rank
            ]
            if not silent:
                return None
            first = self._first_lost(silent[0])
        except RuntimeError:
            return exits.Halt(self._words(STORE), exits.WORLD)
        return exits.Halt(self._words(first), exits.WORLD)

    # ---- the threads

    def _beat(self):
        last_count = -1
        while not self.closed.wait(EVERY):
            try:
                self.store.add(_key(self.world.rank), 1)
                count = self.store.add(_key(self.next_rank), 0)
                asked = self.store.add(f"longhaul/stop/{launch()}", int(self.asked.is_set()))
            except RuntimeError:
                # the store ended with the process that keeps it; the next collective will fail and
                # ask `lost`
                self.closed.set()
                return
            self.answered = time.monotonic()
            if asked:
                self.when_asked()
            if count != last_count:
                last_count = count
                self.heard = self.answered

    def _watch(self):
        while not self.closed.wait(EVERY):
            now = time.monotonic()
            if now - self.answered > self.timeout:
                self._end(STORE)
            elif now - self.heard > self.timeout:
                self._end(self._first_lost(self.next_rank))
            elif now > self.say_at:
                self.say_at = now + STUCK
                self._say_place(minutes=(now - self.begun) / 60)

    def _say_place(self, minutes: float):
        """One line, on every rank: where its main thread is."""
        print(
            f"rank {self.world.rank} of {self.world.size}: no micro-batch has begun for "
            f"{minutes:.0f} minutes; this rank is in {main_thread_place()}. If the run hangs, the "
            "rank in another line than all the others is stuck.",
            file=sys.stderr,
            flush=True,
        )

    def _end(self, silent: str):
        faulthandler.dump_traceback(all_threads=True)
        words = self._words(silent)
        self.leave(exits.WORLD, words)
        exits.last_words(words)
        os._exit(exits.WORLD)

    # ---- the store

    def _first_lost(self, rank: int) -> str:
        """The rank that was lost first, by all ranks' agreement: others may have left because of
        it. `rank` or the store if that does not answer, since asking it could take forever.
        """
        answers = []

        def ask():
            try:
                answers.append(self.store.compare_set("longhaul/lost", "", str(rank)))
            except RuntimeError:
                return  # the store has ended

        asking = threading.Thread(target=ask, name="heartbeat question", daemon=True)
        asking.start()
        asking.join(PATIENCE)
        return answers[0].decode() if answers else f"{rank}, or rank {STORE},"

    def _counts(self) -> list[int]:
        return [self.store.add(_key(rank), 0) for rank in range(self.world.size)]

    def _words(self, rank: str) -> str:
        return (
            f"rank {rank} of {self.world.size} was killed or does not answer (rank "
            f"{self.world.rank} waited {self.timeout:g} s for it): look at that rank's "
            "machine, then run the same command again"
        )


def main_thread_place() -> str:
    """File, line and function of the main thread's innermost frame, and the frame of this
    repository that led to it.
    """
    calls = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    paths = [Path(call.filename) for call in calls]
    ours = [
        call
        for call, path in zip(calls, paths, strict=True)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts
    ]
    words = [f"{call.filename}:{call.lineno} {call.name}" for call in (calls[-1], *ours[-1:])]
    return ", called from ".join(dict.fromkeys(words))


def launch() -> str:
    """Which start of the ranks this is: torchrun restarts them with the same store."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _key(rank: int) -> str:
    return f"longhaul/beat/{rank}"
