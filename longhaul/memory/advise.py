"""What to change so that a task fits a card: the cheapest loss of quality first, with the predicted
bytes after each change.

Figures are the profiler's own: estimate.py for training, confirmed by a replay of the simulated
step through the allocator;
a simulated forward for analysis. Sizes are bytes; GiB = 2^30 bytes. Changes add up, in this order:
logits in chunks, half
precision, smaller micro-batches, the planner's ladder (checkpointing, tiles, the host), no
autoencoder, fewer layers at once, the CPU. `empty_cache` is never advised: the
allocator gives back what is free before it fails. Imports longhaul (config, dist), longhaul.memory
(device, estimate, extrapolate,
inference, plan) and model.py of ours.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.memory import plan
from longhaul.memory.device import EXPANDABLE, FITS, HALF_SINCE, TOO_SMALL, Card, Demand
from longhaul.memory.estimate import CUDA_CONTEXT_GIB, PROCESS_GIB, estimate
from longhaul.memory.extrapolate import profile
from longhaul.memory.inference import forward_peak
from model import GIB, ModelConfig

CODE_FITS, CODE_CHANGED, CODE_NEVER = 0, 2, 3  # exit codes
DTYPES = dict(
    fp32="fp32", float32="fp32", bf16="bf16", bfloat16="bf16", fp16="fp16", float16="fp16"
)
NAMES = dict(fp32="float32", bf16="bfloat16", fp16="float16")
SCRIPTS = dict(
    train="train.py",
    grade="scripts/grade.py",
    intuitor="scripts/intuitor.py",
    analysis="scripts/run_full_analysis.py",
)
FROZEN = dict(
    train=(), grade=("reference", "reward model"), intuitor=("reference",)
)  # decoders beside the policy, in the compute dtype
SAE_WIDTH, SAE_BYTES = (
    2,
    16,
    # latents per model width; fp32 weight, gradient and Adam's two moments of an autoencoder's
    # parameter
)


# ---- what is asked


@dataclass(frozen=True)
class Request:
    """A task with its settings; `cfg` holds model, context and batch, `dtype` one of fp32, bf16,
    fp16.
    """

    task: str
    cfg: TrainConfig
    dtype: str
    sae: bool = True  # analysis: train the sparse autoencoders
    layers: int = 0  # analysis: layers whose activations are held at once; 0: all
    device: str = "cuda"

    def __post_init__(self):
        if self.task not in SCRIPTS:
            raise ValueError(f"--task {self.task} is unknown: choose one of {', '.join(SCRIPTS)}")
        if self.dtype not in NAMES:
            raise ValueError(f"--dtype {self.dtype} is unknown: choose one of {', '.join(DTYPES)}")
        if self.task != "analysis" and self.dtype == "fp16":
            raise ValueError(
                f"--dtype fp16 with --task {self.task}: gradients underflow in fp16 and there is no loss scaler here; use bf16 or fp32"
            )

    @property
    def config(self) -> ModelConfig:
        return dataclasses.replace(self.cfg.model(), compute_dtype=NAMES[self.dtype])

    @property
    def logits(self) -> bool:
        """Whether whole logits exist."""
        return self.config.loss_path(self.cfg.batch_size, self.cfg.context_length) == "standard"

    def change(self, **settings) -> "Request":
        """The request with other settings of the trainer."""
        return dataclasses.replace(self, cfg=dataclasses.replace(self.cfg, **settings))


def request(task: str, cfg: TrainConfig, dtype: str = "") -> Request:
    """`dtype` as on a command line ("float16" or "fp16"); empty: the trainer's."""
    short = DTYPES.get(dtype or cfg.dtype, dtype)
    return Request(
        task, dataclasses.replace(cfg, dtype=short) if short in ("fp32", "bf16") else cfg, short
    )


# ---- what it takes


def breakdown(asked: Request) -> dict[str, int]:
    """What the peak is made of, in bytes; the sum is the live peak."""
    config, element = asked.config, asked.config.dtype.itemsize
    if asked.task != "analysis":
        found = estimate(asked.cfg, config)
        frozen = {f"frozen {name}": config.num_params() * element for name in FROZEN[asked.task]}
        return {
            "parameters and optimizer": found.static,
            f"{found.peak_stage}": found.peak - found.static,
        } | frozen
    N, weights = asked.cfg.batch_size * asked.cfg.context_length, config.num_params() * element
    forward = (
        forward_peak(config, asked.cfg.batch_size, asked.cfg.context_length, asked.logits) - weights
    )
    held = (asked.layers or config.num_layers) * N * config.hidden_size * element
    sae = SAE_BYTES * 2 * config.hidden_size * SAE_WIDTH * config.hidden_size if asked.sae else 0
    return {
        "weights": weights,
        "forward": forward,
        "activations of the layers": held,
        "autoencoder, one layer": sae,
    }


