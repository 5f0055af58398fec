"""Policy gradients over groups of responses: the advantage, the loss of a token and its objective.

Of each prompt a group of G responses is sampled and rewarded. With the ratio
r = p(token) / p_old(token) and the advantage A of its response, the loss of a token is

    -min(r A, clip(r, 1 - c, 1 + c) A) + kl_coef * KL(p || q)

(Shao et al. 2024, arXiv 2402.03300), where q is a frozen reference. The KL is exact, a sum over the
vocabulary: in a group's gradient an estimate from the one drawn token has a spread of its own. All
probabilities are those at the temperature of the draws. No logits [N, V] exist: `vocab_stats` makes
all statistics from hidden states in tiles, and of the reference only hidden states are kept.

Letters: B rows of a micro-batch (one), T tokens of it, N = B*T, n response tokens of a micro-batch,
P tokens of a prompt, R of a response, G responses of a group, D model width, V vocabulary.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lab.posttrain.prompts import SharedPrompts
from longhaul import dist
from longhaul.parallel import apply
from longhaul.step import MicroBatch, Objective
from longhaul.vocab.statistics import VocabStats, vocab_stats
from model import Decoder, OnHost, wide

EPSILON = 1e-6  # added to a group's standard deviation; a deviation up to it is rounding

# How the KL to the reference is taken: exactly, or from the drawn token alone (Schulman 2020,
# "Approximating KL divergence"): k3 = q/p - 1 - log(q/p) in the loss, k1 = log(p/q) in the reward.
KLS = ("exact", "k3", "k1")

# What the summed loss is divided by: all response tokens of the step; or, first by the tokens of
# each response, then by the number of responses; or the responses times their largest length, which
# is a constant (Dr. GRPO, arXiv 2503.20783): it counts all responses that were drawn, also empty
# ones and those of groups that are not learned.
NORMALIZERS = ("tokens", "sequence", "constant")


@dataclass(frozen=True)
class PolicyLoss:
    """The settings of the loss."""

    kl: str = "exact"
    kl_coef: float = 0.005
    clip: float = 0.2
    normalizer: str = "tokens"
    temperature: float = 1.0
    max_response_length: int = 0  # tokens; read if the normalizer is "constant"

    def __post_init__(self):
        if self.kl not in KLS:
            raise ValueError(f"kl={self.kl!r} is unknown: choose one of {', '.join(KLS)}")
        if self.normalizer not in NORMALIZERS:
            names = ", ".join(NORMALIZERS)
            raise ValueError(f"normalizer={self.normalizer!r} is unknown: choose one of {names}")
        if self.normalizer == "constant" and self.max_response_length < 1:
            raise ValueError(
                f"normalizer='constant' divides by max_response_length={self.max_response_length}: "
                "give the largest number of tokens of a response"
            )
        if not self.kl_coef >= 0:
            raise ValueError(f"kl_coef={self.kl_coef} is out of range: give 0 or more")
        if not 0 < self.clip < 1:
            raise ValueError(f"clip={self.clip} is out of range: give a number above 0 and below 1")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} is out of range: give one above 0")


# ---- advantages


def group_advantage(reward_G: Tensor) -> Tensor:
    """(u - mean) / (std + 1e-6) of a group's rewards u, in float64, with the sample's standard
    deviation. It is 0 in a group without variance, as is a group of one.
    """
    reward_G = reward_G.double()
    if no_variance(reward_G):
        return torch.zeros_like(reward_G)
    return (reward_G - reward_G.mean()) / (reward_G.std() + EPSILON)


def no_variance(reward_G: Tensor) -> bool:
    """Whether a group's rewards tell nothing about its responses."""
    return len(reward_G) < 2 or bool(reward_G.double().std() <= EPSILON)


# ---- micro-batches


class Response(NamedTuple):
    """One response of a group, on the host. `logprob_R` are the log-probabilities of its tokens
    when they were drawn; None in a first update, which takes the current ones.
    """

    tokens_R: Tensor
    advantage: float
    logprob_R: Tensor | None = None


class Group(NamedTuple):
    """A prompt and its responses, of which each has a token or more. A group that is not `learned`
    adds nothing to the loss, nor to what it is divided by, unless that is a constant.
    """

    prompt_P: Tensor
    responses: Sequence[Response]
    learned: bool = True
    left_out: int = 0  # more responses that were drawn


def micro_batch(
    groups: Sequence[Group], device: torch.device | str, shared: bool = True
) -> MicroBatch:
    """One row of all groups: what the model reads, and what its responses are scored by.

    `shared`: each prompt stands there once, [prompt | response | response | ...]; otherwise each
    response is a document [prompt | response] of its own, which every kind of attention takes. Loss
    and gradients are the same.

    tokens_BT, positions, and rows or doc_ids      the arguments of Decoder.forward
    scored_n      where in the row the prediction of each response token stands: that of the first
                  one is the last token of the prompt
    target_n      the response tokens
    advantage_n, weight_n, length_n, logprob_n    of each: the advantage of its response, 1 or (in a
                  group that is not learned) 0, the tokens of its response, and `logprob_R`
    responses     the number of those that are learned
    drawn         the number of all, with those that are left out
    """
    tensors, layout = _shared_prompts(groups) if shared else _separate_documents(groups)
    tensors |= _of_each_token(groups)
    learned = sum(len(group.responses) for group in groups if group.learned)
    drawn = sum(len(group.responses) + group.left_out for group in groups)
    tensors |= {"responses": torch.tensor(learned), "drawn": torch.tensor(drawn)}
    on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    return on_device | layout


