"""The demo of GRADE learns what its lexicon means."""

import pytest
import torch

from longhaul import kernels
from longhaul.posttrain import grade_demo, reviews
from longhaul.posttrain.prompts import embedded
from longhaul.posttrain.reward import RewardModel


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


def test_a_reward_model_learns_mixtures_of_two_reviews():
    """Mixed with itself, a review is what it is; others are mixed like their labels."""
    reward = RewardModel(kernels.decoder(grade_demo.base_config().model()))
    torch.nn.init.normal_(reward.weight)
    tokens_BT, label_B = next(grade_demo.rows(4, 3))
    same = tokens_BT[:1].expand(4, -1), label_B[:1].expand(4)
    for found, wanted in zip(
        grade_demo._of_mixtures(reward, *same, torch.Generator()),
        grade_demo._of_words(reward, *same),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)

    generator = torch.Generator().manual_seed(1)
    other_B = torch.randperm(4, generator=generator)
    share_B1 = torch.rand(4, 1, generator=generator)
    assert (other_B != torch.arange(4)).any()
    embedded_BTD = embedded(reward.body, tokens_BT)
    mixed_BTD = torch.lerp(embedded_BTD[other_B], embedded_BTD, share_B1[..., None])
    mixed_BTD[:, : reviews.PROMPT] = embedded_BTD[:, : reviews.PROMPT]
    hidden_BTD = reward.body.hidden(mixed_BTD)[:, reviews.PROMPT :]
    counts_BT = torch.lerp(
        *(grade_demo.counted(one) for one in (tokens_BT[other_B], tokens_BT)), share_B1
    )
    mean_BD = (hidden_BTD * counts_BT[..., None]).sum(1) / counts_BT.sum(1, keepdim=True)

    generator.manual_seed(1)
    logit_B, mixed_B = grade_demo._of_mixtures(reward, tokens_BT, label_B, generator)
    torch.testing.assert_close(logit_B, reward.head(mean_BD))
    torch.testing.assert_close(mixed_B, torch.lerp(label_B[other_B], label_B, share_B1[:, 0]))


def test_an_evaluation_repeats_itself():
    config = grade_demo.base_config().model()
    policy = kernels.decoder(config)
    reward = RewardModel(kernels.decoder(config, seed=1)).requires_grad_(False)
    first = grade_demo.evaluate(policy, reward, "test", responses=2)
    assert first == grade_demo.evaluate(policy, reward, "test", responses=2)
    assert first.reward == pytest.approx(0.5)
