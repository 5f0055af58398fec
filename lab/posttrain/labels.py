"""A reward model learns the labels of texts, between 0 and 1, which its rewards then are.

Labels that are all 0 or 1 are learned by their cross-entropy, others by the squared error of the
reward. `learn` trains whatever parameters it is given; `fit_head` trains the linear layer of a body
that stays as it is, of which only the mean hidden state [D] of each text is kept.

Letters: N texts, B those of a batch, T tokens of the longest of them, D model width.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.posttrain.reward import RewardModel

Loss = Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> their mean loss

SMALLEST = 1e-4  # deviation of a feature that is read, of the largest one
ALIKE = 1e-5  # of the largest feature: what rounding makes of equal texts


class Labelled(NamedTuple):
    """A text of token ids, of which those of the prompt do not count."""

    ids: list[int]
    prompt: int  # tokens of it
    label: float


def squared_error(logit_B: Tensor, label_B: Tensor) -> Tensor:
    """The mean squared error of the rewards."""
    return F.mse_loss(logit_B.sigmoid(), label_B)


def learn(
    judge: Callable,
    batches: Iterator,
    parameters: Iterable[nn.Parameter],
    steps: int,
    lr: float,
    weight_decay: float = 0.0,
    loss: Loss = F.binary_cross_entropy_with_logits,
):
    """AdamW on the loss of batches, for each of which `judge` gives logits and labels."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
    for _ in range(steps):
        logit_B, label_B = judge(next(batches))
        loss(logit_B, label_B).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def accuracy(logit_B: Tensor, label_B: Tensor) -> float:
    """The share of texts whose reward is on their label's side of a half."""
    return float(((logit_B > 0) == (label_B > 0.5)).float().mean())


# ---- a linear layer on a body that stays as it is


@torch.no_grad()
def features(reward: RewardModel, texts: Sequence[Labelled], batch_size: int) -> Tensor:
    """The mean hidden state [N, D] of each text, on the body's device."""
    device = reward.weight.device
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].ids))
    found_ND = torch.empty(len(texts), reward.weight.shape[1], device=device)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        tokens_BT, counts_BT = _padded([texts[index] for index in chosen])
        no_prompt = tokens_BT[:, :0].to(device)
        mean_BD = reward.features(no_prompt, tokens_BT.to(device), counts_BT.to(device))
        found_ND[torch.tensor(chosen, device=device)] = mean_BD
    return found_ND


def _padded(texts: Sequence[Labelled]) -> tuple[Tensor, Tensor]:
    """Tokens [B, T], and 1 for those that count. No token sees what pads the row behind it."""
    T = max(len(text.ids) for text in texts)
    tokens_BT = torch.zeros(len(texts), T, dtype=torch.long)
    counts_BT = torch.zeros(len(texts), T)
    for row, text in enumerate(texts):
        tokens_BT[row, : len(text.ids)] = torch.tensor(text.ids)
        counts_BT[row, text.prompt : len(text.ids)] = 1
    return tokens_BT, counts_BT


class Fit(NamedTuple):
    """How a head is trained."""

    steps: int = 1000
    batch: int = 256  # texts
    lr: float = 1e-2
    weight_decay: float = 0.1
    seed: int = 0


def fit_head(reward: RewardModel, mean_ND: Tensor, label_N: Tensor, loss: Loss, fit: Fit):
    """Train the linear layer on the features of texts.

    AdamW works on features with mean 0 and deviation 1, whose scale the layer then takes over. Next
    to those that vary, a feature that hardly does gets no weight. ValueError for features that are
    not finite or all alike, and for a layer that is not finite.
    """
    require_finite(mean_ND)
    center_D = mean_ND.mean(0)
    deviation_D = mean_ND.std(0)
    largest = deviation_D.max()
    if largest <= ALIKE * mean_ND.abs().max():
        raise ValueError(
            "the checkpoint's hidden states are the same for all texts, so no layer can tell them "
            "apart: give texts that differ, or another --checkpoint"
        )
    scale_D = deviation_D.masked_fill(deviation_D < SMALLEST * largest, math.inf)
    normal_ND = (mean_ND - center_D) / scale_D
    generator = torch.Generator().manual_seed(fit.seed)

    def batches() -> Iterator[Tensor]:
        while True:
            order_N = torch.randperm(len(label_N), generator=generator)
            yield from order_N.to(label_N.device).split(fit.batch)

    def judge(chosen_B: Tensor) -> tuple[Tensor, Tensor]:
        return reward.head(normal_ND[chosen_B]), label_N[chosen_B]

    head = [reward.weight.requires_grad_(True), reward.bias.requires_grad_(True)]
    learn(judge, batches(), head, fit.steps, fit.lr, fit.weight_decay, loss)
    with torch.no_grad():
        reward.weight /= scale_D
        reward.bias -= reward.weight @ center_D
    reward.requires_grad_(False)
    if not (reward.weight.isfinite().all() and reward.bias.isfinite().all()):
        raise ValueError(
            f"after {fit.steps} steps the linear layer is not finite: give a --lr below "
            f"{fit.lr:g}, or less --weight_decay"
        )


def require_finite(mean_ND: Tensor) -> None:
    """ValueError unless all features are finite."""
    wrong = int((~mean_ND.isfinite().all(1)).sum())
    if wrong:
        raise ValueError(
            f"the checkpoint's hidden states of {wrong:,} of {len(mean_ND):,} texts are not "
            "finite: give a --checkpoint that has not diverged, or --dtype fp32"
        )


def train(
    reward: RewardModel,
    texts: Sequence[Labelled],
    held_out: Sequence[Labelled],
    batch_size: int,
    fit: Fit,
) -> str:
    """Train the head on texts; says what it makes of others, which it did not learn from."""
    label_N = torch.tensor([text.label for text in texts], device=reward.weight.device)
    others_N = torch.tensor([text.label for text in held_out], device=reward.weight.device)
    are_classes = all(text.label in (0, 1) for text in (*texts, *held_out))
    loss = F.binary_cross_entropy_with_logits if are_classes else squared_error
    fit_head(reward, features(reward, texts, batch_size), label_N, loss, fit)

    others_ND = features(reward, held_out, batch_size)
    require_finite(others_ND)
    logit_N = reward.head(others_ND)
    if are_classes:
        commoner = round(float(label_N.mean()))
        share = float((others_N == commoner).float().mean())
        return (
            f"{accuracy(logit_N, others_N):.3f} of {len(held_out)} held-out texts have their "
            f"label; {share:.3f} if the label were always {commoner}"
        )
    error = math.sqrt(squared_error(logit_N, others_N))
    of_mean = math.sqrt(F.mse_loss(label_N.mean().expand_as(others_N), others_N))
    return (
        f"rewards of {len(held_out)} held-out texts are {error:.3f} from their labels (root mean "
        f"square); {of_mean:.3f} if the reward were always the mean label"
    )
