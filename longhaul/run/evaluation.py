"""What --eval_every does: the measures of --evals at the context of a stage, and a text sample.

It changes nothing of the training: no weight, no optimizer state and no random number.
"""

from data.load_tokenizer import load_tokenizer
from longhaul.evals.measures import Asked, Measures, Report
from longhaul.evals.score import ModelScorer, MustStop
from longhaul.generate import NotANumber, generate
from longhaul.parallel import apply
from longhaul.run.log import Logger, Validation
from longhaul.run.preflight import Ready
from longhaul.step import TrainState

SAMPLE_TOKENS = 64


class Evaluations:
    """The evaluations of a run, or of a stage of its length schedule."""

    def __init__(self, ready: Ready, state: TrainState, log: Logger, must_stop: MustStop):
        self.ready = ready
        self.state = state
        self.log = log
        self.must_stop = must_stop
        self.scorer = ModelScorer(state.model, state.device)
        self.measures = Measures(ready.corpora, Asked.of(ready.cfg, ready.config.vocab_size))
        validated = self.measures.prepared.get("loss")
        for corpus in ready.corpora:
            if validated is not None and corpus.name not in validated:
                log.say(
                    f"no validation of {corpus.name}: it has no validation split, or no document "
                    "in it that rows are packed from"
                )

    def run(self):
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
        self._log(report)
        if not self.ready.dataset.tokenizer_path:
            return
        try:
            self.log.text(state.step, "sample", self._sample())
        except NotANumber as error:  # the steps that come say what to do about it
            self.log.say(f"no sample at step {state.step}: {error}")

    def _log(self, report: Report):
        step = self.state.step
        if "loss" in report.asked.names and report.losses:
            shares = {corpus.name: float(corpus.share) for corpus in self.ready.corpora}
            found = [
                Validation(name, shares[name], losses.loss, losses.tokens)
                for name, losses in report.losses.items()
            ]
            self.log.validation(step, found)
        self.log.evaluation(step, report)

        seen = self.ready.loader.tokens_seen(step)
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