def live(asked: Request) -> int:
    """Live bytes at the peak."""
    return sum(breakdown(asked).values())


def verdict(asked: Request, on: Card, host_gib: float) -> str:
    """One of device's verdicts; a training step is simulated and replayed through the allocator,
    since what it reserves decides.
    """
    if asked.device == "cpu":
        return FITS if live(asked) / GIB + PROCESS_GIB <= host_gib else TOO_SMALL
    if live(asked) / GIB + CUDA_CONTEXT_GIB > on.gib:
        return TOO_SMALL
    return (
        Demand.of(profile(asked.cfg).trace).verdict(int(on.gib * GIB))
        if asked.task == "train"
        else FITS
    )


# ---- what to change


def ladder(asked: Request, on: Card):
    """(what changes, the request after it), each on top of those before; what is so already is left
    out.
    """
    yield "as asked", asked
    if asked.logits:
        asked = asked.change(loss="chunked")
        yield "logits in chunks", asked
    if asked.dtype == "fp32":
        half = "bf16" if on.cc >= HALF_SINCE else "fp16"
        if half == "bf16" or asked.task == "analysis":
            asked = dataclasses.replace(
                asked.change(dtype="bf16") if half == "bf16" else asked, dtype=half
            )
            yield f"{half} instead of fp32", asked
    while asked.cfg.batch_size > 1:
        asked = smaller_batch(asked)
        yield f"micro-batches of {asked.cfg.batch_size}", asked
    yield from _last(asked)


def _last(asked: Request):
    if asked.task == "analysis":
        asked = dataclasses.replace(asked, sae=False)
        yield "no sparse autoencoder (--skip-sae)", asked
        asked = dataclasses.replace(asked, layers=min(3, asked.config.num_layers))
        yield f"{asked.layers} layers at once (--layers)", asked
    else:
        before = asked
        for names, cfg in plan.ladder(asked.cfg):
            asked = dataclasses.replace(before, cfg=cfg)
            yield names.split(" + ")[-1], asked
    yield "the CPU", dataclasses.replace(asked.change(device="cpu"), device="cpu")


