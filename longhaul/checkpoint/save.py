"""When and how a run saves: at once or in the background, checked again, pruned. Imports
longhaul.checkpoint.store, .dist, .exits, .step of ours.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from longhaul import dist, step
from longhaul.checkpoint import store
from longhaul.checkpoint.store import CheckpointError
from longhaul.exits import StorageError


def size_of(cfg, model_config) -> int:
    """Bytes of a checkpoint of these settings, from a model on meta."""
    alone = dataclasses.replace(cfg, context_parallel_size=1, compile=False, dp_replicate=1)
    state = step.build(alone, model_config, "meta")
    return store.size_of(state.model, state.optimizer)


class Saver:
    """The checkpoints of a run: one save at a time, `keep` of them kept.

    In the background (`--async_save`) the state is copied to host memory and a thread writes it
    through the same rename while training goes on; `wait` ends it, and raises what went wrong. The
    ranks' threads meet in a process group of their own.
    """

    def __init__(
        self,
        folder: Path,
        world: dist.World,
        keep: int,
        background: bool,
        saved: int,
        say: Callable[[str], None],
    ):
        self.folder, self.world, self.keep, self.say = folder, world, keep, say
        self.saved = saved  # the step of the last save
        self.seconds: float | None = None  # that the first one took
        self.group = dist.host_group(world)
        self.pool = ThreadPoolExecutor(1, "save") if background else None
        self.under_way: Future | None = None

    def save(self, state, extra: dict):
        """Save `state`; with a thread, return as soon as the state is copied."""
        self.wait()
        self.saved, start = state.step, time.monotonic()
        shot = store.snapshot(state, extra, copied=self.pool is not None)
        if self.pool is None:
            self._write(shot, start)
        else:
            self.under_way = self.pool.submit(self._write, shot, start)

    def wait(self):
        """Until nothing is being written; raises what went wrong."""
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            under_way.result()

    def end(self):
        """Leave with nothing being written. A save that failed while a run ends for another reason
        is said, not raised.
        """
        if self.under_way is not None and (error := self.under_way.exception()):
            self.say(f"warning: the save that was under way failed: {error}")
        self.under_way = None

    def _write(self, shot: store.Snapshot, start: float):
        path = store.write(shot, self.folder, self.group)
        if not self._reads_back(path):
            path = store.write(shot, self.folder, self.group)
            if not self._reads_back(path):
                raise StorageError(
                    f"{path} does not read back as it was written, twice; it is renamed .corrupt: check the disk"
                )
        if self.seconds is None:
            self.seconds = time.monotonic() - start
            if warning := slow_shutdown(self.seconds, os.environ):
                self.say(warning)
        self.say(f"saved {path}")

    def _reads_back(self, path: Path) -> bool:
        """Whether the new checkpoint verifies, on all ranks alike; if so older ones are pruned,
        else it is set aside.
        """
        damaged = None
        if self.world.rank == 0:
            try:
                store.prune(self.folder, self.keep)
            except CheckpointError as error:
                damaged = error
                store.set_aside(path, error)
        return not dist.any_rank(damaged is not None, self.group)


def slow_shutdown(seconds: float, environment) -> str | None:
    """A warning where the launcher would kill a run that takes `seconds` to save before it has
    saved.
    """
    allowed = float(environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
    if "TORCHELASTIC_RUN_ID" not in environment or seconds < allowed:
        return None
    return (
        f"warning: a save takes {seconds:.1f} s, and torchrun kills after {allowed:g} s what it asked to stop: give "
        f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={int(4 * seconds) + 1} torchrun --shutdown_timeout={int(4 * seconds) + 1} ..."
    )
