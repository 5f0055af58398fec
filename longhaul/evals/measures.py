"""The measures that were asked for, one after the other.

    asked = Asked(names=("loss", "position", "gain"), context_length=131072)
    measures = Measures(corpora, asked)   # what needs no model: rows, far copies, retrieval items
    report = measures.run(scorer)         # as often as there are models to compare

What a model or its data cannot be measured by is left out, and the report says why.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from data.dataset import Split
from data.mixture import Corpus
from longhaul import dist
from longhaul.config import TrainConfig
from longhaul.evals import gain, position, retrieval
from longhaul.evals.score import MustStop, Scorer
from longhaul.evals.tasks import TASKS, Vocabulary


class Measured(Protocol):
    """What a measure returns."""

    def record(self) -> dict:
        """All figures for JSON, with numbers of items and intervals."""

    def line(self) -> str:
        """The figures in a line on screen."""

    def scalars(self) -> dict[str, float]:
        """The figures of TensorBoard by name."""


ITEMS = 32  # of each retrieval task at each length
WHOLE = ""  # the part of a measure that has no parts
Found = dict[str, dict[str, Any]]  # what was measured: by measure, and by corpus or length

# A measure that is prepared. It takes a scorer, what was found before it, world, ranks_per_row and
# must_stop, and returns None if must_stop gave it up.
Measure = Callable[..., Measured | None]
Prepare = Callable[[Sequence[Corpus], "Asked"], dict[str, Measure]]


@dataclass(frozen=True)
class Asked:
    """What is measured, and over how much."""

    context_length: int  # tokens of a row: the full context
    names: tuple[str, ...] = ("loss", "position")  # of EVALS
    rows: int = 8  # of the validation split of each corpus, for the losses and for the gain
    lengths: tuple[int, ...] = ()  # tokens of the rows of retrieval
    tasks: tuple[str, ...] = tuple(TASKS)  # of retrieval
    items: int = ITEMS  # of each retrieval task at each length
    vocab_size: int = 0  # of the model; 0: of the data
    seed: int = 0  # of the order of validation rows
    documents: range | None = None  # lengths of those that validation reads; None: all
    key_tokens: bool = False  # gain: also over LongPPL's key tokens

    @classmethod
    def of(cls, cfg: TrainConfig, vocab_size: int) -> "Asked":
        """What the flags of a run ask for, at the context of `cfg`."""
        return cls(
            context_length=cfg.context_length,
            names=cfg.eval_names(),
            rows=cfg.eval_rows,
            lengths=cfg.retrieval_lengths(),
            items=ITEMS,
            vocab_size=vocab_size,
            seed=cfg.seed,
            documents=cfg.document_lengths,
        )


# ---- the report


@dataclass(frozen=True)
class Report:
    """What was measured, and what was not."""

    asked: Asked
    found: Found
    left_out: dict[str, str]  # with the reason
    seconds: float

    @property
    def losses(self) -> dict[str, position.Losses]:
        """The validation losses by corpus."""
        return self.found.get("loss", {})

    def record(self, per_document: bool = False) -> dict:
        """All figures for JSON; with those of every document, if asked."""
        found: dict[str, Any] = {}
        for name, of_parts in self.found.items():
            found[name] = {part: one.record() for part, one in of_parts.items()}
            if per_document and name != "retrieval":
                for part, one in of_parts.items():
                    found[name][part]["per_document"] = one.per_document()
        if "retrieval" in found:
            found["retrieval"] = found["retrieval"][WHOLE]
        return found | {"left_out": self.left_out, "seconds": self.seconds}

    @property
    def retrieved(self) -> retrieval.Retrieval | None:
        """The scores of retrieval, if it was measured."""
        return self.found.get("retrieval", {}).get(WHOLE)

    def lines(self, loss: bool = True) -> list[str]:
        """A line for each figure of each corpus, and for what was left out. `loss`: with the line
        of the validation loss.
        """
        lines = []
        for corpus, losses in self.losses.items():
            if loss and "loss" in self.asked.names:
                lines.append(self._of("loss", corpus, losses.line()))
            if "position" in self.asked.names:
                lines.append(self._of("loss", corpus, losses.position_line()))
        for name, part, measured in self._others():
            lines.append(self._of(name, part, measured.line()))
        for name, reason in self.left_out.items():
            lines.append(f"left out           {name}: {reason}")
        return lines

    def scalars(self) -> dict[str, float]:
        """The figures of TensorBoard, without the validation losses."""
        results = list(self._others())
        if "position" in self.asked.names:
            results += [("loss", *one) for one in self.losses.items()]

        found = {}
        for name, part, measured in results:
            several = len(self.found[name]) > 1
            for title, value in measured.scalars().items():
                found[f"{title}/{part}" if several else title] = value
        if any(name.startswith("retrieval") for name in self.left_out):
            found.pop("retrieval/effective_context", None)  # a longer one may be
        return found

    def _others(self) -> Iterator[tuple[str, str, Measured]]:
        """What was measured besides the losses."""
        for name, of_parts in self.found.items():
            if name != "loss":
                for part, measured in of_parts.items():
                    yield name, part, measured

    def _of(self, name: str, part: str, line: str) -> str:
        """The line, with the name of its corpus if there are several."""
        return f"{line}    [{part}]" if len(self.found[name]) > 1 else line


# ---- measuring


class Measures:
    """The chosen measures of corpora, prepared: what is the same for every model is made once.

    What cannot be measured, such as the gain of a context that is too short for one, is left out of
    every report; `require` refuses it.
    """

    def __init__(self, corpora: Sequence[Corpus], asked: Asked):
        self.asked = asked
        self.prepared: dict[str, dict[str, Measure]] = {}
        self.impossible: dict[str, str] = {}
        for name, prepare in PREPARE.items():
            asked_for = name in asked.names or (name == "loss" and "position" in asked.names)
            if not asked_for:
                continue
            try:
                self.prepared[name] = prepare(corpora, asked)
            except ValueError as error:
                self.impossible[name] = str(error)

    def require(self) -> None:
        """ValueError if a measure is impossible."""
        for name, reason in self.impossible.items():
            raise ValueError(f"{name} cannot be measured: {reason}")

    def run(
        self,
        scorer: Scorer,
        *,
        world: dist.World | None = None,
        ranks_per_row: int = 1,
        must_stop: MustStop = lambda: False,
    ) -> Report | None:
        """The report on a model, on all ranks; None if `must_stop()` gave it up."""
        start = time.monotonic()
        found: Found = {}
        for name, of_parts in self.prepared.items():
            for part, measure in of_parts.items():
                measured = measure(
                    scorer, found, world=world, ranks_per_row=ranks_per_row, must_stop=must_stop
                )
                if measured is None:
                    return None
                found.setdefault(name, {})[part] = measured
        if "retrieval" in found:
            found["retrieval"] = _joined(found["retrieval"])
        return Report(self.asked, found, dict(self.impossible), time.monotonic() - start)


# ---- the measures, in their order


def _losses(corpora: Sequence[Corpus], asked: Asked) -> dict[str, Measure]:
    """Validation loss and losses by position, of every corpus. ValueError if none has rows with
    targets.
    """
    prepared = {}
    empty = []
    for corpus in corpora:
        if _validation(corpus, asked) is None:
            continue
        rows = position.Rows(
            corpus.dataset, asked.context_length, asked.rows, asked.seed, asked.documents
        )
        if rows:
            prepared[corpus.name] = functools.partial(_measure_losses, rows)
        else:
            empty.append(rows.loader)
    if not prepared and empty:
        raise ValueError(
            f"none of the {sum(loader.rows_per_epoch for loader in empty):,} validation rows of "
            f"{asked.context_length:,} tokens has a target, because all labels are ignored: give a "
            "longer context, or prepare the data with a larger --val_fraction"
        )
    if not prepared:
        raise ValueError(
            "there are no validation documents, or none that rows are packed from: prepare the "
            "data with --val_fraction"
        )
    return prepared


def _validation(corpus: Corpus, asked: Asked) -> Split | None:
    """The validation documents of a corpus that are read; None if there are none."""
    if "val" not in corpus.dataset.splits:
        return None
    split = corpus.dataset.split("val")
    if asked.documents is None:
        return split
    return split.with_lengths(asked.documents) if split.has(asked.documents) else None


def _measure_losses(
    rows: position.Rows, scorer: Scorer, _found: Found, **where: Any
) -> position.Losses | None:
    return position.measure(scorer, rows, **where)


def _gains(corpora: Sequence[Corpus], asked: Asked) -> dict[str, Measure]:
    """Context gain, of every corpus. ValueError if no document of any is long enough."""
    window = gain.Window.within(asked.context_length)
    prepared = {}
    for corpus in corpora:
        split = _validation(corpus, asked)
        if split is None:
            continue
        sample = gain.sample(split, asked.context_length, window, asked.rows)
        if sample.pieces:
            prepared[corpus.name] = functools.partial(
                _measure_gain, corpus.name, sample, asked.key_tokens
            )
    if not prepared:
        raise ValueError(
            f"no validation document has more than {window.least:,} tokens, so nothing compares a "
            f"context of {window.short:,} with a longer one: leave it out, or measure at a shorter "
            "context or with longer documents"
        )
    return prepared


def _measure_gain(
    corpus: str, sample: gain.Sample, key_tokens: bool, scorer: Scorer, found: Found, **where: Any
) -> gain.Gain | None:
    """With the losses of rows that the pass for the validation loss has scored already."""
    losses = found.get("loss", {}).get(corpus)
    known = losses.of_pieces if losses else None
    return gain.measure(scorer, sample, known=known, key_tokens=key_tokens, **where)


def _retrievals(corpora: Sequence[Corpus], asked: Asked) -> dict[str, Measure]:
    """Retrieval at each length, shortest first. Needles hide in what a synthetic corpus consists
    of, if there is one, otherwise in the validation documents of the first corpus that has some.

    ValueError without a length or text, and for items that do not fit.
    """
    if not asked.lengths:
        raise ValueError(f"no length is at most {asked.context_length:,} tokens: give one that is")
    datasets = [corpus.dataset for corpus in corpora]
    hiding = [one for one in datasets if one.manifest.task is not None]
    hiding += [one for one in datasets if "val" in one.splits]
    if not hiding:
        raise ValueError(
            "needles hide in validation documents, and there are none: prepare the data with "
            "--val_fraction"
        )
    dataset = hiding[0]
    vocabulary = Vocabulary.of_dataset(dataset, asked.vocab_size or dataset.vocab_size)
    prepared = {}
    for length in asked.lengths:
        questions = retrieval.Questions(vocabulary, [length], asked.tasks, asked.items)
        for items in questions.at(length):
            items.require()
        prepared[f"at {length:,}"] = functools.partial(_measure_retrieval, questions)
    return prepared


def _measure_retrieval(
    questions: retrieval.Questions, scorer: Scorer, _found: Found, **where: Any
) -> retrieval.Retrieval | None:
    return retrieval.measure(scorer, questions, **where)


def _joined(of_lengths: dict[str, retrieval.Retrieval]) -> dict[str, retrieval.Retrieval]:
    """All lengths as one result."""
    scores = [score for one in of_lengths.values() for score in one.scores]
    return {WHOLE: retrieval.Retrieval(tuple(scores))}


PREPARE: dict[str, Prepare] = {
    "loss": _losses,
    "gain": _gains,
    "retrieval": _retrievals,
}
