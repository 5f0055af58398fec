"""Documents into rows of `context` tokens: best-fit decreasing, nothing cropped.

Imports nothing of ours. A document longer than the context is split at context boundaries into
whole rows and a rest; rests and shorter documents go, longest first, each into the row with the
least room that still holds it. Every token lands in exactly one row. Within a block of 2^18
documents the plan is a pure function of the lengths.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

BLOCK_DOCUMENTS = 1 << 18
# with less than this share of tokens in documents of half the context, it is long in name only
LONG_SHARE = 0.30


@dataclass(frozen=True)
class Plan:
    """Row r holds the pieces first[r] .. first[r + 1] - 1, in order.

    document, start, length: int64 [pieces]: `length` tokens of `document` from `start`; first:
    int64 [rows + 1].
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
        return list(
            zip(
                self.document[pieces].tolist(),
                self.start[pieces].tolist(),
                self.length[pieces].tolist(),
            )
        )

    def padding(self) -> float:
        """The share of positions that hold no token."""
        return 1 - float(self.length.sum()) / (self.num_rows * self.context)


def pack(lengths: np.ndarray, context: int) -> Plan:
    """Plan the rows for documents of these lengths, int [documents], at `context` tokens per row.

    Raises ValueError unless context and every length are positive.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if context < 1:
        raise ValueError(f"context_length is {context}: give a positive number of tokens")
    if len(lengths) == 0 or lengths.min() < 1:
        raise ValueError(
            "there are no documents to pack, or empty ones: give documents of at least one token"
        )
    blocks = [
        _pack_block(lengths[begin : begin + BLOCK_DOCUMENTS], context, begin)
        for begin in range(0, len(lengths), BLOCK_DOCUMENTS)
    ]
    document, start, length, sizes = (np.concatenate(parts) for parts in zip(*blocks))
    return Plan(context, document, start, length, np.concatenate([[0], np.cumsum(sizes)]))


@dataclass(frozen=True)
class EffectiveContext:
    """What context the tokens really have: quantiles over tokens of the length of their piece, in
    tokens.

    long_share: tokens in pieces of at least half the context; causal_share: sum of length^2 over
    context * tokens, the
    causal pairs inside documents over those of unbroken rows.
    """

    context: int
    p10: int
    p50: int
    p90: int
    long_share: float
    causal_share: float

    @property
    def warning(self) -> str | None:
        """A line to print when the data cannot teach this context, else None."""
        if self.long_share >= LONG_SHARE:
            return None
        return (
            f"only {self.long_share:.0%} of the tokens are in documents of at least half the context "
            f"({self.context // 2} tokens): this is not training at {self.context}; use longer documents "
            "(data.prepare --documents directory joins files) or a shorter --context_length"
        )


def effective_context(lengths: np.ndarray, context: int) -> EffectiveContext:
    """The effective context of documents of these lengths, int [documents], cut at `context`
    tokens.
    """
    whole, rest = np.asarray(lengths) // context, np.asarray(lengths) % context
    pieces = np.sort(np.concatenate([np.full(int(whole.sum()), context), rest[rest > 0]]))
    tokens = np.cumsum(pieces)
    p10, p50, p90 = (int(pieces[tokens.searchsorted(q * tokens[-1])]) for q in (0.1, 0.5, 0.9))
    long_share = float(pieces[pieces * 2 >= context].sum() / tokens[-1])
    causal_share = float((pieces.astype(np.float64) ** 2).sum() / (context * tokens[-1]))
    return EffectiveContext(context, p10, p50, p90, long_share, causal_share)


def _pack_block(lengths: np.ndarray, context: int, offset: int) -> tuple[np.ndarray, ...]:
    """(document, start, length, pieces per row) of one block: the whole rows first, then the packed
    ones.
    """
    whole, rest = lengths // context, lengths % context
    full_document = np.repeat(np.arange(len(lengths)), whole)
    full_start = (
        np.arange(len(full_document)) - np.repeat(np.cumsum(whole) - whole, whole)
    ) * context
    short = np.flatnonzero(rest)
    short = short[np.argsort(-rest[short], kind="stable")]
    row = best_fit(rest[short].tolist(), context)
    order = np.argsort(row, kind="stable")
    short = short[order]
    return (
        np.concatenate([full_document, short]) + offset,
        np.concatenate([full_start, whole[short] * context]),
        np.concatenate([np.full(len(full_document), context), rest[short]]),
        np.concatenate([np.ones(len(full_document), dtype=np.int64), np.bincount(row)]),
    )


def best_fit(lengths: list[int], capacity: int) -> np.ndarray:
    """The row of each item, int64 [items]: the fullest row with room, else a new one; O(log rooms)
    per item.

    Rows with equal room form one stack, so the sorted list that is searched holds different rooms
    only.
    """
    rooms: list[int] = []
    rows_with: dict[int, list[int]] = {}
    row_of, num_rows = np.empty(len(lengths), dtype=np.int64), 0
    for item, length in enumerate(lengths):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room, num_rows = num_rows, capacity, num_rows + 1
        else:
            room = rooms[at]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rows_with[room], rooms[at]
        row_of[item] = row
        if (left := room - length) > 0:
            if left not in rows_with:
                rows_with[left] = []
                insort(rooms, left)
            rows_with[left].append(row)
    return row_of
