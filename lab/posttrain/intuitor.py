"""Intuitor: a policy that learns from its own certainty (Zhao et al. 2025, arXiv 2505.19590).

Of each prompt a group of responses is sampled; the reward of a response is the mean over its tokens
of KL(U || p), by which the policy's distribution differs from the uniform one. It needs no answers.
Other rewards have names of their own. What can go wrong is counted: responses that are cut off or
empty, groups whose rewards are all alike, and a policy that repeats itself.

Letters: P tokens of a prompt, T of a response, G responses of a group, V vocabulary.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from data.dataset import Dataset, Split
from data.prompts import Prompt, read_prompt
from lab.posttrain import policy, rollout
from lab.posttrain.own_reward import OwnReward, names_function
from lab.posttrain.policy import Group, PolicyLoss, Response
from lab.posttrain.rollout import Sample, Sampling
from longhaul import dist
from longhaul.exits import Halt
from longhaul.kinds import attention_kind
from longhaul.sampling import uniforms
from longhaul.step import MicroBatch
from model import Decoder

REWARDS = ("self_certainty", "label", "random", "self_certainty_offline", "mixed")
BY_ANSWER = ("label", "mixed")  # rewards that compare a response with an answer
OFFLINE = ("self_certainty_offline",)  # rewards that the reference gives

STALE_STEPS = 10  # steps without any variance after which a run stops
TRUNCATED = 0.5  # share of truncated responses that is warned of
REPETITION = 0.5  # share of repeated n-grams that looks like a collapse
NGRAM = 4  # tokens
KL_SPIKE = 5.0  # times the median of the steps before
KL_FLOOR = 0.05  # nats of a token; a spike below it is none
KL_STEPS = 20  # steps of that median, at most; a quarter of them at least


# ---- answers


@dataclass(frozen=True)
class Answers:
    """Compares responses with reference answers: of both, what follows the last marker, if the data
    have one (`answer_id` of their manifest), and stands before the end of the document, or before
    another token of `stop_ids` that ends a response.
    """

    eod_id: int
    answer_id: int | None = None
    stop_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, dataset: Dataset, stop_ids: tuple[int, ...] = ()) -> "Answers":
        """Those of a dataset."""
        return cls(dataset.eod_id, dataset.manifest.answer_id, stop_ids)

    def before_end(self, tokens: list[int]) -> list[int]:
        """What stands before the first token that ends a response."""
        ends = {self.eod_id, *self.stop_ids}
        return list(itertools.takewhile(lambda token: token not in ends, tokens))

    def answer(self, tokens: list[int]) -> list[int] | None:
        """The answer in a response; None if its marker is missing."""
        tokens = self.before_end(tokens)
        if self.answer_id is None:
            return tokens
        if self.answer_id not in tokens:
            return None
        last = len(tokens) - 1 - tokens[::-1].index(self.answer_id)
        return tokens[last + 1 :]

    def expected(self, prompt: Prompt) -> list[int]:
        """The answer to a prompt; empty if there is none."""
        return self.answer(prompt.answer.tolist()) or []

    def is_right(self, prompt: Prompt, sample: Sample) -> bool:
        """Whether a response has ended and has the answer; never without one."""
        expected = self.expected(prompt)
        if sample.truncated or not expected:
            return False
        return self.answer(sample.tokens_T.tolist()) == expected


def require_answers(dataset: Dataset, split: Split, reward: str):
    """ValueError if a document has no answer, which this reward compares responses with."""
    if not dataset.masked:
        raise ValueError(
            f"--reward {reward} compares responses with answers, but {dataset.path} has no loss "
            "mask, which would tell them from prompts: prepare it with one (docs/LAB.md), or "
            "choose another --reward"
        )
    answers = Answers.of(dataset)
    for document in range(split.num_documents):
        if not answers.expected(read_prompt(dataset, split, document, document)):
            raise ValueError(
                f"document {document} of {split.name} in {dataset.path} has no answer that "
                f"--reward {reward} could compare responses with: leave such documents out, or "
                "choose another --reward"
            )


# ---- rewards


def self_certainty(samples: Sequence[Sample]) -> Tensor:
    """The mean of KL(U || p) over the tokens of each response, as the policy sampled it."""
    return torch.stack([sample.self_certainty_T.double().mean() for sample in samples])


def normalized(reward_G: Tensor) -> Tensor:
    """A group's rewards with mean 0 and deviation 1, so that they can be added to others."""
    return policy.group_advantage(reward_G)


