"""GRADE (arXiv 2601.11574): a policy learns from a reward that is differentiated through its text.

A token is not drawn but mixed. With logits z, Gumbel noise g and a temperature tau, which falls
during training,

    y = softmax((z + g) / tau)        over the K likeliest tokens, or the whole vocabulary

and sum_k y_k E_k is what policy, reference and reward model read instead of an embedding. As tau
goes to 0, y becomes a token drawn from softmax(z). "ste" reads the token with the largest y and
takes the gradient of y (straight-through). The loss of a prompt is

    -reward + kl_coef * mean over tokens of KL(p || q)

with p the policy's distribution over the whole vocabulary and q that of a frozen reference, which
reads the same mixtures. Nothing counts after the end of the document.

Between two words of opposite meaning a reward may turn within a small part of a mixture, and a
gradient passes through every later token. So a single response's gradient may be hundreds of times
that of the others, and drowns them.

`generate_soft` is the method as published, and keeps [B, T, V]. `generate_soft_topk` decodes over a
cache that gradients pass through. What it does with the vocabulary is checkpointed for each token,
and so are the layers, by the lever of `longhaul.step.build`: memory is [B, T, K] and the cache.

Letters: B prompts of P tokens, T tokens of a response, K tokens of a mixture, D model width, V
vocabulary, N = B*T.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lab.posttrain.policy import exact
from lab.posttrain.prompts import GradientCache, SoftTokens, embedded
from lab.posttrain.reward import RewardModel, require_same_vocabulary
from longhaul import dist
from longhaul.exits import NumericalHalt
from longhaul.parallel import apply
from longhaul.sampling import decode, hashed_noise, row_seeds
from longhaul.step import MicroBatch, Objective
from model import Decoder, ModelConfig

METHODS = ("gumbel", "ste", "gumbel_legacy", "ste_legacy")
ENOUGH_MASS = 0.99  # of a distribution, below which its K likeliest tokens misrepresent it

# (position of the token, ids [B, K]) -> noise [B, K]
Noise = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class GradeSettings:
    """The settings of the objective, validated once."""

    eod_id: int
    method: str = "gumbel"
    max_new_tokens: int = 64
    gumbel_topk: int = 256  # tokens of a mixture; 0: the whole vocabulary
    kl_coef: float = 0.1
    tau_start: float = 2.0
    tau_end: float = 0.5
    max_steps: int = 100  # over which tau falls
    checkpoint: bool = True  # compute a token's distribution again in the backward
    vocab_size: int | None = None  # only ids below it are mixed or drawn; None: all

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"--method {self.method!r} is unknown: choose {', '.join(METHODS)}")
        if self.max_new_tokens < 1:
            raise ValueError(
                f"--max_new_tokens {self.max_new_tokens} is no response: give 1 or more"
            )
        if self.gumbel_topk < 0:
            raise ValueError(
                f"--gumbel_topk {self.gumbel_topk} is negative: give the tokens of a mixture, or 0 "
                "for the whole vocabulary"
            )
        for name in ("tau_start", "tau_end"):
            tau = getattr(self, name)
            if not 0 < tau < math.inf:
                raise ValueError(f"--{name} {tau} is no temperature: give a number above 0")
        if not 0 <= self.kl_coef < math.inf:
            raise ValueError(f"--kl_coef {self.kl_coef} is out of range: give 0 or more")

    @property
    def legacy(self) -> bool:
        """Whether responses are generated as published."""
        return self.method.endswith("_legacy")

    @property
    def topk(self) -> int:
        """Tokens of a mixture, 0 for the whole vocabulary, of which the published form is made."""
        return 0 if self.legacy else self.gumbel_topk

    @property
    def straight_through(self) -> bool:
        """Whether models read one token instead of the mixture."""
        return self.method.startswith("ste")

    def tau(self, step: int) -> float:
        """The temperature of a step: tau_start in the first, tau_end in the last, and geometric
        between them.
        """
        done = min(step / max(self.max_steps - 1, 1), 1.0)
        return self.tau_start * (self.tau_end / self.tau_start) ** done

    def check(self, policy: ModelConfig, reward: ModelConfig, prompt: int, context: int) -> None:
        """ValueError for what cannot run with these models, prompts of so many tokens and a context
        of so many; nothing is allocated.
        """
        GradientCache(policy)
        require_same_vocabulary(reward, policy)
        ids = self.vocab_size or policy.vocab_size
        if self.topk > ids:
            raise ValueError(
                f"--gumbel_topk {self.gumbel_topk} exceeds the vocabulary of {ids}: "
                f"give at most {ids}, or 0 for all of it"
            )
        if not 0 <= self.eod_id < policy.vocab_size:
            raise ValueError(
                f"the end of a document is token {self.eod_id}, outside the vocabulary of "
                f"{policy.vocab_size}: give data of this policy's tokenizer"
            )
        if prompt < 1:
            raise ValueError("prompts are empty: give prompts of at least one token")
        if prompt + self.max_new_tokens > context:
            raise ValueError(
                f"prompts of {prompt} tokens and --max_new_tokens {self.max_new_tokens} exceed the "
                f"context of {context}: give shorter prompts or fewer tokens, or raise "
                "--context_length"
            )


# ---- a token


class Mixture(NamedTuple):
    """A token of each row. index_BK is None if the weights are those of the whole vocabulary."""

    weight_BK: Tensor
    index_BK: Tensor | None
    token_B: Tensor  # with the largest weight

    @property
    def soft(self) -> SoftTokens:
        """The tokens as a column [B, 1]."""
        index_B1K = None if self.index_BK is None else self.index_BK[:, None]
        return SoftTokens(self.weight_BK[:, None], index_B1K)


class Figures(NamedTuple):
    """What is known of the distribution that a token was made of, each [B]."""

    kl: Tensor  # nats, exact over the whole vocabulary
    entropy: Tensor  # nats, without a gradient
    mass: Tensor  # the probability of the K tokens, without a gradient
    largest: Tensor  # finite |logit|


def mixture(
    logits_BV: Tensor,
    noise: Callable[[Tensor], Tensor],
    tau: Tensor,
    settings: GradeSettings,
) -> Mixture:
    """softmax((z + g) / tau) of the `topk` largest logits, 0 for all; noise: ids [B, K] -> g.
    Padding of the vocabulary has no part in it.
    """
    index_BK = None
    ids_BK = torch.arange(logits_BV.shape[1], device=logits_BV.device).expand_as(logits_BV)
    if settings.topk:
        of_tokenizer_BV = logits_BV.detach()[:, : settings.vocab_size]
        index_BK = ids_BK = of_tokenizer_BV.topk(settings.topk).indices
        logits_BV = logits_BV.gather(1, index_BK)
    elif settings.vocab_size is not None:
        logits_BV = logits_BV.masked_fill(ids_BK >= settings.vocab_size, -math.inf)

    weight_BK = ((logits_BV + noise(ids_BK)) / tau).softmax(-1)
    place_B1 = weight_BK.argmax(-1, keepdim=True)
    if settings.straight_through:
        hard_BK = torch.zeros_like(weight_BK).scatter(1, place_B1, 1.0)
        weight_BK = hard_BK + (weight_BK - weight_BK.detach())  # its value is exactly hard_BK
    return Mixture(weight_BK, index_BK, ids_BK.gather(1, place_B1)[:, 0])


def figures_of(
    logits_V: Tensor, reference_V: Tensor, index_K: Tensor | None, vocab_size: int | None = None
) -> Figures:
    """The figures of distributions [..., V], in the dtype of the logits. Mixtures are made of the
    tokens of an index, or of all below `vocab_size`.
    """
    logp_V = logits_V.log_softmax(-1)
    kl = (logp_V.exp() * (logp_V - reference_V.log_softmax(-1))).sum(-1)
    with torch.no_grad():
        p_V = logp_V.exp()
        mixed = p_V[..., :vocab_size] if index_K is None else p_V.gather(-1, index_K)
        mass = mixed.sum(-1)
        size_V = logits_V.abs()
        largest = size_V.where(size_V.isfinite(), 0).amax(-1)
        return Figures(kl, -(p_V * logp_V).sum(-1), mass, largest)


def vocabulary_choice(model: int, tokenizer: int) -> str:
    """What mixtures and the KL cover, in words."""
    if model == tokenizer:
        return f"mixtures and KL: over all {model:,} ids"
    return (
        f"mixtures: over the tokenizer's {tokenizer:,} ids; the KL is over the model's {model:,}, "
        f"of which {model - tokenizer:,} are padding"
    )


# ---- responses


class SoftResponse(NamedTuple):
    """Responses of mixtures, differentiable in the policy's weights."""

    soft: SoftTokens
    tokens_BT: Tensor
    counts_BT: Tensor  # 1 up to the end of the document, which counts, 0 after it; fp32
    figures: Figures  # each [B, T]
    hidden_BTD: Tensor  # which the tokens were made of, without a gradient


