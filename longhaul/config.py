"""TrainConfig: every setting of a training run, once. Its fields are the flags of train.py and the
keys of --config.

Imports model.py (ModelConfig, PRESETS), data.order, longhaul.cli, longhaul.parallel.context and
longhaul.exits of ours.
"""

import dataclasses
import math
from dataclasses import dataclass

from data.order import parse_ranges
from longhaul.cli import flag
from longhaul.exits import WorldError
from longhaul.parallel import context
from model import CHOICES, PRESETS, ModelConfig, NSAConfig

# tokens of a part of the MLP where its number of parts is chosen here: long enough for whole matrix
# products
TILE = 4096
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class TrainConfig:
    """Frozen and validated once; sizes are in tokens, rows, steps or GiB as the help says."""

    # ---- model
    model_size: str = flag("4B", "preset of model.py", ("model",), tuple(PRESETS), group="model")
    context_length: int = flag(
        4096, "tokens of a row", ("seq_len", "max_seq_len", "sequence_length"), group="model"
    )
    attention_type: str = flag(
        "standard", "attention", ("attention",), CHOICES["attention_type"], group="model"
    )
    nsa: str = flag(
        (),
        "fields of NSAConfig as name=value, such as kv=separate sel_count=8 (with --attention_type nsa)",
        ("nsa_overrides",),
        many=True,
        group="model",
    )
    vocab_size: int = flag(0, "rows of the embedding; 0: the preset's", group="model")
    rope_theta: float = flag(
        0.0,
        "base of the rotary frequencies (ABF: larger for longer contexts); 0: the preset's",
        group="model",
    )
    rope_scaling: str = flag(
        "none", "extension of trained positions", (), CHOICES["rope_scaling"], group="model"
    )
    rope_factor: float = flag(1.0, "context extension of linear and yarn", group="model")
    rope_original_context: int = flag(
        32768, "yarn: tokens that the weights were trained at", group="model"
    )
    model_overrides: str = flag(
        (),
        "fields of ModelConfig as name=value, for shapes between the presets",
        many=True,
        group="model",
    )
    init_from: str = flag(
        "", "folder of a Hugging Face Qwen3 model to start from", ("init_from_hf",), group="model"
    )
    # ---- data
    data: str = flag(
        "",
        "folder made by `python -m data.prepare`; empty: the embedded corpus",
        ("data_dir", "dataset"),
        group="data",
    )
    documents: str = flag(
        "directory",
        "embedded corpus: one document per file, or per directory (long documents)",
        (),
        ("file", "directory"),
        group="data",
    )
    batch_size: int = flag(
        1,
        "rows of a micro-batch on each rank",
        ("micro_batch_size", "per_device_batch_size"),
        group="data",
    )
    gradient_accumulation_steps: int = flag(
        1, "micro-batches of a step", ("grad_accum", "accumulation_steps"), group="data"
    )
    global_batch_size: int = flag(
        0,
        "rows of a step over all ranks; 0: batch_size x accumulation x ranks. Sets the accumulation",
        group="data",
    )
    seed: int = flag(0, "seed of the weights and of the data order", group="data")
    # ---- optimisation
    max_steps: int = flag(
        1000, "optimizer steps of the run", ("steps", "train_steps"), group="optimisation"
    )
    lr: float = flag(3e-4, "peak learning rate", ("learning_rate",), group="optimisation")
    schedule: str = flag(
        "cosine",
        "learning rate after warmup",
        ("lr_schedule",),
        ("cosine", "wsd", "constant"),
        group="optimisation",
    )
    warmup_steps: int = flag(100, "steps of linear warmup", ("warmup",), group="optimisation")
    decay_fraction: float = flag(
        0.2, "wsd: last part of the run that decays linearly", group="optimisation"
    )
    min_lr_ratio: float = flag(0.1, "final learning rate over the peak", group="optimisation")
    weight_decay: float = flag(
        0.1, "decoupled decay, on matrices only", ("wd",), group="optimisation"
    )
    beta1: float = flag(0.9, "AdamW", ("adam_beta1",), group="optimisation")
    beta2: float = flag(0.95, "AdamW", ("adam_beta2",), group="optimisation")
    adam_eps: float = flag(1e-8, "AdamW", ("eps",), group="optimisation")
    grad_clip: float = flag(
        1.0,
        "largest global gradient norm; 0: no clipping",
        ("max_grad_norm", "clip"),
        group="optimisation",
    )
    pairwise_accumulation: bool = flag(
        False,
        "one process sums its micro-batches in the order of two, whose bits (fp32) it then has: one more gradient",
        group="optimisation",
    )
    # ---- memory and speed
    dtype: str = flag(
        "bf16",
        "compute precision; weights, gradients and optimizer states are fp32",
        ("precision",),
        tuple(DTYPES),
        group="memory and speed",
    )
    gradient_checkpointing: str = flag(
        "none",
        "recompute each layer in the backward: full, none, or selective, which keeps attention's outputs",
        ("activation_checkpointing",),
        ("none", "full", "selective"),
        bare="full",
        group="memory and speed",
    )
    offload_activations: bool = flag(
        False, "layer checkpoints wait in host memory for the backward", group="memory and speed"
    )
    mlp_tiles: int = flag(
        1,
        "parts of the tokens that each MLP runs over in turn; 0, or the bare flag: parts of 4,096 tokens",
        bare=0,
        group="memory and speed",
    )
    attention_head_groups: int = flag(
        1, "parts of the KV heads that attention runs over in turn", group="memory and speed"
    )
    optimizer: str = flag(
        "adamw",
        "fp32, bf16 or 8-bit moments, or Muon for the layers' matrices",
        ("optim",),
        ("adamw", "adamw_bf16", "adamw_8bit", "muon"),
        group="memory and speed",
    )
    master_weights: str = flag(
        "fp32",
        "none: weights in the compute precision, updated by stochastic rounding",
        (),
        ("fp32", "none"),
        group="memory and speed",
    )
    offload_optimizer: bool = flag(
        False,
        "fp32 weights and moments on the host, updated there; in bf16 the device has weights and gradients in bf16",
        group="memory and speed",
    )
    optimizer_in_backward: bool = flag(
        False,
        "update each weight as soon as its gradient is there, which is then freed",
        group="memory and speed",
    )
    loss: str = flag(
        "auto",
        "vocabulary loss: auto chunks when the logits would exceed the threshold, and where chunks are no slower",
        (),
        CHOICES["loss"],
        group="memory and speed",
    )
    logits_threshold_gib: float = flag(
        10.0, "GiB of logits above which --loss auto chunks", group="memory and speed"
    )
    loss_chunk_size: int = flag(
        0,
        "tokens of a tile of the chunked loss; 0: chosen by shape and device",
        group="memory and speed",
    )
    kernels: str = flag(
        "auto",
        "who computes the fused parts: eager torch, torch.compile, or Triton (CUDA)",
        (),
        CHOICES["kernels"],
        group="memory and speed",
    )
    compile: bool = flag(
        False, "compile each layer with torch.compile", ("torch_compile",), group="memory and speed"
    )
    dp_replicate: int = flag(
        1,
        "HSDP: groups of ranks that each hold all parameters",
        ("replicas",),
        group="memory and speed",
    )
    context_parallel_size: int = flag(
        0,
        "ranks that share the tokens of each row; 0: as many as one row needs, which is 1 where a rank can hold it",
        ("context_parallel", "cp", "sequence_parallel_size", "sp"),
        group="memory and speed",
    )
    context_parallel_mode: str = flag(
        "auto",
        "how they meet in attention: all-to-all over heads, or gathered keys and values; auto: fewer bytes",
        (),
        context.MODES,
        group="memory and speed",
    )
    device: str = flag("auto", "device", (), ("auto", "cpu", "cuda"), group="memory and speed")
    # ---- numerics
    max_skipped_steps: int = flag(
        10,
        "steps of a run that may be skipped for a NaN or infinite gradient; one more ends it with exit code 5",
        group="numerics",
    )
    loss_spike: float = flag(
        10.0,
        "a loss this many robust deviations above the median of the last 64 steps is reported; 0: never",
        group="numerics",
    )
    skip_rows: str = flag(
        (),
        "ranges a:b of the row order that are left out, as the log names rows; a resume must start before them",
        many=True,
        group="numerics",
    )
    check_replicas_every: int = flag(
        100,
        "steps between comparisons of weights and optimizer states over the replicas of --dp_replicate; 0: never",
        group="numerics",
    )
    # ---- run
    output_dir: str = flag(
        "runs/default", "checkpoints, logs, TensorBoard", ("out", "save_dir"), group="run"
    )
    save_every: int = flag(
        500, "steps between checkpoints; the last step always saves", ("save_steps",), group="run"
    )
    keep_last: int = flag(2, "checkpoints kept, at least 2", ("save_total_limit",), group="run")
    resume: str = flag(
        "auto",
        "auto: newest good checkpoint of output_dir; none: refuse a folder that holds a run; or a step-* folder",
        ("resume_from",),
        group="run",
    )
    override_settings: bool = flag(
        False,
        "let a resume change settings of the group optimisation, which it refuses otherwise",
        group="run",
    )
    async_save: bool = flag(
        False, "write checkpoints from a copy in host memory while training goes on", group="run"
    )
    audit_every: int = flag(
        0,
        "steps between steps whose forward and backward run twice and must give the same bits; 0: never",
        group="run",
    )
    timeout: int = flag(
        60,
        "seconds after which a rank that gives no sign of life ends the others, exit code 7",
        group="run",
    )
    eval_every: int = flag(
        100,
        "steps between validations, each with a text sample in TensorBoard; 0: never",
        ("eval_steps",),
        group="run",
    )
    eval_rows: int = flag(8, "rows of a validation, over all ranks", group="run")
    log_every: int = flag(
        1,
        "steps between progress lines and TensorBoard points (metrics.jsonl has every step)",
        ("logging_steps",),
        group="run",
    )
    config: str = flag("", "TOML file of these settings; flags win over it", group="run")
    fit: str = flag(
        "refuse",
        "a request that cannot fit here: refuse it, or auto: pull memory levers that leave model, context and batch as they are",
        (),
        ("refuse", "auto"),
        group="run",
    )
    plan: bool = flag(
        False, "print what the run needs and what is there, then stop", ("dry_run",), group="run"
    )

    def __post_init__(self):
        at_least = dict(
            context_length=1,
            batch_size=1,
            gradient_accumulation_steps=1,
            max_steps=1,
            dp_replicate=1,
            context_parallel_size=0,
            save_every=1,
            keep_last=2,
            loss_chunk_size=0,
            lr=0,
            warmup_steps=0,
            weight_decay=0,
            grad_clip=0,
            eval_every=0,
            eval_rows=1,
            log_every=1,
            mlp_tiles=0,
            attention_head_groups=1,
            global_batch_size=0,
            vocab_size=0,
            rope_theta=0,
            audit_every=0,
            timeout=1,
            max_skipped_steps=0,
            loss_spike=0,
            check_replicas_every=0,
            logits_threshold_gib=0,
            min_lr_ratio=0,
            decay_fraction=0,
        )
        for name, least in at_least.items():
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ValueError(
                    f"--{name} {value} is out of range: give a number of at least {least}"
                )
        for name in ("beta1", "beta2", "min_lr_ratio", "decay_fraction"):
            if (
                not 0 <= getattr(self, name) <= 1
                or name.startswith("beta")
                and getattr(self, name) == 1
            ):
                raise ValueError(
                    f"--{name} {getattr(self, name)} is out of range: give a number between 0 and 1"
                )
        if self.adam_eps <= 0:
            raise ValueError(
                f"--adam_eps {self.adam_eps} is not positive: give a small number above 0"
            )
        parse_ranges(self.skip_rows)  # raises on what is no range
        config = self.model()  # raises on a geometry that cannot be built
        self._check_levers(config)
        if self.context_ranks > 1:
            self.context_choice(config)  # raises where they cannot share a row

    def _check_levers(self, model: ModelConfig):
        """ValueError for levers that exclude each other."""
        parts = self.tiles > 1 or self.attention_head_groups > 1
        for wrong, words in [
            (
                model.num_kv_heads % self.attention_head_groups,
                f"--attention_head_groups {self.attention_head_groups} does not divide "
                f"{model.num_kv_heads} KV heads: give a divisor",
            ),
            (
                self.attention_head_groups > 1
                and model.num_kv_heads // self.attention_head_groups % self.context_ranks
                and self.context_choice(model).mode == "ulysses",
                f"--attention_head_groups {self.attention_head_groups} leaves {model.num_kv_heads // self.attention_head_groups} KV heads at a time, "
                f"which do not divide over {self.context_ranks} ranks that share a row: give fewer groups",
            ),
            (
                self.compile and parts,
                "--compile with --mlp_tiles or --attention_head_groups: their backward is not compiled, drop one",
            ),
            (
                self.attention_head_groups > 1 and self.gradient_checkpointing == "selective",
                "--attention_head_groups runs attention again in the backward, --gradient_checkpointing selective keeps its output: use full",
            ),
            (
                self.offload_activations and self.gradient_checkpointing == "none",
                "--offload_activations moves layer checkpoints and there are none: add --gradient_checkpointing",
            ),
            (
                self.bare_weights and self.dtype == "fp32" and self.master_weights == "none",
                "--master_weights none with --dtype fp32 saves nothing: use --dtype bf16, or --master_weights fp32",
            ),
            (
                self.offload_optimizer and self.optimizer != "adamw",
                f"--offload_optimizer keeps fp32 moments on the host, --optimizer {self.optimizer} others on the device: drop one",
            ),
            (
                self.offload_optimizer and self.master_weights == "none",
                "--offload_optimizer has its fp32 weights on the host already: drop --master_weights none",
            ),
            (
                self.optimizer_in_backward and self.optimizer == "muon",
                "--optimizer muon makes whole matrices orthogonal, and with --optimizer_in_backward each rank decides for its rows whether to step: drop one",
            ),
            (
                self.optimizer_in_backward and self.audit_every,
                "--audit_every computes gradients twice before weights change, and --optimizer_in_backward changes them at once: drop one",
            ),
            (
                self.optimizer_in_backward and self.grad_clip,
                "--optimizer_in_backward updates weights before the global norm is known: add --grad_clip 0",
            ),
        ]:
            if wrong:
                raise ValueError(words)

    @property
    def tiles(self) -> int:
        """Parts of the tokens that each MLP runs over; an automatic number leaves `TILE` tokens or
        fewer to each.
        """
        return self.mlp_tiles or -(
            -self.batch_size * self.context_length // self.context_ranks // TILE
        )

    @property
    def bare_weights(self) -> bool:
        """Whether the device holds weights in the compute precision alone."""
        return self.master_weights == "none" or self.offload_optimizer

    def without_effect(self) -> list[str]:
        """Settings that were changed from their default and do nothing beside the others."""
        idle = dict(
            context_parallel_mode=self.context_ranks == 1,
            gradient_accumulation_steps=self.global_batch_size > 0,
            documents=bool(self.data),
            decay_fraction=self.schedule != "wsd",
            min_lr_ratio=self.schedule == "constant",
            warmup_steps=self.warmup_steps > self.max_steps,
            nsa=self.attention_type != "nsa",
            check_replicas_every=self.dp_replicate == 1,
            logits_threshold_gib=self.loss != "auto",
            rope_original_context=self.rope_scaling != "yarn",
        )
        defaults = {spec.name: spec.default for spec in dataclasses.fields(self)} | dict(nsa=())
        return [
            name
            for name, useless in idle.items()
            if useless and getattr(self, name) != defaults[name]
        ]

    def model(self) -> ModelConfig:
        """The model's configuration."""
        overrides = dict(
            attention_type=self.attention_type,
            nsa=NSAConfig(**_parsed(self.nsa, NSAConfig, "nsa")),
            loss=self.loss,
            logits_threshold_gib=self.logits_threshold_gib,
            loss_chunk_size=self.loss_chunk_size,
            kernels=self.kernels,
            compute_dtype=DTYPES[self.dtype],
            rope_scaling=self.rope_scaling,
            rope_factor=self.rope_factor,
            rope_original_context=self.rope_original_context,
        )
        overrides |= {
            name: getattr(self, name)
            for name in ("vocab_size", "rope_theta")
            if getattr(self, name)
        }
        return ModelConfig.preset(
            self.model_size,
            **{**overrides, **_parsed(self.model_overrides, ModelConfig, "model_overrides")},
        )

    @property
    def context_ranks(self) -> int:
        """Ranks that share a row; an automatic number that no plan has settled counts as 1."""
        return max(1, self.context_parallel_size)

    def context_choice(self, config: ModelConfig) -> context.Choice:
        """How `context_ranks` ranks share a row, and why; ValueError where they cannot."""
        return context.choose(
            self.context_parallel_mode,
            config.attention_type,
            config.num_heads,
            config.num_kv_heads,
            self.context_length,
            self.context_ranks,
            config.dtype.itemsize,
        )

    def accumulation(self, ranks: int) -> int:
        """Micro-batches of a step on each of `ranks` ranks; those that share their rows count as
        one.
        """
        if not self.global_batch_size:
            return self._alone(self.gradient_accumulation_steps)
        groups, sharing = (
            ranks // self.context_ranks,
            f" ({self.context_ranks} share each row)" if self.context_ranks > 1 else "",
        )
        rows = groups * self.batch_size
        if self.global_batch_size % rows:
            sizes = [
                size
                for size in range(1, self.global_batch_size + 1)
                if self.global_batch_size % size == 0
            ]
            # whose fault it is: the batch's or the ranks'
            wrong = ValueError if self.global_batch_size % self.batch_size else WorldError
            raise wrong(
                f"--global_batch_size {self.global_batch_size} is not divisible by {ranks} ranks{sharing} x --batch_size "
                f"{self.batch_size} = {rows}: ranks x batch_size must be one of {sizes}"
            )
        return self._alone(self.global_batch_size // rows)

    def _alone(self, micro_batches: int) -> int:
        if self.optimizer_in_backward and micro_batches > 1:
            raise ValueError(
                f"--optimizer_in_backward updates weights after each micro-batch, and a step has {micro_batches}: drop it, or give "
                "a batch of one micro-batch"
            )
        return micro_batches

    def rows_per_step(self, ranks: int) -> int:
        """Rows of the global batch."""
        return self.accumulation(ranks) * (ranks // self.context_ranks) * self.batch_size

    def table(self) -> str:
        """Every setting, a line per group."""
        groups: dict[str, list[str]] = {}
        for spec in dataclasses.fields(self):
            groups.setdefault(spec.metadata["group"], []).append(
                f"{spec.name}={getattr(self, spec.name)!r}"
            )
        return "\n".join(f"  {title}: {', '.join(words)}" for title, words in groups.items())


def _parsed(pairs: tuple[str, ...], cls: type, given_by: str) -> dict:
    """Values of name=value pairs, typed as the fields of the dataclass `cls`."""
    known = {spec.name: spec.type for spec in dataclasses.fields(cls)}
    values = {}
    flags = {spec.name for spec in dataclasses.fields(TrainConfig)} | {"compute_dtype"}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or name not in known:
            raise ValueError(
                f"--{given_by} {pair!r}: give name=value with a name of {', '.join(known)}"
            )
        if name in flags:
            raise ValueError(
                f"--{given_by} {pair!r}: use the flag --{'dtype' if name == 'compute_dtype' else name}"
            )
        if name in values:
            raise ValueError(f"--{given_by} {pair!r}: {name} is given twice, keep one")
        values[name] = _converted(known[name], text, f"--{given_by} {pair!r}")
    return values


def _converted(kind: type, text: str, where: str):
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{where}: give true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{where}: give {'an integer' if kind is int else 'a number'}") from None
