"""What GRADE is shown on: a language model of reviews, and a reward learned from their labels.

The base model learns the responses to prompts. The reward model starts from its weights and learns
which reviews are positive. Neither sees the lexicon: `evaluate` measures with it, as gold, whether
what the reward model likes is what was meant.

Letters: B reviews, T tokens of a row, R responses.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from data.prompts import Prompt
from lab.posttrain import grade, labels, reviews, rollout
from lab.posttrain.prompts import SoftTokens
from lab.posttrain.reward import RewardModel
from lab.posttrain.rollout import Sampling
from longhaul import step
from longhaul.config import TrainConfig
from model import IGNORE, Decoder

CONTEXT = 32  # tokens of the longest review
RESPONSE = CONTEXT - reviews.PROMPT
BATCH = 64
BASE_STEPS = 300
REWARD_STEPS = 600
BASE_LR = 3e-3
REWARD_LR = 1e-3

SHAPE = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_size": 192,
}

Say = Callable[[str], None]


def base_config(seed: int = 0, device: str = "cpu") -> TrainConfig:
    """The base model, and how it is trained."""
    return TrainConfig(
        model_size="tiny",
        model_overrides=tuple(f"{name}={size}" for name, size in SHAPE.items()),
        vocab_size=reviews.VOCABULARY,
        context_length=CONTEXT,
        batch_size=BATCH,
        max_steps=BASE_STEPS,
        warmup_steps=20,
        lr=BASE_LR,
        weight_decay=0.0,
        dtype="fp32",
        device=device,
        seed=seed,
    )


def rows(number: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of `number` reviews: tokens [B, 32], padded with their end, and labels [B],
    1 for a positive review.
    """
    while True:
        tokens_BT = torch.full((number, CONTEXT), reviews.END)
        label_B = torch.zeros(number)
        for index, review in enumerate(reviews.reviews(number, seed)):
            tokens_BT[index, : len(review.tokens)] = torch.from_numpy(review.tokens)
            label_B[index] = float(review.positive)
        yield tokens_BT, label_B
        seed += 1


def train_base(cfg: TrainConfig, say: Say = print) -> Decoder:
    """A model of the responses to prompts, by the training path of `longhaul.step`."""
    state = step.build(cfg, cfg.model(), cfg.device)
    batches = rows(cfg.batch_size, 1_000_000 * (cfg.seed + 1))
    for number in range(cfg.max_steps):
        tokens_BT, _ = next(batches)
        targets_BT = tokens_BT[:, 1:].clone()
        targets_BT[:, : reviews.PROMPT - 1] = IGNORE
        targets_BT[:, reviews.PROMPT - 1 :][counted(tokens_BT) == 0] = IGNORE
        micro = {"tokens_BT": tokens_BT[:, :-1], "labels_BT": targets_BT}
        on_device = {name: tensor.to(state.device) for name, tensor in micro.items()}
        result = step.train_step(state, [on_device])
        if (number + 1) % 100 == 0:
            say(f"base model, step {number + 1}: loss {float(result.loss):.3f}")
    return state.model


def counted(tokens_BT: Tensor) -> Tensor:
    """1 for the tokens of responses that count, [B, 25]."""
    return grade.counted(tokens_BT[:, reviews.PROMPT :], reviews.END)


def train_reward(
    base: Decoder,
    cfg: TrainConfig,
    say: Say = print,
) -> RewardModel:
    """A reward model that starts from the base model and learns the labels of reviews by their
    cross-entropy. Says its accuracy on reviews that it did not learn from.

    A policy asks for the reward of mixtures of words. A model that has only seen words turns from
    one reward to another within a hundredth of the way between two of them, and its gradient there
    is useless. So it learns from mixtures of two reviews, whose label is mixed alike.
    """
    body = step.frozen(cfg, cfg.model(), cfg.device)
    body.load_state_dict(base.state_dict())
    reward = RewardModel(body).requires_grad_(True)
    generator = torch.Generator().manual_seed(cfg.seed)

    def judge(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return _of_mixtures(reward, *batch, generator)

    batches = rows(cfg.batch_size, 1_000_000 * (cfg.seed + 1) + 500_000)
    labels.learn(judge, batches, reward.parameters(), REWARD_STEPS, REWARD_LR)

    reward.requires_grad_(False)
    found = labels.accuracy(*_of_words(reward, *next(rows(512, 7))))
    say(f"reward model: {found:.3f} of new reviews have their label")
    return reward


def _of_words(
    reward: RewardModel,
    tokens_BT: Tensor,
    label_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Logits and labels of reviews."""
    device = reward.weight.device
    prompts_BP, responses_BT = tokens_BT.to(device).split([reviews.PROMPT, RESPONSE], 1)
    counts_BT = counted(tokens_BT).to(device)
    return reward.logits(prompts_BP, responses_BT, counts_BT), label_B.to(device)


def _of_mixtures(
    reward: RewardModel,
    tokens_BT: Tensor,
    label_B: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Logits and labels of reviews whose responses are mixed with those of others: s a + (1 - s) b
    of the embeddings at every token, the counts and the label, with a share s that is uniform in
    [0, 1] for each review (mixup, arXiv 1710.09412). Each keeps its prompt.
    """
    B = len(tokens_BT)
    device = reward.weight.device
    tokens_BT = tokens_BT.to(device)
    label_B = label_B.to(device)
    other_B = torch.randperm(B, generator=generator).to(device)
    share_B1 = torch.rand(B, 1, generator=generator).to(device)

    def mixed(one: Tensor) -> Tensor:
        return share_B1 * one + (1 - share_B1) * one[other_B]

    prompts_BP, responses_BT = tokens_BT.split([reviews.PROMPT, RESPONSE], 1)
    index_BTK = torch.stack([responses_BT, responses_BT[other_B]], -1)
    weight_BK = torch.cat([share_B1, 1 - share_B1], 1)
    soft = SoftTokens(weight_BK[:, None].expand(B, RESPONSE, 2), index_BTK)

    counts_BT = mixed(counted(tokens_BT))
    return reward.logits(prompts_BP, soft, counts_BT), mixed(label_B[:, None])[:, 0]


@dataclasses.dataclass(frozen=True)
class Score:
    """Means over drawn responses to the prompts of a split."""

    reward: float  # of the reward model, 0 to 1
    gold: float  # by the lexicon, -1 to 1
    length: float  # tokens with the end

    def line(self) -> str:
        """The figures on a line."""
        return f"reward {self.reward:.3f}, gold {self.gold:.3f}, length {self.length:.1f}"


@torch.no_grad()
def evaluate(
    policy: Decoder,
    reward: RewardModel,
    split: str,
    responses: int = 8,
    seed: int = 0,
) -> Score:
    """The rewards of tokens that are drawn from the policy, `responses` for each prompt."""
    tokens_NP = reviews.prompts(split)
    prompts = [Prompt(index, tokens, tokens[:0]) for index, tokens in enumerate(tokens_NP)]
    sampling = Sampling(responses, RESPONSE, reviews.END, seed=seed, prompts=len(prompts))
    groups = rollout.sample(policy, prompts, sampling)
    samples = [sample for group in groups for sample in group]

    prompts_RP = torch.from_numpy(tokens_NP).repeat_interleave(responses, 0)
    row = [x.to(reward.weight.device) for x in (prompts_RP, *rollout.padded(samples))]
    rewards = float(reward.forward_hard(*row).mean())
    gold = float(np.mean([reviews.gold(sample.tokens_T.tolist()) for sample in samples]))
    length = float(np.mean([len(sample.tokens_T) for sample in samples]))
    return Score(rewards, gold, length)
