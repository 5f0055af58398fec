"""What to change so that a task fits a card, the smallest loss of quality first.

Each change adds to those before it: logits in chunks, half precision, smaller micro-batches, the
ladder of fit.py (checkpointing, tiles, the host), no autoencoder, fewer layers at once, the CPU.
Each is printed with its predicted bytes. The figures are the profiler's own: for training the
closed form, confirmed by a replay of the simulated step through the allocator; for analysis a
simulated forward. `empty_cache` is never advised, because the allocator gives back free memory
before it fails. Sizes are bytes unless a name says GiB; GiB = 2^30 bytes.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.memory import fit
from longhaul.memory.deep import profile
from longhaul.memory.device import EXPANDABLE_SEGMENTS, HALF_SINCE, Card, Demand, Placement
from longhaul.memory.estimate import CUDA_CONTEXT_GIB, PROCESS_GIB, estimate
from longhaul.memory.fit import Lever, Rung, Verdict
from longhaul.memory.inference import forward_peak
from longhaul.memory.plan import command
from model import GIB, ModelConfig

DTYPES = {
    "fp32": "fp32",
    "float32": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
}
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SCRIPTS = {
    "train": "train.py",
    "grade": "scripts/grade.py",
    "intuitor": "scripts/intuitor.py",
    "analysis": "scripts/run_full_analysis.py",
}
# Decoders next to the policy, in the compute precision
FROZEN = {"train": (), "grade": ("reference", "reward model"), "intuitor": ("reference",)}
SAE_WIDTH = 2  # latents of a sparse autoencoder per model width
SAE_BYTES = 16  # per parameter of one: fp32 weight, gradient and Adam's two moments
LAYERS_AT_ONCE = 3  # of an analysis that holds the activations of a few layers only
MOST_GPUS = (2, 4, 8, 16, 32, 64)  # tried if one card is not enough
CPU = "the CPU"
COUNTED = {
    "grade": "the figures count the policy's training step, the reference and a reward model of "
    "its size; they leave out soft tokens and the cache of generation",
    "intuitor": "the figures count the policy's training step and the reference; they leave out "
    "the cache of generation",
    "analysis": "the figures count the simulated forward, one activation per layer, and the "
    f"training of an autoencoder of width {SAE_WIDTH}",
}
VERDICTS = {
    Verdict.FITS: "fits",
    Verdict.AFTER_CHANGES: "fits after these changes",
    Verdict.NOTHING: "does not fit",
}


# ---- what is asked


@dataclass(frozen=True)
class Request:
    """A task and its settings; `cfg` holds model, context and batch."""

    task: str
    cfg: TrainConfig
    dtype: str  # fp32, bf16 or fp16
    sae: bool = True  # analysis: train the sparse autoencoders
    layers: int = 0  # analysis: layers whose activations are held at once; 0: all
    device: str = "cuda"

    def __post_init__(self):
        if self.task not in SCRIPTS:
            raise ValueError(f"--task {self.task} is unknown: choose one of {', '.join(SCRIPTS)}")
        if self.dtype not in TORCH_NAMES:
            raise ValueError(f"--dtype {self.dtype} is unknown: choose one of {', '.join(DTYPES)}")
        if self.task != "analysis" and self.dtype == "fp16":
            raise ValueError(
                f"--dtype fp16 with --task {self.task}: gradients underflow in fp16 and longhaul "
                "has no loss scaler: use bf16 or fp32"
            )

    @property
    def config(self) -> ModelConfig:
        """The model in the request's precision."""
        return dataclasses.replace(self.cfg.model(), compute_dtype=TORCH_NAMES[self.dtype])

    @property
    def logits(self) -> bool:
        """Whether whole logits exist."""
        return self.config.loss_path(self.cfg.batch_size, self.cfg.context_length) == "standard"

    def change(self, **settings) -> "Request":
        """The request with other settings of the trainer."""
        return dataclasses.replace(self, cfg=dataclasses.replace(self.cfg, **settings))


def request(task: str, cfg: TrainConfig, dtype: str = "") -> Request:
    """A request from a command line's `dtype` ("float16" or "fp16"); empty: the trainer's."""
    short = DTYPES.get(dtype or cfg.dtype, dtype)
    if short in ("fp32", "bf16"):
        cfg = dataclasses.replace(cfg, dtype=short)
    return Request(task, cfg, short)


# ---- what it takes


def breakdown(asked: Request) -> dict[str, int]:
    """What the peak is made of; the sum is the live peak."""
    if asked.task == "analysis":
        return _analysis(asked)

    config = asked.config
    found = estimate(asked.cfg, config)
    parts = {
        "parameters and optimizer": found.static,
        found.peak_stage: found.peak - found.static,
    }
    for name in FROZEN[asked.task]:
        parts[f"frozen {name}"] = config.num_params() * config.dtype.itemsize
    return parts


