"""Validation loss, and how it falls with the context that was read: one pass over validation rows.

A position is counted in its piece of a document, because the model sees nothing before the piece.
At position p the model has read p + 1 tokens and predicts the next one. Buckets are powers of two,
the same ones at every context length; the first holds the positions below FLOOR.
Letters: D documents, E buckets, T tokens of a row, N tokens with a label.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from data.dataset import Dataset
from data.loader import Loader
from longhaul import dist
from longhaul.evals.gain import Place, known_losses
from longhaul.evals.intervals import Interval, bootstrap
from longhaul.evals.score import Item, MustStop, Scorer, Scores, score_all
from model import IGNORE

FLOOR = 16  # every document has one token at each position, so smaller buckets say little
SHOWN = 8  # buckets of the line on screen: the first ones are merged until so many are left


class Rows(Sequence[Item]):
    """The first `count` rows of a dataset's validation split that have a target, read when they are
    asked for; with `lengths`, only of the documents of so many tokens.

    The rows depend on the context length and the seed only, not on the number of ranks.
    """

    def __init__(
        self,
        dataset: Dataset,
        context_length: int,
        count: int,
        seed: int = 0,
        lengths: range | None = None,
    ):
        self.loader = Loader(dataset, context_length, 1, seed=seed, split="val", lengths=lengths)
        self.context_length = context_length
        self.places = list(itertools.islice(self._with_targets(), count))

    def _with_targets(self) -> Iterator[int]:
        """The positions of the rows that have a target."""
        for position in range(self.loader.rows_per_epoch):
            if self.loader.row_targets[self.loader.row_index(position)]:
                yield position

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Item:
        """A row of packed documents as the model takes it."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        batch = self.loader.rows([self.places[index]])
        return Item(*(torch.from_numpy(part) for part in batch))

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """(document of the split, its first token, number of tokens) of each piece of a row."""
        return self.loader.plan.row(self.loader.row_index(self.places[index]))

    def documents(self, index: int) -> NDArray:
        """The document of the split of each token of a row, without its padding: int64 [T]."""
        pieces = self.pieces(index)
        documents = [document for document, _, _ in pieces]
        lengths = [length for _, _, length in pieces]
        return np.repeat(documents, lengths)


# ---- the measure


def measure(
    scorer: Scorer,
    rows: Rows,
    *,
    world: dist.World | None = None,
    ranks_per_row: int = 1,
    must_stop: MustStop | None = None,
) -> "Losses | None":
    """The losses of all tokens of `rows`, on all ranks; None if `must_stop()` gave it up."""
    scores = score_all(scorer, rows, world=world, ranks_per_row=ranks_per_row, must_stop=must_stop)
    return None if scores is None else summed(rows, scores)


def summed(rows: Rows, scores: Sequence[Scores]) -> "Losses":
    """The scores of `rows`, added for each document and bucket."""
    edges = bucket_edges(rows.context_length)
    pieces = [piece for index in range(len(rows)) for piece in rows.pieces(index)]
    documents_D = np.unique([document for document, _, _ in pieces])
    sums_DE = np.zeros((len(documents_D), len(edges)))
    counts_DE = np.zeros(sums_DE.shape, np.int64)

    # row after row: a token takes 8 bytes of losses until here, and places of all would take 40
    for index, of_row in enumerate(scores):
        row = rows[index]
        documents_t = rows.documents(index)
        asked_t = (row.labels_BT[0] != IGNORE).numpy()[: len(documents_t)]

        place_t = np.searchsorted(documents_D, documents_t[asked_t])
        position_t = row.positions[0].numpy()[: len(documents_t)]
        bucket_t = np.searchsorted(edges, position_t[asked_t], side="right") - 1
        nll_t = of_row.nll_BT[0].numpy()[: len(documents_t)]
        np.add.at(sums_DE, (place_t, bucket_t), nll_t[asked_t])
        np.add.at(counts_DE, (place_t, bucket_t), 1)

    asked_D = counts_DE.any(1)
    return Losses(
        first_E=edges,
        documents_D=documents_D[asked_D],
        sums_DE=sums_DE[asked_D],
        counts_DE=counts_DE[asked_D],
        of_pieces=known_losses(map(rows.pieces, range(len(rows))), scores),
        bits_per_nat=rows.loader.split.bits_per_byte(1.0),
        unigram_entropy=rows.loader.split.unigram_entropy,
    )


def bucket_edges(context_length: int) -> NDArray:
    """The first position of each bucket: 0, FLOOR, 2 FLOOR, ... below the context length."""
    edges = [0]
    edge = FLOOR
    while edge < context_length:
        edges.append(edge)
        edge *= 2
    return np.array(edges)


# ---- what it found


@dataclass(frozen=True)
class Bucket:
    """The mean loss of the tokens at positions first .. last - 1, in nats."""

    first: int
    last: int
    loss: float
    tokens: int
    documents: int
    interval: Interval

    @property
    def name(self) -> str:
        """Such as 512-1k."""
        return f"{in_words(self.first)}-{in_words(self.last)}"