def _shared_prompts(groups: Sequence[Group]) -> tuple[dict[str, Tensor], dict]:
    parts = []
    lengths = []
    for group in groups:
        responses = [response.tokens_R for response in group.responses]
        parts += [group.prompt_P, *responses]
        lengths.append([len(group.prompt_P), *map(len, responses)])

    prompts = SharedPrompts(lengths)
    tokens_1T = torch.cat(parts)[None]
    tensors = {
        "tokens_BT": tokens_1T,
        "positions": prompts.positions(tokens_1T.shape),
        "scored_n": prompts.scored()[0],
    }
    return tensors, {"rows": prompts}


def _separate_documents(groups: Sequence[Group]) -> tuple[dict[str, Tensor], dict]:
    parts = []
    positions = []
    scored = []
    start = 0
    for group in groups:
        P = len(group.prompt_P)
        for response in group.responses:
            T = P + len(response.tokens_R)
            parts += [group.prompt_P, response.tokens_R]
            positions.append(torch.arange(T))
            scored.append(start + torch.arange(P - 1, T - 1))
            start += T

    tensors = {
        "tokens_BT": torch.cat(parts)[None],
        "positions": torch.cat(positions)[None],
        "scored_n": torch.cat(scored),
    }
    lengths = torch.tensor([len(positions_T) for positions_T in positions])
    numbers = torch.arange(len(lengths), dtype=torch.int32)
    return tensors, {"doc_ids": OnHost(numbers.repeat_interleave(lengths)[None])}


