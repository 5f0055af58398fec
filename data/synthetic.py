"""The command line that the synthetic datasets share: data.recall and data.sums.

Exit codes: 0 done, 2 bad input, 6 storage.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence

from base import flags
from data.commands import exit_code
from data.writer import TokenizedDocument, write_dataset


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

    def write():
        options = parser.parse_args(arguments)
        if options.seed < 0:
            raise ValueError(f"--seed {options.seed} is negative: give 0 or more")
        dataset = write_dataset(
            documents(options),
            options.output,
            val_fraction=options.val_fraction,
            masked=True,
            **settings,
        )
        for name, split in dataset.splits.items():
            print(f"  {name}: {split.num_documents:,} documents, {split.num_tokens:,} tokens")
        print(f"train with --data {dataset.path} --vocab_size {dataset.vocab_size}")

    return exit_code(parser.prog.removeprefix("python -m "), write)
