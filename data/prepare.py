"""Prepare a dataset: text in, token shards out.

    python -m data.prepare
        the embedded corpus, into the cache
    python -m data.prepare --input books/ --output data/books
        text files; a tokenizer with a vocabulary of 8,192 is trained on them
    python -m data.prepare --input a.jsonl.gz b.parquet --text_field content --output data/web
        JSONL and parquet files, one document per line or row
    python -m data.prepare --input more/ --output data/more --tokenizer Qwen3-0.6B-Base/
        with the tokenizer of a Hugging Face folder, or of another dataset's folder
    python -m data.prepare --input qa.jsonl --text_field question --answer_field answer \\
        --tokenizer Qwen3-0.6B-Base/ --output data/asked
        questions with answers, of which only the answers are learned

Exit codes: 0 done, 2 bad input (one line with the remedy, before anything is written), 3 damaged
data, 6 storage.
"""

import base.installed  # noqa: F401  (first: a missing package is answered in one line)

import argparse
import functools
import sys
import time
from collections.abc import Sequence

from base import flags
from data import report
from data.commands import exit_code
from data.corpus import GROUPINGS, build_embedded, embedded_files, prepare_embedded
from data.dataset import Dataset
from data.pipeline import build_dataset
from data.sources import DOCUMENT_BYTES, TextFiles, by_directory, refuse

OF_THE_DATASET = (
    "workers",
    "vocab_size",
    "val_fraction",
    "tokenizer",
    "eod",
    "character_coverage",
)

