"""What a dataset can teach: `python -m data.report [DIR]`.

Without DIR, that of the embedded corpus.

    documents and tokens        per split, and documents that occur more than once (same ids),
                                also in validation and in training
    lengths                     documents and tokens by the length of their document
    context                     tokens that have at least L tokens of their own document before them
    packing                     what rows of a context length hold: padding, documents cut although
                                they fit, and the share of causal pairs that are inside a document

A line says for which context lengths this is not training at that context. Exit codes: 0 done,
2 bad input, 3 damaged data.
"""

import base.installed  # noqa: F401  (first: a missing package is answered in one line)

import hashlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from base import flags
from data.corpus import prepare_embedded
from data.dataset import Dataset, Split, open_dataset
from data.manifest import IntegrityError
from data.packing import Plan, effective_context, pack

CONTEXTS = tuple(2**power for power in range(10, 21))  # 1k to 1M
PACKED = tuple(2**power for power in range(11, 18))  # 2k to 131k
BAR = 40  # characters of the longest bar


class Packing(NamedTuple):
    """Rows of one context length."""

    context: int
    rows: int
    padding: float  # share of the positions without a token
    needless_cuts: int  # documents that would fit in a row and are in several
    real_pairs: float  # causal pairs inside documents over those of whole rows
    long_share: float  # of the tokens: in pieces of at least half the context
    warning: str | None


class Bucket(NamedTuple):
    """Documents of `low` to 2 * low - 1 tokens."""

    low: int
    documents: int
    tokens: int


# ---- figures


def histogram(lengths: np.ndarray) -> list[Bucket]:
    """The documents by powers of two, without empty buckets at both ends."""
    power = np.log2(lengths).astype(np.int64)
    buckets = []
    for exponent in range(int(power.min()), int(power.max()) + 1):
        inside = lengths[power == exponent]
        buckets.append(Bucket(2**exponent, len(inside), int(inside.sum())))
    return buckets


def share_with_context(lengths: np.ndarray, context: int) -> float:
    """The share of tokens with at least `context` tokens of their own document before them."""
    return float(np.maximum(lengths - context, 0).sum() / lengths.sum())


def packing(lengths: np.ndarray, context: int) -> Packing:
    """What rows of `context` tokens hold of documents of these lengths."""
    plan = pack(lengths, context)
    found = effective_context(lengths, context)
    return Packing(
        context=context,
        rows=plan.num_rows,
        padding=plan.padding(),
        needless_cuts=needless_cuts(plan, lengths),
        real_pairs=real_pairs(plan),
        long_share=found.long_share,
        warning=found.warning,
    )


def real_pairs(plan: Plan) -> float:
    """Causal pairs inside documents over those of rows without borders:
    sum length^2 / (rows * context^2).
    """
    inside = (plan.length.astype(np.float64) ** 2).sum()
    return float(inside / (plan.num_rows * plan.context**2))


def needless_cuts(plan: Plan, lengths: np.ndarray) -> int:
    """Documents that are in more rows than their length needs."""
    pieces = np.bincount(plan.document, minlength=len(lengths))
    return int((pieces > -(-lengths // plan.context)).sum())


def digests(split: Split) -> list[bytes]:
    """A hash of the ids of each document."""
    found = []
    for number, length in enumerate(split.lengths.tolist()):
        ids = np.ascontiguousarray(split.read(number, 0, length))
        found.append(hashlib.blake2b(ids, digest_size=16).digest())
    return found


def duplicates(hashes: list[bytes], lengths: np.ndarray) -> tuple[int, int]:
    """Documents whose ids an earlier document has, and their tokens."""
    seen = set()
    documents = 0
    tokens = 0
    for digest, length in zip(hashes, lengths.tolist(), strict=True):
        if digest in seen:
            documents += 1
            tokens += length
        seen.add(digest)
    return documents, tokens


# ---- text


def report(dataset: Dataset) -> list[str]:
    """All figures in lines."""
    lines = [f"{dataset.path}: vocabulary {dataset.vocab_size:,}, {dataset.dtype.name}"]
    hashes = {name: digests(split) for name, split in dataset.splits.items()}
    for name, split in dataset.splits.items():
        lines.append(_about(split, hashes[name]))
    lines += _in_both_lines(hashes)
    lengths = dataset.split("train").lengths
    lines += ["", *_length_lines(lengths), "", *_context_lines(lengths), ""]
    found = [packing(lengths, context) for context in PACKED]
    lines += _packing_lines(found)
    warnings = [f"warning: {one.warning}" for one in found if one.warning]
    return lines + [""] + warnings if warnings else lines


def _about(split: Split, hashes: list[bytes]) -> str:
    copies, tokens = duplicates(hashes, split.lengths)
    words = (
        f"  {split.name}: {split.num_documents:,} documents, {split.num_tokens:,} tokens, "
        f"{copies:,} documents are copies of others ({tokens / split.num_tokens:.1%} of the tokens)"
    )
    if split.source_bytes:
        words += f", {split.source_bytes / split.num_tokens:.2f} bytes/token"
    return words


def _in_both_lines(hashes: dict[str, list[bytes]]) -> list[str]:
    """How many documents of each other split training sees too."""
    trained = set(hashes["train"])
    lines = []
    for name in hashes:
        if name != "train":
            both = sum(digest in trained for digest in hashes[name])
            lines.append(f"  of {name}, {both:,} documents are also in train")
    return lines


def _length_lines(lengths: np.ndarray) -> list[str]:
    lines = ["tokens of a document   documents   share of tokens"]
    buckets = histogram(lengths)
    most = max(bucket.tokens for bucket in buckets)
    for bucket in buckets:
        share = bucket.tokens / lengths.sum()
        bar = "#" * round(BAR * bucket.tokens / most)
        span = f"{bucket.low:,} to {2 * bucket.low - 1:,}"
        lines.append(f"{span:>21}   {bucket.documents:9,}   {share:6.1%}  {bar}".rstrip())
    return lines


def _context_lines(lengths: np.ndarray) -> list[str]:
    lines = ["at least so many tokens of its document before it   share of tokens"]
    for context in CONTEXTS:
        share = share_with_context(lengths, context)
        bar = "#" * round(BAR * share)
        lines.append(f"{context:>49,}   {share:6.1%}  {bar}".rstrip())
    return lines


def _packing_lines(found: list[Packing]) -> list[str]:
    lines = ["context        rows   padding   needless cuts   real pairs   tokens in long pieces"]
    for one in found:
        lines.append(
            f"{one.context:7,}   {one.rows:9,}   {one.padding:7.2%}   {one.needless_cuts:13,}   "
            f"{one.real_pairs:10.1%}   {one.long_share:21.1%}"
        )
    return lines


# ---- the command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
        dataset = open_dataset(options.data) if options.data else prepare_embedded()
        print("\n".join(report(dataset)))
        return 0
    except ValueError as error:
        print(f"data.report: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, IntegrityError) else 2


def _parser() -> flags.RaisingParser:
    parser = flags.RaisingParser(prog="python -m data.report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "data", nargs="?", help="the folder of a dataset; without it, the embedded corpus"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
