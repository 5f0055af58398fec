"""The command line that the synthetic datasets share: data.recall and data.sums.

Exit codes: 0 done, 2 bad input, 6 storage.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from base import flags
from data.dataset import Dataset

EXIT_BAD_INPUT = 2
EXIT_STORAGE = 6


def run(
    parser: flags.RaisingParser,
    write: Callable[[argparse.Namespace], Dataset],
    arguments: Sequence[str] | None,
    unit: str = "documents",
) -> int:
    """Write the dataset that the arguments ask for and say what it holds; the exit code. `unit`:
    what a document is called.
    """
    program = parser.prog.removeprefix("python -m ")
    try:
        dataset = write(parser.parse_args(arguments))
    except ValueError as error:
        return _fail(program, error, EXIT_BAD_INPUT)
    except OSError as error:
        return _fail(
            program,
            f"cannot write: {error}: check the free space and the permissions, then run the same "
            "command again",
            EXIT_STORAGE,
        )
    for name, split in dataset.splits.items():
        print(f"  {name}: {split.num_documents:,} {unit}, {split.num_tokens:,} tokens")
    print(f"train with --data {dataset.path} --vocab_size {dataset.manifest.vocab_size}")
    return 0


def _fail(program: str, message: object, code: int) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return code
