"""What a simulation runs: the step of a kind of run on one of several ranks.

`Rehearsal` is a step of pretraining. Settings of another kind name a class of their own, which adds
its models, its objective and its batches: `REHEARSAL` of longhaul/config.py.
"""

import pkgutil

from torch.distributed.device_mesh import DeviceMesh

from footprint.tracker import Tracker
from longhaul import step
from longhaul.config import TrainConfig
from longhaul.memory.batches import fake_batch, row_batch
from model import Decoder, ModelConfig


class Rehearsal:
    """A step of pretraining on one of several ranks; post-training adds to it.

    `skeletons` is called before tensors are fake, `begin` when the state is built, and `batch` at
    the start of each step. `every`: all micro-batches of a step run, not only the first ones.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        ranks: int,
        every: bool,
    ):
        self.cfg = cfg
        self.ranks = ranks
        self.every = every
        self.frozen: dict[str, Decoder] = {}  # the models that are only read
        self.rows: list[step.MicroBatch] = []  # that exist before a step

    def skeletons(self, config: ModelConfig, mesh: DeviceMesh | None) -> None:
        """The frozen models on meta: what `step.frozen` begins with."""

    def begin(self, tracker: Tracker, state: step.TrainState) -> None:
        """Memory for what is added to the state."""
        self.tracker = tracker
        self.state = state
        if not tracker.fake:
            self.rows = row_batch(self.cfg, self.ranks)

    def batch(self) -> list[step.MicroBatch]:
        """What precedes the update, and its micro-batches."""
        return list(self.rows) or fake_batch(self.cfg, self.ranks, self.every)


def rehearsal(
    cfg: TrainConfig,
    ranks: int,
    every: bool,
) -> Rehearsal:
    """The step of these settings."""
    return pkgutil.resolve_name(cfg.REHEARSAL)(cfg, ranks, every)
