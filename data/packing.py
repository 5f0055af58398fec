"""Documents into rows of `context` tokens: best-fit decreasing, and nothing is cropped.

A document that is longer than the context is split at context boundaries, into whole rows and a
remainder. The remainders and the shorter documents go, longest first, each into the row with the
least room that still holds it. Every token lands in exactly one row. The plan is a pure function of
the lengths. Packing 2^18 documents at a time keeps this fast.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CHUNK_DOCUMENTS = 1 << 18
# with a smaller share of tokens in documents of half the context, the context is long in name only
LONG_SHARE = 0.30
# with a larger share of rows without a target, much of the training is in vain
EMPTY_SHARE = 0.10


# ---- the plan


@dataclass(frozen=True)
class Plan:
    """Row r holds the pieces first[r] .. first[r + 1] - 1, in order.

    document, start, length: int64 [pieces]; piece p is `length[p]` tokens of `document[p]` from
    token `start[p]`. first: int64 [rows + 1].
    """

    context: int
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    first: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.first) - 1

    def row(self, r: int) -> list[tuple[int, int, int]]:
        """The pieces of row r as (document, start, length)."""
        pieces = slice(self.first[r], self.first[r + 1])
        documents = self.document[pieces].tolist()
        starts = self.start[pieces].tolist()
        lengths = self.length[pieces].tolist()
        return list(zip(documents, starts, lengths, strict=True))

    def row_sums(self, figures: np.ndarray) -> np.ndarray:
        """The sums [rows] of a figure [pieces] over the pieces of each row."""
        return np.add.reduceat(figures, self.first[:-1])

    def padding(self) -> float:
        """The share of positions that hold no token."""
        tokens = float(self.length.sum())
        return 1 - tokens / (self.num_rows * self.context)


class _Pieces(NamedTuple):
    """Pieces row by row, int64: document, start and length [pieces], pieces per row [rows]."""

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    per_row: np.ndarray


def pack(lengths: np.ndarray, context: int) -> Plan:
    """Plan the rows for documents of these lengths, int [documents], at `context` tokens a row.

    Raises ValueError unless the context and every length are positive.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if context < 1:
        raise ValueError(f"context_length is {context}: give a positive number of tokens")
    if len(lengths) == 0 or lengths.min() < 1:
        raise ValueError(
            "there are no documents to pack, or empty ones: give documents of at least one token"
        )

    chunks = []
    for begin in range(0, len(lengths), CHUNK_DOCUMENTS):
        chunk = _pack_chunk(lengths[begin : begin + CHUNK_DOCUMENTS], context)
        chunks.append(chunk._replace(document=chunk.document + begin))

    per_row = np.concatenate([chunk.per_row for chunk in chunks])
    return Plan(
        context=context,
        document=np.concatenate([chunk.document for chunk in chunks]),
        start=np.concatenate([chunk.start for chunk in chunks]),
        length=np.concatenate([chunk.length for chunk in chunks]),
        first=np.concatenate([[0], np.cumsum(per_row)]),
    )


def _pack_chunk(lengths: np.ndarray, context: int) -> _Pieces:
    """First the rows that a part of one document fills, then the rows that are packed."""
    whole_rows = lengths // context
    rest = lengths % context
    full = _full_rows(whole_rows, context)

    # longest first; the sort is stable, so that equal lengths keep their order
    short = np.flatnonzero(rest)
    short = short[np.argsort(-rest[short], kind="stable")]
    row = best_fit(rest[short].tolist(), context)
    short = short[np.argsort(row, kind="stable")]

    return _Pieces(
        document=np.concatenate([full.document, short]),
        start=np.concatenate([full.start, whole_rows[short] * context]),
        length=np.concatenate([full.length, rest[short]]),
        per_row=np.concatenate([full.per_row, np.bincount(row)]),
    )


