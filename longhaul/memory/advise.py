"""What to change so that a task fits a card: the cheapest loss of quality first, with the predicted bytes after each change.

Figures are the profiler's own: estimate.py for training, confirmed by a replay of the simulated step through the allocator;
a simulated forward for analysis. Sizes are bytes; GiB = 2^30 bytes. Changes add up, in this order: logits in chunks, half
precision, smaller micro-batches, checkpointing, no autoencoder, fewer layers at once, the CPU. `empty_cache` is never advised: the
allocator gives back what is free before it fails. Imports longhaul (config, dist), longhaul.memory (allocator, estimate, inference,
plan, simulate) and model.py of ours.
"""

import dataclasses
import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.memory.allocator import beyond_the_allocator, replay, runs_within
from longhaul.memory.estimate import CUDA_CONTEXT_GIB, PROCESS_GIB, estimate
from longhaul.memory.inference import forward_peak
from longhaul.memory.plan import command
from longhaul.memory.simulate import simulate
from model import GIB, ModelConfig

FITS, CHANGED, NEVER = 0, 2, 3  # exit codes
CARDS = {  # GiB that torch sees (nominal memory less the driver's part), compute capability x 10
    "RTX 3060": (11.8, 86), "RTX 3060 Ti": (7.8, 86), "RTX 3070": (7.8, 86), "RTX 3080": (9.8, 86), "RTX 3090": (23.7, 86),
    "RTX 4060 Ti 16GB": (15.7, 89), "RTX 4070": (11.7, 89), "RTX 4080": (15.7, 89), "RTX 4090": (23.6, 89), "RTX 5090": (31.4, 120),
    "RTX A6000": (47.4, 86), "Tesla T4": (14.6, 75), "Tesla V100 16GB": (15.8, 70), "Tesla V100 32GB": (31.7, 70), "L4": (22.0, 89),
    "A10": (22.0, 86), "L40S": (44.4, 89), "A100 40GB": (39.4, 80), "A100 80GB": (79.1, 80), "H100": (79.1, 90), "H200": (139.8, 90),
    "B200": (178.3, 100)}
HALF_SINCE = 80  # capability from which bf16 (and FlashAttention) run on the card itself
DTYPES = dict(fp32="fp32", float32="fp32", bf16="bf16", bfloat16="bf16", fp16="fp16", float16="fp16")
NAMES = dict(fp32="float32", bf16="bfloat16", fp16="float16")
SCRIPTS = dict(train="train.py", grade="scripts/grade.py", intuitor="scripts/intuitor.py", analysis="scripts/run_full_analysis.py")
FROZEN = dict(train=(), grade=("reference", "reward model"), intuitor=("reference",))  # decoders beside the policy, in the compute dtype
SAE_WIDTH, SAE_BYTES = 2, 16  # latents per model width; fp32 weight, gradient and Adam's two moments of an autoencoder's parameter


# ---- what is asked


@dataclass(frozen=True)
class Card:
    """A GPU; `gib` as torch sees it, `cc` its compute capability x 10."""

    name: str
    gib: float
    cc: int


def card(gpu: str = "", vram: float = 0.0, cc: int = 0) -> Card:
    """From a name or from GiB; ValueError for an unknown name (lists the known ones), for both or neither, for sizes that are none."""
    if bool(gpu) == bool(vram):
        raise ValueError("--gpu and --vram: give one of them, a card's name or its GiB")
    if vram and not 0 < vram < 1e6:
        raise ValueError(f"--vram {vram} is out of range: give GiB above 0")
    if cc and not 35 <= cc <= 200:
        raise ValueError(f"--cc {cc} is out of range: give the compute capability times ten, such as 86")
    if vram:
        return Card(f"{vram:g} GiB card", vram, cc or HALF_SINCE)
    names = {_plain(name): name for name in CARDS}
    if _plain(gpu) not in names:
        near = difflib.get_close_matches(_plain(gpu), names, n=1, cutoff=0.5)
        hint = f"did you mean {names[near[0]]}? " if near else ""
        raise ValueError(f"--gpu {gpu!r} is unknown: {hint}known are {', '.join(CARDS)}; or give --vram GIB --cc CAPABILITY")
    name = names[_plain(gpu)]
    return Card(name, CARDS[name][0], cc or CARDS[name][1])


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


