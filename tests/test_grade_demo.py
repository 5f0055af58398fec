"""The demo of GRADE learns what its lexicon means."""

import pytest

from data import reviews
from longhaul.posttrain import grade_demo
from longhaul.posttrain.reward import RewardModel
from model import Decoder


def test_rows_hold_reviews_and_their_labels():
    tokens_BT, label_B = next(grade_demo.rows(5, 3))
    drawn = list(reviews.reviews(5, 3))
    assert label_B.tolist() == [float(review.positive) for review in drawn]
    for row_T, review in zip(tokens_BT.tolist(), drawn, strict=True):
        assert row_T[: len(review.tokens)] == review.tokens.tolist()
        assert set(row_T[len(review.tokens) :]) <= {reviews.END}


def test_what_counts_is_the_response_with_its_end():
    tokens_BT, _ = next(grade_demo.rows(5, 3))
    lengths = [len(review.tokens) - reviews.PROMPT for review in reviews.reviews(5, 3)]
    assert grade_demo.counted(tokens_BT).sum(1).tolist() == lengths


def test_an_evaluation_repeats_itself():
    config = grade_demo.base_config().model()
    policy = Decoder(config)
    reward = RewardModel(Decoder(config, seed=1)).requires_grad_(False)
    first = grade_demo.evaluate(policy, reward, "test", responses=2)
    assert first == grade_demo.evaluate(policy, reward, "test", responses=2)
    assert first.reward == pytest.approx(0.5)
