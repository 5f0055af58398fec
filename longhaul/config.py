"""TrainConfig: every setting of a training run.

Its fields are the flags of train.py and the keys of the TOML file that --config names.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from base.flags import PRECISIONS, spellings
from data.mixture import DECIMALS
from data.order import parse_ranges
from footprint.cards.device import DEFAULT
from longhaul import config_checks, lengths
from longhaul.cli import check_ranges, flag, known_words, read_pairs, words_of
from longhaul.dist import divisors
from longhaul.exits import WorldError
from longhaul.kernels import loss_path
from longhaul.kinds import KINDS, attention_kind, unfit_exchanges
from longhaul.optimizers import OPTIMIZERS, Adam
from longhaul.parallel import context
from model import CHOICES, PRESETS, ModelConfig

# Tokens per tile of the MLP if --mlp_tiles leaves the choice open: matrix products of this length
# still use the whole machine.
TOKENS_PER_TILE = 4096

# What --evals may name, in the order in which it is measured.
EVALS = ("loss", "position", "gain", "retrieval")
SHORTEST_EVAL = 1024  # tokens of the shortest row of retrieval

HERE = "here"  # of --plan: on this machine

# How --dtype may be spelled, and the one spelling that configurations, checkpoints and printed
# commands use.
DTYPE_SPELLINGS = spellings("bf16", "fp32")


# The flags of each group of --help.
model_flag, data_flag, optimisation_flag, memory_flag, numerics_flag, run_flag = (
    partial(flag, group=title)
    for title in ("model", "data", "optimisation", "memory and speed", "numerics", "run")
)


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run, validated once and never changed; the help of a field has its unit."""

    PROGRAM: ClassVar[str] = "train.py"  # what is run with these settings
    TASK: ClassVar[str] = "train"  # what --task of profile_memory.py calls that
    # MODULE:CLASS of what the planner runs; named, because the planner is above the settings
    PLANNED: ClassVar[str] = "longhaul.planner.program:Program"
    SAMPLES: ClassVar[bool] = False  # whether a step begins with text that the model writes
    DTYPES: ClassVar[dict[str, str]] = DTYPE_SPELLINGS  # spelling of --dtype -> the one that counts
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

    model_size: str = model_flag(
        "4B", "preset of the model's shape, from model.py", choices=tuple(PRESETS)
    )
    context_length: int = model_flag(
        4096, "tokens per row, which is one training sequence", at_least=2
    )
    attention_type: str = model_flag(
        "standard",
        "standard: full causal; nsa: Native Sparse Attention; indexed: a trained indexer's blocks; "
        "without new weights: blocks by largest logits (exact), their bounds (bounds), or means of "
        "keys (pooled, mean)",
        choices=KINDS,
    )
    blocks: tuple[str, ...] = model_flag(
        (),
        "sizes of sparse attention: kv=separate sel_count=8 of nsa, count=32 local=4 of the others",
        many=True,
    )
    vocab_size: int = model_flag(
        0, "tokens in the vocabulary; 0: the preset's", at_least=0, at_most=10**8
    )
    rope_theta: float = model_flag(
        0.0,
        "base of the rotary frequencies; 0: the preset's",
        at_least=0,
    )
    rope_scaling: str = model_flag(
        "none",
        "stretch rotary positions: none, linear:FACTOR, yarn:FACTOR[:ORIGINAL] or "
        "llama3:FACTOR[:ORIGINAL]; FACTOR is the new context length divided by the trained one, "
        f"ORIGINAL ({ModelConfig.rope_original_context}, or the folder's of --init_from)",
    )
    model_overrides: tuple[str, ...] = model_flag(
        (),
        "fields of ModelConfig, for shapes between the presets, such as num_layers=12",
        many=True,
    )
    init_from: str = model_flag(
        "",
        "start from the weights, shape and positions of a Hugging Face folder, a run, or a step-* "
        "folder; empty: random weights",
    )

    # ---- data

    data: str = data_flag(
        "",
        "folder of data.prepare; or several with shares, such as web:0.7,books:0.3, or a TOML file "
        "of these; empty: the sources of Python, torch and numpy",
    )
    long_fraction: float = data_flag(
        0.0,
        "share of the tokens from documents of at least --context_length tokens; 0: as they come",
        at_least=0,
        at_most=1,
        decimals=DECIMALS,
    )
    length_schedule: str = data_flag(
        "",
        "context lengths to train at in turn, as LENGTH:STEPS[:THETA], such as "
        "4096:1000,32768:500; batch flags are for the longest; --context_length and --max_steps "
        "follow",
    )
    short_fraction: float = data_flag(
        0.0,
        "--length_schedule: later stages' share of documents that fit the first length; "
        "0: as they come",
        at_least=0,
        at_most=1,
        decimals=DECIMALS,
    )
    whole_documents: bool = data_flag(
        False,
        "leave out documents longer than --context_length (of each stage) instead of cutting them",
    )
    batch_size: int = data_flag(
        1, "rows per micro-batch on each rank; activation memory grows with it", at_least=1
    )
    gradient_accumulation_steps: int = data_flag(
        1, "micro-batches per optimizer step on each rank; costs time, not memory", at_least=1
    )
    global_batch_size: int = data_flag(
        0,
        "rows per optimizer step over all ranks; "
        "0: batch_size x gradient_accumulation_steps x ranks",
        at_least=0,
    )
    seed: int = data_flag(
        0, "seed of the initial weights and of the data order", at_least=-(2**63), at_most=2**63 - 1
    )

    # ---- optimisation

    max_steps: int = optimisation_flag(
        1000, "optimizer steps in the whole run", at_least=1, at_most=10**12
    )
    lr: float = optimisation_flag(3e-4, "peak learning rate", at_least=0, at_most=1000)
    schedule: str = optimisation_flag(
        "cosine",
        "learning rate after the warmup: cosine[:MIN], wsd[:DECAY[:MIN]], which is constant and "
        "then falls linearly in the last DECAY (0.2) of the run, or constant; MIN (0.1) is the "
        "final rate as a fraction of the peak",
    )
    warmup_steps: int = optimisation_flag(
        100, "steps over which the learning rate rises to its peak", at_least=0
    )
    weight_decay: float = optimisation_flag(
        0.1,
        "decoupled weight decay of matrices, not of norms and biases",
        at_least=0,
        at_most=1000,
    )
    adam: tuple[str, ...] = optimisation_flag(
        (),
        "AdamW's beta1 (0.9) and beta2 (0.95), the decay rates of its moments, and eps (1e-8), "
        "such as beta2=0.98",
        many=True,
    )
    grad_clip: float = optimisation_flag(
        1.0,
        "scale gradients down to this global norm; 0: no clipping",
        at_least=0,
    )
    indexer_warmup: int = optimisation_flag(
        0,
        "first steps, in which attention is dense and only the indexer learns",
        at_least=0,
    )

    # ---- memory and speed

    dtype: str = memory_flag(
        "bf16",
        "compute precision; weights, gradients and optimizer states stay fp32 "
        "unless other flags change them",
        choices=tuple(DTYPE_SPELLINGS),
    )
    gradient_checkpointing: str = memory_flag(
        "none",
        "run layers again in the backward: full (the flag alone) keeps only their inputs, "
        "selective also attention's outputs",
        choices=("none", "full", "selective"),
        bare="full",
    )
    offload_activations: bool = memory_flag(
        False,
        "keep checkpointed layer inputs in host memory; needs --gradient_checkpointing",
    )
    mlp_tiles: int = memory_flag(
        1,
        "token tiles that each MLP computes in turn, its forward twice; "
        f"0, or the flag alone: tiles of {TOKENS_PER_TILE:,} tokens",
        bare=0,
        at_least=0,
    )
    attention_head_groups: int = memory_flag(
        1,
        "groups of KV heads that attention computes in turn, its forward twice",
        at_least=1,
    )
    optimizer: str = memory_flag(
        "adamw",
        "AdamW with fp32, bf16 or 8-bit moments (8, 4 or 2 bytes per parameter; the last two "
        "round), or Muon for the layers' matrices",
        choices=tuple(OPTIMIZERS),
    )
    master_weights: str = memory_flag(
        "fp32",
        "fp32: round fp32 weights to --dtype for computing; "
        "none: weights in --dtype only, updated by stochastic rounding; host: keep and update fp32 "
        "weights and moments in host memory (12 bytes per parameter); the device's are in --dtype",
        choices=("fp32", "none", "host"),
    )
    optimizer_in_backward: bool = memory_flag(
        False,
        "update each weight when its gradient is complete, and free the gradient; needs "
        "--grad_clip 0 and one micro-batch per step",
    )
    loss: str = memory_flag(
        "auto",
        "standard: all logits at once; chunked: by tiles, twice; one_pass: gradients with the "
        "loss; auto: tiles above 10 GiB of logits, or if as fast",
        choices=CHOICES["loss"],
    )
    kernels: str = memory_flag(
        "auto",
        "fused functions by eager torch, torch.compile, or Triton (CUDA)",
        choices=CHOICES["kernels"],
    )
    compile: bool = memory_flag(
        False, "compile each layer; the first step takes about a minute longer"
    )
    dp_replicate: int = memory_flag(
        1,
        "replicas that each hold all parameters (HSDP); 1: shard over all ranks",
        at_least=1,
    )
    context_parallel_size: int = memory_flag(
        0,
        "ranks that share the tokens of each row; 0: as few as a row needs",
        at_least=0,
    )
    context_parallel_mode: str = memory_flag(
        "auto",
        "ranks share rows by all-to-all over heads (ulysses), by gathering keys and values "
        "(gather_kv), or by whichever moves fewer bytes",
        choices=context.MODES,
    )
    device: str = memory_flag(
        "auto",
        "auto: the GPU if torch sees one",
        choices=("auto", "cpu", "cuda"),
    )

    # ---- numerics

    max_skipped_steps: int = numerics_flag(
        10,
        "steps that may be skipped for a NaN or infinite gradient; one more ends the run with exit "
        "code 5",
        at_least=0,
    )
    skip_rows: tuple[str, ...] = numerics_flag(
        (),
        "rows to skip, as ranges a:b in the log's numbering; resume from a checkpoint before them",
        many=True,
    )

    # ---- run

    output_dir: str = run_flag("runs/default", "folder for checkpoints, logs and TensorBoard")
    save_every: int = run_flag(
        500, "steps between checkpoints; the last step always saves one", at_least=1
    )
    keep_last: int = run_flag(
        2,
        "newest checkpoints to keep; the newest one from which a step was taken stays, too",
        at_least=2,
    )
    resume: str = run_flag(
        "auto",
        "auto: from the newest intact checkpoint in output_dir; none: refuse a folder that holds a "
        "run; or a step-* folder, with its model, context, seed and data, also with other "
        "optimisation settings",
    )
    async_save: bool = run_flag(
        False,
        "write checkpoints from a copy in host memory during training",
    )
    deterministic: bool = run_flag(
        False,
        "on a GPU, use only kernels that repeat their bits; attention is slower",
    )
    eval_every: int = run_flag(
        100,
        "steps between evaluations, with a text sample in TensorBoard; 0: never",
        at_least=0,
    )
    evals: str = run_flag(
        "loss,position",
        f"what --eval_every measures, of {', '.join(EVALS)}",
    )
    eval_rows: int = run_flag(
        8, "validation rows of each corpus that are measured, over all ranks", at_least=1
    )
    config: str = run_flag(
        "",
        "TOML file with these settings, also below headings such as [memory]; flags win over it",
    )
    fit: str = run_flag(
        "refuse",
        "if a run does not fit: refuse it, or turn on memory levers, which keep model, context and "
        "batch",
        choices=("refuse", "auto"),
    )
    plan: str = run_flag(
        "",
        "print what the run needs and this machine has, then stop; or, of a GPU that is named, "
        f"what it has; without a name and where no GPU is and the run is too large, of {DEFAULT}",
        bare=HERE,
    )

    def __post_init__(self):
        spelling = str(self.dtype)
        if spelling not in self.DTYPES:
            raise ValueError(
                f"--dtype {spelling} is unknown: choose one of {', '.join(self.DTYPES)}"
            )
        # one spelling, so that every spelling gives the same run, checkpoint and command
        object.__setattr__(self, "dtype", self.DTYPES[spelling])
        object.__setattr__(self, "schedule", lengths.rate_schedule(self.schedule).in_words())
        object.__setattr__(self, "adam", self.adam_numbers().changed_pairs())
        if self.length_schedule:
            self._take_lengths()
        check_ranges(self)
        parse_ranges(self.skip_rows)  # raises for what is not a range
        config = self.model()  # raises for a shape that cannot be built

        config_checks.check_attention(self)
        config_checks.check_activation_levers(self, config)
        config_checks.check_optimizer_levers(self)
        if self.eval_every:
            known_words("--evals", self.evals, EVALS)
        if self.context_parallel_size > 1:
            self.context_choice(config)  # raises if the ranks cannot share a row
        if self.length_schedule:
            config_checks.check_schedule(self, config)

    # ---- validation

    def _take_lengths(self) -> None:
        """The longest length and the sum of the steps of --length_schedule; ValueError if flags
        contradict them.
        """
        stages = lengths.parse(self.length_schedule)
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

    def scheduled(self, step: int) -> dict[str, float]:
        """What a schedule over --max_steps sets in a step, by name, next to the learning rate."""
        return {}

    @property
    def dense_steps(self) -> int:
        """Steps of the indexer's warm-up; 0 for an attention without an indexer."""
        return self.indexer_warmup if attention_kind(self).learner else 0

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

        model = self.model()
        thetas = lengths.thetas(schedule, model.rope_theta, model.rope_scaling == "none")
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
        """Tokens of the rows of retrieval: powers of two up to the context."""
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
        kind = attention_kind(self)
        sizes = self.blocks if kind.settings else ()
        fields = dict(
            attention=kind.config(**read_pairs(sizes, kind.config, "blocks")),
            loss=self.loss,
            kernels=self.kernels,
            compute_dtype=PRECISIONS[self.dtype],
            **rope_fields(self.rope_scaling),
        )
        if self.vocab_size:
            fields["vocab_size"] = self.vocab_size
        if self.rope_theta:
            fields["rope_theta"] = self.rope_theta

        fields |= model_fields(self.model_overrides)
        return ModelConfig.preset(self.model_size, **fields)

    def adam_numbers(self) -> Adam:
        """The numbers of --adam; ValueError for others."""
        return Adam(**read_pairs(self.adam, Adam, "adam"))

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
        return self.master_weights != "fp32"

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
    def frozen_models(self) -> int:
        """Models of this shape that a step only reads."""
        return 0

    def kinds(self) -> "list[TrainConfig]":
        """The settings of each kind of step, if one run has several of different size."""
        return [self]

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

    def table(self, every: bool = True) -> str:
        """Every setting, or those that differ from their defaults, one line per group."""
        changed = self.changed_settings()
        groups: dict[str, list[str]] = {}
        for spec in dataclasses.fields(self):
            if not every and spec.name not in changed:
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


# ---- the fields of the model


def model_fields(overrides: Sequence[str]) -> dict[str, Any]:
    """Fields of ModelConfig from the pairs of --model_overrides; ValueError for one with a flag."""
    flags = {spec.name: spec.name for spec in dataclasses.fields(TrainConfig)}
    flags |= {"compute_dtype": "dtype", "attention": "attention_type"}
    return read_pairs(overrides, ModelConfig, "model_overrides", flags)


def rope_fields(text: str) -> dict[str, Any]:
    """Fields of ModelConfig from --rope_scaling, such as yarn:4:32768; ValueError for others."""
    kind, *numbers = text.split(":")
    values: dict[str, Any] = dict(rope_scaling=kind)
    try:
        if numbers:
            values["rope_factor"] = float(numbers[0])
        if len(numbers) > 1:
            values["rope_original_context"] = int(numbers[1])
    except ValueError:
        kind = ""
    if kind not in CHOICES["rope_scaling"] or len(numbers) > 2:
        raise ValueError(
            f"--rope_scaling {text[:40]} is unknown: give none, linear:FACTOR, "
            "yarn:FACTOR[:ORIGINAL] or llama3:FACTOR[:ORIGINAL]"
        )
    return values