# What a flag needs, without which it would have no effect.
NEEDS = {
    "tokenizer": "output DIR",
    "character_coverage": "output DIR",
    "input": "output DIR",
    "text_field": "input PATH",
    "answer_field": "input PATH",
    "on_error": "input PATH",
    "max_document_mib": "input PATH",
    "eod": "tokenizer PATH",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return exit_code("data.prepare", lambda: run(arguments))


def run(arguments: Sequence[str] | None):
    """Prepare, and say what the dataset holds."""
    options = parse(arguments)
    begin = time.perf_counter()
    dataset = prepare(options)
    print("\n".join(report.summary(dataset)))
    print(f"{time.perf_counter() - begin:.1f} s; train with --data {dataset.path}")
    print(f"what it can teach: python -m data.report {dataset.path}")


# ---- what the flags ask for


def prepare(options: argparse.Namespace) -> Dataset:
    """Do what the flags ask for; returns the dataset."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    settings = {name: given[name] for name in OF_THE_DATASET if name in given}
    if options.input:
        return prepare_files(options, settings)

    documents = options.documents or "directory"
    if options.output is None:
        return prepare_embedded(documents=documents, max_bytes=options.max_bytes, **settings)
    files = embedded_files(options.max_bytes)
    return build_embedded(files, options.output, documents, **settings)


def prepare_files(options: argparse.Namespace, settings: dict) -> Dataset:
    """Prepare the user's own files."""
    # a dictionary, because each document is read twice and its message is to be printed once
    skipped: dict[str, None] = {}

    def skip(message: str) -> None:
        skipped[message] = None

    limit = DOCUMENT_BYTES
    if options.max_document_mib is not None:
        limit = options.max_document_mib << 20
    files = TextFiles(
        options.input,
        options.text_field,
        skip if options.on_error == "skip" else refuse,
        replace=options.on_error == "replace",
        document_bytes=limit,
        answer_field=options.answer_field,
    )
    is_joined = options.documents == "directory"
    join = functools.partial(by_directory, limit=limit) if is_joined else iter
    try:
        dataset = build_dataset(
            lambda: join(files.documents()),
            options.output,
            sources=files.describe,
            key=[files.stamp(), options.documents, options.on_error],
            answers=options.answer_field is not None,
            **settings,
        )
    finally:
        for message in skipped:
            print(f"left out: {message}", file=sys.stderr)
    for note in files.notes():
        print(note, file=sys.stderr)
    return dataset


# ---- flags


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags. Raises ValueError for flags that are unknown or contradict each other."""
    options = _parser().parse_args(arguments)
    _check(options)
    return options


class _Parser(flags.RaisingParser):
    """A parser whose errors all end with a remedy."""

    def error(self, message: str) -> None:
        super().error(message if "--help" in message else f"{message}: see --help")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m data.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Hyphens and underscores in flags are the same.",
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        metavar="PATH",
        help="text, .jsonl or .parquet files, also with .gz, .xz, .bz2 or .zst, folders of them, "
        "or patterns such as 'books/**/*.txt'; without this flag, the "
        "sources of the installed Python, numpy and torch (no download)",
    )
    add(
        "--output",
        metavar="DIR",
        help="new folder for the dataset; without it, the embedded corpus goes to the cache",
    )
    add(
        "--tokenizer",
        metavar="PATH",
        help="use this tokenizer: a folder of Hugging Face with a tokenizer.json, that file, a "
        "sentencepiece .model file, or the folder of another dataset",
    )
    add(
        "--eod",
        metavar="TOKEN",
        help="the special token that ends a document (default: the eos_token that the folder of "
        "the Hugging Face tokenizer names)",
    )
    add(
        "--vocab_size",
        type=int,
        metavar="N",
        help="train a tokenizer with a vocabulary of N on this text (default 8192)",
    )
    add(
        "--character_coverage",
        type=float,
        metavar="X",
        help="share of the characters of the text that get into the vocabulary; "
        "the others are encoded as bytes (default 1.0)",
    )
    add(
        "--text_field",
        metavar="FIELD",
        help="which text of a JSONL line or parquet row is the document: a field or column "
        "(default text), a dotted path such as meta.body, or a template such as "
        "'{title}\\n\\n{text}'",
    )
    add(
        "--answer_field",
        metavar="FIELD",
        help="JSONL and parquet: which text of a record is the answer to that of --text_field, "
        "spelled like it; only the answer and the end of the document are learned, and the two are "
        "tokenized separately, so that the prompt has the ids that it has without an answer",
    )
    add(
        "--max_document_mib",
        type=int,
        metavar="N",
        help="the longest document (default 64): a longer text file becomes several documents, cut "
        "at lines, and a longer record is an error; it bounds the memory",
    )
    add(
        "--documents",
        choices=GROUPINGS,
        help="file: each file or line is a document (default with --input); directory: "
        "the files of a directory form one long document (default without --input)",
    )
    add(
        "--val_fraction",
        type=float,
        metavar="X",
        help="share of the tokens, in whole documents, that is held out for validation "
        "(default 0.01; embedded corpus 0.02; 0: none)",
    )
    add(
        "--on_error",
        choices=("error", "skip", "replace"),
        help="what to do with a document that is not UTF-8 (`iconv -t utf-8` converts others): "
        "error stops (default), skip leaves it out and prints its place, replace writes U+FFFD",
    )
    add(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="number of encoding threads (default 2); it does not change the result",
    )
    add(
        "--max_bytes",
        type=int,
        metavar="N",
        help="embedded corpus only: take a sample of about N bytes",
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for flags that contradict each other or would have no effect."""
    given = {name for name, value in vars(options).items() if value is not None}
    for name, needed in NEEDS.items():
        if name in given and needed.split()[0] not in given:
            raise ValueError(f"--{name} needs --{needed}: add that, or drop --{name}")
    for name in sorted(given & {"vocab_size", "character_coverage"}):
        if "tokenizer" in given:
            raise ValueError(
                f"--tokenizer is already trained, so it and --{name} exclude each other: drop one "
                "of them"
            )
    if "input" in given and "max_bytes" in given:
        raise ValueError(
            "--max_bytes is for the embedded corpus: leave it out, or leave out --input"
        )
    if options.answer_field == "":
        raise ValueError("--answer_field is empty: name a field, or drop --answer_field")
    if "answer_field" in given and options.documents == "directory":
        raise ValueError(
            "--documents directory joins records, and --answer_field is for each of them: drop one "
            "of the two"
        )


if __name__ == "__main__":
    sys.exit(main())
