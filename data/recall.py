"""A synthetic task that needs the whole context: `python -m data.recall --output DIR`.

    python -m data.recall --output data/recall
        documents of 16 to 1,024 tokens
    python -m data.recall --output data/far --lengths 1024:64 4096:64 16384:64 --tokens 2000000

In a document, pairs of a key and a value stand at random places in noise. The keys follow once
more at the end, in random order, and the answer to each is its value. Only answers are learned, so
nothing but looking far back lowers the loss. The form is that of associative recall (Arora et al.
2023, arXiv 2312.04927) and of RULER's needles (Hsieh et al. 2024, arXiv 2404.06654).

    k7 v3 . . k2 v9 . . . . k5 v1 . . .  k2 v9  k7 v3  k5 v1  end

The noise of a document has one of four kinds, each as often: the ids of noise, the values, the keys
of no pair, or all of these. So no class of ids says where a pair is: a value is what stands behind
its key.

The short documents, of at most --easy tokens, help a model to begin to compare keys. They may ask a
key again, or else it could learn to answer with a value that was not used yet. And a share of them
(--periodic) is a list of pairs that is repeated, with another period in each document: they have an
answer at every second token, and attending to a fixed distance gains nothing in them. The longer
documents have 8 pairs or more, up to PAIRS, small numbers as often as large ones (log-uniform).

The folder is an ordinary dataset. Its manifest says under "task" which ids are keys, values and
noise. Exit codes: 0 done, 2 bad input, 6 storage.
"""

import base.installed  # noqa: F401  (first: a missing package is answered in one line)

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from base import flags
from data import synthetic
from data.writer import TokenizedDocument

KINDS = 128  # of keys, of values, and of noise
KEYS = range(KINDS)
VALUES = range(KINDS, 2 * KINDS)
NOISE = range(2 * KINDS, 3 * KINDS)
END = 3 * KINDS  # of a document
VOCABULARY = END + 1

MOST_PAIRS = KINDS // 2  # half of the keys are left for the noise
FEWEST_PAIRS = 8  # in a document that is not short
NOISES = ("own", "values", "keys", "all")

LENGTHS = ("16:4", "32:8", "64:16", "256:32", "1024:64")
WANTED = "give LENGTH:PAIRS, such as 256:32"


