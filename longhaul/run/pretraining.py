"""Where the batches of pretraining come from, what a run says of them, and what --eval_every does:
the measures of --evals at the context of a stage, and a text sample.
"""

from typing import Protocol

from data.load_tokenizer import load_tokenizer
from data.loader import Batch
from longhaul import step
from longhaul.evals.measures import Asked, Measures, Report
from longhaul.evals.score import ModelScorer
from longhaul.generate import NotANumber, generate
from longhaul.parallel import apply
from longhaul.run.log import Logger, Validation, mfu, perplexity
from longhaul.run.preflight import Ready
from longhaul.step import MicroBatch, MustStop, StepResult, TrainState

SAMPLE_TOKENS = 64


class Source(Protocol):
    """What a run asks for from the kind of training that it does: pretraining, or one of
    lab/posttrain/.
    """

    def open(self, log: Logger):
        """The log is open, and the first step comes next."""

    def load(self, index: int) -> tuple[object, list[MicroBatch]]:
        """This rank's batch of a step, as `record` and as `train_step` want it."""

    def record(
        self,
        record: dict,
        loaded: object,
        result: StepResult,
        seconds: float,
    ):
        """Add figures of a step to its record for the log, and halt the run if they are wrong."""

    def evaluate(self):
        """What --eval_every asks for; it changes nothing of the training."""

    def kept(self) -> dict:
        """What a checkpoint keeps for a source of the same kind, for JSON; rank 0's counts."""


class Pretraining:
    """Rows of the data, and the measures of --evals."""

    def __init__(self, ready: Ready, state: TrainState, must_stop: MustStop):
        self.ready = ready
        self.state = state
        self.must_stop = must_stop

        # ranks that share their rows read the same ones
        sharing = ready.cfg.context_ranks
        self.rank = ready.world.rank // sharing
        self.ranks = ready.world.size // sharing

    def open(self, log: Logger):
        ready = self.ready
        self.log = log
        if not ready.cfg.eval_every:
            return
        self.scorer = ModelScorer(self.state.model, self.state.device)
        self.measures = Measures(ready.corpora, Asked.of(ready.cfg, ready.config.vocab_size))
        if "loss" in self.measures.impossible:
            log.say(f"no validation loss: {self.measures.impossible['loss']}")
        validated = self.measures.prepared.get("loss")
        for corpus in ready.corpora:
            if validated is not None and corpus.name not in validated:
                log.say(
                    f"no validation of {corpus.name}: it has no validation split, or no document "
                    "in it that rows are packed from, or no row of these has a target"
                )

    def load(self, index: int) -> tuple[Batch, list[MicroBatch]]:
        """This rank's rows of a step, in the loader's memory and on the device."""
        rows = self.ready.loader.batch(index, self.rank, self.ranks)
        return rows, step.micro_batches(rows, self.ready.cfg.batch_size, self.ready.device)

    def record(
        self,
        record: dict,
        loaded: Batch,
        result: StepResult,
        seconds: float,
    ):
        ready = self.ready
        record["perplexity"] = None if record["loss"] is None else perplexity(record["loss"])
        record["targets"] = int(result.weight)
        record["mfu"] = mfu(ready.config, loaded, ready.cfg.context_ranks, seconds, ready.device)
        for name, seen in ready.loader.tokens_seen(self.state.step).items():
            record[f"tokens/{name}"] = seen

    def kept(self) -> dict:
        return {}

    # ---- evaluation: no weight, no optimizer state and no random number changes

    def evaluate(self):
        """Measure the model of this step and log it, unless the run is asked to stop meanwhile."""
        state = self.state
        report = self.measures.run(
            self.scorer,
            world=self.ready.world,
            ranks_per_row=self.ready.cfg.context_ranks,
            must_stop=self.must_stop,
        )
        if report is None:
            return
        self._log_report(report)
        if not self.ready.dataset.tokenizer_path:
            return
        try:
            self.log.text(state.step, "sample", self._sample())
        except NotANumber as error:  # the steps that come say what to do about it
            self.log.say(f"no sample at step {state.step}: {error}")

    def _log_report(self, report: Report):
        if "loss" in report.asked.names and report.losses:
            shares = {corpus.name: float(corpus.share) for corpus in self.ready.corpora}
            found = [
                Validation(name, shares[name], losses.loss, losses.tokens)
                for name, losses in report.losses.items()
            ]
            self.log.validation(self.state.step, found)
        self.log.evaluation(self.state.step, report)

        seen = self.ready.loader.tokens_seen(self.state.step)
        if seen:
            of_each = ", ".join(f"{name} {tokens:,}" for name, tokens in seen.items())
            self.log.say(f"  tokens seen: {of_each}")

    def _sample(self) -> str:
        """A text from the start of a document. Every rank draws the same number of tokens, because
        each draw is a collective.
        """
        tokenizer = load_tokenizer(self.ready.dataset.tokenizer_path)
        end = tokenizer.eod_id
        drawn = generate(self.state.model, [end], SAMPLE_TOKENS, vocab_size=tokenizer.vocab_size)
        with apply.eager(self.state.model):
            ids = list(drawn)
        if end in ids:
            ids = ids[: ids.index(end)]
        return tokenizer.decode(ids)