def _analysis(asked: Request) -> dict[str, int]:
    config = asked.config
    batch = asked.cfg.batch_size
    tokens = asked.cfg.context_length
    element = config.dtype.itemsize
    width = config.hidden_size

    weights = config.num_params() * element
    layers = asked.layers or config.num_layers
    autoencoder = SAE_BYTES * 2 * width * SAE_WIDTH * width
    return {
        "weights": weights,
        "forward": forward_peak(config, batch, tokens, asked.logits) - weights,
        "activations of the layers": layers * batch * tokens * width * element,
        "autoencoder, one layer": autoencoder if asked.sae else 0,
    }


def live(asked: Request) -> int:
    """Live bytes at the peak."""
    return sum(breakdown(asked).values())


def placement(asked: Request, card: Card, host_gib: float) -> Placement:
    """Whether the card, or the host for a request on the CPU, holds the request.

    A training step is simulated and replayed, because what the allocator reserves decides.
    """
    needed = live(asked) / GIB
    if asked.device == "cpu":
        fits = needed + PROCESS_GIB <= host_gib
        return Placement.FITS if fits else Placement.TOO_SMALL
    if needed + CUDA_CONTEXT_GIB > card.gib:
        return Placement.TOO_SMALL
    if asked.task == "train":
        return Demand.of(profile(asked.cfg).trace).placement(int(card.gib * GIB))
    return Placement.FITS


# ---- what to change


def ladder(asked: Request, card: Card) -> Iterator[Rung]:
    """The request as asked, then with one more change at a time."""
    levers = [Lever("logits in chunks", chunked_logits)]
    if asked.dtype == "fp32" and card.cc >= HALF_SINCE:
        levers.append(Lever("bf16 instead of fp32", in_bf16))
    elif asked.dtype == "fp32" and asked.task == "analysis":
        levers.append(Lever("fp16 instead of fp32", in_fp16))

    levers += [batch_lever(size) for size in smaller_batches(asked.cfg.batch_size)]
    if asked.task == "analysis":
        layers = min(LAYERS_AT_ONCE, asked.config.num_layers)
        levers.append(Lever("no sparse autoencoder (--skip-sae)", without_sae))
        levers.append(layers_lever(layers))
    else:
        levers += [training_lever(lever) for lever in fit.LEVERS]
    levers.append(Lever(CPU, on_cpu))
    return fit.climb(asked, levers)


def chunked_logits(asked: Request) -> Request:
    return asked.change(loss="chunked") if asked.logits else asked


def in_bf16(asked: Request) -> Request:
    return dataclasses.replace(asked.change(dtype="bf16"), dtype="bf16")


def in_fp16(asked: Request) -> Request:
    return dataclasses.replace(asked, dtype="fp16")


def batch_lever(size: int) -> Lever:
    """Micro-batches of `size` rows; accumulation keeps the rows of a training step."""

    def pull(asked: Request) -> Request:
        more = asked.cfg.batch_size // size
        micro_batches = asked.cfg.gradient_accumulation_steps * more
        return asked.change(batch_size=size, gradient_accumulation_steps=micro_batches)

    return Lever(f"micro-batches of {size}", pull)


