"""A stop that cannot wait for the micro-batch: the last whole step is saved while it still runs.

Weights and optimizer states change only in the optimizer's step. In the middle of a forward or
backward they are those of the last whole step, so if the launcher would kill the run before the
micro-batch ends, a thread saves them, and the process ends without finishing the micro-batch.

The threads of all ranks agree through the job's TCP store, because the main threads are busy with
the collectives of training.
"""

import copy
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch

from longhaul import dist, exits
from longhaul.checkpoint.save import Saver, snapshot_of
from longhaul.run.guard import Guard
from longhaul.run.heartbeat import launch
from longhaul.step import TrainState

BUSY = "busy"  # this rank's state cannot be read now
LEAVING = "leaving"  # all ranks save between two micro-batches, as they would without a rescue
TURN = 0.05  # seconds between two tries, and between two looks at the answers
ANSWERED = 2.0  # seconds within which the ranks answer, if they are all alive

# ---- the warning


def slow_stop(
    seconds: float, save_seconds: float, lost: str, environment: Mapping[str, str]
) -> str | None:
    """A warning if torchrun would not wait for the end of a micro-batch, which takes `seconds`, and
    for a save; `lost` says what a stop then costs.
    """
    allowed = dist.launcher_patience(environment)
    if "TORCHELASTIC_RUN_ID" not in environment or seconds <= dist.patience(allowed, save_seconds):
        return None
    enough = dist.enough_seconds(seconds, save_seconds)
    saving = f" of {save_seconds:.1f} s" if save_seconds else ""
    return (
        f"warning: a micro-batch takes {seconds:.0f} s, and torchrun kills a run {allowed:g} s "
        f"after asking it to stop, with a save{saving} in between, so a stop loses {lost}: put "
        f"{dist.TIMEOUT}={enough} in front of the command"
    )


# ---- the rescue


class Rescue:
    """The thread that saves the last whole step of a run that is asked to stop.

    It reads the state only inside `over(state)`, where the main thread changes none of it; at the
    end of this block the main thread waits for a rescue that has begun, which ends the process.
    """

    def __init__(
        self,
        guard: Guard,
        saver: Saver,
        model: torch.nn.Module,
        flush_log: Callable[[], None],
    ):
        self.guard = guard
        self.saver = saver
        self.flush_log = flush_log
        self.world = guard.world
        self.store = None
        if self.world.size > 1:
            self.store = dist.connect_to_store(timeout=timedelta(seconds=10 * ANSWERED))

        # sharded, as no forward has gathered them yet
        self.parameters = list(model.named_parameters())
        self.state: TrainState | None = None  # of the last whole step, where it may be read
        self.manifest: dict = {}
        self.reading = threading.Lock()  # whoever holds it may change the state, or save it
        self.reading.acquire()
        self.asked = threading.Event()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="rescue", daemon=True)
        self.thread.start()
        guard.when_asked(self.asked.set)

    # ---- the main thread

    @contextmanager
    def over(self, state: TrainState, manifest: dict) -> Iterator[None]:
        """Inside, `state` as it is now may be saved at any moment, until `forbid`; `manifest` joins
        the checkpoint's.
        """
        self.state = copy.copy(state)  # its counters; the tensors are the same
        self.manifest = manifest
        self.reading.release()
        try:
            yield
        finally:
            self.forbid()

    def forbid(self):
        """The main thread is going to change the state; does not return if a rescue has begun."""
        if self.state is not None:
            self.reading.acquire()
            self.state = None

    def close(self):
        """All ranks are between two micro-batches and need no rescue, or the run has ended."""
        self.closed.set()
        self.asked.set()
        self.forbid()

    # ---- the thread

    def _run(self):
        self.asked.wait()
        if self.closed.is_set():
            return
        if self.world.rank == 0:
            print(
                "\nasked to stop: finishing this micro-batch, or giving it up if it takes too "
                "long, then saving; again to leave at once",
                file=sys.stderr,
                flush=True,
            )
        self.closed.wait(dist.patience(self.guard.allowed, self.saver.seconds or 0.0))
        self._save_or_leave()

    def _save_or_leave(self):
        """Try to save until it works, which ends the process, or until all ranks leave."""
        for attempt in itertools.count():
            readable = not self.closed.is_set() and self.reading.acquire(timeout=1)
            answers = self._exchange(attempt, self._answer(readable))
            if readable and len(answers) == 1:
                self._save()
            if readable:
                self.reading.release()
            if LEAVING in answers:
                return
            # other ranks may need this one's main thread, which must get the lock first
            self.closed.wait(TURN)

    def _answer(self, readable: bool) -> str:
        """What the other ranks must know: the step that could be saved here, or why none could."""
        if readable:
            return str(self.state.step)
        return LEAVING if self.closed.is_set() else BUSY

    def _exchange(self, attempt: int, answer: str) -> set[str]:
        """The different answers of all ranks; BUSY among them if a rank did not answer in time,
        LEAVING if the store and the job ended.
        """
        if self.store is None:
            return {answer}
        try:
            return self._answers(f"longhaul/rescue/{launch()}/{attempt}", answer)
        except RuntimeError:
            return {answer, LEAVING}

    def _answers(self, name: str, answer: str) -> set[str]:
        """A rank may be gone, so nobody waits for long; but all ranks must agree on whether all
        have answered, so the first one to know it writes it down for all.
        """
        keys = [f"{name}/{rank}" for rank in range(self.world.size)]
        self.store.set(keys[self.world.rank], answer)

        waited_until = time.monotonic() + ANSWERED
        complete = self.store.check(keys)
        while not complete and time.monotonic() < waited_until and not self.closed.wait(TURN):
            complete = self.store.check(keys)

        verdict = "complete" if complete else "given up"
        if self.store.compare_set(f"{name}/verdict", "", verdict) != b"complete":
            return {answer, BUSY}
        return {self.store.get(key).decode() for key in keys}

    def _save(self) -> NoReturn:
        """Save the state on all ranks, and end the process."""
        code = 1
        try:
            end = self._saved()
            self.guard.leave(end.exit_code, str(end))
            code = end.exit_code
            if code == exits.PREEMPTED:  # nobody leaves before rank 0 has spoken for all
                dist.barrier(self.saver.group)
        finally:
            if code == 1:  # a bug, whose traceback nobody else would print
                traceback.print_exc()
            os._exit(code)

    def _saved(self) -> exits.Halt | exits.StorageError:
        """How the run ends: saved, with a disk that refuses, or with a rank that is gone, so that
        a collective failed.
        """
        stream = None
        if self.state.device.type == "cuda":
            # not behind the kernels that the main thread has launched
            stream = torch.cuda.Stream(self.state.device)
        try:
            with torch.cuda.stream(stream):
                self.saver.save_now(snapshot_of(self.state, self.parameters, self.manifest))
        except exits.StorageError as error:
            return error
        except RuntimeError:
            lost = self.guard.heartbeat and self.guard.heartbeat.lost()
            if not lost:
                raise
            return lost

        self.flush_log()
        sys.stdout.flush()
        self.guard.step = self.state.step
        return self.guard.preempted()
