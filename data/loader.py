"""Position -> batch, as a pure function of {seed, epoch, position}: no workers, no hidden state.

T is the context length. The global batch of step s is the positions [s * rows, (s + 1) * rows).
Position p is in epoch p // rows_per_epoch, and `permute` names its row of the packing plan. A rank
takes a contiguous slice of the positions, so the order does not depend on the number of ranks.
Positions may be skipped (`skip`): steps then count those that remain.

An `Order` says which positions a step has; a `Loader` reads the rows of one corpus at them, and
data/mixture.py those of several.
"""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.dataset import Dataset
from data.order import Ranges, permute, remaining_position
from data.packing import EffectiveContext, Plan, effective_context, pack, too_few_targets

IGNORE = -100


class Batch(NamedTuple):
    """Rows of a batch, numpy arrays [rows, T].

    tokens: int64
    labels: int64, the next token of the same document, also across the cut of a document longer
            than T; -100 if there is none, or if it is not learned (data/storage.py)
    positions: int64, from 0 in every piece
    doc_ids: int32, rising from 0 in every row; the padding at the end of a row is its own piece
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    doc_ids: np.ndarray


class Order(ABC):
    """The positions of each step, and what is read at them.

    Attributes: context_length (T), global_batch_rows, seed, skip (the positions that are left out),
    fingerprint (SHA-256 of the data), and rows_per_epoch, unless `place` and `row_index` are its
    own. Raises ValueError for a batch without rows.
    """

    rows_per_epoch: int

    def __init__(
        self,
        context_length: int,
        global_batch_rows: int,
        seed: int,
        fingerprint: str,
    ):
        if global_batch_rows < 1:
            raise ValueError(
                f"the global batch is {global_batch_rows} rows: give a positive number"
            )
        self.context_length = context_length
        self.global_batch_rows = global_batch_rows
        self.seed = seed
        self.skip: Ranges = ()
        self.fingerprint = fingerprint

    # ---- order

    def without(self, skip: Ranges) -> "Order":
        """The same order without the positions in `skip`, instead of those in its own."""
        other = copy.copy(self)
        other.skip = skip
        return other

    def first_position(self, step: int) -> int:
        """The position at which a step begins."""
        return remaining_position(step * self.global_batch_rows, self.skip)

    def state(self, step: int) -> dict:
        """Where step `step` begins, for a checkpoint, with "skip" if positions are skipped."""
        state = {"seed": self.seed, **self.place(self.first_position(step))}
        if self.skip:
            state["skip"] = [list(span) for span in self.skip]
        return state

    def place(self, position: int) -> dict:
        """A global position, as a state has it: {epoch, position in the epoch}."""
        epoch, position_in_epoch = divmod(position, self.rows_per_epoch)
        return {"epoch": epoch, "position": position_in_epoch}

    def positions(self, step: int, rank: int = 0, world_size: int = 1) -> Sequence[int]:
        """The global positions of one rank in one step.

        Raises ValueError unless world_size divides the global batch.
        """
        rows = self.global_batch_rows
        if rows % world_size:
            allowed = [str(n) for n in range(1, rows + 1) if rows % n == 0]
            raise ValueError(
                f"a global batch of {rows} rows does not divide over {world_size} ranks: "
                f"allowed are {', '.join(allowed)} ranks"
            )

        share = rows // world_size
        begin = step * rows + rank * share
        indices = range(begin, begin + share)
        if not self.skip:
            return indices
        return [remaining_position(index, self.skip) for index in indices]

    def row_index(self, position: int) -> int | tuple[str, int]:
        """The row of the plan at a global position; for a mixture, with the name of its corpus."""
        epoch, position_in_epoch = divmod(position, self.rows_per_epoch)
        return permute(self.seed, epoch, self.rows_per_epoch, position_in_epoch)

    def tokens_seen(self, step: int) -> dict[str, int]:
        """Tokens of each corpus before a step, padding included; empty if there is only one."""
        return {}

    # ---- tokens

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """One rank's rows of one step."""
        return self.rows(self.positions(step, rank, world_size))

    def rows(self, positions: Sequence[int]) -> Batch:
        """The rows at these global positions of any epoch, in this order."""
        shape = (len(positions), self.context_length)
        batch = Batch(
            tokens=np.empty(shape, np.int64),
            labels=np.empty(shape, np.int64),
            positions=np.empty(shape, np.int64),
            doc_ids=np.empty(shape, np.int32),
        )
        for r, position in enumerate(positions):
            self.fill(Batch(*(part[r] for part in batch)), position)
        return batch

    @abstractmethod
    def fill(self, row: Batch, position: int) -> None:
        """Write the row at a global position into the arrays [T] of `row`."""

    # ---- what a user should know

    @abstractmethod
    def summary(self, steps: int) -> list[str]:
        """What the data is, and how much of it so many steps read, in lines."""

    def warnings(self) -> list[str]:
        """What a user should be warned of, in lines."""
        return []