def counted(tokens_BT: Tensor, eod_id: int) -> Tensor:
    """1 for each token before which no document has ended, 0 for the others; fp32."""
    ends_BT = (tokens_BT == eod_id).long()
    return (ends_BT.cumsum(1) - ends_BT == 0).float()


def generate_soft_topk(
    policy: Decoder,
    reference: Decoder,
    prompts_BP: Tensor,
    noise: Noise,
    tau: Tensor,
    settings: GradeSettings,
) -> SoftResponse:
    """Responses token by token over caches: one forward of the policy, one of the reference without
    gradients, and `choose`.
    """
    B, P = prompts_BP.shape
    T = settings.max_new_tokens
    cache = GradientCache(policy.config)
    reference_cache = reference.new_cache(B, P + T)

    def next_token(position: int, reads: tuple[Tensor, Tensor]) -> tuple[Mixture, Figures, Tensor]:
        nonlocal cache
        read, read_by_reference = reads
        hidden_BD = policy.hidden(read, cache=cache)[:, -1]
        cache = cache.extended()
        with torch.no_grad():
            of_reference_BD = reference.hidden(read_by_reference, cache=reference_cache)[:, -1]
        token, of_token = _choose(
            policy, reference, hidden_BD, of_reference_BD, noise, position, tau, settings
        )
        return token, of_token, hidden_BD.detach()

    def following(made: tuple[Mixture, Figures, Tensor]) -> tuple[Tensor, Tensor]:
        read = embedded(policy, made[0].soft)
        with torch.no_grad():
            return read, embedded(reference, made[0].soft)

    made = decode(next_token, (prompts_BP, prompts_BP), following, T)
    tokens, figures, hiddens = zip(*made, strict=True)
    of_tokens = Figures(*(torch.stack(column, 1) for column in zip(*figures, strict=True)))
    return _response(tokens, of_tokens, hiddens, settings)


