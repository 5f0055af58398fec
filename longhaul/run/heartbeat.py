"""Who is still there: every rank beats in the job's TCP store, so that one that was killed or
stopped can be named.

gloo reports a closed connection, and NCCL nothing for minutes; neither says whose process it was.
Each rank watches the next one
alone: two small requests a second, however many ranks there are. Imports longhaul.dist and
longhaul.exits of ours.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable

import torch

from longhaul import dist, exits

EVERY = 0.5  # seconds between beats
STORE = "0 (or the launcher, which keeps the store)"


class Peers:
    """Heartbeats of this rank and a watch over the next; `timeout` seconds of silence end this
    process, with its stacks on screen.

    `leave(code, words)` is called before that, to record it.
    """

    def __init__(self, world: dist.World, timeout: float, leave: Callable[[int, str], None]):
        self.world, self.timeout, self.leave, self.closed = world, timeout, leave, threading.Event()
        self.store = torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
        )
        self.answered = self.heard = time.monotonic()  # the store; the next rank
        self.threads = [
            threading.Thread(target=work, name="peers", daemon=True)
            for work in (self._beat, self._watch)
        ]
        for thread in self.threads:
            thread.start()

    def close(self):
        """Beat no more; nobody should wait for this rank from here on."""
        self.closed.set()
        for thread in self.threads:
            thread.join(2)  # a store that does not answer would keep it

    def _beat(self):
        next_one, beats = (self.world.rank + 1) % self.world.size, -1
        while not self.closed.wait(EVERY):
            try:
                self.store.add(_beat(self.world.rank), 1)
                found = self.store.add(_beat(next_one), 0)
            # the store ended with the process that kept it: the next collective fails and asks
            # `lost`
            except RuntimeError:
                self.closed.set()
                return
            self.answered = time.monotonic()
            if found != beats:
                beats, self.heard = found, self.answered

    def _watch(self):
        """A thread of its own: a store whose process is stopped never answers the other."""
        while not self.closed.wait(EVERY):
            now = time.monotonic()
            if now - self.answered > self.timeout:
                self._end(STORE)
            elif now - self.heard > self.timeout:
                self._end(
                    self.store.compare_set(
                        "longhaul/lost", "", str((self.world.rank + 1) % self.world.size)
                    ).decode()
                )

    def _end(self, silent: str):
        faulthandler.dump_traceback(all_threads=True)
        words = self._words(silent)
        self.leave(exits.WORLD, words)
        dist.last_words(words)
        os._exit(exits.WORLD)

    def lost(self) -> exits.Halt | None:
        """After a collective failed: the halt that names who is gone, None where all ranks still
        beat.
        """
        try:
            before = self._beats()
            time.sleep(4 * EVERY)
            silent = [
                rank
                for rank, beats in enumerate(self._beats())
                if beats == before[rank] and rank != self.world.rank
            ]
            if not silent:
                return None
            first = self.store.compare_set(
                "longhaul/lost", "", str(silent[0])
            ).decode()  # others may have left since, because of it
        except RuntimeError:
            return exits.Halt(self._words(STORE), exits.WORLD)
        return exits.Halt(self._words(first), exits.WORLD)

    def _beats(self) -> list[int]:
        return [self.store.add(_beat(rank), 0) for rank in range(self.world.size)]

    def _words(self, rank: str) -> str:
        return (
            f"rank {rank} of {self.world.size} was killed or does not answer (rank {self.world.rank} waited for it, --timeout "
            f"{self.timeout:g}): look at that rank's machine, then give the same command again"
        )


def _beat(rank: int) -> str:
    return f"longhaul/beat/{rank}"