@dataclass(frozen=True, eq=False)
class Losses:
    """The sums of a corpus from which its validation loss and all losses by position follow.

    loss = sum of sums / sum of counts, and the loss of a bucket or of a document is the same over
    its column or row. So buckets weighted by their counts are the loss, but for rounding.
    Intervals are those of the bootstrap over documents.
    """

    first_E: NDArray  # first position of each bucket
    documents_D: NDArray  # number in the validation split
    sums_DE: NDArray  # nats
    counts_DE: NDArray  # tokens with a label
    of_pieces: dict[Place, NDArray]  # of every token, by the place of its piece: gain asks again
    bits_per_nat: float  # bits per byte of a loss of 1 nat; NaN if the bytes are unknown
    unigram_entropy: float  # of the split, in nats

    @property
    def tokens(self) -> int:
        """Tokens with a label."""
        return int(self.counts_DE.sum())

    @property
    def loss(self) -> float:
        """The validation loss in nats per token."""
        return float(self.sums_DE.sum() / self.tokens)

    @cached_property
    def interval(self) -> Interval:
        """Of the validation loss."""
        return _interval(self.sums_DE.sum(1), self.counts_DE.sum(1))

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Those that have a token."""
        return self._buckets(merged=1)

    def _buckets(self, merged: int) -> tuple[Bucket, ...]:
        """The buckets, the first `merged` of them as one."""
        starts = [0, *range(merged, len(self.first_E))]
        first_E = self.first_E[starts]
        last_E = np.append(first_E[1:], max(FLOOR, 2 * self.first_E[-1]))
        sums_ED = np.add.reduceat(self.sums_DE, starts, axis=1).T
        counts_ED = np.add.reduceat(self.counts_DE, starts, axis=1).T

        found = []
        for first, last, sums_D, counts_D in zip(first_E, last_E, sums_ED, counts_ED, strict=True):
            if counts_D.any():
                found.append(_bucket(int(first), int(last), sums_D, counts_D))
        return tuple(found)

    # ---- reports

    def record(self) -> dict:
        """The loss and its buckets for JSON."""
        return {
            "loss": _number(self.loss),
            "interval": _pair(self.interval),
            "tokens": self.tokens,
            "documents": len(self.documents_D),
            "bits_per_byte": _number(self.loss * self.bits_per_nat),
            "unigram_entropy": self.unigram_entropy,
            "by_position": [
                {
                    "first": bucket.first,
                    "last": bucket.last,
                    "loss": bucket.loss,
                    "interval": _pair(bucket.interval),
                    "tokens": bucket.tokens,
                    "documents": bucket.documents,
                }
                for bucket in self.buckets
            ],
        }

    def per_document(self) -> dict[str, list]:
        """The documents of the validation split with their tokens and losses, for JSON."""
        counts_D = self.counts_DE.sum(1)
        losses_D = self.sums_DE.sum(1) / counts_D
        return {
            "document": self.documents_D.tolist(),
            "tokens": counts_D.tolist(),
            "loss": losses_D.tolist(),
        }

    def line(self) -> str:
        """The validation loss with what to compare it with."""
        documents = len(self.documents_D)
        counted = "1 document" if documents == 1 else f"{documents:,} documents"
        words = f"{self.loss:.4f}{self.interval.half()} nats/token ({counted}), "
        words += f"perplexity {np.exp(self.loss):.2f}"
        if not math.isnan(self.bits_per_nat):
            words += f", bits per byte {self.loss * self.bits_per_nat:.4f}"
        return f"validation loss    {words}    [unigram entropy {self.unigram_entropy:.2f}]"

    def position_line(self) -> str:
        """The loss of each bucket, of which the first ones are merged."""
        merged = max(1, len(self.first_E) - SHOWN + 1)
        found = [f"{bucket.name} {bucket.loss:.3f}" for bucket in self._buckets(merged)]
        return f"by position        {' | '.join(found)}"

    def scalars(self) -> dict[str, float]:
        """The loss of each bucket under its name."""
        return {f"position/{bucket.name}": bucket.loss for bucket in self.buckets}


def _bucket(first: int, last: int, sums_D: NDArray, counts_D: NDArray) -> Bucket:
    return Bucket(
        first=first,
        last=last,
        loss=float(sums_D.sum() / counts_D.sum()),
        tokens=int(counts_D.sum()),
        documents=int((counts_D > 0).sum()),
        interval=_interval(sums_D, counts_D),
    )


def _interval(sums_D: NDArray, counts_D: NDArray) -> Interval:
    """Of the mean over all tokens, when documents are drawn."""
    return bootstrap(sums_D / np.maximum(counts_D, 1), counts_D)


def _number(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return value if math.isfinite(value) else None


def _pair(interval: Interval) -> list[float] | None:
    """For JSON; None if it is not known."""
    return None if math.isnan(interval.low) else list(interval)


def in_words(tokens: int) -> str:
    """1024 as 1k."""
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)
