"""Where the batches of pretraining come from, and what a run says of them."""

from typing import Protocol

from data.loader import Batch
from longhaul import step
from longhaul.run.evaluation import Evaluations
from longhaul.run.log import Logger, mfu, perplexity
from longhaul.run.preflight import Ready
from longhaul.step import MicroBatch, MustStop, StepResult, TrainState


class Source(Protocol):
    """What a run asks for from the kind of training that it does: pretraining, or one of
    longhaul/posttrain/.
    """

    # whether the batch of a step may be made before the step before it has changed the weights
    reads_ahead: bool

    def open(self, log: Logger):
        """The log is open, and the first step comes next."""

    def load(self, index: int) -> tuple[object, list[MicroBatch]]:
        """This rank's batch of a step, as `record` and as `train_step` want it."""

    def record(self, record: dict, loaded: object, result: StepResult, seconds: float):
        """Add figures of a step to its record for the log, and halt the run if they are wrong."""

    def evaluate(self):
        """What --eval_every asks for; it changes nothing of the training."""

    def kept(self) -> dict:
        """What a checkpoint keeps for a source of the same kind, for JSON; rank 0's counts."""


class Pretraining:
    """Rows of the data, and the measures of --evals."""

    reads_ahead = True

    def __init__(self, ready: Ready, state: TrainState, must_stop: MustStop):
        self.ready = ready
        self.state = state
        self.must_stop = must_stop

        # ranks that share their rows read the same ones
        sharing = ready.cfg.context_ranks
        self.rank = ready.world.rank // sharing
        self.ranks = ready.world.size // sharing

    def open(self, log: Logger):
        if self.ready.cfg.eval_every:
            self.evaluations = Evaluations(self.ready, self.state, log, self.must_stop)

    def load(self, index: int) -> tuple[Batch, list[MicroBatch]]:
        """This rank's rows of a step, in the loader's memory and on the device."""
        rows = self.ready.loader.batch(index, self.rank, self.ranks)
        return rows, step.micro_batches(rows, self.ready.cfg.batch_size, self.ready.device)

    def record(self, record: dict, loaded: Batch, result: StepResult, seconds: float):
        ready = self.ready
        record["perplexity"] = perplexity(float(result.loss))
        record["mfu"] = mfu(ready.config, loaded, ready.cfg.context_ranks, seconds, ready.device)
        for name, seen in ready.loader.tokens_seen(self.state.step).items():
            record[f"tokens/{name}"] = seen

    def evaluate(self):
        self.evaluations.run()

    def kept(self) -> dict:
        return {}


class Batches:
    """The batches of a source, of which that of the next step may be made early."""

    def __init__(self, source: Source):
        self.source = source
        self.loaded: dict[int, tuple[object, list[MicroBatch]]] = {}

    def load(self, index: int):
        """Make the batch of a step that comes, once."""
        if index not in self.loaded:
            self.loaded = {index: self.source.load(index)}

    def take(self, index: int) -> tuple[object, list[MicroBatch]]:
        """The batch of a step, which is not kept any longer."""
        self.load(index)
        return self.loaded.pop(index)
