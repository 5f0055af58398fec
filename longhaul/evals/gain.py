"""Context gain: how much lower the loss is with the full context than with a short one.

Both losses are of the same tokens of the same documents, in nats per token. For the short one, the
document is read in windows of `short` tokens, each from position 0 as by a model of that context,
and only the last `stride` positions of a window are counted:

    window k = 1, 2, ...      reads the tokens        k stride .. k stride + short - 1
                              counts the positions    (k stride + short - stride) .. its last

So a counted position has read short - stride + 1 to `short` tokens, and every position from
`short` on is counted once. Earlier positions have no longer context to gain from and are not
compared. Position t predicts the token after it.

Letters: T positions of a row, t of a part of it, N positions that are compared, D documents.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.dataset import Split
from longhaul import dist
from longhaul.evals.copies import NGRAM, far_copies
from longhaul.evals.intervals import Interval, bootstrap
from longhaul.evals.score import Item, MustStop, Scorer, Scores, score_all
from model import IGNORE

STRIDE_SHARE = 4  # the stride is this part of the short context
KEY_NATS = 2.0  # alpha and -beta of LongPPL

Place = tuple[int, int]  # document of the split, and the token of it at which a row begins
Ask = Callable[[Sequence[Item]], list[Scores] | None]


@dataclass(frozen=True)
class Window:
    """The short context, and what counts as a far copy."""

    short: int
    stride: int
    ngram: int = NGRAM

    def __post_init__(self):
        if self.short < 1 or self.ngram < 1:
            raise ValueError(
                f"a short context of {self.short} tokens with n-grams of {self.ngram}: give at "
                "least 1 for both"
            )
        if not 1 <= self.stride <= self.short:
            raise ValueError(
                f"a stride of {self.stride} tokens cannot cover a document with windows of "
                f"{self.short}: give 1 to {self.short}"
            )

    @classmethod
    def within(cls, context: int) -> "Window":
        """Half of the context: a gain says that its other half is read. ValueError for a context
        below 8 tokens.
        """
        short = context // 2
        if short < STRIDE_SHARE:
            raise ValueError(
                f"a context of {context} tokens is too short to compare with a shorter one: give "
                f"at least {2 * STRIDE_SHARE}"
            )
        return cls(short, short // STRIDE_SHARE)

    @property
    def least(self) -> int:
        """Positions that a row must have."""
        return self.short + self.stride

    def starts(self, piece: "Piece") -> range:
        """Where the windows of a row begin."""
        end = piece.positions - self.short + self.stride
        return range(self.stride, end, self.stride)

    def first_counted(self, start: int) -> int:
        """The first position that the window from `start` on counts."""
        return start + self.short - self.stride


# ---- which tokens


class Piece(NamedTuple):
    """A row of one document: T positions, and T + 1 tokens, because the last one is predicted."""

    document: int
    start: int
    ids: NDArray  # [T + 1]
    far_copies: NDArray  # bool [T + 1]
    learned: NDArray  # bool [T + 1]: what a masked dataset only lets the model read is not compared

    @property
    def place(self) -> Place:
        """Document, and the token of it at which the row begins."""
        return self.document, self.start

    @property
    def positions(self) -> int:
        """T."""
        return len(self.ids) - 1

    def labels(self, start: int, length: int) -> Tensor:
        """The targets of so many positions from `start` on, fewer at the end."""
        targets = slice(start + 1, start + 1 + length)
        return torch.from_numpy(np.where(self.learned[targets], self.ids[targets], IGNORE))


@dataclass(frozen=True, eq=False)
class Sample:
    """The rows over which context gain is measured, and how many documents are too short for it."""

    window: Window
    pieces: tuple[Piece, ...]
    documents: int  # of the split
    too_short: int  # of them

    @property
    def context(self) -> int:
        """Positions of the longest row; 0 without rows."""
        return max((piece.positions for piece in self.pieces), default=0)


def sample(split: Split, context: int, window: Window, rows: int, seed: int = 0) -> Sample:
    """At most `rows` rows of `context` positions, of as many documents as possible.

    First the beginnings of the documents, the longest first, then what follows these beginnings.
    The seed decides between equal lengths. It is no seed of training: with the same one, all runs
    measure the same tokens. ValueError if the context is no longer than the short one, or rows < 1.
    """
    if rows < 1:
        raise ValueError(f"{rows} rows for the context gain: give at least 1")
    if context < window.least:
        raise ValueError(
            f"a context of {context:,} tokens has nothing to gain on a short one of "
            f"{window.short:,} in steps of {window.stride:,}: give a context of at least "
            f"{window.least:,}, or a shorter short context"
        )

    places = _places(split.lengths, context, window.least, rows, seed)
    return Sample(
        window=window,
        pieces=tuple(_read(split, place, context, window) for place in places),
        documents=split.num_documents,
        too_short=int((split.lengths <= window.least).sum()),
    )


def _places(lengths: NDArray, context: int, least: int, rows: int, seed: int) -> list[Place]:
    """Where the rows begin."""
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    places: list[Place] = []
    for start in range(0, int(lengths.max()), context):
        positions = np.minimum(lengths[shuffled] - 1 - start, context)
        longest_first = np.argsort(-positions, kind="stable")
        enough = longest_first[positions[longest_first] >= least]

        places += [(document, start) for document in shuffled[enough].tolist()]
        if len(places) >= rows or len(enough) == 0:
            break
    return places[:rows]


def _read(split: Split, place: Place, context: int, window: Window) -> Piece:
    document, start = place
    ids = np.array(split.read(document, start, context + 1), dtype=np.int64)
    far = far_copies(ids, window.short, window.ngram)
    learned = split.learned(document, start, context + 1)
    return Piece(document, start, ids, far, learned)


# ---- the measure


def measure(
    scorer: Scorer,
    sample: Sample,
    *,
    known: Mapping[Place, NDArray] | None = None,
    key_tokens: bool = False,
    world: dist.World | None = None,
    ranks_per_row: int = 1,
    must_stop: MustStop | None = None,
) -> "Gain | None":
    """The context gain over the rows of `sample`, on all ranks; None if `must_stop()` gave it up.

    known: losses of rows that another pass has scored already (`known_losses`). key_tokens: also
    over the key tokens of LongPPL's rule, loss_short - loss_full > 2 nats and loss_full < 2 nats,
    which this model itself chooses. Source: Fang et al., arXiv 2410.23771 (their short context is
    4,096 tokens).
    """
    ask = functools.partial(
        score_all, scorer, world=world, ranks_per_row=ranks_per_row, must_stop=must_stop
    )
    full_N = _full_losses(sample, known or {}, ask)
    short_N = None if full_N is None else _short_losses(sample, ask)
    if full_N is None or short_N is None:
        return None
    return _gain(sample, full_N, short_N, key_tokens)


def known_losses(
    rows: Iterable[Sequence[tuple[int, int, int]]], scores: Iterable[Scores]
) -> dict[Place, NDArray]:
    """The losses of each piece of packed rows, for `measure`.

    rows: (document, start, length) of the pieces of each row, as data.packing.Plan.row has them;
    scores: of the rows, with all their labels.
    """
    found = {}
    for pieces, of_row in zip(rows, scores, strict=True):
        end = 0
        for document, start, length in pieces:
            begin = end
            end = begin + length
            found[document, start] = of_row.nll_BT[0, begin:end].numpy()
    return found


class Lazy(Sequence[Item]):
    """Items that are made when they are asked for."""

    def __init__(self, makers: Sequence[Callable[[], Item]]):
        self.makers = makers

    def __len__(self) -> int:
        return len(self.makers)

    def __getitem__(self, index: int) -> Item:
        """A new item at each call."""
        return self.makers[index]()


def _full_losses(sample: Sample, known: Mapping[Place, NDArray], ask: Ask) -> NDArray | None:
    """The losses [N] with the full context of the compared positions, piece after piece."""
    first = sample.window.short
    missing = [
        piece for piece in sample.pieces if len(known.get(piece.place, ())) < piece.positions
    ]
    scores = ask(Lazy([functools.partial(_whole_row, piece, first) for piece in missing]))
    if scores is None:
        return None

    found = dict(known)
    for piece, of_piece in zip(missing, scores, strict=True):
        found[piece.place] = of_piece.nll_BT[0].numpy()
    return _joined(found[piece.place][first : piece.positions] for piece in sample.pieces)


def _whole_row(piece: Piece, first: int) -> Item:
    """A row whose positions from `first` on are asked."""
    tokens_T = torch.from_numpy(piece.ids[:-1])
    labels_T = piece.labels(0, piece.positions)
    labels_T[:first] = IGNORE
    return Item(tokens_T[None], labels_T[None])


def _short_losses(sample: Sample, ask: Ask) -> NDArray | None:
    """The losses [N] with the short context of the same positions.

    The windows of all pieces fill batches of about as many tokens as the longest piece has, so that
    they need no more memory than it does.
    """
    window = sample.window
    windows = [(piece, start) for piece in sample.pieces for start in window.starts(piece)]
    at_once = max(1, sample.context // window.short)
    batches = [windows[first : first + at_once] for first in range(0, len(windows), at_once)]
    scores = ask(Lazy([functools.partial(_short_rows, batch, window) for batch in batches]))
    if scores is None:
        return None

    counted = (nll_t for of_batch in scores for nll_t in of_batch.nll_BT[:, -window.stride :])
    kept = []
    for (piece, start), nll_t in zip(windows, counted, strict=True):
        kept.append(nll_t[: piece.positions - window.first_counted(start)].numpy())
    return _joined(kept)


def _short_rows(windows: list[tuple[Piece, int]], window: Window) -> Item:
    """Windows as rows, whose last positions are asked; the end of a document is padded."""
    shape = (len(windows), window.short)
    tokens_BT = torch.zeros(shape, dtype=torch.int64)
    labels_BT = torch.full(shape, IGNORE, dtype=torch.int64)
    for row, (piece, start) in enumerate(windows):
        labels_t = piece.labels(start, window.short)
        tokens_BT[row, : len(labels_t)] = torch.from_numpy(piece.ids[start:][: len(labels_t)])
        labels_BT[row, : len(labels_t)] = labels_t
    labels_BT[:, : -window.stride] = IGNORE
    return Item(tokens_BT, labels_BT)


def _joined(parts: Iterable[NDArray]) -> NDArray:
    """The parts one after the other; empty without parts."""
    return np.concatenate([np.zeros(0), *parts])


# ---- what it found


@dataclass(frozen=True, eq=False)
class Compared:
    """Both losses over one set of tokens, added for each document that has some."""

    documents_D: NDArray  # number in the validation split
    tokens_D: NDArray
    full_D: NDArray  # sums in nats
    short_D: NDArray
    share: float  # of the tokens that were compared

    @property
    def tokens(self) -> int:
        """Tokens of the set."""
        return int(self.tokens_D.sum())

    @property
    def full(self) -> float:
        """Mean loss with the full context; NaN without tokens."""
        return self._mean(self.full_D)

    @property
    def short(self) -> float:
        """Mean loss with the short context; NaN without tokens."""
        return self._mean(self.short_D)

    @property
    def gain(self) -> float:
        """Mean of loss with the short context - loss with the full one; NaN without tokens."""
        return self._mean(self.gained_D)

    @property
    def gain_D(self) -> NDArray:
        """The gain of each document."""
        return self.gained_D / self.tokens_D

    @cached_property
    def gained_D(self) -> NDArray:
        """Loss with the short context - loss with the full one, in nats, added for each document.

        NaN for a model that has diverged: infinity - infinity is no warning of ours.
        """
        with np.errstate(invalid="ignore"):
            return self.short_D - self.full_D

    @cached_property
    def interval(self) -> Interval:
        """Of the gain, when documents are drawn; NaN below two documents."""
        return bootstrap(self.gain_D, self.tokens_D)

    def _mean(self, sums_D: NDArray) -> float:
        return float(sums_D.sum() / self.tokens) if self.tokens else math.nan

    def record(self) -> dict:
        """The set for JSON; None where nothing is known."""
        return {
            "gain": _known(self.gain),
            "interval": _known(list(self.interval)),
            "tokens": self.tokens,
            "documents": len(self.documents_D),
            "share": self.share,
            "loss_full": _known(self.full),
            "loss_short": _known(self.short),
        }

    def words(self) -> str:
        """The gain, with half the width of its interval."""
        if not self.tokens:
            return "none"
        return f"{self.gain:.4f}{self.interval.half()}"


@dataclass(frozen=True, eq=False)
class Gain:
    """Context gain over all compared tokens, over the far copies among them, and, if they were
    asked for, over the key tokens that the measured model chose.
    """

    sample: Sample
    all: Compared
    far_copies: Compared
    key_tokens: Compared | None

    @property
    def longppl(self) -> float:
        """exp of the mean loss with the full context over the key tokens; NaN without them.

        In the paper another, strong model chooses them, for all models that are compared.
        """
        return math.nan if self.key_tokens is None else math.exp(self.key_tokens.full)

    def record(self) -> dict:
        """All figures for JSON."""
        window = self.sample.window
        found = {
            "short": window.short,
            "stride": window.stride,
            "ngram": window.ngram,
            "context": self.sample.context,
            "rows": len(self.sample.pieces),
            "documents": self.sample.documents,
            "documents_too_short": self.sample.too_short,
            "all": self.all.record(),
            "far_copies": self.far_copies.record(),
        }
        if self.key_tokens is not None:
            chosen = {"chosen_by": "the measured model", "longppl": _known(self.longppl)}
            found["key_tokens"] = self.key_tokens.record() | chosen
        return found

    def per_document(self) -> dict[str, list]:
        """Tokens and gain of each document, over all tokens and over far copies, for JSON."""
        return {
            "all": _by_document(self.all),
            "far_copies": _by_document(self.far_copies),
        }

    def line(self) -> str:
        """The gains in words, with the set of tokens of each."""
        sample = self.sample
        if not sample.pieces:
            return (
                f"context gain       not measured: no document of {sample.documents:,} has more "
                f"than {sample.window.least:,} tokens"
            )

        if not self.all.tokens:
            return "context gain       not measured: no token of these rows is learned"

        words = f"context gain       {sample.window.short:,} -> {sample.context:,}: "
        words += f"{self.all.words()} nats/token ({_documents(self.all)}"
        others = "1 other is" if sample.too_short == 1 else f"{sample.too_short:,} others are"
        words += f", {others} too short)" if sample.too_short else ")"
        words += f"; far copies ({self.far_copies.share:.1%} of tokens) {self.far_copies.words()}"
        words += f"; it reads more than {sample.window.short:,} tokens back: {self.reach()}"
        return words + self._key_words()

    def reach(self) -> str:
        """Whether the model reads further back than the short context. Far copies have their
        passage there and nowhere nearer, so they gain more than other tokens if it does.
        """
        low = self.far_copies.interval.low
        if math.isnan(low):
            return "unknown"
        return "yes" if low > max(self.all.gain, 0) else "not shown"

    def _key_words(self) -> str:
        """The key tokens, and who chose them."""
        key = self.key_tokens
        if key is None:
            return ""
        words = "; key tokens by LongPPL's rule, chosen by this model itself "
        words += f"({key.share:.1%} of tokens) {key.words()}"
        return words if math.isnan(self.longppl) else f"{words}, LongPPL {self.longppl:.3f}"

    def scalars(self) -> dict[str, float]:
        """The gains that are known, by their set."""
        sets = {"all": self.all, "far_copies": self.far_copies, "key_tokens": self.key_tokens}
        return {
            f"gain/{name}": of_set.gain
            for name, of_set in sets.items()
            if of_set is not None and of_set.tokens
        }


def _gain(sample: Sample, full_N: NDArray, short_N: NDArray, key_tokens: bool) -> Gain:
    """The losses of the compared positions, by set and document."""
    first = sample.window.short
    pieces = sample.pieces
    learned_N = _joined(piece.learned[first + 1 :] for piece in pieces).astype(bool)
    far_N = _joined(piece.far_copies[first + 1 :] for piece in pieces).astype(bool)
    document_N = _joined(np.full(piece.positions - first, piece.document) for piece in pieces)

    full_N = full_N[learned_N]
    short_N = short_N[learned_N]
    far_N = far_N[learned_N]
    add = functools.partial(_add, document_N.astype(np.int64)[learned_N], full_N, short_N)

    key = None
    if key_tokens:
        key = add((short_N - full_N > KEY_NATS) & (full_N < KEY_NATS))
    return Gain(sample, add(np.ones_like(far_N)), add(far_N), key)


def _add(document_N: NDArray, full_N: NDArray, short_N: NDArray, chosen_N: NDArray) -> Compared:
    """The sums over the chosen tokens of each document."""
    documents_D, place_n = np.unique(document_N[chosen_N], return_inverse=True)
    return Compared(
        documents_D=documents_D,
        tokens_D=np.bincount(place_n, minlength=len(documents_D)),
        full_D=np.bincount(place_n, full_N[chosen_N], minlength=len(documents_D)),
        short_D=np.bincount(place_n, short_N[chosen_N], minlength=len(documents_D)),
        share=float(chosen_N.mean()) if len(chosen_N) else 0.0,
    )


def _by_document(compared: Compared) -> dict[str, list]:
    return {
        "document": compared.documents_D.tolist(),
        "tokens": compared.tokens_D.tolist(),
        "gain": [_known(gain) for gain in compared.gain_D.tolist()],
    }


def _documents(compared: Compared) -> str:
    count = len(compared.documents_D)
    return f"{count:,} documents" if count > 1 else "1 document, which has no interval"


def _known(value: float | list[float]) -> float | list[float] | None:
    """A figure for JSON, which has neither NaN nor infinity: None for these."""
    return value if np.isfinite(value).all() else None
