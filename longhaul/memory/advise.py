"""What to change so that a task fits a card, the smallest loss of quality first.

Each change adds to those before it: logits in chunks, half precision, smaller micro-batches, the
ladder of fit.py (checkpointing, tiles, the host), no autoencoder, fewer layers, the CPU. The
figures are the profiler's own: for training the simulated step and its replay through the
allocator, for analysis the highest peak of its simulated parts.
`empty_cache` is never advised, because the allocator gives back free memory
before it fails. Sizes are bytes unless a name says GiB; GiB = 2^30 bytes.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from base.flags import PRECISIONS, spellings
from footprint.device import EXPANDABLE_SEGMENTS, HALF_SINCE, Card, Placement
from longhaul.analysis.config import Measures
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.kernels import loss_path
from longhaul.kinds import attention_kind
from longhaul.memory import analysis, fit
from longhaul.memory.needs import CUDA_CONTEXT_GIB, PROCESS_GIB, needs
from longhaul.memory.plan import command
from longhaul.memory.search import Found, Lever, Say, Search, Tried, Verdict, pulled
from longhaul.memory.solve import Run
from longhaul.memory.solve import judged as judged_run
from longhaul.posttrain.config import PolicyConfig
from model import GIB, ModelConfig

DTYPES = spellings(*PRECISIONS)
SCRIPTS = {
    "train": "train.py",
    "grade": "scripts/grade.py",
    "intuitor": "scripts/intuitor.py",
    "analysis": "scripts/run_full_analysis.py",
}
FEW_LAYERS = 3  # of an analysis that looks at a few only
MOST_GPUS = (2, 4, 8, 16, 32, 64)  # tried if one card is not enough
EVERYTHING = Measures()  # that an analysis measures unless it is told otherwise
CPU = "the CPU"
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
    measures: Measures = EVERYTHING  # of an analysis
    device: str = "cuda"
    ranks: int = 1  # cards that share the model

    def __post_init__(self):
        if self.task not in SCRIPTS:
            raise ValueError(f"--task {self.task} is unknown: choose one of {', '.join(SCRIPTS)}")
        if self.dtype not in PRECISIONS:
            raise ValueError(f"--dtype {self.dtype} is unknown: choose one of {', '.join(DTYPES)}")
        if self.task != "analysis" and self.dtype == "fp16":
            raise ValueError(
                f"--dtype fp16 with --task {self.task}: gradients underflow in fp16 and longhaul "
                "has no loss scaler: use bf16 or fp32"
            )

    @property
    def config(self) -> ModelConfig:
        """The model in the request's precision."""
        return dataclasses.replace(self.cfg.model(), compute_dtype=PRECISIONS[self.dtype])

    @property
    def simulated(self) -> bool:
        """Whether its step is simulated for want of a closed form."""
        return isinstance(self.cfg, PolicyConfig)

    @property
    def logits(self) -> bool:
        """Whether whole logits exist."""
        if self.simulated or self.task == "analysis":
            return False
        return loss_path(self.config, self.cfg.batch_size * self.cfg.context_length) == "standard"

    @property
    def analysed(self) -> analysis.Analysed:
        """What an analysis looks at."""
        cfg = self.cfg
        return analysis.Analysed(self.config, self.measures, cfg.batch_size, cfg.context_length)

    def measure(self, **settings) -> "Request":
        """The request with other measures of an analysis."""
        return dataclasses.replace(self, measures=dataclasses.replace(self.measures, **settings))

    def change(self, **settings) -> "Request":
        """The request with other settings of the trainer."""
        return dataclasses.replace(self, cfg=dataclasses.replace(self.cfg, **settings))


def request(
    task: str,
    cfg: TrainConfig,
    dtype: str = "",
    ranks: int = 1,
    measures: Measures = EVERYTHING,
) -> Request:
    """A request from a command line's `dtype` ("float16" or "fp16"); empty: the trainer's."""
    short = DTYPES.get(dtype or cfg.dtype, dtype)
    if short in ("fp32", "bf16"):
        cfg = dataclasses.replace(cfg, dtype=short)
    return Request(task, cfg, short, measures, ranks=ranks)


# ---- what it takes


