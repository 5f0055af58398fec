"""Position -> batch, as a pure function of {seed, epoch, position}: no workers, no hidden state.

Imports data.shards, data.packing, data.order. Letters: R rows, T context length, B rows of the
global batch. The global batch of step s is the positions [s * B, (s + 1) * B); position p is in
epoch p // rows, and `permute` names its row of the packing plan. A rank takes a contiguous slice of
the positions, so the order ignores the world size. Positions may be left out (`skip`): steps then
count those that remain.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.dataset import Dataset
from data.order import Ranges, around, before, permute
from data.packing import EffectiveContext, Plan, effective_context, pack

IGNORE = -100


class Batch(NamedTuple):
    """Rows of a batch, numpy arrays.

    tokens [R,T] int64; labels [R,T] int64: the next token of the same document (also across the cut
    of a document longer than T), -100 where there is none; positions [R,T] int64, from 0 in every
    piece; doc_ids [R,T] int32, rising from 0 in every row, the padding at the end of a row counting
    as a piece of its own; num_valid: labels that are not -100.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    doc_ids: np.ndarray
    num_valid: int


class Loader:
    """The rows of one split at one context length, in the order of `seed`, without the global
    positions in `skip`.

    Raises ValueError when the split has fewer rows than one global batch, naming what would work.
    """

    def __init__(
        self,
        dataset: Dataset,
        context_length: int,
        global_batch_rows: int,
        seed: int = 0,
        split: str = "train",
        skip: Ranges = (),
    ):
        if global_batch_rows < 1:
            raise ValueError(
                f"the global batch is {global_batch_rows} rows: give a positive number"
            )
        self.dataset, self.split = dataset, dataset.split(split)
        self.context_length, self.global_batch_rows, self.seed = (
            context_length,
            global_batch_rows,
            seed,
        )
        self.skip = skip
        self.plan: Plan = pack(self.split.lengths, context_length)
        if self.rows_per_epoch < global_batch_rows:
            raise ValueError(self._too_small())

    @property
    def rows_per_epoch(self) -> int:
        """Rows in one pass over the split."""
        return self.plan.num_rows

    def state(self, step: int, skip: Ranges | None = None) -> dict:
        """Where step `step` begins, for a checkpoint: {seed, epoch, position}, position within the
        epoch, and what is left out.

        skip: in the order without these rows, rather than this loader's.
        """
        skip = self.skip if skip is None else skip
        epoch, position = divmod(around(step * self.global_batch_rows, skip), self.rows_per_epoch)
        return {"seed": self.seed, "epoch": epoch, "position": position} | (
            {"skip": list(map(list, skip))} if skip else {}
        )

    def step(self, state: dict) -> int:
        """The step that begins at `state`. Raises ValueError when none does (another seed, data or
        batch size).
        """
        position = state["epoch"] * self.rows_per_epoch + state["position"]
        index = position - sum(end - begin for begin, end in before(self.skip, position))
        if state["seed"] != self.seed or index % self.global_batch_rows:
            raise ValueError(
                f"the data state {state} is not at a step of this run (seed {self.seed}, global batch "
                f"{self.global_batch_rows} rows): resume with the seed and global batch of that run"
            )
        return index // self.global_batch_rows

    def positions(self, step: int, rank: int = 0, world_size: int = 1) -> Sequence[int]:
        """The global positions of one rank in one step. Raises ValueError unless world_size divides
        the batch.
        """
        if self.global_batch_rows % world_size:
            valid = [
                n for n in range(1, self.global_batch_rows + 1) if self.global_batch_rows % n == 0
            ]
            raise ValueError(
                f"a global batch of {self.global_batch_rows} rows does not divide over {world_size} ranks: "
                f"allowed are {', '.join(map(str, valid))} ranks"
            )
        share = self.global_batch_rows // world_size
        begin = step * self.global_batch_rows + rank * share
        indices = range(begin, begin + share)
        return [around(index, self.skip) for index in indices] if self.skip else indices

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """One rank's rows of one step."""
        return self.rows(self.positions(step, rank, world_size))

    def rows(self, positions: Sequence[int]) -> Batch:
        """The rows at global positions (any number of epochs on), in that order."""
        shape = (len(positions), self.context_length)
        batch = Batch(
            np.empty(shape, np.int64),
            np.empty(shape, np.int64),
            np.empty(shape, np.int64),
            np.empty(shape, np.int32),
            0,
        )
        for r, position in enumerate(positions):
            self._fill(self.row_index(position), *(part[r] for part in batch[:4]))
        if batch.tokens.size and batch.tokens.max() >= self.dataset.vocab_size:
            self.dataset.require_ids_in_vocab()
        return batch._replace(num_valid=int(np.count_nonzero(batch.labels != IGNORE)))

    def row_index(self, position: int) -> int:
        """The row of the plan at a global position."""
        epoch, inside = divmod(position, self.rows_per_epoch)
        return permute(self.seed, epoch, self.rows_per_epoch, inside)

    def effective_context(self) -> EffectiveContext:
        """How much context the tokens of this split really have at this context length."""
        return effective_context(self.split.lengths, self.context_length)

    def _fill(
        self,
        row: int,
        tokens: np.ndarray,
        labels: np.ndarray,
        positions: np.ndarray,
        doc_ids: np.ndarray,
    ) -> None:
        """Write one row in place; each array is [T]."""
        end = 0
        starts = []
        for document, start, length in self.plan.row(row):
            begin, end = end, end + length
            starts.append(begin)
            ids = self.split.read(document, start, length + 1)
            tokens[begin:end] = ids[:length]
            labels[begin : begin + len(ids) - 1] = ids[1:]
            if len(ids) == length:  # the document ends here: no next token
                labels[end - 1] = IGNORE
        if end < self.context_length:
            starts.append(end)
            tokens[end:], labels[end:] = self.dataset.eod_id, IGNORE
        lengths = np.diff(starts, append=self.context_length)
        positions[:] = np.arange(self.context_length) - np.repeat(starts, lengths)
        doc_ids[:] = np.repeat(np.arange(len(starts)), lengths)

    def _too_small(self) -> str:
        rows, wanted, lengths = self.rows_per_epoch, self.global_batch_rows, self.split.lengths
        context = self.context_length
        while context > 1 and pack(lengths, context).num_rows < wanted:
            context //= 2
        shorter = (
            f"--context_length {context} (with this batch)"
            if context > 1
            else "a corpus with more text"
        )
        return (
            f"the {self.split.name} split of {self.dataset.path} has {self.split.num_tokens} tokens: {rows} rows of "
            f"{self.context_length}, fewer than one global batch of {wanted}: use a global batch of at most {rows} "
            f"rows, or {shorter}, or more text"
        )