def smaller_batch(asked: Request) -> Request:
    """The largest micro-batch of at most half the rows that divides them; accumulation keeps the
    rows of a training step.
    """
    rows = asked.cfg.batch_size
    size = next(size for size in range(rows // 2, 0, -1) if rows % size == 0)
    return asked.change(
        batch_size=size,
        gradient_accumulation_steps=asked.cfg.gradient_accumulation_steps * (rows // size),
    )


@dataclass(frozen=True)
class Advice:
    """The answer; `steps` are (what, live bytes, verdict)."""

    asked: Request
    on: Card
    steps: list[tuple[str, int, str]]
    answer: Request | None  # what fits
    notes: list[str]

    @property
    def code(self) -> int:
        """0: fits as asked, 2: after changes, 3: never."""
        return (
            CODE_NEVER
            if self.answer is None
            else CODE_FITS
            if len(self.steps) == 1 and self.steps[0][2] == FITS
            else CODE_CHANGED
        )

    @property
    def command(self) -> str:
        """What to run; empty where nothing fits, or the task's script is not there."""
        return (
            run(self.answer, self.steps[-1][2] == EXPANDABLE)
            if self.answer and built(self.asked.task)
            else ""
        )

    def text(self) -> str:
        """For the screen."""
        rows = [
            f"{self.asked.task}: {self.asked.cfg.model_size} ({self.asked.config.num_params():,} parameters), {self.asked.cfg.batch_size} x "
            f"{self.asked.cfg.context_length:,} tokens, {self.asked.dtype}, on {self.on.name} ({self.on.gib:g} GiB, capability {self.on.cc / 10})"
        ]
        rows += [
            f"  {name:<34}{size / GIB:>9.2f} GiB" for name, size in breakdown(self.asked).items()
        ]
        rows += [
            f"  {'CUDA context':<34}{CUDA_CONTEXT_GIB:>9.2f} GiB",
            "changes, each on top of those before (live GiB, predicted):",
        ]
        rows += [
            f"  {index}. {what:<31}{size / GIB:>9.2f} GiB  {found}"
            for index, (what, size, found) in enumerate(self.steps)
        ]
        rows += [f"note: {note}" for note in self.notes]
        rows.append(
            {
                CODE_FITS: "verdict: fits",
                CODE_CHANGED: "verdict: fits after these changes",
                CODE_NEVER: "verdict: does not fit",
            }[self.code]
        )
        return "\n".join([*rows, *([f"run: {self.command}"] if self.command else [])])

    def as_json(self) -> dict:
        """Plain values; sizes in bytes."""
        return dict(
            task=self.asked.task,
            gpu=dataclasses.asdict(self.on),
            code=self.code,
            breakdown=breakdown(self.asked),
            command=self.command,
            steps=[
                dict(change=what, live_bytes=size, verdict=found)
                for what, size, found in self.steps
            ],
            notes=self.notes,
        )


def advise(asked: Request, on: Card, host_gib: float = 0.0, judge=verdict) -> Advice:
    """Climb until it fits. host_gib: memory of the host for the last resort, the CPU (0: unknown,
    so it never counts as fitting).
    """
    steps, answer, notes = [], None, _notes(asked, on)
    for what, changed in ladder(asked, on):
        found = judge(changed, on, host_gib)
        steps.append((what, live(changed), found))
        if found != TOO_SMALL:
            answer = changed
            break
    return Advice(
        asked, on, steps, answer, notes + (_beyond(steps, asked, on) if answer is None else [])
    )


def _notes(asked: Request, on: Card) -> list[str]:
    notes = []
    if not built(asked.task):
        notes.append(
            f"{SCRIPTS[asked.task]} is not built yet, so there is nothing to run: {COUNTED[asked.task]}"
        )
    if on.cc < HALF_SINCE and asked.dtype == "bf16":
        notes.append(
            f"bf16 is emulated at capability {on.cc / 10} (native from 8.0): slow; {'fp16' if asked.task == 'analysis' else 'fp32'} runs on the card itself"
        )
    if on.cc < HALF_SINCE and asked.task != "analysis":
        notes.append(
            "figures assume FlashAttention, which needs capability 8.0; half precision is not advised: bf16 is emulated, and fp16 needs a loss scaler"
        )
    return notes


COUNTED = {
    "grade": "counted are the policy's training step, the reference and a reward model of its size; soft tokens and the cache of generation are not",
    "intuitor": "counted are the policy's training step and the reference; the cache of generation is not",
    "analysis": f"counted are the simulated forward, one activation per layer, and the training of an autoencoder of width {SAE_WIDTH}",
}


def _beyond(steps: list, asked: Request, on: Card) -> list[str]:
    """What no change above does: more GPUs, the host's memory."""
    notes = [f"the CPU would need {steps[-1][1] / GIB + PROCESS_GIB:.1f} GiB of host memory"]
    if asked.task == "train":
        least = [changed for what, changed in ladder(asked, on) if what != "the CPU"][-1].cfg
        ranks = next(
            (
                ranks
                for ranks in (2, 4, 8, 16, 32, 64)
                if estimate(least, least.model(), ranks).peak / GIB + CUDA_CONTEXT_GIB <= on.gib
            ),
            0,
        )
        notes.append(
            f"with all changes {ranks} such GPUs hold it (FSDP2)"
            if ranks
            else "not even 64 such GPUs hold it: activations are not sharded; shorten the context"
        )
    return notes


def built(task: str) -> bool:
    """Whether the task's script is there."""
    return (Path(__file__).parents[2] / SCRIPTS[task]).exists()


def run(asked: Request, expandable: bool = False) -> str:
    """The command that runs the request."""
    before = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True " if expandable else ""
    if asked.task == "train":
        return before + plan.command(asked.cfg, World())
    words = [
        "python -m",
        SCRIPTS[asked.task].removesuffix(".py").replace("/", "."),
        "--checkpoint DIR",
        f"--batch_size {asked.cfg.batch_size}",
    ]
    if asked.task == "analysis":
        words += [
            f"--dtype {NAMES[asked.dtype]}",
            f"--device {asked.device}",
            *(["--skip-sae"] if not asked.sae else []),
        ]
        words += (
            [f'--layers "{",".join(map(str, spread(asked.config.num_layers, asked.layers)))}"']
            if asked.layers
            else []
        )
    return " ".join(words)


def spread(layers: int, count: int) -> list[int]:
    """`count` layers from the first to the last, evenly."""
    return sorted({round(index * (layers - 1) / max(count - 1, 1)) for index in range(count)})