def vocabulary_choice(model: int, tokenizer: int) -> str:
    """What the uniform distribution of self-certainty covers, in words."""
    if model == tokenizer:
        return f"self-certainty: the uniform distribution is over all {model:,} ids"
    return (
        f"self-certainty: the uniform distribution is over the model's {model:,} ids, of which "
        f"{model - tokenizer:,} are padding that the tokenizer does not have; responses are drawn "
        f"from the other {tokenizer:,}"
    )


def require_known(reward: str) -> None:
    """ValueError for a reward that is neither a name nor a function of a file."""
    if reward not in REWARDS and not names_function(reward):
        raise ValueError(
            f"--reward {reward!r} is unknown: give one of {', '.join(REWARDS)}, or "
            "FILE.py:FUNCTION, a function of your own (docs/LAB.md)"
        )


# ---- what a step has found


@dataclass
class Counts:
    """Sums over the responses of a step."""

    responses: int = 0
    truncated: int = 0
    empty: int = 0
    answers: int = 0  # responses to prompts that have an answer
    right: int = 0
    tokens: int = 0
    self_certainty: float = 0.0
    rewarded: int = 0  # responses that a reward was taken of: not those that are empty
    reward: float = 0.0
    reward_label: float = 0.0
    reward_self_certainty: float = 0.0
    ngrams: int = 0
    repeated: int = 0
    groups: int = 0
    zero_variance: int = 0

    def add(self, sample: Sample, answers: Answers, prompt: Prompt):
        """Count a response to a prompt."""
        self.responses += 1
        self.truncated += sample.truncated
        self.empty += sample.empty
        self.answers += bool(answers.expected(prompt))
        self.right += answers.is_right(prompt, sample)
        self.tokens += len(sample.tokens_T)
        self.self_certainty += float(sample.self_certainty_T.double().mean())
        ngrams, repeated = repetition(sample.tokens_T.tolist())
        self.ngrams += ngrams
        self.repeated += repeated

    def figures(self, device: torch.device | str) -> dict[str, float]:
        """Means and shares over all ranks, which call it together; those of answers only where
        prompts have some.
        """
        own = torch.tensor(list(vars(self).values()), dtype=torch.float64, device=device)
        total = Counts(*dist.all_sum(own).tolist())
        responses = max(total.responses, 1)
        rewarded = max(total.rewarded, 1)
        found = {
            "reward": total.reward / rewarded,
            "reward_label": total.reward_label / rewarded,
            "reward_self_certainty": total.reward_self_certainty / rewarded,
            "self_certainty": total.self_certainty / responses,
            "accuracy": total.right / max(total.answers, 1),
            "response_tokens": total.tokens / responses,
            "truncated": total.truncated / responses,
            "empty": total.empty / responses,
            "repetition": total.repeated / max(total.ngrams, 1),
            "zero_variance": total.zero_variance / max(total.groups, 1),
        }
        if not total.answers:
            del found["accuracy"], found["reward_label"]
        return found


def repetition(tokens: list[int]) -> tuple[int, int]:
    """(n-grams of a response, how many of them stood in it before)."""
    counts = Counter(zip(*(tokens[start:] for start in range(NGRAM)), strict=False))
    number = counts.total()
    return number, number - len(counts)


@dataclass
class Guard:
    """Looks at the figures of one step after another. What it knows is in fields of plain numbers,
    for a checkpoint.
    """

    stale: int = 0  # steps without any variance, one after another
    kls: list[float] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    def after(self, figures: dict[str, float], say: Callable[[str], None]):
        """Warn, each kind once; Halt after ten steps in which no group had any variance."""
        if figures["truncated"] > TRUNCATED:
            self._warn(
                "truncated",
                f"warning: {figures['truncated']:.0%} of the responses were cut off before their "
                "end: raise --max_response_length",
                say,
            )
        self._collapse(figures, say)

        self.stale = self.stale + 1 if figures["zero_variance"] == 1 else 0
        if self.stale >= STALE_STEPS:
            raise Halt(
                f"for {STALE_STEPS} steps all rewards of each group were alike, so that nothing "
                "can be learned: choose another --reward, a larger --group_size or harder prompts",
                1,
            )

    def _collapse(self, figures: dict[str, float], say: Callable[[str], None]):
        spike = False
        if "kl" in figures:
            kl = figures["kl"]
            enough = len(self.kls) >= KL_STEPS // 4
            spike = enough and kl > max(KL_SPIKE * statistics.median(self.kls), KL_FLOOR)
            self.kls = [*self.kls, kl][-KL_STEPS:]

        found = ""
        if figures["repetition"] > REPETITION:
            found = f"{figures['repetition']:.0%} of the n-grams of a response repeat earlier ones"
        elif spike:
            found = f"the KL to the reference jumped to {kl:.3f} nats"
        if found:
            words = f"warning: the policy may collapse: {found}: raise --kl_coef or lower --lr"
            self._warn("collapse", words, say)

    def _warn(self, kind: str, words: str, say: Callable[[str], None]):
        if kind not in self.warned:
            self.warned.append(kind)
            say(words)