def _choose(
    policy: Decoder,
    reference: Decoder,
    hidden_BD: Tensor,
    of_reference_BD: Tensor,
    noise: Noise,
    position: int,
    tau: Tensor,
    settings: GradeSettings,
) -> tuple[Mixture, Figures]:
    """The token of a position, made inside the forwards of the heads, where their weights are
    whole. With settings.checkpoint nothing of size [B, V] waits for the backward.
    """

    def with_weight(hidden_BD: Tensor, weight_VD: Tensor) -> tuple[Mixture, Figures]:
        with torch.no_grad():
            reference_BV = reference.apply_head(of_reference_BD, wide_logits)
        logits_BV = wide_logits(hidden_BD, weight_VD)
        token = mixture(logits_BV, functools.partial(noise, position), tau, settings)
        return token, figures_of(logits_BV, reference_BV, token.index_BK, settings.vocab_size)

    head = with_weight
    if settings.checkpoint:
        head = functools.partial(
            checkpoint, with_weight, use_reentrant=False, preserve_rng_state=False
        )
    return policy.apply_head(hidden_BD, head)


def wide_logits(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits in fp32, or in fp64 for fp64 inputs, of which nothing was rounded to bf16."""
    return WideProduct.apply(exact(hidden_ND), weight_VD).t()


class WideProduct(torch.autograd.Function):
    """weight @ hidden^T [V, N] in the dtype of the hidden states. The weight waits for the backward
    as it is, and not as a copy in that dtype, of which each token would have its own.
    """

    @staticmethod
    def forward(ctx, hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD)
        return weight_VD.to(hidden_ND.dtype) @ hidden_ND.t()

    @staticmethod
    def backward(ctx, grad_VN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_ND, weight_VD = ctx.saved_tensors
        grad_ND = grad_VD = None
        if ctx.needs_input_grad[0]:
            grad_ND = grad_VN.t() @ weight_VD.to(hidden_ND.dtype)
        if ctx.needs_input_grad[1]:
            # no view, so that autograd adds the tokens' gradients in place, and [V, D] exists twice
            # instead of three times
            grad_VD = (grad_VN @ hidden_ND).to(weight_VD.dtype)
        return grad_ND, grad_VD


def generate_soft(
    policy: Decoder,
    reference: Decoder,
    prompts_BP: Tensor,
    noise: Noise,
    tau: Tensor,
    settings: GradeSettings,
) -> SoftResponse:
    """Responses as published: each token is a forward of the whole prefix and a mixture of the
    whole vocabulary. The reference reads the row at the end.
    """
    P = prompts_BP.shape[1]

    def next_token(position: int, row_BTD: Tensor) -> tuple[Mixture, Tensor, Tensor, Tensor]:
        hidden_BD = policy.hidden(row_BTD)[:, -1]
        logits_BV = policy.apply_head(hidden_BD, wide_logits)
        token = mixture(logits_BV, functools.partial(noise, position), tau, settings)
        return token, logits_BV, hidden_BD.detach(), row_BTD

    def following(made: tuple[Mixture, Tensor, Tensor, Tensor]) -> Tensor:
        token, _, _, row_BTD = made
        return torch.cat([row_BTD, embedded(policy, token.soft)], 1)

    row_BTD = embedded(policy, prompts_BP)
    made = decode(next_token, row_BTD, following, settings.max_new_tokens)
    tokens, all_logits, hiddens, _ = zip(*made, strict=True)

    soft_BTV = torch.stack([token.weight_BK for token in tokens], 1)
    with torch.no_grad():
        row = [embedded(reference, prompts_BP), embedded(reference, SoftTokens(soft_BTV))]
        # position t predicts the token after it
        hidden_BTD = reference.hidden(torch.cat(row, 1))[:, P - 1 : -1]
        hidden_ND = hidden_BTD.flatten(0, 1)
        reference_NV = reference.apply_head(hidden_ND, wide_logits)
        reference_BTV = reference_NV.unflatten(0, hidden_BTD.shape[:2])
    figures = figures_of(
        torch.stack(all_logits, 1), reference_BTV, None, vocab_size=settings.vocab_size
    )
    return _response(tokens, figures, hiddens, settings)


def _response(
    tokens: Sequence[Mixture],
    figures: Figures,
    hiddens: Sequence[Tensor],
    settings: GradeSettings,
) -> SoftResponse:
    weights, indices, ids = zip(*tokens, strict=True)
    index_BTK = None if indices[0] is None else torch.stack(indices, 1)
    tokens_BT = torch.stack(ids, 1)
    return SoftResponse(
        SoftTokens(torch.stack(weights, 1), index_BTK),
        tokens_BT,
        counted(tokens_BT, settings.eod_id),
        figures,
        torch.stack(hiddens, 1),
    )


# ---- the objective


def micro_batches(
    prompts: Sequence[Tensor],
    numbers: Sequence[int],
    step: int,
    seed: int,
    size: int,
    settings: GradeSettings,
    device: torch.device | str,
) -> list[MicroBatch]:
    """This rank's prompts [P] of a step, `size` in a micro-batch; `numbers` are theirs among the
    step's prompts on all ranks. ValueError for several lengths in a micro-batch.

    prompts_BP   int64
    seed_B       int64, of each prompt's noise
    step, tau    0-d
    """
    seed_N = row_seeds(seed, step, numbers)
    tau = torch.tensor(settings.tau(step), dtype=torch.float32)
    batch = []
    for start in range(0, len(prompts), size):
        part = slice(start, start + size)
        micro = {"prompts_BP": _stacked(prompts[part]), "seed_B": seed_N[part]}
        batch.append(micro | {"step": torch.tensor(step), "tau": tau})
    return [
        {name: tensor.to(device, non_blocking=True) for name, tensor in micro.items()}
        for micro in batch
    ]


def _stacked(prompts: Sequence[Tensor]) -> Tensor:
    lengths = sorted({len(prompt_P) for prompt_P in prompts})
    if len(lengths) > 1:
        raise ValueError(
            f"prompts of {lengths[0]} and of {lengths[-1]} tokens in one micro-batch: give "
            "--batch_size 1, or prompts of one length"
        )
    return torch.stack(list(prompts))


class Latest(NamedTuple):
    """The latest micro-batch: its model, its hidden states, and which of its tokens count."""

    model: Decoder
    micro: MicroBatch
    hidden_ND: Tensor
    counts_BT: Tensor


class GradeObjective(Objective):
    """What a step of `longhaul.step.train_step` minimises, over `micro_batches`: the mean over all
    prompts of the step, however they are split.

    `reference` is a model of `longhaul.step.frozen`. Sums for the log stay on the device until
    `figures` reads them.
    """

    def __init__(self, settings: GradeSettings, reference: Decoder, reward: RewardModel):
        self.settings = settings
        self.reference = reference
        self.reward = reward
        self.sums: Tensor | None = None
        self.largest: Tensor | None = None
        self.latest: Latest | None = None
        self.when: tuple[Tensor, Tensor] | None = None  # step and tau of the last figures
        self.advised = False
        self.advice = ""  # what `figures` has found that a user should know

    def weight(self, micro: MicroBatch) -> Tensor:
        """The number of prompts."""
        return torch.tensor(len(micro["prompts_BP"]))

    def tokens(self, micro: MicroBatch, ranks: int) -> int:
        """Tokens of all responses with their prompts, which differ: a micro-batch of a run says
        what all ranks have ("all_tokens"), any other is taken to be like those of the other ranks.
        """
        B, P = micro["prompts_BP"].shape
        return int(micro.get("all_tokens", ranks * self.tokens_of([P] * B)))

    def tokens_of(self, prompts: Sequence[int]) -> int:
        """Tokens of all responses to prompts of these lengths, with the prompts."""
        return sum(P + self.settings.max_new_tokens for P in prompts)

    def loss(self, model: Decoder, micro: MicroBatch, divisor: Tensor) -> Tensor:
        """The micro-batch's share of the loss."""
        prompts_BP = micro["prompts_BP"]
        noise = functools.partial(hashed_noise, micro["seed_B"])
        generate = generate_soft if self.settings.legacy else generate_soft_topk
        response = generate(model, self.reference, prompts_BP, noise, micro["tau"], self.settings)
        reward_B = self.reward.forward_soft(prompts_BP, response.soft, response.counts_BT)
        of_tokens = response.figures
        kl_B = mean_of_counted(of_tokens.kl, response.counts_BT)

        entropy_B = mean_of_counted(of_tokens.entropy, response.counts_BT)
        mass_B = mean_of_counted(of_tokens.mass, response.counts_BT)
        lengths_B = response.counts_BT.sum(1)
        self._count(reward_B, kl_B, entropy_B, lengths_B, mass_B)
        hidden_ND = response.hidden_BTD.flatten(0, 1)
        self._remember(model, micro, hidden_ND, response.counts_BT, of_tokens.largest.amax())
        return (self.settings.kl_coef * kl_B - reward_B).sum() / divisor

    # ---- figures

    @torch.no_grad()
    def _count(self, *of_prompts: Tensor):
        """Add figures [B] of each prompt to the sums."""
        ones_B = torch.ones_like(of_prompts[0])
        sums_F = torch.stack([ones_B, *of_prompts]).double().sum(1)
        self.sums = sums_F if self.sums is None else self.sums + sums_F

    def _remember(
        self,
        model: Decoder,
        micro: MicroBatch,
        hidden_ND: Tensor,
        counts_BT: Tensor,
        largest: Tensor,
    ):
        """What `figures` may need to say what is wrong."""
        self.latest = Latest(model, micro, hidden_ND, counts_BT)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def figures(self) -> dict[str, float]:
        """Means over the prompts of all ranks since the last call: reward; KL and entropy per token
        (nats); tokens of a response; the probability of the tokens that mixtures are made of. And
        the largest logit.

        All ranks call it together, once a step: the host waits for the sums. `advice` is set, once,
        if the mixtures leave out more than 1% of the probability.
        """
        prompts, *sums = dist.all_sum(self.sums).tolist()
        largest = float(dist.all_max(self.largest))
        means = [total / prompts for total in sums]
        names = ("reward", "kl", "entropy", "response_length", "topk_mass")
        figures = dict(zip(names, means, strict=True)) | {"largest_logit": largest}
        self.advice = ""
        if self.settings.topk and figures["topk_mass"] < ENOUGH_MASS and not self.advised:
            self.advised = True
            self.advice = self._advice(figures["topk_mass"])

        self.sums = None
        self.largest = None
        self.when = self.latest.micro["step"], self.latest.micro["tau"]
        self.latest = None
        apply.reshard(self.reference)
        self.reward.reshard()
        return figures

    def require_finite(self, figures: dict[str, float]):
        """NumericalHalt if a figure of the last step is not finite."""
        wrong = [name for name, value in figures.items() if not math.isfinite(value)]
        if not wrong:
            return
        step, tau = self.when
        raise NumericalHalt(
            f"step {int(step) + 1}: {', '.join(wrong)} not finite at tau {float(tau):.3g}, with a "
            f"largest finite |logit| of {figures['largest_logit']:.3g}: --resume an earlier "
            "checkpoint with a lower --lr or a higher --tau_end and a new --output_dir"
        )

    def _advice(self, mass: float) -> str:
        latest = self.latest
        counted_nD = latest.hidden_ND[latest.counts_BT.flatten() > 0]
        K = self.settings.gumbel_topk
        needed = enough_tokens(latest.model, counted_nD, self.settings.vocab_size)
        if needed <= K:  # not for this micro-batch, but for others of the step
            return (
                f"warning: the {K} tokens of --gumbel_topk have {mass:.3f} of the probability: "
                "give a larger one"
            )
        return (
            f"warning: the {K} tokens of --gumbel_topk have {mass:.3f} of the probability: give "
            f"--gumbel_topk {needed}, which have {ENOUGH_MASS} in the last micro-batch"
        )


def mean_of_counted(figure_BT: Tensor, counts_BT: Tensor) -> Tensor:
    """The mean [B] over the tokens that count."""
    return (figure_BT * counts_BT).sum(1) / counts_BT.sum(1)


@torch.no_grad()
def enough_tokens(model: Decoder, hidden_ND: Tensor, vocab_size: int | None = None) -> int:
    """The smallest K whose likeliest tokens have on average ENOUGH_MASS of the probability, or
    the number of all ids below `vocab_size` if these have less; the largest of all ranks' numbers.
    """

    def mean_mass(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
        ids = len(weight_VD[:vocab_size])
        total_V = torch.zeros(ids, dtype=torch.float64, device=hidden_ND.device)
        for hidden_1D in hidden_ND.split(1):
            p_1V = wide_logits(hidden_1D, weight_VD).softmax(-1)
            total_V += (
                p_1V[0, :vocab_size].sort(descending=True).values.cumsum(0, dtype=torch.float64)
            )
        return total_V / len(hidden_ND)

    mass_V = model.apply_head(hidden_ND, mean_mass)
    enough = (mass_V < ENOUGH_MASS).sum() + 1
    apply.reshard(model)
    return min(int(dist.all_max(enough)), len(mass_V))


def freeze_embeddings(model: Decoder) -> None:
    """Embedding and output weight stay as they are, and no gradient [V, D] of them exists."""
    model.embed.weight.requires_grad_(False)
    model.lm_head.weight.requires_grad_(False)
