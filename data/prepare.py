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
from data.corpus import build_embedded, embedded_files, prepare_embedded
from data.dataset import Dataset
from data.pipeline import build_dataset
from data.sources import DOCUMENT_BYTES, JOINS, TextFiles, by_directory, refuse

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
    given = vars(parse(arguments))
    begin = time.perf_counter()
    if "input" in given:
        dataset = prepare_files(**given)
    elif "output" in given:
        dataset = build_embedded(embedded_files(given.pop("max_bytes", None)), **given)
    else:
        dataset = prepare_embedded(**given)
    print("\n".join(report.summary(dataset)))
    print(f"{time.perf_counter() - begin:.1f} s; train with --data {dataset.path}")
    print(f"what it can teach: python -m data.report {dataset.path}")


def prepare_files(
    input: Sequence[str],
    output: str,
    text_field: str | None = None,
    answer_field: str | None = None,
    on_error: str | None = None,
    max_document_mib: int = DOCUMENT_BYTES >> 20,
    documents: str | None = None,
    **settings,
) -> Dataset:
    """Prepare the user's own files; `settings` as in `build_dataset`."""
    # a dictionary, because each document is read twice and its message is to be printed once
    skipped: dict[str, None] = {}
    report_bad = skipped.setdefault if on_error == "skip" else refuse
    limit = max_document_mib << 20
    files = TextFiles(
        input,
        text_field,
        report_bad,
        replace=on_error == "replace",
        document_bytes=limit,
        answer_field=answer_field,
    )
    join = functools.partial(by_directory, limit=limit) if documents == "directory" else iter
    try:
        dataset = build_dataset(
            lambda: join(files.documents()),
            output,
            sources=files.describe,
            key=[files.stamp(), documents, on_error],
            answers=answer_field is not None,
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
    """The flags that are given. ValueError if one is unknown, or if they contradict each other."""
    given = new_parser().parse_args(arguments)
    _check(vars(given))
    return given


def new_parser() -> flags.RaisingParser:
    """All flags; those that are not given leave nothing behind."""
    parser = flags.RaisingParser(
        prog="python -m data.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
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
        "(default text), or a dotted path such as meta.body",
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
        choices=tuple(JOINS),
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


def _check(given: dict) -> None:
    """Raise ValueError for flags that contradict each other or would have no effect."""
    for name, needed in NEEDS.items():
        if name in given and needed.split()[0] not in given:
            raise ValueError(f"--{name} needs --{needed}: add that, or drop --{name}")
    for name in ("character_coverage", "vocab_size"):
        if name in given and "tokenizer" in given:
            raise ValueError(
                f"--tokenizer is already trained, so it and --{name} exclude each other: drop one "
                "of them"
            )
    if "input" in given and "max_bytes" in given:
        raise ValueError(
            "--max_bytes is for the embedded corpus: leave it out, or leave out --input"
        )
    if given.get("answer_field") == "":
        raise ValueError("--answer_field is empty: name a field, or drop --answer_field")
    if "answer_field" in given and given.get("documents") == "directory":
        raise ValueError(
            "--documents directory joins records, and --answer_field is for each of them: drop one "
            "of the two"
        )


if __name__ == "__main__":
    sys.exit(main())