@dataclass(frozen=True)
class Request:
    """A task with its settings; `cfg` holds model, context and batch, `dtype` one of fp32, bf16, fp16."""

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
            raise ValueError(f"--dtype fp16 with --task {self.task}: gradients underflow in fp16 and there is no loss scaler here; use bf16 or fp32")

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
    return Request(task, dataclasses.replace(cfg, dtype=short) if short in ("fp32", "bf16") else cfg, short)


# ---- what it takes


def breakdown(asked: Request) -> dict[str, int]:
    """What the peak is made of, in bytes; the sum is the live peak."""
    config, element = asked.config, asked.config.dtype.itemsize
    if asked.task != "analysis":
        found = estimate(asked.cfg, config)
        frozen = {f"frozen {name}": config.num_params() * element for name in FROZEN[asked.task]}
        return {"parameters and optimizer": found.static, f"{found.peak_stage}": found.peak - found.static} | frozen
    N, weights = asked.cfg.batch_size * asked.cfg.context_length, config.num_params() * element
    forward = forward_peak(config, asked.cfg.batch_size, asked.cfg.context_length, asked.logits) - weights
    held = (asked.layers or config.num_layers) * N * config.hidden_size * element
    sae = SAE_BYTES * 2 * config.hidden_size * SAE_WIDTH * config.hidden_size if asked.sae else 0
    return {"weights": weights, "forward": forward, "activations of the layers": held, "autoencoder, one layer": sae}


def live(asked: Request) -> int:
    """Live bytes at the peak."""
    return sum(breakdown(asked).values())


def verdict(asked: Request, on: Card, host_gib: float) -> str:
    """"fits", "expandable" (only with expandable segments), or "too large"."""
    if asked.device == "cpu":
        return "fits" if live(asked) / GIB + PROCESS_GIB <= host_gib else "too large"
    if live(asked) / GIB + CUDA_CONTEXT_GIB > on.gib:
        return "too large"
    return replayed(asked, on) if asked.task == "train" else "fits"


def replayed(asked: Request, on: Card) -> str:
    """The verdict of the allocator: the step of all layers, simulated and replayed."""
    trace, size = simulate(asked.cfg), int(on.gib * GIB)
    if runs_within(trace, size):
        return "fits"
    reserved = replay(trace, expandable=True).peak_reserved + sum(beyond_the_allocator().values())
    return "expandable" if reserved <= size else "too large"


# ---- what to change


def ladder(asked: Request, on: Card):
    """(what changes, the request after it), each on top of those before; what is so already is left out."""
    yield "as asked", asked
    if asked.logits:
        asked = asked.change(loss="chunked")
        yield "logits in chunks", asked
    if asked.dtype == "fp32":
        half = "bf16" if on.cc >= HALF_SINCE else "fp16"
        if half == "bf16" or asked.task == "analysis":
            asked = dataclasses.replace(asked.change(dtype="bf16") if half == "bf16" else asked, dtype=half)
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
    elif asked.cfg.gradient_checkpointing == "none":
        asked = asked.change(gradient_checkpointing="full")
        yield "checkpointing", asked
    yield "the CPU", dataclasses.replace(asked.change(device="cpu"), device="cpu")


