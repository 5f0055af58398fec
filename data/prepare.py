"""Prepare a dataset: text in, token shards out.

    python -m data.prepare                                          the embedded corpus, into the cache
    python -m data.prepare --input books/ --output data/books       text files, a tokenizer of 8,192 pieces trained on them
    python -m data.prepare --input a.jsonl.gz b.jsonl --text_field content --output data/web
    --vocab_size 32000
    python -m data.prepare --input more/ --output data/more --tokenizer data/web/tokenizer.model

Imports data.corpus, data.pipeline, data.sources, data.packing, data.shards, files.folders. Exit
codes: 0 done, 2 bad
input (one line, with the remedy, before anything is written), 3 damaged data, 6 storage.
"""

import argparse
import difflib
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data.corpus import GROUPINGS, build_embedded, embedded_files, prepare_embedded
from data.dataset import Dataset
from data.manifest import IntegrityError, sha256_file
from data.packing import effective_context
from data.pipeline import build_dataset
from data.sources import by_directory, list_files, read_documents, refuse
from data.writer import require_new

CONTEXTS = (2048, 8192, 32768, 131072)
EXIT_BAD_INPUT, EXIT_INTEGRITY, EXIT_STORAGE, EXIT_INTERRUPTED = 2, 3, 6, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        begin = time.perf_counter()
        dataset = prepare(options)
        print(summary(dataset))
        print(f"{time.perf_counter() - begin:.1f} s; train with --data {dataset.path}")
        return 0
    except IntegrityError as error:
        return _fail(error, EXIT_INTEGRITY)
    except ValueError as error:
        return _fail(error, EXIT_BAD_INPUT)
    except ChildProcessError as error:
        return _fail(error, EXIT_STORAGE)
    except OSError as error:
        return _fail(
            f"cannot read or write: {error}: check the free space and the permissions", EXIT_STORAGE
        )
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", EXIT_INTERRUPTED)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the flags. Raises ValueError for an unknown or contradictory one."""
    parser = _parser()
    options, unknown = parser.parse_known_args([_underscored(argument) for argument in arguments])
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        raise ValueError(
            f"unknown flag {unknown[0]}: " + (f"did you mean {near[0]}?" if near else "see --help")
        )
    _check(options)
    return options


def prepare(options: argparse.Namespace) -> Dataset:
    """Do what the flags ask for; returns the dataset."""
    settings = {"workers": options.workers, "vocab_size": options.vocab_size or 8192}
    if options.val_fraction is not None:
        settings["val_fraction"] = options.val_fraction
    if options.input is None and options.output is None:
        return prepare_embedded(
            documents=options.documents or "directory", max_bytes=options.max_bytes, **settings
        )
    require_new(Path(options.output))
    settings |= {
        "tokenizer": options.tokenizer,
        "character_coverage": options.character_coverage or 1.0,
    }
    if options.input is None:
        return build_embedded(
            embedded_files(options.max_bytes),
            options.output,
            options.documents or "directory",
            **settings,
        )
    return prepare_files(options, settings)


def prepare_files(options: argparse.Namespace, settings: dict) -> Dataset:
    """Prepare the user's own files."""
    skipped: dict[str, None] = {}  # each document is read twice: count a message once
    report = (
        (lambda message: skipped.update({message: None})) if options.on_error == "skip" else refuse
    )
    text_field = options.text_field or "text"
    join = by_directory if options.documents == "directory" else iter
    dataset = build_dataset(
        lambda: join(read_documents(options.input, text_field, report)),
        options.output,
        sources=[describe_input(path) for path in options.input],
        **settings,
    )
    for message in skipped:
        print(f"left out: {message}", file=sys.stderr)
    return dataset


