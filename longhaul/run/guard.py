"""What surrounds a run: signals and the STOP file, the lock on its folder, and how it ends (exit
code, exit.json, last line).
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from base import durable
from longhaul import dist, exits
from longhaul.run import heartbeat

# Seconds within which a second signal counts as the first one: torchrun passes on what the whole
# process group has already received.
SAME_SIGNAL = 1.0

# seconds after which a step ends with a checkpoint even if --save_every does not ask for one
SAVE_SECONDS = 1800

# What rank 0 adds to the votes on stopping when a save is due: more than there are ranks.
SAVE_DUE = 2**20


class Signals:
    """SIGTERM and SIGINT: the first one asks the run to stop, a second one ends it at once.

    A thread reads them from a pipe that the interpreter writes to when they arrive, so a second one
    is obeyed even in the middle of a long operation. Until `training` is set there is nothing to
    save, and the first one ends the program immediately.
    """

    def __init__(self):
        self.received: str | None = None  # the first signal's name
        self.when_asked: Callable[[], None] = lambda: None  # called when it came
        self.when_asked_again: Callable[[int, str], None] = lambda code, words: None
        self.time = 0.0
        self.training = False
        self.ending = False  # the run has stopped as it was asked to: what comes now asks no more

    def __enter__(self) -> "Signals":
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        numbers = (signal.SIGTERM, signal.SIGINT)
        self.before = {number: signal.signal(number, self._handle) for number in numbers}
        self.wakeup = signal.set_wakeup_fd(self.write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *error):
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        os.close(self.write_end)  # which ends the thread

    def _handle(self, number: int, frame):
        if not self.training:
            raise exits.Halt(
                f"{signal.Signals(number).name} came before the first step, so there is nothing "
                "to save: run the same command again",
                exits.PREEMPTED,
            )

    def _watch(self):
        while byte := os.read(self.read_end, 1):
            number = byte[0]
            if number not in self.before or self.ending:
                continue
            if self.received is None:
                self.received = signal.Signals(number).name
                self.time = time.monotonic()
                self.when_asked()
            elif time.monotonic() - self.time > SAME_SIGNAL:
                self.when_asked_again(
                    128 + number,
                    "a second signal came, so the run ended without saving; its last checkpoint is "
                    "intact: run the same command again",
                )
                os._exit(128 + number)
        os.close(self.read_end)


class Lock:
    """The right to write a run's folder, held by one job. The system releases it when the process
    ends, so a killed job holds nothing.
    """

    def __init__(self, folder: Path):
        self.path = folder / ".lock"
        self.descriptor: int | None = None

    def take(self):
        """ValueError naming the holder if another job has it."""
        while self.descriptor is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            if not durable.lock(descriptor):
                holder = _read(descriptor) or "a job that is just starting"
                os.close(descriptor)
                raise ValueError(
                    f"--output_dir {self.path.parent} is in use by {holder}: wait until it ends, "
                    "or choose another --output_dir"
                )
            if self._is_current(descriptor):
                self.descriptor = descriptor
            else:
                os.close(descriptor)
        self._sign()

    def _is_current(self, descriptor: int) -> bool:
        """Whether the locked file is still the one in the folder: its holder may have ended and
        deleted it after it was opened here.
        """
        if not self.path.exists():
            return False
        return os.path.samestat(os.fstat(descriptor), os.stat(self.path))

    def _sign(self):
        """Write this process into the file, in which a killed job has left its own name."""
        before = _read(self.descriptor)
        if before:
            print(
                f"{before} ended without releasing {self.path.parent}; its lock is taken over",
                flush=True,
            )
        os.ftruncate(self.descriptor, 0)
        name = f"process {os.getpid()} on {socket.gethostname()}\n"
        os.pwrite(self.descriptor, name.encode(), 0)

    def release(self):
        """Delete the file and release the lock, if this process has it."""
        if self.descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(self.descriptor)
            self.descriptor = None


def _read(descriptor: int) -> str:
    return os.read(descriptor, 200).decode(errors="replace").strip()


class Guard:
    """Surrounds a whole run: `with Guard("train.py", world) as guard`. However the run ends, it
    ends here.

    An exception with an exit code (longhaul.exits) ends the program with one line and that code;
    before training begins, so does a ValueError, as bad input. Anything else is a bug in the
    program and keeps its traceback. In a folder that was taken, exit.json says how the run ended.
    """

    def __init__(self, program: str, world: dist.World):
        self.program = program
        self.world = world
        self.signals = Signals()
        self.signals.when_asked_again = self.leave
        self.screens = exits.Screens()
        self.allowed = dist.DEFAULT_PATIENCE  # seconds that a launcher waits for the end of a run
        self.folder: Path | None = None
        self.lock: Lock | None = None
        self.step: int | None = None  # the last step that was done
        self.heartbeat: heartbeat.Heartbeat | None = None
        self.decisions = None  # the process group of `must_stop`
        self.saved_at = time.monotonic()
        self.save_due = False  # as of the last `must_stop`, the same on all ranks

    def __enter__(self) -> "Guard":
        self.screens.guard()
        self.signals.__enter__()
        return self

    def watch(self):
        """From now on a rank that is killed or stopped is named, and the others end with code 7.

        ValueError if the environment gives the launcher a time that is no number.
        """
        self.allowed = dist.launcher_patience(os.environ)
        if self.world.size > 1:
            self.heartbeat = heartbeat.Heartbeat(self.world, heartbeat.LOST, self._record)
            self.decisions = dist.decision_group(self.world)

    # ---- the folder

    def take(self, folder: Path):
        """Make `folder`, if it is missing, and lock it for this job. Called on rank 0."""
        if self.lock is None:
            lock = Lock(folder)
            durable.make_folder(folder)
            lock.take()
            self.lock = lock

    def begin(self, folder: Path, step: int):
        """From now on `folder` belongs to this run, and a signal or a STOP file ends the run with a
        checkpoint.
        """
        self.folder = folder
        self.step = step
        self.saved_at = time.monotonic()
        if self.world.rank == 0:
            (folder / "exit.json").unlink(missing_ok=True)
        self.signals.training = True

    # ---- stopping

    def asked_to_stop(self) -> str | None:
        """Why this rank was asked to stop: a signal, or, on rank 0, a file STOP in the folder."""
        received = self.signals.received
        if received is None and self.world.rank == 0 and (self.folder / "STOP").exists():
            return "STOP file"
        return received

    def when_asked(self, function: Callable[[], None]):
        """Call `function` as soon as this rank or another one has received a signal."""
        self.signals.when_asked = function
        if self.heartbeat is not None:
            self.signals.when_asked = self.heartbeat.ask_all
            self.heartbeat.when_asked = function
        if self.signals.received:
            self.signals.when_asked()

    def must_stop(self) -> bool:
        """Whether any rank was asked to stop. All ranks must call this together, before each
        micro-batch, and all get the same answer; `save_due` comes with it.
        """
        votes = int(self.asked_to_stop() is not None)
        if self.world.rank == 0 and time.monotonic() - self.saved_at >= SAVE_SECONDS:
            votes += SAVE_DUE
        votes = dist.sum_over_ranks(votes, self.decisions)
        self.save_due = votes >= SAVE_DUE
        if self.heartbeat is not None:
            self.heartbeat.micro_batch_begins()
        return votes % SAVE_DUE > 0

    def preempted(self) -> exits.Halt:
        """The halt of a run that was asked to stop and has saved; deletes the STOP file."""
        reason = self.asked_to_stop() or "another rank's signal"
        if self.world.rank == 0:
            (self.folder / "STOP").unlink(missing_ok=True)
        if not self.step:
            words = f"stopped by {reason} in the first step, so there is nothing to save"
            return exits.Halt(f"{words}: run the same command again", exits.PREEMPTED)
        return exits.Halt(
            f"stopped by {reason} and saved at step {self.step}: run the same command again to "
            "continue",
            exits.PREEMPTED,
        )

    # ---- the end

    def leave(self, code: int, words: str):
        """Say how the run ends, on screen and in exit.json, before all ranks leave at once."""
        if self.world.rank == 0:
            self._record(code, words)
            exits.last_words(f"{self.program}: {words}")
        if self.lock is not None:
            self.lock.release()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ):
        if isinstance(error, RuntimeError) and self.heartbeat is not None:
            # perhaps a collective failed, because a rank is gone
            error = self.heartbeat.lost() or error
        try:
            self._end(kind, error)
        finally:
            self.screens.restore()

    def _end(self, kind: type[BaseException] | None, error: BaseException | None):
        code, words = self._ending(error)
        halted = code == exits.PREEMPTED and self.signals.training
        # from now on, a launcher that repeats its signal asks no more
        self.signals.ending = halted
        try:
            if kind is not SystemExit and (self.world.rank == 0 or code == exits.WORLD):
                self._record(code, words)
        finally:
            if self.lock is not None:
                self.lock.release()
            if self.heartbeat is not None:
                self.heartbeat.close()
            if not halted:
                self.signals.__exit__()

        if halted:
            # all ranks are here, so rank 0 speaks for all and none has to wait for its words
            if self.world.rank == 0:
                exits.last_words(f"{self.program}: {words}")
            dist.barrier()
        dist.stop()

        if self.world.size > 1 and (halted or error is None):
            dist.end(code)
        if halted:
            self.signals.__exit__()
            sys.exit(code)
        if error is not None and words:
            dist.refuse(f"{self.program}: error: {words}", code=code)

    def _ending(self, error: BaseException | None) -> tuple[int, str]:
        """Exit code and words; the words are empty for a bug in the program."""
        if error is None:
            return exits.DONE, "completed"
        if hasattr(error, "exit_code"):
            return error.exit_code, str(error)
        if isinstance(error, ValueError) and not self.signals.training:
            return exits.BAD_INPUT, str(error)
        return 1, ""

    def _record(self, code: int, words: str):
        """Write exit.json in the run's folder, because torchrun does not pass on exit codes."""
        if self.folder is None:
            return
        cause, remedy = exits.cause_and_remedy(words or "a bug in the program: see its traceback")
        content = {"code": code, "cause": cause, "remedy": remedy, "last_step": self.step}
        try:
            durable.write_json(self.folder / "exit.json", content)
        except OSError as error:
            print(f"warning: exit.json cannot be written ({error})", file=sys.stderr, flush=True)