def breakdown(asked: Request) -> dict[str, int]:
    """What the peak is made of; the sum is the live peak."""
    if asked.task == "analysis":
        return _analysis(asked)

    found = needs(dataclasses.replace(asked.cfg, device=asked.device), asked.ranks)
    return {
        "parameters and optimizer": found.static,
        found.peak_stage: found.peak - found.static,
    }


def _analysis(asked: Request) -> dict[str, int]:
    """The weights, and what the part with the highest peak adds to them."""
    config = asked.config
    weights = config.num_params() * config.dtype.itemsize
    target = "cpu" if asked.device == "cpu" else "cuda"
    peaks = analysis.peaks(asked.analysed, target)
    largest = max(peaks, key=lambda name: peaks[name])
    return {"weights": weights, f"highest part: {largest}": peaks[largest] - weights}


def live(asked: Request) -> int:
    """Live bytes at the peak."""
    return sum(breakdown(asked).values())


def judged(asked: Request, card: Card, host_gib: float) -> Found:
    """What the request needs, and whether the card, or the host for one on the CPU, holds it.

    Of a training step what the allocator reserves decides.
    """
    if asked.device == "cpu":
        return _found(live(asked), PROCESS_GIB, host_gib)
    if asked.task == "analysis":
        return _found(live(asked), CUDA_CONTEXT_GIB, card.gib)
    return judged_run(int(card.gib * GIB), Run(asked.cfg, asked.ranks))


def _found(live_bytes: int, hidden_gib: float, room_gib: float) -> Found:
    """What needs so much, with what no tensor shows."""
    needed = live_bytes + int(hidden_gib * GIB)
    fits = needed <= room_gib * GIB
    return Found(live_bytes, needed, Placement.FITS if fits else Placement.TOO_SMALL)


# ---- what to change


def ladder(asked: Request, card: Card) -> list[Lever]:
    """The changes, the smallest loss of quality first."""
    levers = [Lever("logits in chunks", chunked_logits)]
    if asked.measures.compare:
        pass  # what is compared begins with the model in float32
    elif asked.dtype == "fp32" and card.cc >= HALF_SINCE:
        levers.append(Lever("bf16 instead of fp32", in_bf16))
    elif asked.dtype == "fp32" and asked.task == "analysis":
        levers.append(Lever("fp16 instead of fp32", in_fp16))

    levers += [batch_lever(size) for size in smaller_batches(asked.cfg.batch_size)]
    if asked.task == "analysis":
        levers.append(Lever(f"rows in parts of {analysis.CHUNK:,}", in_parts))
        levers.append(Lever("no sparse autoencoder (--skip-sae)", without_sae))
        levers.append(Lever(f"{FEW_LAYERS} layers (--layers)", few_layers))
    else:
        levers += [training_lever(lever) for lever in fit.LEVERS]
    return [*levers, Lever(CPU, on_cpu)]


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
        return dataclasses.replace(asked, cfg=pulled(lever, asked.cfg))

    return Lever(lever.name, pull)


def in_parts(asked: Request) -> Request:
    """Rows over the KV cache, if they are long enough and their attention allows it."""
    allowed = attention_kind(asked.cfg).prompt_in_parts
    if asked.measures.chunk or not allowed or asked.cfg.context_length <= analysis.CHUNK:
        return asked
    return asked.measure(chunk=analysis.CHUNK)


def without_sae(asked: Request) -> Request:
    return asked.measure(skip_sae=True)


def few_layers(asked: Request) -> Request:
    """Only a few of the layers, from the first to the last."""
    measures = asked.measures
    if len(measures.chosen(asked.config)) <= FEW_LAYERS:
        return asked
    fewer = analysis.with_layers(measures, asked.config, FEW_LAYERS)
    return dataclasses.replace(asked, measures=fewer)


def on_cpu(asked: Request) -> Request:
    return dataclasses.replace(asked.change(device="cpu"), device="cpu")


# ---- the answer