def describe_input(path: str) -> dict:
    """Provenance of one --input: its files, bytes, and the SHA-256 over "name hash" lines."""
    files, digest = list_files([path]), hashlib.sha256()
    for file in files:
        digest.update(
            f"{file.relative_to(path)} {sha256_file(file)}\n".encode("utf-8", "surrogateescape")
        )
    return {
        "name": path,
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "sha256": digest.hexdigest(),
    }


def summary(dataset: Dataset) -> str:
    """What a user wants to know of a dataset, several lines."""
    lines = [f"{dataset.path}: vocabulary {dataset.vocab_size:,}, {dataset.dtype.name}"]
    for name, split in dataset.splits.items():
        per_token = split.source_bytes / split.num_tokens
        lines.append(
            f"  {name}: {split.num_documents:,} documents, {split.num_tokens:,} tokens, {per_token:.2f} "
            f"bytes/token, unigram entropy {split.unigram_entropy:.3f} nats/token"
        )
    lines.append(
        "  context   half of all tokens have at least   tokens in documents of half the context or more"
    )
    lengths = dataset.split("train").lengths
    for context in CONTEXTS:
        found = effective_context(lengths, context)
        lines.append(f"  {context:7,}   {found.p50:31,}   {found.long_share:48.1%}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="python -m data.prepare",
        description=__doc__.split("\n\nImports")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Hyphens and underscores in flags are the same.",
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        metavar="PATH",
        help="text files, .jsonl files, either with .gz, or folders of them; "
        "without it: the sources of Python, numpy and torch as installed here (no download)",
    )
    add(
        "--output",
        metavar="DIR",
        help="new folder for the dataset (the embedded corpus may go to the cache instead)",
    )
    add(
        "--tokenizer",
        metavar="PATH",
        help="a sentencepiece model to use, for example another dataset's tokenizer.model",
    )
    add(
        "--vocab_size",
        type=int,
        metavar="N",
        help="train a tokenizer of N pieces on this text (default 8192)",
    )
    add(
        "--character_coverage",
        type=float,
        metavar="X",
        help="share of the characters that get a piece of their own; the rest become bytes (default 1.0)",
    )
    add(
        "--text_field",
        metavar="NAME",
        help="the field of a JSONL line that holds the text (default text)",
    )
    add(
        "--documents",
        choices=GROUPINGS,
        help="file: each file or line is a document (default with --input); directory: "
        "the files of a directory are one long document (default without)",
    )
    add(
        "--val_fraction",
        type=float,
        metavar="X",
        help="share of the tokens, in whole documents, held out for validation "
        "(default 0.01; embedded corpus 0.02; 0 for none)",
    )
    add(
        "--on_error",
        choices=("error", "skip"),
        help="at a document that is no valid text: stop (default), or leave it out and say so",
    )
    add(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="encoding processes (default 2); no effect on the result",
    )
    add(
        "--max_bytes", type=int, metavar="N", help="embedded corpus only: a sample of about N bytes"
    )
    return parser


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(f"{message}: see --help")


def _underscored(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return (
        name[:2] + name[2:].replace("-", "_") + equals + value
        if name.startswith("--")
        else argument
    )


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for flags that contradict each other or would have no effect."""
    given = {name for name, value in vars(options).items() if value is not None}
    for name in sorted(given & {"tokenizer", "character_coverage", "input"}):
        if "output" not in given:
            raise ValueError(f"--{name} needs --output DIR, the new folder for the dataset")
    for name in sorted(given & {"text_field", "on_error"}):
        if "input" not in given:
            raise ValueError(
                f"--{name} needs --input PATH: it has no effect on the embedded corpus"
            )
    for name in sorted(given & {"vocab_size", "character_coverage"}):
        if "tokenizer" in given:
            raise ValueError(
                f"--tokenizer and --{name} exclude each other: a given tokenizer is not trained"
            )
    if {"input", "max_bytes"} <= given:
        raise ValueError(
            "--max_bytes is for the embedded corpus: leave it out, or leave out --input"
        )


def _fail(message: object, code: int) -> int:
    print(f"data.prepare: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
