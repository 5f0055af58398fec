"""The synthetic reviews: their words, splits and labels."""

import numpy as np

from lab.posttrain import reviews


def test_the_vocabulary_has_104_different_words():
    assert reviews.VOCABULARY == len(set(reviews.WORDS)) == 104


def test_no_prompt_is_in_two_splits():
    splits = {name: {tuple(row) for row in reviews.prompts(name)} for name in reviews.SPLITS}
    assert {name: len(rows) for name, rows in splits.items()} == reviews.SPLITS
    everything = set.union(*splits.values())
    assert len(everything) == len(reviews.PRODUCTS) * len(reviews.MAKERS)


def test_reviews_begin_with_a_training_prompt_and_end_once():
    beginnings = {tuple(row) for row in reviews.prompts("train")}
    for review in reviews.reviews(200, 1):
        assert tuple(review.tokens[: reviews.PROMPT]) in beginnings
        assert list(review.tokens).count(reviews.END) == 1
        assert review.tokens[-1] == reviews.END
        assert len(review.tokens) <= 32


def test_labels_are_balanced_and_agree_with_most_opinions():
    drawn = list(reviews.reviews(2000, 0))
    assert abs(np.mean([review.positive for review in drawn]) - 0.5) < 0.04
    for kind in (False, True):
        gold = np.mean([reviews.gold(r.tokens) for r in drawn if r.positive == kind])
        assert (gold > 0.4) if kind else (gold < -0.4)


def test_gold_counts_opinions_up_to_the_end():
    tokens = reviews.ids("the lid is good . i hate the fan .")
    assert reviews.gold(tokens) == 0
    assert reviews.gold(tokens[:5]) == 1
    assert reviews.gold([*tokens[:5], reviews.END, *tokens[5:]]) == 1
    assert reviews.gold(tokens[:3]) == 0


def test_a_seed_gives_the_same_reviews():
    first = [review.tokens.tolist() for review in reviews.reviews(20, 4)]
    assert first == [review.tokens.tolist() for review in reviews.reviews(20, 4)]
    assert first != [review.tokens.tolist() for review in reviews.reviews(20, 5)]
