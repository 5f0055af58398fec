"""TrainConfig: every setting of a training run.

Its fields are the flags of train.py and the keys of the TOML file that --config names.
"""

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from base.flags import PRECISIONS, spellings
from data.mixture import DECIMALS
from data.order import parse_ranges
from longhaul import lengths
from longhaul.cli import check_ranges, flag, known_words, words_of
from longhaul.dist import divisors
from longhaul.exits import WorldError
from longhaul.kernels import loss_path
from longhaul.kinds import KINDS, attention_kind, unfit_exchanges
from longhaul.parallel import context
from longhaul.sparse.layer import BlockConfig
from model import CHOICES, PRESETS, ModelConfig, NSAConfig

# Tokens per tile of the MLP if --mlp_tiles leaves the choice open: matrix products of this length
# still use the whole machine.
TOKENS_PER_TILE = 4096

# What --evals may name, in the order in which it is measured.
EVALS = ("loss", "position", "gain", "retrieval")
SHORTEST_EVAL = 1024  # tokens of the shortest row of retrieval, if --eval_lengths does not say

# How --dtype may be spelled, and the one spelling that configurations, checkpoints and printed
# commands use.
DTYPE_SPELLINGS = spellings("bf16", "fp32")


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run, validated once and never changed; the help of a field has its unit."""

    PROGRAM: ClassVar[str] = "train.py"  # what is run with these settings
    UNTIMED: ClassVar[str] = ""  # what the predicted time of a step leaves out

    # A loss is reported that is so many robust standard deviations above the median of the last 64.
    LOSS_SPIKE: ClassVar[float] = 10.0

    # Printed by --help: a sentence for each group of flags, and commands to start from.
    GROUPS: ClassVar[dict[str, str]] = {
        "model": "What is trained.",
        "data": "What the model is trained on, and how much data a step takes.",
        "optimisation": "How gradients change weights; --resume auto may change only --max_steps.",
        "memory and speed": "Precision, memory levers, backends and parallelism.",
        "numerics": "What happens when numbers go wrong.",
        "run": "Checkpoints, validation, logs and what to do before the first step.",
    }
    EXAMPLES: ClassVar[str] = """examples:
  python train.py --model_size tiny --max_steps 100
  python train.py --context_length 131072 --attention_type nsa --gradient_checkpointing --plan
  torchrun --nproc_per_node=2 train.py --context_length 131072 --gradient_checkpointing"""

    # ---- model

    model_size: str = flag(
        "4B",
        "preset of the model's shape, from model.py",
        choices=tuple(PRESETS),
        group="model",
    )
    context_length: int = flag(
        4096,
        "tokens per row, which is one training sequence",
        at_least=2,
        group="model",
    )
    attention_type: str = flag(
        "standard",
        "kind of attention: standard is full causal attention, nsa is Native Sparse Attention, "
        "indexed reads the blocks that a trained indexer chooses; without new weights, exact reads "
        "the blocks with the largest logits, bounds those with the largest bounds of them, pooled "
        "and mean those whose means of keys fit best",
        choices=KINDS,
        group="model",
    )
    nsa: tuple[str, ...] = flag(
        (),
        "fields of NSAConfig as name=value, for example kv=separate sel_count=8; "
        "needs --attention_type nsa",
        many=True,
        group="model",
    )
    blocks: tuple[str, ...] = flag(
        (),
        "fields of the settings of indexed, exact, bounds, pooled or mean as name=value, for "
        "example count=32 local=4; needs one of these as --attention_type",
        many=True,
        group="model",
    )
    vocab_size: int = flag(
        0,
        "number of tokens in the vocabulary; 0: the preset's",
        at_least=0,
        at_most=10**8,
        group="model",
    )
    rope_theta: float = flag(
        0.0,
        "base of the rotary frequencies, larger for longer contexts (ABF); 0: the preset's",
        at_least=0,
        group="model",
    )
    rope_scaling: str = flag(
        "none",
        "how rotary positions are stretched beyond the context that the weights were trained at",
        choices=CHOICES["rope_scaling"],
        group="model",
    )
    rope_factor: float = flag(
        1.0,
        "linear and yarn: the new context length divided by the trained one",
        group="model",
    )
    rope_original_context: int = flag(
        32768,
        "yarn: context length in tokens that the weights were trained at",
        group="model",
    )
    model_overrides: tuple[str, ...] = flag(
        (),
        "fields of ModelConfig as name=value, for shapes between the presets, "
        "for example num_layers=12; and for loss_chunk_size, the tokens per tile of the loss",
        many=True,
        group="model",
    )
    init_from: str = flag(
        "",
        "folder whose weights training starts from: a Hugging Face Qwen3 model, or a run or step-* "
        "folder of longhaul; its shape, vocabulary and positions are the model's, and so is the "
        "context of a longhaul run, unless flags say otherwise; empty: random weights",
        group="model",
    )

    # ---- data

    data: str = flag(
        "",
        "folder written by `python -m data.prepare`; or several with their shares of the tokens, "
        "such as web:0.7,books:0.3, or a TOML file with these; empty: the embedded corpus, which "
        "is the source text of the installed Python, torch and numpy",
        group="data",
    )
    long_fraction: float = flag(
        0.0,
        "share of the tokens that comes from documents of at least --context_length tokens, at "
        "most 4 decimals; 0: as documents come",
        at_least=0,
        at_most=1,
        group="data",
    )
    length_schedule: str = flag(
        "",
        "context lengths to train at one after the other, as LENGTH:STEPS[:THETA] for each stage, "
        "such as 4096:1000,32768:500; steps keep their tokens, the batch flags are those of the "
        "longest, and --context_length and --max_steps follow",
        group="data",
    )
    short_fraction: float = flag(
        0.0,
        "--length_schedule: from the second stage on, the share of the tokens that comes from "
        "documents no longer than the first stage's length; 0: as documents come",
        at_least=0,
        at_most=1,
        group="data",
    )
    whole_documents: bool = flag(
        False,
        "pack rows only from documents of at most --context_length tokens, in a length schedule "
        "those of each stage; longer ones are left out instead of cut",
        group="data",
    )
    batch_size: int = flag(
        1,
        "rows per micro-batch on each rank; activation memory grows with it",
        at_least=1,
        group="data",
    )
    gradient_accumulation_steps: int = flag(
        1,
        "micro-batches per optimizer step on each rank; costs time, not memory",
        at_least=1,
        group="data",
    )
    global_batch_size: int = flag(
        0,
        "rows per optimizer step over all ranks, from which the micro-batches per step follow; "
        "0: batch_size x gradient_accumulation_steps x ranks",
        at_least=0,
        group="data",
    )
    seed: int = flag(
        0,
        "seed of the initial weights and of the data order",
        at_least=-(2**63),
        at_most=2**63 - 1,
        group="data",
    )

    # ---- optimisation

    max_steps: int = flag(
        1000,
        "optimizer steps in the whole run",
        at_least=1,
        at_most=10**12,
        group="optimisation",
    )
    lr: float = flag(
        3e-4,
        "peak learning rate",
        at_least=0,
        at_most=1000,
        group="optimisation",
    )
    schedule: str = flag(
        "cosine",
        "learning rate after the warmup: cosine decay to the end, "
        "wsd (constant, then a linear decay), or constant",
        choices=("cosine", "wsd", "constant"),
        group="optimisation",
    )
    warmup_steps: int = flag(
        100,
        "steps over which the learning rate rises linearly to its peak",
        at_least=0,
        group="optimisation",
    )
    decay_fraction: float = flag(
        0.2,
        "wsd: fraction of the run, at its end, during which the learning rate decays",
        at_least=0,
        at_most=1,
        group="optimisation",
    )
    min_lr_ratio: float = flag(
        0.1,
        "final learning rate as a fraction of the peak",
        at_least=0,
        at_most=1,
        group="optimisation",
    )
    weight_decay: float = flag(
        0.1,
        "decoupled weight decay of matrices; norms and biases do not decay",
        at_least=0,
        at_most=1000,
        group="optimisation",
    )
    beta1: float = flag(
        0.9,
        "AdamW: decay rate of the first moment",
        group="optimisation",
    )
    beta2: float = flag(
        0.95,
        "AdamW: decay rate of the second moment",
        group="optimisation",
    )
    adam_eps: float = flag(
        1e-8,
        "AdamW: number added to the root of the second moment",
        group="optimisation",
    )
    grad_clip: float = flag(
        1.0,
        "scale gradients down to this global norm if theirs is larger; 0: no clipping",
        at_least=0,
        group="optimisation",
    )
    indexer_warmup: int = flag(
        0,
        "steps at the start of the run in which attention stays dense and only the indexer learns; "
        "needs --attention_type indexed",
        at_least=0,
        group="optimisation",
    )

    # ---- memory and speed

    dtype: str = flag(
        "bf16",
        "compute precision; weights, gradients and optimizer states stay fp32 "
        "unless --master_weights, --offload_optimizer or --optimizer changes them",
        choices=tuple(DTYPE_SPELLINGS),
        group="memory and speed",
    )
    gradient_checkpointing: str = flag(
        "none",
        "run layers again in the backward pass instead of keeping their activations: "
        "full keeps only layer inputs and costs about a third more compute, "
        "selective also keeps attention's outputs so that attention runs once; "
        "the flag without a value means full",
        choices=("none", "full", "selective"),
        bare="full",
        group="memory and speed",
    )
    offload_activations: bool = flag(
        False,
        "keep checkpointed layer inputs in host memory until the backward pass; "
        "needs --gradient_checkpointing",
        group="memory and speed",
    )
    mlp_tiles: int = flag(
        1,
        "number of token tiles that each MLP computes one after another; "
        "above 1 its forward runs again in the backward pass; "
        f"0, or the flag without a value: tiles of {TOKENS_PER_TILE:,} tokens",
        bare=0,
        at_least=0,
        group="memory and speed",
    )
    attention_head_groups: int = flag(
        1,
        "number of groups of KV heads that attention computes one after another; "
        "above 1 its forward runs again in the backward pass",
        at_least=1,
        group="memory and speed",
    )
    optimizer: str = flag(
        "adamw",
        "AdamW with fp32, bf16 or 8-bit moments (8, 4 or about 2 bytes per parameter; "
        "bf16 and 8-bit round), "
        "or Muon for the matrices of the layers with AdamW for the rest",
        choices=("adamw", "adamw_bf16", "adamw_8bit", "muon"),
        group="memory and speed",
    )
    master_weights: str = flag(
        "fp32",
        "fp32: keep fp32 weights and round them to --dtype for computing; "
        "none: keep only weights in --dtype, updated by stochastic rounding",
        choices=("fp32", "none"),
        group="memory and speed",
    )
    offload_optimizer: bool = flag(
        False,
        "keep fp32 weights and moments in host memory and update them there "
        "(12 bytes per parameter); in bf16, weights and gradients on the device are bf16",
        group="memory and speed",
    )
    optimizer_in_backward: bool = flag(
        False,
        "update each weight as soon as its gradient is complete, then free the gradient; "
        "needs --grad_clip 0 and one micro-batch per step",
        group="memory and speed",
    )
    loss: str = flag(
        "auto",
        "standard computes all logits at once; chunked computes them tile by tile, twice; one_pass "
        "computes the gradients with the loss, for a block of tokens at a time; auto: tiles if the "
        "logits exceed 10 GiB (logits_threshold_gib of --model_overrides) or if tiles are at least "
        "as fast, and in one pass if the weights are not in low precision",
        choices=CHOICES["loss"],
        group="memory and speed",
    )
    kernels: str = flag(
        "auto",
        "backend for fused ops: eager torch, torch.compile, or Triton (CUDA)",
        choices=CHOICES["kernels"],
        group="memory and speed",
    )
    compile: bool = flag(
        False,
        "compile each layer with torch.compile; the first step takes about a minute longer",
        group="memory and speed",
    )
    dp_replicate: int = flag(
        1,
        "number of replicas that each hold all parameters (HSDP); 1: shard over all ranks",
        at_least=1,
        group="memory and speed",
    )
    context_parallel_size: int = flag(
        0,
        "number of ranks that share the tokens of each row; "
        "0: as few as a row needs, which is 1 if it fits on one rank",
        at_least=0,
        group="memory and speed",
    )
    context_parallel_mode: str = flag(
        "auto",
        "communication for context parallelism: ulysses (all-to-all over heads), "
        "gather_kv (all-gather keys and values), or auto (whichever moves fewer bytes)",
        choices=context.MODES,
        group="memory and speed",
    )
    device: str = flag(
        "auto",
        "where to run; auto: on the GPU if torch sees one, otherwise on the CPU",
        choices=("auto", "cpu", "cuda"),
        group="memory and speed",
    )

    # ---- numerics

    max_skipped_steps: int = flag(
        10,
        "number of steps that may be skipped because of a NaN or infinite gradient; "
        "one more ends the run with exit code 5, and so does one at the end of the run",
        at_least=0,
        group="numerics",
    )
    skip_rows: tuple[str, ...] = flag(
        (),
        "rows to skip, as ranges a:b in the numbering the log uses; "
        "resume from a checkpoint taken before them",
        many=True,
        group="numerics",
    )

    # ---- run

    output_dir: str = flag(
        "runs/default",
        "folder for checkpoints, logs and TensorBoard",
        group="run",
    )
    save_every: int = flag(
        500,
        "steps between checkpoints; the last step always saves one",
        at_least=1,
        group="run",
    )
    keep_last: int = flag(
        2,
        "number of newest checkpoints to keep, at least 2; the newest one from which a step was "
        "taken stays, too",
        at_least=2,
        group="run",
    )
    resume: str = flag(
        "auto",
        "auto: continue from the newest intact checkpoint in output_dir, if there is one; "
        "none: start anew, and refuse a folder that holds a run; "
        "or the path of a step-* folder to continue from, also with other settings of the group "
        "optimisation",
        group="run",
    )
    async_save: bool = flag(
        False,
        "write checkpoints in the background, from a copy in host memory, while training goes on",
        group="run",
    )
    deterministic: bool = flag(
        False,
        "on a GPU, use only kernels that repeat their bits, so that a resumed run does too; "
        "attention is slower (its backward, and no cuDNN); on a CPU all runs repeat anyway",
        group="run",
    )
    eval_every: int = flag(
        100,
        "steps between evaluations, each with a text sample in TensorBoard; 0: never",
        at_least=0,
        group="run",
    )
    evals: str = flag(
        "loss,position",
        f"what --eval_every measures, of {', '.join(EVALS)}: the validation loss, the loss by "
        "position, the gain of the full context on a short one, retrieval",
        group="run",
    )
    eval_rows: int = flag(
        8,
        "rows of each corpus's validation split that are measured, over all ranks",
        at_least=1,
        group="run",
    )
    eval_lengths: str = flag(
        "",
        "--evals retrieval: tokens of a row, such as 4096,8192; empty: powers of two from 1,024 to "
        "the context length",
        group="run",
    )
    eval_seconds: float = flag(
        0.0,
        "seconds after which an evaluation leaves out what it has not measured yet, but never the "
        "losses; 0: no limit",
        at_least=0,
        group="run",
    )
    log_every: int = flag(
        1,
        "steps between progress lines and TensorBoard points; metrics.jsonl has every step",
        at_least=1,
        group="run",
    )
    config: str = flag("", "TOML file with these settings; flags win over the file", group="run")
    fit: str = flag(
        "refuse",
        "what to do if the run would not fit in memory: refuse it, or auto, which turns on memory "
        "levers that keep the model, the context and the batch",
        choices=("refuse", "auto"),
        group="run",
    )
    plan: bool = flag(
        False,
        "print what the run needs and what this machine has, then stop",
        group="run",
    )

    def __post_init__(self):
        self._normalise_dtype()
        self._take_lengths()
        self._check_ranges()
        parse_ranges(self.skip_rows)  # raises for what is not a range
        config = self.model()  # raises for a shape that cannot be built

        self._check_attention()
        self._check_activation_levers(config)
        self._check_optimizer_levers()
        if self.eval_every:
            self._check_evals()
        if self.context_ranks > 1:
            self.context_choice(config)  # raises if the ranks cannot share a row
        if self.length_schedule:
            self._check_lengths(config)

    # ---- validation

    def _normalise_dtype(self) -> None:
        """One spelling, so that every spelling gives the same run, checkpoint and command."""
        spelling = str(self.dtype)
        if spelling in DTYPE_SPELLINGS:
            object.__setattr__(self, "dtype", DTYPE_SPELLINGS[spelling])

    def _take_lengths(self) -> None:
        """The longest length and the sum of the steps of --length_schedule; ValueError if flags
        contradict them.
        """
        stages = lengths.parse(self.length_schedule)
        if not stages:
            return
        follows = dict(
            context_length=stages[-1].tokens,
            max_steps=sum(stage.steps for stage in stages),
        )
        for name, value in follows.items():
            given = getattr(self, name)
            if given not in (value, getattr(TrainConfig, name)):
                raise ValueError(
                    f"--{name} {given}, but --length_schedule {self.length_schedule} makes it "
                    f"{value}: drop --{name}"
                )
            object.__setattr__(self, name, value)

    def _check_lengths(self, model: ModelConfig) -> None:
        """ValueError for a stage that cannot be built, and for positions that do not reach the
        longest one.
        """
        stages = lengths.parse(self.length_schedule)
        if self.rope_theta and stages[0].theta not in (None, self.rope_theta):
            raise ValueError(
                f"--rope_theta {self.rope_theta:g}, but the first stage of --length_schedule has "
                f"{stages[0].theta:g}: drop one of them"
            )
        if self.long_fraction and self.short_fraction:
            raise ValueError(
                "--long_fraction and --short_fraction divide the same documents: drop one of them"
            )

        reach = round(model.rope_original_context * model.rope_factor)
        if model.rope_scaling != "none" and reach < self.context_length:
            factor = self.context_length / model.rope_original_context
            raise ValueError(
                f"--rope_scaling {model.rope_scaling} reaches {reach} tokens, and "
                f"--length_schedule {self.context_length}: give --rope_factor {factor:g}"
            )
        self.stages()

    def _check_ranges(self) -> None:
        """ValueError for a number outside its range."""
        check_ranges(self)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(
                    f"--{name} {value} is out of range: give a number of at least 0 and below 1"
                )

        for name in ("long_fraction", "short_fraction"):
            value = getattr(self, name)
            if round(value, DECIMALS) != value:
                raise ValueError(
                    f"--{name} {value} has too many digits: give at most {DECIMALS} behind the "
                    "point"
                )
        if not 0 < self.adam_eps <= 1:
            raise ValueError(
                f"--adam_eps {self.adam_eps} is out of range: give a number above 0 and at most 1"
            )

    def _check_evals(self) -> None:
        """ValueError for no measure, an unknown one, and lengths that are no numbers."""
        known_words("--evals", self.evals, EVALS)
        self._given_eval_lengths()

    def check_eval_lengths(self) -> None:
        """ValueError for a length beyond the context; not of a stage, which may be shorter."""
        given = self._given_eval_lengths()
        if given and given[-1] > self.context_length:
            raise ValueError(
                f"--eval_lengths {self.eval_lengths} has {given[-1]}, and --context_length is "
                f"{self.context_length}: give at most {self.context_length}"
            )

    def _given_eval_lengths(self) -> tuple[int, ...]:
        """The numbers of --eval_lengths, rising; ValueError for another word."""
        return lengths.numbers("--eval_lengths", self.eval_lengths) if self.eval_lengths else ()

    def _check_attention(self) -> None:
        """ValueError for settings that cannot serve the kind of attention, and for a warm-up of its
        indexer that leaves no step to train the rest.
        """
        self._check_attention_sizes()
        changed = self.changed_settings()
        for name, reason in attention_kind(self).refused_levers.items():
            if name in changed:
                raise ValueError(
                    f"--{name} {getattr(self, name)} cannot serve {self.attention_type} attention, "
                    f"{reason}: drop it"
                )
        if self.dense_steps >= self.max_steps:
            raise ValueError(
                f"--indexer_warmup {self.indexer_warmup} is not shorter than the run of "
                f"--max_steps {self.max_steps}: give at most {self.max_steps - 1}"
            )
        if self.dense_steps and self.optimizer_in_backward:
            raise ValueError(
                "--indexer_warmup leaves most weights as they are, but --optimizer_in_backward "
                "updates each weight in the backward pass: drop one of them"
            )

    def _check_attention_sizes(self) -> None:
        """ValueError for sizes of another attention, which would train this one without a word."""
        for name, kind in (("nsa", "nsa"), ("blocks", "exact")):
            given = getattr(self, name)
            if given and attention_kind(self).settings != name:
                raise ValueError(
                    f"--{name} {' '.join(given)} changes nothing of --attention_type "
                    f"{self.attention_type}: give --attention_type {kind}, or drop --{name}"
                )

    def _check_activation_levers(self, model: ModelConfig) -> None:
        """ValueError for levers of layers that exclude each other."""
        groups = self.attention_head_groups
        if model.num_kv_heads % groups:
            raise ValueError(
                f"--attention_head_groups {groups} does not divide {model.num_kv_heads} KV heads: "
                "give a divisor"
            )
        if groups > 1:
            self._check_shared_head_groups(model)

        if self.compile and (self.tiles > 1 or groups > 1):
            raise ValueError(
                "--compile cannot compile the backward pass of --mlp_tiles and "
                "--attention_head_groups: drop one of them"
            )
        if groups > 1 and self.gradient_checkpointing == "selective":
            raise ValueError(
                "--gradient_checkpointing selective keeps attention's outputs so that it runs "
                "once, but --attention_head_groups runs it again in the backward pass: use full"
            )
        if self.offload_activations and self.gradient_checkpointing == "none":
            raise ValueError(
                "--offload_activations moves checkpointed layer inputs, but no layer is "
                "checkpointed: add --gradient_checkpointing"
            )

    def _check_shared_head_groups(self, model: ModelConfig) -> None:
        """ValueError if ranks that exchange heads cannot divide a head group's KV heads."""
        heads = model.num_kv_heads // self.attention_head_groups
        if heads % self.context_ranks == 0:
            return
        if self.context_choice(model).mode == "ulysses":
            raise ValueError(
                f"--attention_head_groups {self.attention_head_groups} leaves {heads} KV heads at "
                f"a time, which cannot be divided evenly among the {self.context_ranks} ranks that "
                "share a row: give fewer groups"
            )

    def _check_optimizer_levers(self) -> None:
        """ValueError for levers of the optimizer that exclude each other."""
        without_master = self.master_weights == "none"
        if without_master and self.dtype == "fp32":
            raise ValueError(
                "--master_weights none saves nothing with --dtype fp32: use --dtype bf16, or "
                "--master_weights fp32"
            )
        if self.offload_optimizer and self.optimizer != "adamw":
            raise ValueError(
                "--offload_optimizer keeps fp32 moments in host memory, but --optimizer "
                f"{self.optimizer} keeps others on the device: drop one of them"
            )
        if self.offload_optimizer and without_master:
            raise ValueError(
                "--offload_optimizer already keeps its fp32 weights in host memory: "
                "drop --master_weights none"
            )
        if self.optimizer_in_backward:
            self._check_optimizer_in_backward()

    def _check_optimizer_in_backward(self) -> None:
        if self.optimizer == "muon":
            raise ValueError(
                "--optimizer muon orthogonalises whole matrices, but with --optimizer_in_backward "
                "each rank decides for its own shard whether to step: drop one of them"
            )
        if self.grad_clip:
            raise ValueError(
                "--optimizer_in_backward updates weights before the global norm is known: "
                "add --grad_clip 0"
            )

    def scheduled(self, step: int) -> dict[str, float]:
        """What a schedule over --max_steps sets in a step, by name, next to the learning rate."""
        return {}

    def warnings(self) -> list[str]:
        """What a run with these settings should be told: settings without effect, a warmup that is
        longer than the run, sparse attention over rows that are too short for it.
        """
        found = []
        for name in self.ineffective_settings():
            found.append(f"--{name} {getattr(self, name)} has no effect with the other settings")

        if self.warmup_steps >= self.max_steps:
            reached = self.max_steps / self.warmup_steps
            found.append(
                f"the run ends inside the warmup, at {reached:.0%} of the peak learning rate "
                f"(--max_steps {self.max_steps}, --warmup_steps {self.warmup_steps}): give fewer "
                "--warmup_steps"
            )

        sparse = self.model().attention
        if isinstance(sparse, NSAConfig) and self.context_length <= sparse.window:
            found.append(
                f"each window of {sparse.window} tokens holds a whole row of "
                f"{self.context_length}, so sparse attention only adds work: use "
                "--attention_type standard, or a longer --context_length"
            )

        if isinstance(sparse, BlockConfig) and self.context_length <= sparse.dense_tokens:
            found.append(
                f"--attention_type {self.attention_type} reads every key before position "
                f"{sparse.dense_tokens}, so rows of {self.context_length} have full attention: "
                "give a longer --context_length, or --blocks with a smaller count or dense_below"
            )
        return found

    def ineffective_settings(self) -> list[str]:
        """Names of settings that were changed from their default and that the others make void."""
        only_warmup = self.warmup_steps >= self.max_steps
        asks_nothing = self.eval_every > 0 and "retrieval" not in self.eval_names()
        costly = set(self.eval_names()) - {"loss", "position"}
        ineffective = dict(
            eval_lengths=asks_nothing,
            eval_seconds=self.eval_every > 0 and not costly,
            context_parallel_mode=self.context_ranks == 1,
            gradient_accumulation_steps=self.global_batch_size > 0,
            short_fraction=not self.length_schedule,
            schedule=only_warmup,
            decay_fraction=self.schedule != "wsd" or only_warmup,
            min_lr_ratio=self.schedule == "constant" or only_warmup,
            indexer_warmup=self.indexer_ineffective,
            rope_original_context=self.rope_scaling != "yarn" and not self.init_from,
        )
        changed = self.changed_settings()
        return [name for name in ineffective if name in changed and ineffective[name]]

    @property
    def indexer_ineffective(self) -> bool:
        """Whether the attention has no indexer."""
        return not attention_kind(self).learner

    @property
    def dense_steps(self) -> int:
        """Steps of the indexer's warm-up; 0 for an attention without an indexer."""
        return 0 if self.indexer_ineffective else self.indexer_warmup

    def changed_settings(self) -> list[str]:
        """Names of the settings that differ from their defaults."""
        changed = []
        for spec in dataclasses.fields(self):
            default = () if spec.default is dataclasses.MISSING else spec.default
            if getattr(self, spec.name) != default:
                changed.append(spec.name)
        return changed

    # ---- what follows from the settings

    def stages(self) -> tuple["Stage", ...]:
        """The stages of --length_schedule, each with its settings; without one, the whole run."""
        schedule = lengths.parse(self.length_schedule)
        if not schedule:
            return (Stage(0, 0, self.max_steps, self),)

        proportional = self.rope_scaling == "none"
        thetas = lengths.thetas(schedule, self.model().rope_theta, proportional)
        found = []
        first_step = 0
        for number, length in enumerate(schedule):
            cfg = self._at_length(length.tokens, thetas[number])
            found.append(Stage(number, first_step, first_step + length.steps, cfg))
            first_step += length.steps
        return tuple(found)

    def _at_length(self, tokens: int, theta: float) -> "TrainConfig":
        """The settings of a stage: as many more rows as they are shorter."""
        ratio = self.context_length // tokens
        return dataclasses.replace(
            self,
            length_schedule="",
            short_fraction=0.0,
            context_length=tokens,
            rope_theta=theta,
            batch_size=self.batch_size * ratio,
            global_batch_size=self.global_batch_size * ratio,
        )

    def eval_names(self) -> tuple[str, ...]:
        """What an evaluation measures."""
        return words_of(self.evals)

    def retrieval_lengths(self) -> tuple[int, ...]:
        """Tokens of the rows of retrieval; a stage of a length schedule has those that fit."""
        given = self._given_eval_lengths()
        if given:
            return tuple(length for length in given if length <= self.context_length)

        return lengths.doublings(SHORTEST_EVAL, self.context_length)

    @property
    def document_lengths(self) -> range | None:
        """The lengths of the documents that are read, in tokens; None: all."""
        return range(1, self.context_length + 1) if self.whole_documents else None

    def stage_of(self, step: int) -> "Stage":
        """The stage in which the step after `step` steps is; after the last one, the last."""
        stages = self.stages()
        return next((stage for stage in stages if step < stage.last_step), stages[-1])

    def model(self) -> ModelConfig:
        """The model's configuration."""
        fields = dict(
            attention=self._attention(),
            loss=self.loss,
            kernels=self.kernels,
            compute_dtype=self._compute_dtype(),
            rope_scaling=self.rope_scaling,
            rope_factor=self.rope_factor,
            rope_original_context=self.rope_original_context,
        )
        if self.vocab_size:
            fields["vocab_size"] = self.vocab_size
        if self.rope_theta:
            fields["rope_theta"] = self.rope_theta

        fields |= read_pairs(self.model_overrides, ModelConfig, "model_overrides")
        return ModelConfig.preset(self.model_size, **fields)

    def _attention(self):
        """The settings of the kind of attention."""
        kind = attention_kind(self)
        given = getattr(self, kind.settings) if kind.settings else ()
        return kind.config(**read_pairs(given, kind.config, kind.settings))

    def _compute_dtype(self) -> str:
        if self.dtype not in DTYPE_SPELLINGS:
            raise ValueError(
                f"--dtype {self.dtype} is unknown: choose one of {', '.join(DTYPE_SPELLINGS)}"
            )
        return PRECISIONS[self.dtype]

    @property
    def tiles(self) -> int:
        """Tiles of the tokens that each MLP computes one after another.

        If --mlp_tiles leaves the number open, a tile has TOKENS_PER_TILE tokens or fewer.
        """
        if self.mlp_tiles:
            return self.mlp_tiles
        tokens = self.batch_size * self.context_length // self.context_ranks
        return math.ceil(tokens / TOKENS_PER_TILE)

    @property
    def weights_in_compute_dtype(self) -> bool:
        """Whether the device holds weights only in the compute precision."""
        return self.master_weights == "none" or self.offload_optimizer

    def loss_path(self, config: ModelConfig, ranks: int) -> str:
        """Which loss runs on each of `ranks` ranks: "standard", "chunked" or "one_pass"."""
        # FSDP2 gathers weights in the compute precision.
        without_masters = ranks > 1 or self.weights_in_compute_dtype
        low_precision = self.dtype == "bf16" and without_masters
        tokens = self.context_length // self.context_ranks
        return loss_path(config, self.batch_size * tokens, low_precision)

    def loss_in_words(self, config: ModelConfig, ranks: int) -> str:
        """What is minimised, and what its logits would need."""
        shape = (self.batch_size, self.context_length // self.context_ranks)
        return (
            f"{self.loss_path(config, ranks)} (full logits would be "
            f"{config.logits_gib(*shape):.2f} GiB per rank and micro-batch; threshold "
            f"{config.logits_threshold_gib:g} GiB)"
        )

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row of a micro-batch."""
        return self.context_length

    @property
    def context_ranks(self) -> int:
        """Ranks that share a row; 1 until a plan has chosen the number that 0 leaves open."""
        return max(1, self.context_parallel_size)

    def context_choice(self, config: ModelConfig) -> context.Choice:
        """How `context_ranks` ranks share a row, and why; ValueError if they cannot."""
        return context.choose(
            self.context_parallel_mode,
            unfit_exchanges(config.attention.name),
            config.num_heads,
            config.num_kv_heads,
            self.context_length,
            self.context_ranks,
            config.dtype.itemsize,
        )

    def accumulation(self, ranks: int) -> int:
        """Micro-batches of a step on each of `ranks` ranks.

        Ranks that share a row count as one. ValueError or WorldError if the global batch does not
        divide.
        """
        micro_batches = self.gradient_accumulation_steps
        if self.global_batch_size:
            given = f"--global_batch_size {self.global_batch_size}"
            micro_batches = self.micro_batches_of(self.global_batch_size, ranks, given)

        if self.optimizer_in_backward and micro_batches > 1:
            raise ValueError(
                "--optimizer_in_backward updates weights after each micro-batch, and a step has "
                f"{micro_batches}: drop it, or give a batch of one micro-batch"
            )
        return micro_batches

    def micro_batches_of(self, batch: int, ranks: int, given: str) -> int:
        """Micro-batches on each of `ranks` ranks of a step of `batch` rows. ValueError or
        WorldError if it does not divide, which begins with `given`.
        """
        rows = ranks // self.context_ranks * self.batch_size
        if batch % rows == 0:
            return batch // rows

        sharing = ""
        if self.context_ranks > 1:
            sharing = f" ({self.context_ranks} share each row)"
        message = (
            f"{given} is not divisible by {ranks} ranks{sharing} x --batch_size "
            f"{self.batch_size} = {rows}: make ranks x batch_size one of {divisors(batch)}"
        )

        # The exit code tells a launcher whether another number of ranks would help.
        if batch % self.batch_size:
            raise ValueError(message)
        raise WorldError(message)

    def rows_per_step(self, ranks: int) -> int:
        """Rows of an optimizer step over all ranks."""
        return self.accumulation(ranks) * (ranks // self.context_ranks) * self.batch_size

    def table(self, names: Collection[str] | None = None) -> str:
        """These settings, or every one, one line per group."""
        groups: dict[str, list[str]] = {}
        for spec in dataclasses.fields(self):
            if names is not None and spec.name not in names:
                continue
            settings = groups.setdefault(spec.metadata["group"], [])
            settings.append(f"{spec.name}={getattr(self, spec.name)!r}")
        return "\n".join(f"  {title}: {', '.join(words)}" for title, words in groups.items())


@dataclass(frozen=True)
class Stage:
    """A part of a run that has one context length, from its first step to the one after its last.

    `cfg` has the settings of a run of this length, with the steps of the whole run.
    """

    number: int
    first_step: int
    last_step: int
    cfg: TrainConfig

    def of_its_steps(self) -> TrainConfig:
        """The settings, without an indexer's warm-up that has ended before."""
        if self.first_step < self.cfg.dense_steps:
            return self.cfg
        return dataclasses.replace(self.cfg, indexer_warmup=0)

    def in_words(self) -> str:
        """The stage in a line."""
        return (
            f"stage {self.number + 1}: context {self.cfg.context_length:,}, "
            f"theta {self.cfg.rope_theta:g}, to step {self.last_step:,}"
        )


# ---- name=value pairs


# kinds that any model of standard attention can be read with
WEIGHTLESS = tuple(
    name for name, kind in KINDS.items() if kind.settings == "blocks" and not kind.starts_fresh
)


def add_attention(parser):
    """The flags that say how a model of standard attention is read."""
    parser.add_argument(
        "--attention_type",
        choices=WEIGHTLESS,
        help="read a model of standard attention sparsely: by blocks of keys that are chosen so",
    )
    parser.add_argument(
        "--blocks",
        nargs="+",
        default=(),
        metavar="NAME=VALUE",
        help="sizes of that attention, such as count=32 local=4",
    )


def read_with(config: ModelConfig, attention: str | None, blocks: Collection[str]) -> ModelConfig:
    """The same model read with another attention, of the sizes that the pairs `blocks` change.

    ValueError for a model that has no standard attention, and for sizes without an attention.
    """
    if attention is None:
        if blocks:
            raise ValueError(f"--blocks {' '.join(blocks)} needs --attention_type")
        return config
    if config.attention.name != "standard":
        raise ValueError(
            f"--attention_type {attention} reads models of standard attention, and this one has "
            f"{config.attention.name}: drop --attention_type"
        )
    sizes = KINDS[attention].config
    return dataclasses.replace(
        config, attention=sizes(**read_pairs(tuple(blocks), sizes, "blocks"))
    )


def read_pairs(pairs: tuple[str, ...], cls: type, given_by: str) -> dict[str, Any]:
    """Values of name=value pairs, typed as the fields of the dataclass `cls`.

    ValueError for another name, another type, or a field that has a flag.
    """
    types = {spec.name: spec.type for spec in dataclasses.fields(cls)}
    flags = {spec.name: spec.name for spec in dataclasses.fields(TrainConfig)}
    flags |= {"compute_dtype": "dtype", "attention": "attention_type"}

    values = {}
    for pair in pairs:
        given = f"--{given_by} {pair!r}"
        name, equals, text = pair.partition("=")
        if not equals or name not in types:
            raise ValueError(f"{given}: give name=value with a name of {', '.join(types)}")
        if name in flags:
            raise ValueError(f"{given}: use the flag --{flags[name]}")
        if name in values:
            raise ValueError(f"{given}: {name} is given twice: keep one")
        values[name] = _converted(types[name], text, given)
    return values


def _converted(kind: type, text: str, given: str):
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{given}: give true or false")
        return text.lower() == "true"

    try:
        return kind(text)
    except ValueError:
        wanted = "an integer" if kind is int else "a number"
        raise ValueError(f"{given}: give {wanted}") from None