class Form(NamedTuple):
    """Documents of `length` tokens with `pairs` pairs; `again`: a key may be asked twice."""

    length: int
    pairs: int
    again: bool = False

    @property
    def asked(self) -> int:
        """The pairs that are asked: all, or as many as there is room for."""
        room = self.length - 1 - 2 * self.pairs  # the last token ends the document
        return min(self.pairs, room // 2)


def task() -> dict:
    """What the ids mean, for the manifest: ranges [first, stop); no id stands before a question."""
    return {
        "keys": [KEYS.start, KEYS.stop],
        "values": [VALUES.start, VALUES.stop],
        "noise": [NOISE.start, NOISE.stop],
        "query": None,
    }


# ---- documents


def recall(form: Form, random: np.random.Generator, noise: str = "own") -> TokenizedDocument:
    """Pairs at random places in noise, asked at the end in random order, once or as it comes."""
    pairs = draw_pairs(form.pairs, random)
    end = form.length - 1
    first_asked = end - 2 * form.asked

    # each pair takes one of so many places, behind those before it
    places = np.sort(random.choice(first_asked - form.pairs, form.pairs, replace=False))
    begins = places + np.arange(form.pairs)
    asked = random.choice(form.pairs, form.asked, replace=form.again)

    tokens = random.choice(noise_ids(noise, pairs[:, 0]), form.length)
    tokens[begins] = pairs[:, 0]
    tokens[begins + 1] = pairs[:, 1]
    tokens[first_asked:end] = pairs[asked].flatten()
    tokens[end] = END

    learned = np.zeros(form.length, dtype=bool)
    learned[first_asked + 1 : end : 2] = True
    return TokenizedDocument(tokens, learned=learned)


def noise_ids(noise: str, keys: np.ndarray) -> np.ndarray:
    """The ids that stand between the pairs with these keys, which are none of them."""
    pools = {"own": NOISE, "values": VALUES, "keys": KEYS, "all": range(END)}
    return np.setdiff1d(pools[noise], keys)


def periodic(form: Form, random: np.random.Generator) -> TokenizedDocument:
    """Pairs that are repeated in their order until the end, with a random number of them."""
    most = min(form.pairs, (form.length - 1) // 4)
    number = int(random.integers(1, most + 1))
    pairs = draw_pairs(number, random)

    tokens = np.resize(pairs.flatten(), form.length)
    tokens[-1] = END

    learned = np.zeros(form.length, dtype=bool)
    learned[2 * number + 1 : -1 : 2] = True
    return TokenizedDocument(tokens, learned=learned)


def draw_pairs(number: int, random: np.random.Generator) -> np.ndarray:
    """Different keys, each with any value, int64 [number, 2]."""
    keys = random.choice(len(KEYS), number, replace=False)
    values = random.integers(VALUES.start, VALUES.stop, number)
    return np.stack([keys, values], axis=1)


def documents(
    forms: Sequence[Form], tokens: int, share: float, seed: int
) -> Iterator[TokenizedDocument]:
    """At least `tokens` tokens of each form; of those that ask again, `share` is periodic."""
    for form in forms:
        random = np.random.default_rng([seed, form.length, form.pairs])
        for _ in range(-(-tokens // form.length)):
            if form.again and random.random() < share:
                yield periodic(form, random)
            else:
                yield recall(draw_form(form, random), random, str(random.choice(NOISES)))


def draw_form(form: Form, random: np.random.Generator) -> Form:
    """A document that is not short has FEWEST_PAIRS or more, up to those of its form."""
    if form.again or form.pairs <= FEWEST_PAIRS:
        return form
    pairs = np.exp(random.uniform(np.log(FEWEST_PAIRS), np.log(form.pairs + 1)))
    return form._replace(pairs=min(int(pairs), form.pairs))


# ---- the command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    settings = {"vocab_size": VOCABULARY, "eod_id": END, "task": task()}
    return synthetic.run(_parser(), asked_for, arguments, **settings)


def asked_for(options: argparse.Namespace) -> Iterator[TokenizedDocument]:
    """The documents that the flags ask for. Raises ValueError for what cannot be made."""
    forms = [parse_form(word) for word in options.lengths]
    lengths = [form.length for form in forms]
    if len(set(lengths)) < len(lengths):
        raise ValueError(f"--lengths {' '.join(options.lengths)} names a length twice: keep one")
    if options.tokens < max(lengths):
        raise ValueError(
            f"--tokens {options.tokens} is less than one document of {max(lengths)} tokens: "
            f"give {max(lengths)} or more"
        )
    if not 0 <= options.periodic <= 1:
        raise ValueError(f"--periodic {options.periodic} is no share: give 0 to 1")
    forms = [form._replace(again=form.length <= options.easy) for form in forms]
    return documents(forms, options.tokens, options.periodic, options.seed)


def parse_form(word: str) -> Form:
    """LENGTH:PAIRS. Raises ValueError for what is none, and for pairs that do not fit."""
    length, colon, pairs = word.partition(":")
    if not (colon and length.isdecimal() and pairs.isdecimal()):
        raise ValueError(f"--lengths {word[:40]!r} is no length: {WANTED}")

    form = Form(int(length), int(pairs))
    if not 1 <= form.pairs <= MOST_PAIRS:
        raise ValueError(f"--lengths {word} has {pairs} pairs: give 1 to {MOST_PAIRS}")
    least = 2 * form.pairs + 3
    if form.length < least:
        raise ValueError(
            f"--lengths {word}: {form.pairs} pairs, a question and the end of the document take "
            f"{least} tokens: give longer documents, or fewer pairs"
        )
    return form


def _parser() -> flags.RaisingParser:
    parser = synthetic.new_parser("data.recall", __doc__, val_fraction=0.01)
    add = parser.add_argument
    add(
        "--lengths",
        nargs="+",
        metavar="LENGTH:PAIRS",
        default=LENGTHS,
        help=f"tokens of a document and the most pairs in it (default {' '.join(LENGTHS)})",
    )
    add(
        "--tokens",
        type=int,
        metavar="N",
        default=700_000,
        help="tokens of each length (default 700000)",
    )
    add(
        "--periodic",
        type=float,
        metavar="SHARE",
        default=0.5,
        help="share of the short documents whose pairs are repeated with a random period "
        "(default 0.5)",
    )
    add(
        "--easy",
        type=int,
        metavar="N",
        default=64,
        help="tokens of the longest document that is short (default 64)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