def smaller_batch(asked: Request) -> Request:
    """The largest micro-batch of at most half the rows that divides them; accumulation keeps the rows of a training step."""
    rows = asked.cfg.batch_size
    size = next(size for size in range(rows // 2, 0, -1) if rows % size == 0)
    return asked.change(batch_size=size, gradient_accumulation_steps=asked.cfg.gradient_accumulation_steps * (rows // size))


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
        return NEVER if self.answer is None else FITS if len(self.steps) == 1 and self.steps[0][2] == "fits" else CHANGED

    @property
    def command(self) -> str:
        """What to run; empty where nothing fits, or the task's script is not there."""
        return run(self.answer, self.steps[-1][2] == "expandable") if self.answer and built(self.asked.task) else ""

    def text(self) -> str:
        """For the screen."""
        rows = [f"{self.asked.task}: {self.asked.cfg.model_size} ({self.asked.config.num_params():,} parameters), {self.asked.cfg.batch_size} x "
                f"{self.asked.cfg.context_length:,} tokens, {self.asked.dtype}, on {self.on.name} ({self.on.gib:g} GiB, capability {self.on.cc / 10})"]
        rows += [f"  {name:<34}{size / GIB:>9.2f} GiB" for name, size in breakdown(self.asked).items()]
        rows += [f"  {'CUDA context':<34}{CUDA_CONTEXT_GIB:>9.2f} GiB", "changes, each on top of those before (live GiB, predicted):"]
        words = {"expandable": "fits with expandable segments alone"}
        rows += [f"  {index}. {what:<31}{size / GIB:>9.2f} GiB  {words.get(found, found)}" for index, (what, size, found) in enumerate(self.steps)]
        rows += [f"note: {note}" for note in self.notes]
        rows.append({FITS: "verdict: fits", CHANGED: "verdict: fits after these changes", NEVER: "verdict: does not fit"}[self.code])
        return "\n".join([*rows, *([f"run: {self.command}"] if self.command else [])])

    def as_json(self) -> dict:
        """Plain values; sizes in bytes."""
        return dict(task=self.asked.task, gpu=dataclasses.asdict(self.on), code=self.code, breakdown=breakdown(self.asked), command=self.command,
                    steps=[dict(change=what, live_bytes=size, verdict=found) for what, size, found in self.steps], notes=self.notes)


def advise(asked: Request, on: Card, host_gib: float = 0.0, judge=verdict) -> Advice:
    """Climb until it fits. host_gib: memory of the host for the last resort, the CPU (0: unknown, so it never counts as fitting)."""
    steps, answer, notes = [], None, _notes(asked, on)
    for what, changed in ladder(asked, on):
        found = judge(changed, on, host_gib)
        steps.append((what, live(changed), found))
        if found != "too large":
            answer = changed
            break
    return Advice(asked, on, steps, answer, notes + (_beyond(steps, asked, on) if answer is None else []))


def _notes(asked: Request, on: Card) -> list[str]:
    notes = []
    if not built(asked.task):
        notes.append(f"{SCRIPTS[asked.task]} is not built yet, so there is nothing to run: {COUNTED[asked.task]}")
    if on.cc < HALF_SINCE and asked.dtype == "bf16":
        notes.append(f"bf16 is emulated at capability {on.cc / 10} (native from 8.0): slow; {'fp16' if asked.task == 'analysis' else 'fp32'} runs on the card itself")
    if on.cc < HALF_SINCE and asked.task != "analysis":
        notes.append("figures assume FlashAttention, which needs capability 8.0; half precision is not advised: bf16 is emulated, and fp16 needs a loss scaler")
    return notes


COUNTED = {
    "grade": "counted are the policy's training step, the reference and a reward model of its size; soft tokens and the cache of generation are not",
    "intuitor": "counted are the policy's training step and the reference; the cache of generation is not",
    "analysis": f"counted are the simulated forward, one activation per layer, and the training of an autoencoder of width {SAE_WIDTH}"}


def _beyond(steps: list, asked: Request, on: Card) -> list[str]:
    """What no change above does: more GPUs, the host's memory."""
    notes = [f"the CPU would need {steps[-1][1] / GIB + PROCESS_GIB:.1f} GiB of host memory", "offloading to the host is not built yet"]
    if asked.task == "train":
        least = [changed for what, changed in ladder(asked, on) if what != "the CPU"][-1].cfg
        ranks = next((ranks for ranks in (2, 4, 8, 16, 32, 64) if estimate(least, least.model(), ranks).peak / GIB + CUDA_CONTEXT_GIB <= on.gib), 0)
        notes.append(f"with all changes {ranks} such GPUs hold it (FSDP2)" if ranks else "not even 64 such GPUs hold it: activations are not sharded; shorten the context")
    return notes


def built(task: str) -> bool:
    """Whether the task's script is there."""
    return (Path(__file__).parents[2] / SCRIPTS[task]).exists()


def run(asked: Request, expandable: bool = False) -> str:
    """The command that runs the request."""
    before = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True " if expandable else ""
    if asked.task == "train":
        return before + command(asked.cfg, World())
    words = ["python -m", SCRIPTS[asked.task].removesuffix(".py").replace("/", "."), "--checkpoint DIR", f"--batch_size {asked.cfg.batch_size}"]
    if asked.task == "analysis":
        words += [f"--dtype {NAMES[asked.dtype]}", f"--device {asked.device}", *(["--skip-sae"] if not asked.sae else [])]
        words += [f'--layers "{",".join(map(str, spread(asked.config.num_layers, asked.layers)))}"'] if asked.layers else []
    return " ".join(words)


def spread(layers: int, count: int) -> list[int]:
    """`count` layers from the first to the last, evenly."""
    return sorted({round(index * (layers - 1) / max(count - 1, 1)) for index in range(count)})
