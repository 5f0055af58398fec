"""What a dataset can teach: `python -m data.report [DIR]`.

Without DIR, that of the embedded corpus.

    documents and tokens        per split, and documents that occur more than once (same ids),
                                also in validation and in training
    context                     documents that are as long, tokens that have as many of their own
                                document before them, and what rows of that length hold: padding,
                                the share of causal pairs that are inside a document, and the
                                length of piece that half of the tokens have at least
    targets                     of a dataset with a loss mask: the learned tokens, and for rows of
                                each length how many have none

A line says for which context lengths this is not training at that context, and at which many rows
teach nothing. Exit codes: 0 done,
2 bad input, 3 damaged data.
"""

import base.installed  # noqa: F401  (first: a missing package is answered in one line)

import hashlib
import sys
from collections.abc import Sequence

import numpy as np

from base import flags
from data.commands import exit_code
from data.corpus import prepare_embedded
from data.dataset import Dataset, Split, open_dataset
from data.losses import Losses
from data.packing import effective_context, pack, too_few_targets

CONTEXTS = tuple(2**power for power in range(10, 21))  # 1k to 1M
PACKED = 2**17  # the longest rows that are packed


def summary(dataset: Dataset) -> list[str]:
    """The splits of a dataset, a line for each."""
    lines = [f"{dataset.path}: vocabulary {dataset.vocab_size:,}, {dataset.dtype.name}"]
    for name, split in dataset.splits.items():
        words = f"  {name}: {split.num_documents:,} documents, {split.num_tokens:,} tokens, "
        if split.source_bytes:
            words += f"{split.source_bytes / split.num_tokens:.2f} bytes/token, "
        words += targets_in_words(split)
        lines.append(f"{words}unigram entropy {split.unigram_entropy:.3f} nats/token")
    return lines + Losses(**dataset.manifest.losses or {}).lines()


def targets_in_words(split: Split) -> str:
    """The targets of a split, with a comma behind them; nothing if all tokens are learned, and
    every document has some.
    """
    targets = split.document_targets()
    empty = int((targets == 0).sum())
    if not (split.masked or empty):
        return ""
    none = f" (none in {empty:,} of the documents)" if empty else ""
    return f"{targets.sum():,} of these are targets of the loss{none}, "


def share_with_context(lengths: np.ndarray, context: int) -> float:
    """The share of tokens with at least `context` tokens of their own document before them."""
    return float(np.maximum(lengths - context, 0).sum() / lengths.sum())


def contexts(lengths: np.ndarray) -> list[str]:
    """For each context what documents of these lengths have; of those up to 131k, what rows hold,
    and a warning if this is not training at that context.
    """
    lines = [
        "  context   documents   tokens after as many      rows   padding   real pairs   half in"
    ]
    warnings = []
    for context in CONTEXTS:
        long_enough = (lengths >= context).sum()
        share = share_with_context(lengths, context)
        line = f"{context:9,}   {long_enough:9,}   {share:20.1%}"
        if context <= PACKED:
            plan = pack(lengths, context)
            found = effective_context(lengths, context)
            padding = plan.padding()
            pairs = found.causal_share * (1 - padding)  # of those of whole rows
            line += f"   {plan.num_rows:7,}   {padding:7.2%}   {pairs:10.1%}   {found.p50:7,}"
            warnings += [f"warning: {found.warning}"] if found.warning else []
        lines.append(line)
    return lines + warnings


def targets(split: Split) -> list[str]:
    """For each context how many rows have no target, and a warning if many have none; nothing if
    every document has one token to learn after another.
    """
    if not split.masked and split.document_targets().all():
        return []
    lines = ["  context        rows   no targets   targets a row"]
    warnings = []
    for context in CONTEXTS:
        if context > PACKED:
            continue
        plan = pack(split.lengths, context)
        found = plan.row_sums(split.count_targets(plan.document, plan.start, plan.length))
        empty = (found == 0).sum()
        lines.append(f"{context:9,}   {plan.num_rows:9,}   {empty:10,}   {found.mean():13,.1f}")
        warning = too_few_targets(found, split.lengths, context)
        warnings += [f"warning: {warning}"] if warning else []
    return lines + warnings


def digests(split: Split) -> list[bytes]:
    """A hash of the ids of each document."""
    found = []
    for number, length in enumerate(split.lengths.tolist()):
        ids = np.ascontiguousarray(split.read(number, 0, length))
        found.append(hashlib.blake2b(ids, digest_size=16).digest())
    return found


def copies(dataset: Dataset) -> list[str]:
    """Documents whose ids an earlier document of their split, or one of training, has."""
    trained = set(digests(dataset.split("train")))
    lines = []
    for name, split in dataset.splits.items():
        hashes = digests(split)
        lines.append(f"  of {name}, {len(hashes) - len(set(hashes)):,} documents are copies")
        if name != "train":
            both = sum(digest in trained for digest in hashes)
            lines.append(f"  of {name}, {both:,} documents are also in train")
    return lines


def report(dataset: Dataset) -> list[str]:
    """All figures in lines."""
    train = dataset.split("train")
    return [*summary(dataset), *copies(dataset), *contexts(train.lengths), *targets(train)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return exit_code("data.report", lambda: run(arguments))


def run(arguments: Sequence[str] | None):
    """Open the dataset and print all figures."""
    parser = flags.RaisingParser(prog="python -m data.report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "data", nargs="?", help="the folder of a dataset; without it, the embedded corpus"
    )
    options = parser.parse_args(arguments)
    dataset = open_dataset(options.data) if options.data else prepare_embedded()
    print("\n".join(report(dataset)))


if __name__ == "__main__":
    sys.exit(main())