def _full_rows(whole_rows: np.ndarray, context: int) -> _Pieces:
    """The rows that one document fills, given how many such rows each document has."""
    document = np.repeat(np.arange(len(whole_rows)), whole_rows)
    rows_before = np.cumsum(whole_rows) - whole_rows
    row_of_document = np.arange(len(document)) - np.repeat(rows_before, whole_rows)
    return _Pieces(
        document=document,
        start=row_of_document * context,
        length=np.full(len(document), context),
        per_row=np.ones(len(document), dtype=np.int64),
    )


def best_fit(lengths: list[int], capacity: int) -> np.ndarray:
    """The row of each item, int64 [items]: the fullest row with enough room, else a new row.

    Rows with equal room share one stack, so the sorted list that is searched holds each amount of
    room once; an item takes O(log amounts).
    """
    rooms: list[int] = []  # ascending
    rows_with: dict[int, list[int]] = {}  # room -> rows
    row_of = np.empty(len(lengths), dtype=np.int64)
    num_rows = 0

    for item, length in enumerate(lengths):
        index = bisect_left(rooms, length)
        if index == len(rooms):
            row = num_rows
            room = capacity
            num_rows += 1
        else:
            room = rooms[index]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rows_with[room]
                del rooms[index]
        row_of[item] = row

        left = room - length
        if left > 0:
            if left not in rows_with:
                rows_with[left] = []
                insort(rooms, left)
            rows_with[left].append(row)
    return row_of


# ---- how long the context really is


@dataclass(frozen=True)
class EffectiveContext:
    """What context the tokens really have, once documents are cut at `context` tokens.

    p10, p50, p90: quantiles over tokens of the length of their piece, in tokens; long_share: the
    share of tokens in pieces of at least half the context; causal_share: the causal pairs inside
    documents over those of unbroken rows, sum of length^2 / (context * tokens).
    """

    context: int
    p10: int
    p50: int
    p90: int
    long_share: float
    causal_share: float

    @property
    def warning(self) -> str | None:
        """A line to print if the data cannot teach this context, else None."""
        return too_short(self.long_share, self.context)


def too_short(long_share: float, context: int) -> str | None:
    """A line to print if too few tokens are in documents of half the context, else None."""
    if long_share >= LONG_SHARE:
        return None
    return (
        f"only {long_share:.0%} of the tokens are in documents of at least half the "
        f"context ({context // 2} tokens): this is not training at {context}; use "
        "longer documents (data.prepare --documents directory joins files) or a shorter "
        "--context_length"
    )


def too_few_targets(targets: np.ndarray, lengths: np.ndarray, context: int) -> str | None:
    """A line to print if many rows teach nothing, else None.

    targets: of each row; lengths: of the documents that the rows are packed from.
    """
    empty = int((targets == 0).sum())
    share = empty / len(targets)
    if share < EMPTY_SHARE:
        return None

    shortest, longest = int(lengths.min()), int(lengths.max())
    remedy = "prepare the data without documents that have no learned token"
    if longest > context:
        remedy = (
            f"give a longer --context_length (documents have {shortest:,} to {longest:,} tokens)"
        )
        remedy += ", or" if shortest <= context else ", with or without"
        remedy += " --whole_documents, which reads only documents that fit into a row"
    return (
        f"{empty:,} of {len(targets):,} rows of {context:,} tokens ({share:.0%}) have no target, "
        f"because all of their labels are ignored, so they teach nothing: {remedy}"
    )


def effective_context(lengths: np.ndarray, context: int) -> EffectiveContext:
    """The effective context of documents of these lengths, int [documents]."""
    lengths = np.asarray(lengths)
    whole_rows = int((lengths // context).sum())
    rest = lengths % context
    pieces = np.sort(np.concatenate([np.full(whole_rows, context), rest[rest > 0]]))

    tokens = np.cumsum(pieces)
    total = tokens[-1]
    p10, p50, p90 = (int(pieces[tokens.searchsorted(q * total)]) for q in (0.1, 0.5, 0.9))

    long_tokens = pieces[pieces * 2 >= context].sum()
    pairs = (pieces.astype(np.float64) ** 2).sum()
    return EffectiveContext(
        context=context,
        p10=p10,
        p50=p50,
        p90=p90,
        long_share=float(long_tokens / total),
        causal_share=float(pairs / (context * total)),
    )
