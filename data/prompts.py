"""Prompts and their reference answers: what post-training reads, one document for each row.

In a dataset with a loss mask, a document is a prompt up to the first token that is learned, and the
answer is the first run of learned tokens: what follows it, learned or not, is not read. A document
of data.recall asks many keys, so its prompt ends with the first key and its answer is one value. A
document of any other dataset is a prompt without an answer. The token that ends a document belongs
to neither.

The order is that of the loader: position -> document, a pure function of {seed, epoch, position}.
"""

from typing import NamedTuple

import numpy as np

from data.dataset import Dataset, Split
from data.loader import IGNORE, Batch, Order


class Prompt(NamedTuple):
    """Token ids, int64; the answer is empty if there is none."""

    position: int  # in the order of the run; in a split, the document
    tokens: np.ndarray
    answer: np.ndarray


def read_prompt(dataset: Dataset, split: Split, document: int, position: int) -> Prompt:
    """The prompt of a document and its answer, the first run of learned tokens. ValueError if
    nothing precedes the answer.
    """
    length = int(split.lengths[document])
    tokens = split.read(document, 0, length).astype(np.int64)
    if len(tokens) and tokens[-1] == dataset.eod_id:
        tokens = tokens[:-1]

    end = answer_end = len(tokens)
    if dataset.masked:
        learned = split.learned(document, 0, len(tokens))
        if learned.any():
            end = int(learned.argmax())
            rest = learned[end:]
            answer_end = end + (len(rest) if rest.all() else int(rest.argmin()))

    if end == 0:
        raise ValueError(
            f"document {document} of {split.name} in {dataset.path} has no token before its "
            "answer: prepare the data with prompts of at least one token"
        )
    return Prompt(position, tokens[:end], tokens[end:answer_end])


class Prompts(Order):
    """The prompts of the training split, `global_batch_rows` in each step.

    Raises ValueError for a document without a prompt, for a prompt of more than `longest` tokens
    and for fewer prompts than one step takes.
    """

    def __init__(
        self,
        dataset: Dataset,
        longest: int,
        global_batch_rows: int,
        seed: int = 0,
    ):
        super().__init__(longest, global_batch_rows, seed, dataset.fingerprint)
        self.dataset = dataset
        self.split = dataset.split("train")
        self.rows_per_epoch = self.split.num_documents
        if self.split.num_documents < global_batch_rows:
            raise ValueError(
                f"{dataset.path} has {self.split.num_documents:,} prompts for training, fewer than "
                f"the {global_batch_rows:,} of one step: give fewer prompts for each step"
            )
        require_fitting(dataset, self.split, longest)

    # ---- tokens

    def prompts(self, step: int, rank: int = 0, ranks: int = 1) -> list[Prompt]:
        """One rank's prompts of one step."""
        return [self.prompt(position) for position in self.positions(step, rank, ranks)]

    def prompt(self, position: int) -> Prompt:
        """The prompt at a global position."""
        return read_prompt(self.dataset, self.split, self.row_index(position), position)

    def fill(self, row: Batch, position: int) -> None:
        """The prompt and as much of the answer as fits, padded with ends of documents."""
        prompt, answer = self.prompt(position)[1:]
        ids = np.concatenate([prompt, answer])[: self.context_length]

        row.tokens[:] = self.dataset.eod_id
        row.tokens[: len(ids)] = ids
        row.labels[:] = IGNORE
        row.labels[len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
        row.positions[:] = np.arange(self.context_length)
        row.doc_ids[:] = 0

    # ---- what a user should know

    def summary(self, steps: int) -> list[str]:
        """How many prompts there are, and how often so many steps read them."""
        epochs = steps * self.global_batch_rows / self.split.num_documents
        return [
            f"prompts: {self.split.num_documents:,} for training, {self.global_batch_rows:,} in "
            f"each step, {epochs:.2f} epochs in {steps:,} steps"
        ]


def require_fitting(dataset: Dataset, split: Split, longest: int):
    """ValueError naming a document of a split that has no prompt, or one of more than `longest`
    tokens.

    Of a document that is no longer than `longest`, at most one token is read.
    """
    empty = split.lengths < 2  # nothing but the end of the document
    if dataset.masked:
        empty |= split.begins_learned()
    for document in np.flatnonzero(empty):
        read_prompt(dataset, split, int(document), 0)

    for document in np.flatnonzero(split.lengths > longest):
        tokens = len(read_prompt(dataset, split, int(document), 0).tokens)
        if tokens > longest:
            raise ValueError(
                f"document {document} of {split.name} in {dataset.path} has a prompt of {tokens:,} "
                f"tokens, and the context leaves {longest:,} for it: give a longer "
                "--context_length, or shorter responses"
            )


def require_one_length(dataset: Dataset, split: Split):
    """ValueError naming the first document of a split whose prompt is longer or shorter than that
    of the document before it.
    """
    before = 0
    for document in range(split.num_documents):
        tokens = len(read_prompt(dataset, split, document, document).tokens)
        if document and tokens != before:
            raise ValueError(
                f"document {document} of {split.name} in {dataset.path} has a prompt of {tokens:,} "
                f"tokens, and the one before it {before:,}; prompts of several lengths cannot be "
                "answered in one micro-batch: give --batch_size 1, or prompts of one length"
            )
        before = tokens
