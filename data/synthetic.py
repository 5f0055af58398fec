"""The command line that the synthetic datasets share: data.recall and data.sums.

Exit codes: 0 done, 2 bad input, 6 storage.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from base import flags
from data.writer import TokenizedDocument, require_fraction, require_new, write_dataset


def new_parser(program: str, description: str, val_fraction: float) -> flags.RaisingParser:
    """The flags that all of them have; each adds its own."""
    parser = flags.RaisingParser(
        prog=f"python -m {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output", metavar="DIR", required=True, help="new folder for the dataset")
    add("--seed", type=int, metavar="N", default=0, help="(default 0)")
    add(
        "--val_fraction",
        type=float,
        metavar="SHARE",
        default=val_fraction,
        help=f"share of the tokens that is held out for validation (default {val_fraction})",
    )
    return parser


def run(
    parser: flags.RaisingParser,
    documents: Callable[[argparse.Namespace], Iterable[TokenizedDocument]],
    arguments: Sequence[str] | None,
    **settings: object,
) -> int:
    """Write the documents that the arguments ask for, with these settings of `write_dataset`, and
    say what the dataset holds; the exit code.
    """
    program = parser.prog.removeprefix("python -m ")
    try:
        options = parser.parse_args(arguments)
        if options.seed < 0:
            raise ValueError(f"--seed {options.seed} is negative: give 0 or more")
        require_fraction(options.val_fraction)
        require_new(Path(options.output))
        dataset = write_dataset(
            documents(options),
            options.output,
            val_fraction=options.val_fraction,
            masked=True,
            **settings,
        )
    except ValueError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"{program}: cannot write: {error}: check the free space and the permissions, then run "
            "the same command again",
            file=sys.stderr,
        )
        return 6
    for name, split in dataset.splits.items():
        print(f"  {name}: {split.num_documents:,} documents, {split.num_tokens:,} tokens")
    print(f"train with --data {dataset.path} --vocab_size {dataset.vocab_size}")
    return 0
