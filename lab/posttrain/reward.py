"""A learned reward: a decoder and a linear layer on the mean of its hidden states.

    reward = sigmoid(w . mean_t h_t + b)        the mean is over the tokens that count

A policy is trained through it, so it reads mixtures of tokens (prompts.SoftTokens) as well as
tokens.
It has an embedding of its own; its vocabulary must be the policy's.

The folder of a reward model is a Hugging Face Qwen3 folder, which holds the body, with one file
more: reward.safetensors has the head's `weight` [1, D] and `bias` [1].

Letters: B prompts of P tokens, T response tokens, D model width, V vocabulary.
"""

from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from base import tensors
from lab.posttrain.prompts import SoftTokens, embedded
from longhaul import qwen3
from longhaul.parallel import apply
from model import Decoder, ModelConfig

HEAD = "reward.safetensors"


class RewardModel(nn.Module):
    """Rewards [B] in (0, 1), fp32, of responses to prompts; see above.

    The body may have the levers of `longhaul.step.frozen`. counts_BT is 1 for the tokens of a
    response that count, and 0 for those after its end.
    """

    def __init__(self, body: Decoder):
        super().__init__()
        self.body = body
        device = body.embed.weight.device
        self.weight = nn.Parameter(torch.zeros(1, body.config.hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward_hard(self, prompts_BP: Tensor, tokens_BT: Tensor, counts_BT: Tensor) -> Tensor:
        """Rewards of tokens."""
        return self.logits(prompts_BP, tokens_BT, counts_BT).sigmoid()

    def forward_soft(self, prompts_BP: Tensor, soft: SoftTokens, counts_BT: Tensor) -> Tensor:
        """Rewards of mixtures, differentiable in their weights; without an index these are [B, T,
        V], else nothing larger than [B, T, K] exists.
        """
        return self.logits(prompts_BP, soft, counts_BT).sigmoid()

    def logits(
        self, prompts_BP: Tensor, response: Tensor | SoftTokens, counts_BT: Tensor
    ) -> Tensor:
        """What a reward is the sigmoid of, for training; of tokens [B, T] or mixtures."""
        return self.head(self.features(prompts_BP, response, counts_BT))

    def features(
        self, prompts_BP: Tensor, response: Tensor | SoftTokens, counts_BT: Tensor
    ) -> Tensor:
        """What the linear layer reads: mean hidden states [B, D]."""
        row = [embedded(self.body, prompts_BP), embedded(self.body, response)]
        hidden_BTD = self.body.hidden(torch.cat(row, 1))
        return self._mean(hidden_BTD, counts_BT)

    def head(self, mean_BD: Tensor) -> Tensor:
        """The logits [B] of mean hidden states."""
        return (mean_BD @ self.weight.t() + self.bias)[:, 0]

    def _mean(self, hidden_BTD: Tensor, counts_BT: Tensor) -> Tensor:
        responses_BTD = hidden_BTD[:, -counts_BT.shape[1] :].to(self.weight.dtype)
        share_BT = counts_BT / counts_BT.sum(1, keepdim=True)
        return (responses_BTD * share_BT[..., None]).sum(1)

    def reshard(self) -> None:
        """Free what FSDP2 keeps of the body after a forward."""
        apply.reshard(self.body)


def require_same_vocabulary(reward: ModelConfig, policy: ModelConfig) -> None:
    """ValueError unless both models give a token the same id, as far as sizes tell."""
    if reward.vocab_size != policy.vocab_size:
        raise ValueError(
            f"the reward model's vocabulary has {reward.vocab_size} tokens and the policy's "
            f"{policy.vocab_size}: train a reward model with the policy's tokenizer"
        )


# ---- folders


def read_config(folder: str | Path) -> ModelConfig:
    """The shape of a saved reward model's body; no weight is read. ValueError if there is none."""
    folder = Path(folder)
    if not (folder / HEAD).is_file():
        raise ValueError(
            f"{folder} is no reward model, because it has no {HEAD}: give a folder that a reward "
            "model was saved to"
        )
    return ModelConfig(**qwen3.read_config(folder))


def save(reward: RewardModel, folder: str | Path) -> None:
    """Write a whole, unsharded reward model to a new folder; ValueError if it holds anything."""
    qwen3.to_hf(reward.body, folder)
    head = {"weight": reward.weight.detach(), "bias": reward.bias.detach()}
    tensors.write_tensors(Path(folder) / HEAD, head)


def load_into(reward: RewardModel, folder: str | Path) -> None:
    """Fill a reward model, whose body may be sharded, from a folder. ValueError for a file that is
    damaged or does not fit.
    """
    folder = Path(folder)
    qwen3.load_into(reward.body, folder)
    with tensors.opened(folder / HEAD) as source:
        for name in ("weight", "bias"):
            _fill(getattr(reward, name), source, name, folder)


@torch.no_grad()
def _fill(parameter: nn.Parameter, source, name: str, folder: Path) -> None:
    if name not in source.keys():  # noqa: SIM118 (a reader of safetensors is no dict)
        raise ValueError(f"{folder / HEAD} has no {name!r}: save the reward model again")
    stored = source.get_tensor(name)
    if stored.shape != parameter.shape:
        raise ValueError(
            f"{folder / HEAD}: {name} has shape {tuple(stored.shape)}, and the body needs "
            f"{tuple(parameter.shape)}: save the reward model again"
        )
    parameter.copy_(stored)
