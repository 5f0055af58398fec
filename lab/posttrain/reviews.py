"""Synthetic product reviews, for policies that learn from a reward: the demo of GRADE.

A review has a label, positive or negative, that stands nowhere in it. Most of its opinions are of
that kind, the others are not, so a reward model learns from labels which words are positive:

    review of the kettle by acme : the handle is very sturdy . i love the lid . <end>

`LEXICON` knows the words' kind. Nothing is trained with it: it measures, as `gold`, what a policy
learned from the reward model. A prompt is a review's first seven words. Pairs of a product and a
maker are split into training, validation and test; reviews are only of the first.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from data.order import permute


def _words(text: str) -> list[str]:
    return text.split()


GOOD = _words("good great sturdy lovely quiet elegant reliable bright smooth handy superb neat")
BAD = _words("bad poor flimsy ugly noisy clumsy faulty dull rough awkward awful cheap")
GOOD += ["fresh", "solid"]
BAD += ["stale", "broken"]
LIKE = _words("love like enjoy admire praise")
DISLIKE = _words("hate dislike regret avoid blame")
PRODUCTS = _words("kettle lamp chair radio clock fan mixer oven phone camera printer desk")
MAKERS = _words("acme nordic apex orbit delta zenith polar atlas vega lumen")
PARTS = _words("handle lid cable screen base button switch surface frame cover motor light battery")
PARTS += ["manual"]
ADVERBS = _words("very quite really rather so too truly fairly")
NUMBERS = _words("two three four ten")
OTHERS = _words("<end> review of the by : . is i it arrived after days weeks cost dollars looks")
OTHERS += ["feels"]

WORDS = [
    *OTHERS,
    *GOOD,
    *BAD,
    *LIKE,
    *DISLIKE,
    *PRODUCTS,
    *MAKERS,
    *PARTS,
    *ADVERBS,
    *NUMBERS,
]
IDS = {word: index for index, word in enumerate(WORDS)}
VOCABULARY = len(WORDS)
END = IDS["<end>"]
LEXICON = {IDS[word]: 1 for word in (*GOOD, *LIKE)} | {IDS[word]: -1 for word in (*BAD, *DISLIKE)}

AGREES = 0.85  # share of a review's opinions that are of its label's kind
OPINIONS = 0.75  # share of sentences that are opinions
SENTENCES = range(2, 5)  # of a review
PROMPT = 7  # tokens

# Of the pairs of a product and a maker, in this order.
SPLITS = {"train": 72, "validation": 24, "test": 24}


class Review(NamedTuple):
    """A review, int64 tokens with the end, and whether its label is positive."""

    tokens: np.ndarray
    positive: bool


def prompts(split: str) -> np.ndarray:
    """The prompts of a split, int64 [N, 7]: no two splits have a pair of product and maker in
    common.
    """
    pairs = [(product, maker) for product in PRODUCTS for maker in MAKERS]
    first = 0
    for name, size in SPLITS.items():
        if name == split:
            break
        first += size
    chosen = [pairs[permute(0, 0, len(pairs), first + index)] for index in range(SPLITS[split])]
    return np.array([ids(f"review of the {product} by {maker} :") for product, maker in chosen])


def reviews(number: int, seed: int) -> Iterator[Review]:
    """Reviews of products of the training split."""
    random = np.random.default_rng(seed)
    beginnings = prompts("train")
    for _ in range(number):
        positive = bool(random.random() < 0.5)
        beginning = beginnings[random.integers(len(beginnings))]
        sentences = [_sentence(positive, random) for _ in range(random.choice(SENTENCES))]
        tokens = np.concatenate([beginning, ids(" ".join(sentences)), [END]])
        yield Review(tokens, positive)


def _sentence(positive: bool, random: np.random.Generator) -> str:
    def one(words: Sequence[str]) -> str:
        return words[random.integers(len(words))]

    if random.random() > OPINIONS:
        if random.random() < 0.5:
            return f"it cost {one(NUMBERS)} dollars ."
        return f"it arrived after {one(NUMBERS)} {one(['days', 'weeks'])} ."

    agrees = random.random() < AGREES
    is_good = positive == agrees
    if random.random() < 0.25:
        return f"i {one(LIKE if is_good else DISLIKE)} the {one(PARTS)} ."
    verb = one(["is", "looks", "feels"])
    adjective = one(GOOD if is_good else BAD)
    if random.random() < 0.5:
        return f"the {one(PARTS)} {verb} {adjective} ."
    return f"the {one(PARTS)} {verb} {one(ADVERBS)} {adjective} ."


def ids(text: str) -> list[int]:
    """The token ids of words of the vocabulary."""
    return [IDS[word] for word in text.split()]


def gold(tokens: Sequence[int]) -> float:
    """(positive - negative) / (positive + negative) of the opinions up to the end, from -1 to 1; 0
    without an opinion.
    """
    kinds = []
    for token in tokens:
        if token == END:
            break
        kinds.append(LEXICON.get(int(token), 0))
    return sum(kinds) / max(1, sum(abs(kind) for kind in kinds))