def _of_each_token(groups: Sequence[Group]) -> dict[str, Tensor]:
    """What micro_batch gives for each response token."""
    pairs = [(group, response) for group in groups for response in group.responses]
    lengths = torch.tensor([len(response.tokens_R) for _, response in pairs])

    def spread(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(lengths)

    figures = {
        "target_n": torch.cat([response.tokens_R for _, response in pairs]),
        "advantage_n": spread([response.advantage for _, response in pairs]),
        "weight_n": spread([float(group.learned) for group, _ in pairs]),
        "length_n": lengths.float().repeat_interleave(lengths),
    }
    logprobs = [response.logprob_R for _, response in pairs if response.logprob_R is not None]
    if 0 < len(logprobs) < len(pairs):
        raise ValueError(
            f"{len(pairs) - len(logprobs)} of {len(pairs)} responses have no log-probabilities "
            "from when they were drawn: give those of all responses, or of none"
        )
    if logprobs:
        figures["logprob_n"] = torch.cat(logprobs).float()
    return figures


def model_inputs(micro: MicroBatch) -> dict:
    """The arguments of Decoder.hidden."""
    names = ("tokens_BT", "positions", "doc_ids", "rows")
    return {name: micro[name] for name in names if name in micro}


# ---- the objective


class PolicyObjective(Objective):
    """What a step of `longhaul.step.train_step` minimises, over micro-batches of `micro_batch`.

    `reference` is a model of `longhaul.step.frozen`; without one there is no KL, and with a kl_coef
    of 0 it is only measured. Sums for the log stay on the device until `figures` reads them.
    """

    def __init__(self, settings: PolicyLoss, reference: Decoder | None = None):
        self.settings = settings
        self.reference = reference
        self.sums: Tensor | None = None
        if reference is None and settings.kl_coef > 0:
            raise ValueError(
                f"kl_coef={settings.kl_coef} needs a reference: give one, or a kl_coef of 0"
            )

    def weight(self, micro: MicroBatch) -> Tensor:
        """What the normalizer counts, int64."""
        if self.settings.normalizer == "tokens":
            return micro["weight_n"].sum().long()
        if self.settings.normalizer == "sequence":
            return micro["responses"]
        return micro["drawn"] * self.settings.max_response_length

    def tokens(self, micro: MicroBatch, ranks: int) -> int:
        """Responses differ, so a sampled micro-batch says what all ranks have ("all_tokens"); any
        other is taken to be like those of the other ranks.
        """
        return int(micro.get("all_tokens", ranks * micro["tokens_BT"].numel()))

    def loss(self, model: Decoder, micro: MicroBatch, divisor: Tensor) -> Tensor:
        """The micro-batch's share of the loss; the reference runs first, without gradients."""
        reference = None
        if self.reference is not None:
            reference = hidden_of_responses(self.reference, micro)
        head = functools.partial(self._share, micro, divisor, reference)
        return model(**model_inputs(micro), head=head)

    def _share(
        self,
        micro: MicroBatch,
        divisor: Tensor,
        reference: tuple[Tensor, Tensor] | None,
        hidden_ND: Tensor,
        weight_VD: Tensor,
    ) -> Tensor:
        stats = statistics(hidden_ND, weight_VD, micro, self.settings.temperature, reference)
        policy_n, clipped_n = clipped_ratio(stats.logprob, micro, self.settings.clip)
        loss_n = policy_n
        if self.settings.kl_coef and self.settings.kl != "k1":
            loss_n = loss_n + self.settings.kl_coef * self._kl(stats, micro, reference)

        weight_n = micro["weight_n"]
        self._count(weight_n, policy_n, clipped_n, stats)
        if self.settings.normalizer == "sequence":
            weight_n = weight_n / micro["length_n"]
        return (loss_n * weight_n).sum() / divisor

    def _kl(self, stats: VocabStats, micro: MicroBatch, reference: tuple[Tensor, Tensor]) -> Tensor:
        if self.settings.kl == "exact":
            return stats.kl_ref
        with torch.no_grad():
            of_reference = vocab_stats(
                *reference, micro["target_n"], temperature=self.settings.temperature
            )
        return k3(stats.logprob, of_reference.logprob)

    # ---- figures

    @torch.no_grad()
    def _count(self, weight_n: Tensor, policy_n: Tensor, clipped_n: Tensor, stats: VocabStats):
        """Add the micro-batch to the sums."""
        kl_n = torch.zeros_like(policy_n) if stats.kl_ref is None else stats.kl_ref
        figures_Fn = torch.stack(
            [torch.ones_like(policy_n), policy_n, clipped_n, stats.entropy, kl_n]
        )
        sums_F = (figures_Fn * weight_n).double().sum(1)
        self.sums = sums_F if self.sums is None else self.sums + sums_F

    def figures(self) -> dict[str, float]:
        """Means over the response tokens of all ranks since the last call: the policy's part of the
        loss, the share of clipped tokens, the entropy and the exact KL to the reference (nats).
        Nothing if no group was learned.

        All ranks call it together. It is the only time that the host waits for the sums.
        """
        tokens, *sums = dist.all_sum(self.sums).tolist()
        self.sums = None
        if self.reference is not None:
            apply.reshard(self.reference)
        if not tokens:
            return {}
        means = [total / tokens for total in sums]
        figures = dict(zip(("policy_loss", "clip_share", "entropy", "kl"), means, strict=True))
        if self.reference is None:
            figures.pop("kl")
        return figures


def clipped_ratio(logprob_n: Tensor, micro: MicroBatch, clip: float) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A) of each token, and 1 where the clipped one was taken."""
    old_n = micro.get("logprob_n", logprob_n.detach())
    advantage_n = micro["advantage_n"]
    ratio_n = (logprob_n - old_n).exp()
    plain_n = ratio_n * advantage_n
    bounded_n = ratio_n.clamp(1 - clip, 1 + clip) * advantage_n
    return -torch.minimum(plain_n, bounded_n), (bounded_n < plain_n).to(plain_n.dtype)


def k3(logprob_n: Tensor, reference_n: Tensor) -> Tensor:
    """The estimate q/p - 1 - log(q/p) of KL(p || q) from the log-probabilities of drawn tokens."""
    gap_n = reference_n - logprob_n
    return torch.expm1(gap_n) - gap_n


def k1_penalty(logprob_R: Tensor, reference_R: Tensor) -> float:
    """log p - log q of a whole response: an estimate of the KL of all its tokens together, for its
    reward.
    """
    return float((logprob_R.double() - reference_R.double()).sum())


# ---- what the two models say of the responses


def statistics(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    micro: MicroBatch,
    temperature: float,
    reference: tuple[Tensor, Tensor] | None = None,
) -> VocabStats:
    """`vocab_stats` of the response tokens of a micro-batch.

    Hidden states are taken in fp32, so that the logits are in fp32, too. From logits in bf16, a
    probability is off by up to 2e-2 (tests/lab/test_policy_probabilities.py).
    """
    hidden_nD = exact(hidden_ND[micro["scored_n"]])
    return vocab_stats(
        hidden_nD, weight_VD, micro["target_n"], reference=reference, temperature=temperature
    )


def exact(hidden_nD: Tensor) -> Tensor:
    """Hidden states in the dtype that logits are made in."""
    return hidden_nD.to(wide(hidden_nD.dtype))


@torch.no_grad()
def hidden_of_responses(model: Decoder, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """The hidden states [n, D] that predict the response tokens, and the output weight [V, D].

    FSDP2 keeps the root group, which has the output weight, whole after a forward without a
    backward, so the weight can be read until `apply.reshard`.
    """
    hidden_ND = model.hidden(**model_inputs(micro)).flatten(0, 1)
    return exact(hidden_ND[micro["scored_n"]]), model.lm_head.weight


@torch.no_grad()
def score(model: Decoder, micro: MicroBatch, temperature: float) -> VocabStats:
    """What a model says of the response tokens of a micro-batch, in a forward without gradients.
    All ranks of a sharded model call it as often.
    """

    def head(hidden_ND: Tensor, weight_VD: Tensor) -> VocabStats:
        return statistics(hidden_ND, weight_VD, micro, temperature)

    with apply.eager(model):
        stats = model(**model_inputs(micro), head=head)
    apply.reshard(model)
    return stats
