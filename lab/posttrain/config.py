"""The settings of post-training: those of train.py that a policy has, too, and its own.

Their fields are the flags of lab.intuitor and lab.grade.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from lab.posttrain.grade import METHODS, GradeSettings
from lab.posttrain.intuitor import OFFLINE, require_known
from lab.posttrain.policy import KLS, NORMALIZERS, PolicyLoss
from lab.posttrain.rollout import Sampling
from longhaul.cli import changed_flag, flag
from longhaul.config import TrainConfig
from longhaul.kinds import attention_kind
from longhaul.sampling import COLDEST, HOTTEST
from model import ModelConfig

LARGEST = ("ste", "ste_legacy")  # methods: each other one needs what one of them does
VALIDATION_SEED = 1  # of the draws of a validation

# Settings of pretraining's rows, losses and evaluations, and of what a policy cannot use.
OF_PRETRAINING = frozenset(
    {
        "long_fraction",
        "length_schedule",
        "short_fraction",
        "whole_documents",
        "loss",
        "context_parallel_size",
        "context_parallel_mode",
        "evals",
        "fit",
    }
)


@dataclass(frozen=True)
class PolicyConfig(TrainConfig):
    """What the settings of all post-training have in common."""

    LEFT_OUT: ClassVar[frozenset[str]] = OF_PRETRAINING
    SAMPLES: ClassVar[bool] = True
    NSA_LACKS: ClassVar[str] = "cannot be trained from rewards yet"
    LOSS_SPIKE: ClassVar[float] = math.inf  # a policy's loss has no level of its own
    GROUPS: ClassVar[dict[str, str]] = {
        "policy": "What is sampled, how it is rewarded, and what holds the policy back.",
        **TrainConfig.GROUPS,
    }

    init_from: str = changed_flag(
        TrainConfig,
        "init_from",
        help="folder of the policy's first weights, which are the reference's, too: a run or "
        "step-* folder of longhaul, or a Hugging Face model",
        aliases=("checkpoint",),
    )
    context_length: int = changed_flag(
        TrainConfig,
        "context_length",
        help="tokens of a prompt and its response together, at most",
    )
    data: str = changed_flag(
        TrainConfig,
        "data",
        help="folder of a dataset whose documents are prompts; in one with a loss mask, the tokens "
        "that are learned are the answer to the prompt before them (docs/LAB.md)",
    )
    batch_size: int = changed_flag(
        TrainConfig,
        "batch_size",
        help="prompts per micro-batch on each rank; activation memory grows with it",
    )
    global_batch_size: int = changed_flag(
        TrainConfig,
        "global_batch_size",
        help="prompts per optimizer step over all ranks; "
        "0: batch_size x gradient_accumulation_steps x ranks",
        aliases=("train_prompt_bsz",),
    )
    eval_rows: int = changed_flag(
        TrainConfig,
        "eval_rows",
        default=64,
        help="prompts of the validation split that are answered by --eval_every, over all ranks",
    )
    max_steps: int = changed_flag(TrainConfig, "max_steps", default=100)
    lr: float = changed_flag(TrainConfig, "lr", default=1e-6)
    warmup_steps: int = changed_flag(TrainConfig, "warmup_steps", default=0)
    weight_decay: float = changed_flag(TrainConfig, "weight_decay", default=0.0)
    schedule: str = changed_flag(TrainConfig, "schedule", default="constant")
    demo: bool = flag(
        False,
        "make a small task, train a first model on it, and improve that; nothing is downloaded",
        group="run",
    )

    def __post_init__(self):
        super().__post_init__()
        if attention_kind(self).settings:
            raise ValueError(
                f"--attention_type {self.attention_type} {self.NSA_LACKS}: use standard"
            )

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response of training."""
        raise NotImplementedError

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that leaves room for a response."""
        return self.context_length - self.longest_response

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row: a prompt and all its responses."""
        raise NotImplementedError

    def loss_in_words(self, config: ModelConfig, ranks: int) -> str:
        """What the logits of a micro-batch would need, of which only tiles exist."""
        gib = config.logits_gib(self.batch_size, self.row_tokens)
        return f"over tiles of the vocabulary (full logits would be {gib:.2f} GiB per rank)"

    def _check_response(self, name: str, tokens: int) -> None:
        """ValueError if a response of so many tokens leaves no room for a prompt."""
        if tokens >= self.context_length:
            raise ValueError(
                f"--{name} {tokens} leaves no token of --context_length {self.context_length} for "
                f"a prompt: give a longer context, or at most {self.context_length - 1}"
            )