@dataclass(frozen=True)
class Advice:
    """What was tried, and what fits; None if nothing does."""

    asked: Request
    card: Card
    tried: list[Tried]
    answer: Tried | None
    notes: list[str]

    @property
    def verdict(self) -> Verdict:
        if self.answer is None:
            return Verdict.NOTHING
        unchanged = self.answer.request == self.asked
        if unchanged and self.answer.found.placement is Placement.FITS:
            return Verdict.FITS
        return Verdict.AFTER_CHANGES

    @property
    def command(self) -> str:
        """What to run; empty if nothing fits."""
        if self.answer is None:
            return ""
        return run(self.answer.request, self.answer.found.placement is Placement.EXPANDABLE)

    def text(self) -> str:
        """What was found, below the table of what was tried."""
        rows = [f"note: {note}" for note in self.notes]
        rows.append(f"verdict: {VERDICTS[self.verdict]}")
        if self.answer and self.answer.found.host:
            host = self.answer.found.host / GIB
            rows.append(f"host memory: {host:.2f} GiB per rank, moving it takes more time")
        if self.command:
            rows.append(f"run: {self.command}")
        return "\n".join(rows)

    def as_json(self) -> dict:
        """Plain values; sizes in bytes."""
        steps = []
        for one in self.tried:
            steps.append(
                {
                    "change": one.name,
                    "live_bytes": one.found.live,
                    "verdict": one.found.placement,
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


def advise(asked: Request, card: Card, host_gib: float, say: Say) -> Advice:
    """Add changes until the request fits; `host_gib` is what the last one, the CPU, may use."""
    for row in _title(asked, card):
        say(row)

    def judge(one: Request) -> Found:
        return judged(one, card, host_gib)

    search = Search(judge, int(card.gib * GIB), say, with_costs=asked.task != "analysis")
    say(search.head())
    best = search.climb(asked, ladder(asked, card)).best
    notes = _notes(asked, card)
    if best.fits:
        return Advice(asked, card, search.tried, best, notes)
    return Advice(asked, card, search.tried, None, notes + _if_nothing_fits(asked, card))


def _title(asked: Request, card: Card) -> list[str]:
    """What is asked, and what its peak is made of."""
    cfg = asked.cfg
    cards = f"{asked.ranks} x " if asked.ranks > 1 else ""
    rows = [
        f"{asked.task}: {cfg.model_size} ({asked.config.num_params():,} parameters), "
        f"{cfg.batch_size} x {cfg.row_tokens:,} tokens, {asked.dtype}, "
        f"on {cards}{card.name} ({card.gib:g} GiB, capability {card.cc / 10})"
    ]
    for name, size in breakdown(asked).items():
        rows.append(f"  {name:<34}{size / GIB:>9.2f} GiB")
    rows.append("changes, each added to those above it; GiB, predicted:")
    return rows


def _notes(asked: Request, card: Card) -> list[str]:
    notes: list[str] = []
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


def _if_nothing_fits(asked: Request, card: Card) -> list[str]:
    """What would be enough: the host's memory, or more GPUs."""
    *levers, to_cpu = ladder(asked, card)
    least = _with(levers, asked)
    host = live(to_cpu.pull(least)) / GIB + PROCESS_GIB
    notes = [f"the CPU would need {host:.1f} GiB of host memory"]
    if asked.task != "train":
        return notes

    for ranks in MOST_GPUS:
        found = judged(dataclasses.replace(least, ranks=ranks), card, 0.0)
        if found.placement is not Placement.TOO_SMALL:
            return [*notes, f"with all changes, {ranks} such GPUs are enough (FSDP2)"]
    return [
        *notes,
        f"not even {MOST_GPUS[-1]} such GPUs are enough, because activations are not sharded: "
        "shorten the context",
    ]


def _with(levers: Sequence[Lever], asked: Request) -> Request:
    """The request with all of these changes."""
    for lever in levers:
        asked = pulled(lever, asked)
    return asked


# ---- the command


def run(asked: Request, expandable: bool = False) -> str:
    """The command that runs the request."""
    if asked.task == "train" or asked.simulated:
        before = EXPANDABLE_SEGMENTS if expandable else ""
        return before + command(asked.cfg, World(size=asked.ranks, local_size=asked.ranks))

    return analysis.command(
        asked.analysed, asked.cfg.init_from, asked.cfg.data, PRECISIONS[asked.dtype], asked.device
    )