def smaller_batches(rows: int) -> list[int]:
    """Sizes of micro-batches down to 1: each the largest divisor of at most half the one before."""
    sizes = []
    while rows > 1:
        divisors = [size for size in range(1, rows // 2 + 1) if rows % size == 0]
        rows = divisors[-1]
        sizes.append(rows)
    return sizes


def training_lever(lever: Lever) -> Lever:
    """A lever of the trainer on a request."""

    def pull(asked: Request) -> Request:
        return dataclasses.replace(asked, cfg=lever.pull(asked.cfg))

    return Lever(lever.name, pull)


def without_sae(asked: Request) -> Request:
    return dataclasses.replace(asked, sae=False)


def layers_lever(layers: int) -> Lever:
    """Only the activations of so many layers at once."""

    def pull(asked: Request) -> Request:
        return dataclasses.replace(asked, layers=layers)

    return Lever(f"{layers} layers at once (--layers)", pull)


def on_cpu(asked: Request) -> Request:
    return dataclasses.replace(asked.change(device="cpu"), device="cpu")


# ---- the answer


class Step(NamedTuple):
    """A rung that was tried."""

    change: str
    live_bytes: int
    placement: Placement


@dataclass(frozen=True)
class Advice:
    """The rungs up to the first that fits, and what it is; None if no rung fits."""

    asked: Request
    card: Card
    steps: list[Step]
    answer: Request | None
    notes: list[str]

    @property
    def verdict(self) -> Verdict:
        if self.answer is None:
            return Verdict.NOTHING
        if len(self.steps) == 1 and self.steps[0].placement is Placement.FITS:
            return Verdict.FITS
        return Verdict.AFTER_CHANGES

    @property
    def command(self) -> str:
        """What to run; empty if nothing fits or the task's script does not exist."""
        if self.answer is None or not built(self.asked.task):
            return ""
        return run(self.answer, self.steps[-1].placement is Placement.EXPANDABLE)

    def text(self) -> str:
        """The advice for the screen."""
        rows = [self._title()]
        for name, size in breakdown(self.asked).items():
            rows.append(f"  {name:<34}{size / GIB:>9.2f} GiB")
        rows.append(f"  {'CUDA context':<34}{CUDA_CONTEXT_GIB:>9.2f} GiB")

        rows.append("changes, each added to those above it (live GiB, predicted):")
        for index, step in enumerate(self.steps):
            size = f"{step.live_bytes / GIB:>9.2f} GiB"
            rows.append(f"  {index}. {step.change:<31}{size}  {step.placement}")

        rows += [f"note: {note}" for note in self.notes]
        rows.append(f"verdict: {VERDICTS[self.verdict]}")
        if self.command:
            rows.append(f"run: {self.command}")
        return "\n".join(rows)

    def _title(self) -> str:
        cfg = self.asked.cfg
        return (
            f"{self.asked.task}: {cfg.model_size} ({self.asked.config.num_params():,} parameters), "
            f"{cfg.batch_size} x {cfg.context_length:,} tokens, {self.asked.dtype}, "
            f"on {self.card.name} ({self.card.gib:g} GiB, capability {self.card.cc / 10})"
        )

    def as_json(self) -> dict:
        """Plain values; sizes in bytes."""
        steps = []
        for step in self.steps:
            steps.append(
                {
                    "change": step.change,
                    "live_bytes": step.live_bytes,
                    "verdict": step.placement,
                }
            )
        return {
            "task": self.asked.task,
            "gpu": dataclasses.asdict(self.card),
            "code": self.verdict.exit_code,
            "breakdown": breakdown(self.asked),
            "command": self.command,
            "steps": steps,
            "notes": self.notes,
        }


def advise(asked: Request, card: Card, host_gib: float = 0.0) -> Advice:
    """Climb until a rung fits; `host_gib` is what the last one, the CPU, may use."""
    steps = []
    notes = _notes(asked, card)
    for rung in ladder(asked, card):
        found = placement(rung.request, card, host_gib)
        steps.append(Step(rung.lever, live(rung.request), found))
        if found is not Placement.TOO_SMALL:
            return Advice(asked, card, steps, rung.request, notes)
    return Advice(asked, card, steps, None, notes + _if_nothing_fits(steps, asked, card))


def _notes(asked: Request, card: Card) -> list[str]:
    notes = []
    if not built(asked.task):
        script = SCRIPTS[asked.task]
        notes.append(f"{script} does not exist yet, so no command is given: {COUNTED[asked.task]}")
    if card.cc >= HALF_SINCE:
        return notes

    if asked.dtype == "bf16":
        native = "fp16" if asked.task == "analysis" else "fp32"
        notes.append(
            f"bf16 is emulated at capability {card.cc / 10} and slow (native from 8.0); "
            f"the card computes {native} itself"
        )
    if asked.task != "analysis":
        notes.append(
            "the figures assume FlashAttention, which needs capability 8.0; half precision is not "
            "advised on this card, because bf16 is emulated and fp16 needs a loss scaler"
        )
    return notes


def _if_nothing_fits(steps: list[Step], asked: Request, card: Card) -> list[str]:
    """What would be enough: the host's memory, or more GPUs."""
    host = steps[-1].live_bytes / GIB + PROCESS_GIB
    notes = [f"the CPU would need {host:.1f} GiB of host memory"]
    if asked.task != "train":
        return notes

    rungs = [rung for rung in ladder(asked, card) if rung.lever != CPU]
    least = rungs[-1].request.cfg
    for ranks in MOST_GPUS:
        needed = estimate(least, least.model(), ranks).peak / GIB + CUDA_CONTEXT_GIB
        if needed <= card.gib:
            return [*notes, f"with all changes, {ranks} such GPUs are enough (FSDP2)"]
    return [
        *notes,
        f"not even {MOST_GPUS[-1]} such GPUs are enough, because activations are not sharded: "
        "shorten the context",
    ]


# ---- the command


def built(task: str) -> bool:
    """Whether the task's script exists."""
    return (Path(__file__).parents[2] / SCRIPTS[task]).exists()


def run(asked: Request, expandable: bool = False) -> str:
    """The command that runs the request."""
    if asked.task == "train":
        before = EXPANDABLE_SEGMENTS if expandable else ""
        return before + command(asked.cfg, World())

    module = SCRIPTS[asked.task].removesuffix(".py").replace("/", ".")
    words = ["python -m", module, "--checkpoint DIR", f"--batch_size {asked.cfg.batch_size}"]
    if asked.task == "analysis":
        words += [f"--dtype {TORCH_NAMES[asked.dtype]}", f"--device {asked.device}"]
        if not asked.sae:
            words.append("--skip-sae")
        if asked.layers:
            chosen = ",".join(str(layer) for layer in spread(asked.config.num_layers, asked.layers))
            words.append(f'--layers "{chosen}"')
    return " ".join(words)


def spread(layers: int, count: int) -> list[int]:
    """`count` layers from the first to the last, evenly."""
    return sorted({round(index * (layers - 1) / max(count - 1, 1)) for index in range(count)})