class Loader(Order):
    """The rows of one split at one context length, in the order of `seed`; with `lengths`, only the
    documents of so many tokens.

    Raises ValueError if the split has fewer rows than one global batch, naming what would work.
    """

    def __init__(
        self,
        dataset: Dataset,
        context_length: int,
        global_batch_rows: int,
        seed: int = 0,
        split: str = "train",
        lengths: range | None = None,
    ):
        super().__init__(context_length, global_batch_rows, seed, dataset.fingerprint)
        self.dataset = dataset
        self.split = dataset.split(split)
        if lengths is not None:
            self.split = self.split.with_lengths(lengths)

        self.plan: Plan = pack(self.split.lengths, context_length)
        self.rows_per_epoch = self.plan.num_rows
        if self.rows_per_epoch < global_batch_rows:
            raise ValueError(self._explain_too_few_rows())

    # ---- tokens

    def fill(self, row: Batch, position: int) -> None:
        """Write the row at a global position into the arrays [T] of `row`."""
        starts = []
        end = 0
        for document, start, length in self.plan.row(self.row_index(position)):
            begin = end
            end = begin + length
            starts.append(begin)

            ids = self.split.read(document, start, length + 1)
            row.tokens[begin:end] = ids[:length]
            row.labels[begin : begin + len(ids) - 1] = ids[1:]
            if len(ids) == length:  # the document ends here: there is no next token
                row.labels[end - 1] = IGNORE
            if self.dataset.masked:
                learned = self.split.learned(document, start + 1, length)
                row.labels[begin : begin + len(learned)][~learned] = IGNORE

        if end < self.context_length:
            starts.append(end)
            row.tokens[end:] = self.dataset.eod_id
            row.labels[end:] = IGNORE

        lengths = np.diff(starts, append=self.context_length)
        row.positions[:] = np.arange(self.context_length) - np.repeat(starts, lengths)
        row.doc_ids[:] = np.repeat(np.arange(len(starts)), lengths)

    # ---- what a user should know

    @functools.cached_property
    def row_targets(self) -> np.ndarray:
        """How many labels of each row of the plan are not -100, int64 [rows]."""
        plan = self.plan
        return plan.row_sums(self.split.count_targets(plan.document, plan.start, plan.length))

    def targets_in_words(self) -> str:
        """The targets, with a semicolon before them; nothing if all tokens are learned, and every
        row has some.
        """
        empty = int((self.row_targets == 0).sum())
        if not (self.dataset.masked or empty):
            return ""
        words = f"; {self.row_targets.sum():,} tokens are targets of the loss"
        return f"{words}, no targets in {empty:,} rows" if empty else words

    def target_warning(self) -> str | None:
        """A line to print if many rows have no target, else None."""
        return too_few_targets(self.row_targets, self.split.lengths, self.context_length)

    def effective_context(self) -> EffectiveContext:
        """How much context the tokens of this split really have at this context length."""
        return effective_context(self.split.lengths, self.context_length)

    def summary(self, steps: int) -> list[str]:
        """One line, as for any number of steps."""
        context = self.effective_context()
        return [
            f"data: {self.split.num_tokens:,} tokens, {self.rows_per_epoch:,} rows of "
            f"{self.context_length:,}, half of the tokens in pieces of {context.p50:,} or more; "
            f"unigram entropy {self.split.unigram_entropy:.3f} nats{self.targets_in_words()}"
        ]

    def warnings(self) -> list[str]:
        """Whether the data cannot teach this context, and whether many rows teach nothing."""
        found = (self.effective_context().warning, self.target_warning())
        return [warning for warning in found if warning]

    def _explain_too_few_rows(self) -> str:
        rows = self.rows_per_epoch
        wanted = self.global_batch_rows

        context = self.context_length
        while context > 1 and pack(self.split.lengths, context).num_rows < wanted:
            context //= 2
        if context > 1:
            remedy = f"--context_length {context} (with this batch)"
        else:
            remedy = f"a shorter context than {self.context_length}"

        return (
            f"the {self.split.name} split of {self.dataset.path} has {self.split.num_tokens} "
            f"tokens: {rows} rows of {self.context_length}, fewer than one global batch of "
            f"{wanted}: use a global batch of at most {rows} rows, or {remedy}, or more text"
        )