@dataclass(frozen=True)
class IntuitorConfig(PolicyConfig):
    """The settings of lab.intuitor."""

    PROGRAM: ClassVar[str] = "-m lab.intuitor"
    TASK: ClassVar[str] = "intuitor"
    PLANNED: ClassVar[str] = "lab.posttrain.rehearsal:Intuitor"
    NSA_LACKS: ClassVar[str] = "cannot share a prompt among responses yet"
    UNTIMED: ClassVar[str] = "without the time of sampling"
    EXAMPLES: ClassVar[str] = """examples:
  python -m lab.intuitor --demo
  python -m lab.intuitor --checkpoint runs/mine --data prompts --reward self_certainty --plan
  torchrun --nproc_per_node=2 -m lab.intuitor --checkpoint runs/mine --data prompts"""

    reward: str = flag(
        "self_certainty",
        "what a response is worth: self_certainty, the mean of KL(uniform || p) over its tokens; "
        "self_certainty_offline, the same by the reference; label, 1 if it is the answer; mixed, "
        "the label and the self-certainty, each normalised in its group; random, a draw; or "
        "FILE.py:FUNCTION, your own function of texts (docs/LAB.md)",
        group="policy",
    )
    group_size: int = flag(
        8,
        "responses to each prompt, which are compared with each other",
        aliases=("n_resp_per_prompt",),
        at_least=2,
        group="policy",
    )
    max_response_length: int = flag(
        1024, "tokens of a response, at most; a longer one is cut", at_least=1, group="policy"
    )
    v_max_response_length: int = flag(
        0,
        "tokens of a response to a validation prompt, at most; 0: as in training",
        at_least=0,
        group="policy",
    )
    temperature: float = flag(
        1.0, "temperature of the responses that are sampled and scored", group="policy"
    )
    kl_coef: float = flag(
        0.005,
        "weight of the KL divergence from the reference; in fp32 exact, in bf16 the KL has a floor "
        "of 1e-4 nats. With the published 0.005, certainty may rise while accuracy falls",
        at_least=0,
        group="policy",
    )
    kl: str = flag(
        "exact",
        "how the KL is taken: exact, over the whole vocabulary; k3, in the loss from the drawn "
        "token; k1, in the reward from the drawn token",
        choices=KLS,
        group="policy",
    )
    clip_ratio: float = flag(
        0.2,
        "how far the ratio to the policy that sampled may move from 1",
        aliases=("clip",),
        group="policy",
    )
    normalizer: str = flag(
        "tokens",
        "what the loss is divided by: all response tokens of the step; sequence, each response's "
        "tokens and then the responses; constant, all responses, empty and skipped ones too, x "
        "--max_response_length, as in Dr. GRPO, which also leaves the advantage undivided by the "
        "group's deviation, unlike here",
        choices=NORMALIZERS,
        group="policy",
    )
    skip_zero_variance: bool = flag(
        False,
        "leave out groups in which all rewards are equal, so that not even their KL counts",
        group="policy",
    )
    keep_reference: bool = flag(
        True,
        "hold the reference even if only the log reads it: with --kl_coef 0 its KL is then still "
        "measured; --no_keep_reference saves its memory and its forward",
        group="memory and speed",
    )
    rollout_prompts: int = flag(
        0,
        "prompts that are answered at once, in training and in validation, on each rank; "
        "0: as many as --batch_size",
        at_least=0,
        group="memory and speed",
    )

    def __post_init__(self):
        super().__post_init__()
        require_known(self.reward)
        if not COLDEST <= self.temperature <= HOTTEST:
            raise ValueError(
                f"--temperature {self.temperature:g} is out of range: give {COLDEST:g} to "
                f"{HOTTEST:g}"
            )
        if not 0 < self.clip_ratio < 1:
            raise ValueError(
                f"--clip_ratio {self.clip_ratio:g} is out of range: give a number above 0 and "
                "below 1"
            )
        self._check_response("max_response_length", self.max_response_length)
        self._check_response("v_max_response_length", self.v_max_response_length)
        self.policy_loss()  # raises for what cannot be trained

    @property
    def longest_response(self) -> int:
        return max(self.max_response_length, self.v_max_response_length)

    @property
    def row_tokens(self) -> int:
        return self.longest_prompt + self.group_size * self.max_response_length

    @property
    def needs_reference(self) -> bool:
        """Whether a second model is held: for a KL in the loss or the log, or for its rewards."""
        return self.keep_reference or self.reads_reference

    @property
    def frozen_models(self) -> int:
        return int(self.needs_reference)

    @property
    def reads_reference(self) -> bool:
        """Whether what is learned depends on the reference."""
        return self.kl_coef > 0 or self.reward in OFFLINE

    @property
    def prompts_at_once(self) -> int:
        """Prompts that are answered at once."""
        return self.rollout_prompts or self.batch_size

    def policy_loss(self) -> PolicyLoss:
        """The settings of the loss."""
        return PolicyLoss(
            kl=self.kl,
            kl_coef=self.kl_coef,
            clip=self.clip_ratio,
            normalizer=self.normalizer,
            temperature=self.temperature,
            max_response_length=self.max_response_length,
        )

    def sampling(self, eod_id: int, vocab_size: int) -> Sampling:
        """How the responses of training are sampled."""
        return Sampling(
            group_size=self.group_size,
            max_response_length=self.max_response_length,
            eod_id=eod_id,
            temperature=self.temperature,
            vocab_size=vocab_size,
            seed=self.seed,
            prompts=self.prompts_at_once,
        )

    def validation_sampling(self, sampling: Sampling) -> Sampling:
        """How validation prompts are answered: once, with the same draws at every validation."""
        return dataclasses.replace(
            sampling,
            seed=VALIDATION_SEED,
            group_size=1,
            max_response_length=self.v_max_response_length or self.max_response_length,
        )


