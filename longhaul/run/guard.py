"""What stands around a run: signals and the STOP file, the lock on its folder, how it ends (exit
code, exit.json, last line).

Imports longhaul.dist, longhaul.exits, longhaul.run.heartbeat and files.durable of ours.
"""

import fcntl
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from files import durable
from longhaul import dist, exits
from longhaul.run.heartbeat import Peers

# seconds within which a second signal is the first one again: torchrun passes on what the group has
# had already
TOGETHER = 1.0


class Signals:
    """SIGTERM and SIGINT: the first asks the run to stop, a second one leaves at once.

    A thread reads them from a pipe that the interpreter writes to when they arrive, so that a
    second one is obeyed even in the middle of a long operation. Until `training` is set there is
    nothing to save, and the first one ends the program where it stands.
    """

    def __init__(self):
        self.received, self.time, self.training = None, 0.0, False

    def __enter__(self):
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        self.before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        self.wakeup = signal.set_wakeup_fd(self.write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *error):
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        os.close(self.write_end)

    def _handle(self, number: int, frame):
        if not self.training:
            raise exits.Halt(
                f"{signal.Signals(number).name} before the first step, nothing to save: give the same command again",
                exits.PREEMPTED,
            )

    def _watch(self):
        while byte := os.read(self.read_end, 1):
            if byte[0] not in self.before:
                continue
            if self.received is None:
                self.received, self.time = signal.Signals(byte[0]).name, time.monotonic()
            elif time.monotonic() - self.time > TOGETHER:
                os.write(
                    2,
                    b"\na second signal: left without saving; the last checkpoint is whole: give the same command again\n",
                )
                os._exit(128 + byte[0])
        os.close(self.read_end)


class Lock:
    """The right to write a run's folder, held by one job. The kernel drops it with the process, so
    a dead job holds nothing.
    """

    def __init__(self, folder: Path):
        self.path, self.handle = folder / ".lock", None

    def take(self):
        """ValueError naming the holder where another job has it."""
        while self.handle is None:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = (
                    os.read(handle, 200).decode(errors="replace").strip()
                    or "a job that is just starting"
                )
                os.close(handle)
                raise ValueError(
                    f"--output_dir {self.path.parent} is in use by {holder}: wait for its end, or choose another --output_dir"
                ) from None
            if self.path.exists() and os.path.samestat(os.fstat(handle), os.stat(self.path)):
                self.handle = handle
            else:  # the holder ended and removed the file between the two calls
                os.close(handle)
        self._sign()

    def _sign(self):
        before = os.read(self.handle, 200).decode(errors="replace").strip()
        if before:
            print(f"{before} ended without giving back {self.path.parent}: taken over", flush=True)
        os.ftruncate(self.handle, 0)
        os.pwrite(self.handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self):
        if self.handle is not None:
            self.path.unlink(missing_ok=True)
            os.close(self.handle)
            self.handle = None


class Guard:
    """Around a whole run: `with Guard("train.py", world) as guard`. However the run ends, it ends
    here.

    An exception with an exit code (longhaul.exits) ends the program in one line and that code;
    before training, so does a ValueError, as bad input. Anything else is a fault of the program and
    keeps its traceback. In a folder that was taken, exit.json says how it ended.
    """

    def __init__(self, program: str, world: dist.World):
        self.program, self.world, self.signals = program, world, Signals()
        self.folder: Path | None = None
        self.lock: Lock | None = None
        self.step: int | None = None  # the last that was done
        self.peers: Peers | None = None

    def __enter__(self):
        self.signals.__enter__()
        return self

    def watch_peers(self, timeout: float):
        """From here on a rank that is killed or stopped is named, and the others end with code 7."""
        if self.world.size > 1:
            self.peers = Peers(self.world, timeout, self._record)

    # ---- the folder

    def take(self, folder: Path):
        """Lock `folder` for this job, on rank 0; a folder that is not there is made."""
        if self.lock is None:
            lock = Lock(folder)
            durable.make_folder(folder)
            lock.take()
            self.lock = lock

    def begin(self, folder: Path, step: int):
        """From here on `folder` is this run's to write, and a signal or STOP file ends it with a
        checkpoint.
        """
        self.folder, self.step = folder, step
        if self.world.rank == 0:
            (folder / "exit.json").unlink(missing_ok=True)
        self.signals.training = True

    # ---- stopping

    def asked_to_stop(self) -> str | None:
        """Why this rank was asked to stop: a signal, or on rank 0 a file STOP in the run's folder."""
        if (
            self.signals.received is None
            and self.world.rank == 0
            and (self.folder / "STOP").exists()
        ):
            return "STOP file"
        return self.signals.received

    def must_stop(self) -> bool:
        """Whether any rank was asked to stop: the same answer on every rank, which all must ask for
        together.
        """
        return dist.any_rank(self.asked_to_stop() is not None)

    def preempted(self) -> exits.Halt:
        """The halt of a run that was asked to stop and has saved; a STOP file is used up."""
        why = self.asked_to_stop() or "another rank's signal"
        if self.world.rank == 0:
            (self.folder / "STOP").unlink(missing_ok=True)
        return exits.Halt(
            f"stopped by {why} and saved at step {self.step}: give the same command again to continue",
            exits.PREEMPTED,
        )

    # ---- the end

    def __exit__(self, kind, error, trace):
        if (
            isinstance(error, RuntimeError) and self.peers is not None
        ):  # a collective, perhaps: is everybody there?
            error = self.peers.lost() or error
        code, words = self._ending(error)
        try:
            if (self.world.rank == 0 or code == exits.WORLD) and kind is not SystemExit:
                self._record(code, words)
        finally:
            if self.lock is not None:
                self.lock.release()
            if self.peers is not None:
                self.peers.close()
            self.signals.__exit__()
        if (
            code == exits.PREEMPTED and self.signals.training
        ):  # all ranks are here, so none need wait to see whether rank 0 says it
            dist.print0(f"{self.program}: {words}", world=self.world, file=sys.stderr)
            dist.barrier()
        dist.stop()
        if code == exits.PREEMPTED and self.signals.training:
            sys.exit(code)
        if error is not None and words:
            dist.refuse(f"{self.program}: error: {words}", code=code)

    def _ending(self, error: BaseException | None) -> tuple[int, str]:
        """Exit code and words, which are empty for a fault of the program."""
        if error is None:
            return exits.DONE, "completed"
        if hasattr(error, "exit_code"):
            return error.exit_code, str(error)
        return (
            (exits.BAD_INPUT, str(error))
            if isinstance(error, ValueError) and not self.signals.training
            else (1, "")
        )

    def _record(self, code: int, words: str):
        """exit.json in a folder that was taken, for those that torchrun tells no exit code."""
        if self.folder is None:
            return
        cause, remedy = exits.cause_and_remedy(words or "a fault of the program: see its traceback")
        try:
            durable.write_json(
                self.folder / "exit.json",
                dict(code=code, cause=cause, remedy=remedy, last_step=self.step),
            )
        except OSError as error:
            print(f"warning: exit.json cannot be written ({error})", file=sys.stderr, flush=True)