# ---- batches


@dataclass(frozen=True)
class Settings:
    """What makes the batches of a run."""

    context_length: int  # tokens of a prompt and a response together, at most
    reward: str = "self_certainty"
    prompts_per_micro_batch: int = 1
    skip_zero_variance: bool = False

    def __post_init__(self):
        require_known(self.reward)


class Intuitor:
    """Makes the micro-batches of each step: samples, rewards, advantages, rows.

    All of it is a pure function of the weights, the seed, the step and the prompts. An offline
    reward and a KL in the reward need the reference, and a reward FILE.py:FUNCTION the function.
    """

    def __init__(
        self,
        settings: Settings,
        sampling: Sampling,
        loss: PolicyLoss,
        answers: Answers,
        model: Decoder,
        reference: Decoder | None = None,
        world: dist.World | None = None,
        own_reward: OwnReward | None = None,
    ):
        self.settings = settings
        self.own_reward = own_reward
        self.sampling = sampling
        self.loss = loss
        self.answers = answers
        self.model = model
        self.reference = reference
        self.world = world or dist.World()
        self.device = model.embed.weight.device
        self.counts = Counts()
        check(settings, sampling, loss, reference)

    def batch(self, step: int, prompts: Sequence[Prompt]) -> list[MicroBatch]:
        """The micro-batches of a step, from this rank's prompts. All ranks call it together, with
        as many prompts.
        """
        self._require_room(prompts)
        sampled = rollout.sample(self.model, prompts, self.sampling, step, self.world)
        self.counts = Counts()
        groups = [
            self._group(step, prompt, samples)
            for prompt, samples in zip(prompts, sampled, strict=True)
        ]
        size = self.settings.prompts_per_micro_batch
        parts = [groups[start : start + size] for start in range(0, len(groups), size)]
        batch = [self._micro_batch(part) for part in parts]
        self._count_tokens(batch)
        return batch

    def _count_tokens(self, batch: list[MicroBatch]):
        """Tell each micro-batch how many tokens all ranks have in theirs at its place."""
        own = [micro["tokens_BT"].numel() for micro in batch]
        of_ranks = rollout.of_all_ranks(own, self.world)
        for micro, tokens in zip(batch, zip(*of_ranks, strict=True), strict=True):
            micro["all_tokens"] = torch.tensor(sum(tokens))  # on the host

    def figures(self) -> dict[str, float]:
        """The figures of the last batch over all ranks, which call it together. Of a mixed reward,
        whose mean is 0 in each group, they have the two parts.
        """
        found = self.counts.figures(self.device)
        parts = ("reward_label", "reward_self_certainty")
        unused = ("reward",) if self.settings.reward == "mixed" else parts
        return {name: value for name, value in found.items() if name not in unused}

    def _micro_batch(self, groups: Sequence[Group]) -> MicroBatch:
        shared = not attention_kind(self.model.config).refused_prompts
        return policy.micro_batch(groups, self.device, shared)

    def _group(self, step: int, prompt: Prompt, samples: list[Sample]) -> Group:
        for sample in samples:
            self.counts.add(sample, self.answers, prompt)
        kept = [index for index, sample in enumerate(samples) if not sample.empty]
        # without any, a row that counts for nothing, so that all ranks have as many
        numbers = kept or [0]
        chosen = [samples[index] for index in numbers]
        reward_G = self._rewards(step, prompt, chosen, numbers)
        alike = policy.no_variance(reward_G)
        self.counts.groups += 1
        self.counts.zero_variance += alike
        if kept:
            self._count_rewards(reward_G, prompt, chosen)

        advantages = policy.group_advantage(reward_G).tolist()
        responses = [
            Response(sample.tokens_T, advantage, sample.logprob_T)
            for sample, advantage in zip(chosen, advantages, strict=True)
        ]
        learned = bool(kept) and not (alike and self.settings.skip_zero_variance)
        left_out = len(samples) - len(responses)
        return Group(torch.from_numpy(prompt.tokens), responses, learned, left_out)

    def _count_rewards(self, reward_G: Tensor, prompt: Prompt, samples: list[Sample]):
        """Add the rewards of a group's responses, of which none is empty, to the sums."""
        right = sum(self.answers.is_right(prompt, sample) for sample in samples)
        self.counts.rewarded += len(samples)
        self.counts.reward += float(reward_G.sum())
        self.counts.reward_label += right
        self.counts.reward_self_certainty += float(self_certainty(samples).sum())

    def _rewards(self, step: int, prompt: Prompt, samples: list[Sample], kept: list[int]) -> Tensor:
        """The rewards of a group's responses, float64 [G]."""
        name = self.settings.reward
        right_G = torch.tensor(
            [self.answers.is_right(prompt, sample) for sample in samples]
        ).double()
        if name == "label":
            reward_G = right_G
        elif name == "random":
            seed = self.sampling.seed + 1  # other numbers than those of the draws
            reward_G = torch.from_numpy(
                uniforms(seed, step, [prompt.position], self.sampling.group_size, 1)
            )[0, kept, 0]
        elif name == "mixed":
            reward_G = normalized(self_certainty(samples)) + normalized(right_G)
        elif name == "self_certainty":
            reward_G = self_certainty(samples)
        elif names_function(name):
            texts = [self.answers.before_end(sample.tokens_T.tolist()) for sample in samples]
            reward_G = self.own_reward.of_group(prompt.tokens.tolist(), texts)
        else:
            of_reference = self._of_reference(prompt, samples)
            reward_G = torch.stack([c_T.double().mean() for c_T in of_reference.self_certainty])

        if self.loss.kl == "k1" and self.loss.kl_coef:
            reward_G = reward_G - self.loss.kl_coef * self._k1(prompt, samples)
        return reward_G

    def _k1(self, prompt: Prompt, samples: list[Sample]) -> Tensor:
        """The estimates of the KL of whole responses."""
        of_reference = self._of_reference(prompt, samples)
        pairs = zip(samples, of_reference.logprob, strict=True)
        return torch.tensor([policy.k1_penalty(sample.logprob_T, q_T) for sample, q_T in pairs])

    def _of_reference(self, prompt: Prompt, samples: list[Sample]) -> "OfReference":
        """What the reference says of the tokens of a group's responses."""
        responses = [Response(sample.tokens_T, 0.0) for sample in samples]
        micro = self._micro_batch([Group(torch.from_numpy(prompt.tokens), responses)])
        stats = policy.score(self.reference, micro, self.loss.temperature)
        lengths = [len(sample.tokens_T) for sample in samples]
        return OfReference(
            stats.logprob.cpu().split(lengths), stats.self_certainty.cpu().split(lengths)
        )

    def _require_room(self, prompts: Sequence[Prompt]):
        """ValueError if a prompt and its responses are longer than the context."""
        for prompt in prompts:
            needed = len(prompt.tokens) + self.sampling.max_response_length
            if needed > self.settings.context_length:
                raise ValueError(
                    f"a prompt of {len(prompt.tokens)} tokens and responses of "
                    f"{self.sampling.max_response_length} are {needed} tokens, more than the "
                    f"context of {self.settings.context_length}: give a larger --context_length or "
                    "a smaller --max_response_length"
                )


class OfReference(NamedTuple):
    """Statistics of the tokens of each response of a group."""

    logprob: Sequence[Tensor]
    self_certainty: Sequence[Tensor]


def check(
    settings: Settings,
    sampling: Sampling,
    loss: PolicyLoss,
    reference: Decoder | None,
) -> None:
    """ValueError for settings that do not fit each other."""
    if sampling.group_size < 2:
        raise ValueError(
            f"group_size={sampling.group_size}: a response is judged by the others of its group: "
            "give at least 2"
        )
    if sampling.temperature != loss.temperature:
        raise ValueError(
            f"responses are drawn at temperature {sampling.temperature:g} and scored at "
            f"{loss.temperature:g}: give one temperature"
        )
    if settings.prompts_per_micro_batch < 1:
        raise ValueError(
            f"{settings.prompts_per_micro_batch} prompts in a micro-batch: give at least 1"
        )
    in_reward = loss.kl == "k1" and loss.kl_coef > 0
    if reference is None and (settings.reward in OFFLINE or in_reward):
        raise ValueError(
            f"reward={settings.reward!r} with kl={loss.kl!r} needs a reference: give one"
        )