@dataclass(frozen=True)
class GradeConfig(PolicyConfig):
    """The settings of lab.grade."""

    PROGRAM: ClassVar[str] = "-m lab.grade"
    TASK: ClassVar[str] = "grade"
    PLANNED: ClassVar[str] = "lab.posttrain.rehearsal:Grade"
    NSA_LACKS: ClassVar[str] = "has no cache yet that gradients pass through"
    UNTIMED: ClassVar[str] = "as if the tokens of a response were computed at once"
    EXAMPLES: ClassVar[str] = """examples:
  python -m lab.grade --demo
  python -m lab.grade --checkpoint runs/mine --reward_checkpoint rewards/mine --data prompts
  torchrun --nproc_per_node=2 -m lab.grade --demo --method ste"""

    method: str = flag(
        "gumbel",
        "how a gradient passes through sampled text: gumbel, mixtures of tokens; ste, mixtures "
        "whose likeliest token is read (straight-through); gumbel_legacy and ste_legacy, the same "
        "without a cache and with all of [tokens, vocabulary]; all, one after the other, for "
        "comparison",
        choices=(*METHODS, "all"),
        group="policy",
    )
    reward_checkpoint: str = flag("", "folder of the reward model (docs/LAB.md)", group="policy")
    max_new_tokens: int = flag(
        64, "tokens of a response", aliases=("max_response_length",), at_least=1, group="policy"
    )
    gumbel_topk: int = flag(
        256,
        "tokens that a mixture is made of, the likeliest ones; 0: the whole vocabulary",
        at_least=0,
        group="policy",
    )
    kl_coef: float = flag(
        0.1,
        "weight of the exact KL divergence from the reference, per token",
        at_least=0,
        group="policy",
    )
    tau_start: float = flag(2.0, "temperature of the mixtures in the first step", group="policy")
    tau_end: float = flag(
        0.5, "temperature of the mixtures in the last step, falling geometrically", group="policy"
    )
    gradient_checkpointing: str = changed_flag(
        TrainConfig,
        "gradient_checkpointing",
        default="full",
        help="run layers, and what each token does with the vocabulary, again in the backward pass "
        "instead of keeping it; none keeps all",
        without=("none", "no_checkpoint"),
    )
    freeze_embeddings: bool = flag(
        False,
        "leave embedding and output weight as they are, so that no gradient of them exists",
        group="memory and speed",
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_response("max_new_tokens", self.max_new_tokens)
        # raises for what is out of range
        if self.method == "all":
            for method in METHODS:
                dataclasses.replace(self, method=method)
        else:
            self.settings(eod_id=0)

    @property
    def longest_response(self) -> int:
        return self.max_new_tokens

    @property
    def row_tokens(self) -> int:
        return self.context_length

    @property
    def needs_reference(self) -> bool:
        """Whether a second model is held; its KL is logged even if it is not in the loss."""
        return True

    @property
    def frozen_models(self) -> int:
        """The reference, and a reward model that is not named, which has the policy's shape."""
        return 1 + (not self.reward_checkpoint)

    def kinds(self) -> list[TrainConfig]:
        """Of --method all the two methods that need most."""
        if self.method != "all":
            return [self]
        return [dataclasses.replace(self, method=method) for method in LARGEST]

    def scheduled(self, step: int) -> dict[str, float]:
        return {"tau": self.settings(eod_id=0).tau(step)}

    def settings(self, eod_id: int, vocab_size: int | None = None) -> GradeSettings:
        """The settings of the objective; only ids below `vocab_size` are mixed or drawn."""
        return GradeSettings(
            eod_id=eod_id,
            vocab_size=vocab_size,
            method=self.method,
            max_new_tokens=self.max_new_tokens,
            gumbel_topk=self.gumbel_topk,
            kl_coef=self.kl_coef,
            tau_start=self.tau_start,
            tau_end=self.tau_end,
            max_steps=self.max_steps,
            checkpoint=self.gradient_checkpointing != "none",
        )

    def validation_sampling(self, eod_id: int, vocab_size: int) -> Sampling:
        """How validation prompts are answered: once, with the same draws at every validation."""
        return Sampling(
            group_size=1,
            max_response_length=self.max_new_tokens,
            eod_id=eod_id,
            vocab_size=vocab_size,
            seed=VALIDATION_SEED,
            prompts=self.batch_size,
        )


def with_sources(settings: dict) -> dict:
    """The settings of a command line; ValueError if they name no weights or no prompts."""
    for name, what in (("init_from", "the policy's first weights"), ("data", "the prompts")):
        if not settings.get(name):
            flag_name = "checkpoint" if name == "init_from" else name
            raise ValueError(f"--{flag_name} is missing: name the folder of {what}, or give --demo")
    return settings
