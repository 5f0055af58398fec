"""A synthetic task for training from rewards: `python -m data.sums --output DIR`.

    python -m data.sums --output data/sums              for a model to begin with
    python -m data.sums --output data/asked --worked 1  prompts with their right answers

Each document is a sum of two numbers below 100, and a response. A response either works first: it
writes what the ones and the tens add up to, with the carry, two digits each, and then the answer,
which is right. Or it guesses: then the answer is off by up to 5.

    4 7 + 3 8 = w 1 5 0 8 : 0 8 5 end     worked
    4 7 + 3 8 = : 0 8 9 end               a guess

A model of these documents does both, and is certain of what it works out and not of what it
guesses. So a policy that learns from its own certainty comes to work, and to be right more often.
Every sum is there once, and the same ones are held out whatever the share of worked ones.

The folder is an ordinary masked dataset: the learned tokens of a document are its response, and
what stands before them is the prompt. All documents have 16 tokens, so that rows of 16 are packed
without cuts: a guess is followed by ends that are not learned. The manifest has the id of the
marker of an answer, under "answer_id". Exit codes: 0 done, 2 bad input, 6 storage.
"""

import base.installed  # noqa: F401  (first: a missing package is answered in one line)

import argparse
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from data import synthetic
from data.writer import TokenizedDocument

DIGITS = range(10)
PLUS = 10
EQUALS = 11
WORK = 12
ANSWER = 13
END = 14
VOCABULARY = END + 1

LENGTH = 16  # tokens of a document
NUMBERS = range(100)
OFF = 5  # a guess is off by so much at most


def worked_out(first: int, second: int) -> list[int]:
    """The response that works: to 47 and 38, w 1 5 0 8 : 0 8 5 end."""
    ones = first % 10 + second % 10
    tens = first // 10 + second // 10 + ones // 10
    return [WORK, *divmod(ones, 10), *divmod(tens, 10), *answered(first + second)]


def answered(number: int) -> list[int]:
    """An answer of three digits with what surrounds it."""
    return [ANSWER, number // 100, number // 10 % 10, number % 10, END]


def document(first: int, second: int, response: list[int]) -> TokenizedDocument:
    """A sum of two numbers below 100 with a response to it."""
    prompt = [*divmod(first, 10), PLUS, *divmod(second, 10), EQUALS]
    tokens = np.full(LENGTH, END)
    written = [*prompt, *response]
    tokens[: len(written)] = written
    learned = np.zeros(LENGTH, dtype=bool)
    learned[len(prompt) : len(written)] = True
    return TokenizedDocument(tokens, learned=learned)


def documents(worked: float, seed: int) -> Iterator[TokenizedDocument]:
    """Every sum once in random order; of each, `worked` is the probability to be worked."""
    random = np.random.default_rng(seed)
    for index in random.permutation(len(NUMBERS) ** 2).tolist():
        first, second = divmod(index, len(NUMBERS))
        guess = first + second + int(random.integers(-OFF, OFF + 1))
        works = random.random() < worked
        response = worked_out(first, second) if works else answered(abs(guess))
        yield document(first, second, response)


# ---- the command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = synthetic.new_parser("data.sums", __doc__, val_fraction=0.1)
    parser.add_argument(
        "--worked",
        type=float,
        metavar="SHARE",
        default=0.4,
        help="share of the responses that work before they answer (default 0.4)",
    )
    settings = {"vocab_size": VOCABULARY, "eod_id": END, "answer_id": ANSWER}
    return synthetic.run(parser, asked_for, arguments, **settings)


def asked_for(options: argparse.Namespace) -> Iterator[TokenizedDocument]:
    """The documents that the flags ask for. Raises ValueError for what cannot be made."""
    if not 0 <= options.worked <= 1:
        raise ValueError(f"--worked {options.worked} is no share: give 0 to 1")
    return documents(options.worked, options.seed)


if __name__ == "__main__":
    sys.exit(main())
