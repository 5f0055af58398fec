"""Predict the peak memory of a training step: `python profile_memory.py --context_length 131072`.

Every flag of train.py is a flag here and means the same. `--script train.py --its flags` predicts
any training script, `--step FILE.py` and `--hf FOLDER` a step that is not longhaul's
(docs/FOOTPRINT.md). No GPU is needed, because the real step
runs on fake tensors. Sizes are in GiB (2^30 bytes) and per rank. Exit code 0: the request fits as
asked, or no card was named; 2: it fits after a printed change, or bad input; 3: nothing fits.
"""

import base.with_torch  # noqa: F401  (first: a missing package is answered in one line)

import dataclasses
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from base.flags import PRECISIONS, RaisingParser, spellings
from footprint.__main__ import main as script_memory
from footprint.answers import page
from footprint.answers.snapshot import write_snapshot
from footprint.answers.tables import heading
from footprint.cards.device import HALF_SINCE, Demand
from footprint.record.trace import Trace
from footprint.steps import door
from footprint.steps.flags import is_about_step
from footprint.steps.search import VERDICTS, Verdict, note_on_size
from lab.analysis import memory as analysis
from lab.analysis.config import Measures
from lab.analysis.memory import Analysed
from lab.posttrain.config import GradeConfig, IntuitorConfig
from longhaul import cli, dist
from longhaul.checkpoint import start
from longhaul.cli import flag
from longhaul.config import TrainConfig
from longhaul.planner import advise, reconcile, report, reserve
from longhaul.planner import solve as solver
from longhaul.planner.card_flags import CardFlags
from longhaul.planner.needs import largest
from longhaul.planner.plan import host_available_bytes, on_ranks
from longhaul.planner.simulate import profile
from model import GIB, ModelConfig

DTYPES = spellings(*PRECISIONS)
PROGRAMS = (IntuitorConfig, GradeConfig)  # that train, next to train.py: a row for each
TASKS = ("train", *(program.TASK for program in PROGRAMS), "analysis")
SCRIPT = "--script"  # what follows is a training script, with its flags
MOST_RANKS = 2**16  # that are planned for
MOST_GPUS = 8  # that --solve world_size tries unless --gpus or --nproc asks for more


@dataclass(frozen=True)
class Profiler(CardFlags):
    """The profiler's own flags, next to those of a program that trains (`SETTINGS`).

    `--device cpu` predicts a run on a CPU, any other device a run on CUDA.
    """

    SETTINGS: ClassVar[type[TrainConfig]]
    DTYPES: ClassVar[dict[str, str]] = DTYPES

    dtype: str = flag(
        "bf16",
        "compute precision; fp16 only with --task analysis",
        choices=tuple(DTYPES),
        group="memory and speed",
    )
    nproc: int = flag(
        1,
        "ranks that share the model (FSDP2)",
        ("nproc_per_node",),
        at_least=1,
        at_most=MOST_RANKS,
        group="profiler",
    )
    measure: bool = flag(
        False,
        "also run two real steps on this machine (with --device cuda: on its GPU) and compare",
        group="profiler",
    )
    snapshot: str = flag(
        "",
        "file to write for PyTorch's memory visualiser: the step, or with --measure the real one",
        group="profiler",
    )
    solve: str = flag(
        "none",
        "what to find: the longest context, the cheapest levers, or the fewest ranks that fit",
        (),
        ("none", "context", "levers", "world_size"),
        group="profiler",
    )
    advise: bool = flag(
        False, "say what to change so that --task fits --gpu or --vram", group="profiler"
    )
    task: str = flag(
        "train",
        "the task to run, whose flags are then known",
        (),
        TASKS,
        group="profiler",
    )
    gpus: int = flag(
        0,
        f"most GPUs, with --solve; 0: as many as --nproc, or {MOST_GPUS} for world_size; "
        "with --advise the GPUs that share the model, 0: one",
        at_least=0,
        at_most=MOST_RANKS,
        group="profiler",
    )

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.gpu_memory_gib < 1e6:
            raise ValueError(
                f"--gpu_memory_gib {self.gpu_memory_gib} is out of range: give GiB above 0"
            )
        dist.check_replicas(dist.World(size=self.nproc), self.dp_replicate, self.context_ranks)
        self.accumulation(self.nproc)
        if self.compile:
            raise ValueError(
                "--compile: compiled layers are not simulated; the eager step is an upper bound: "
                "drop --compile"
            )
        if self.half == "fp16" and self.task != "analysis":
            raise ValueError(
                "--dtype fp16 works only with --task analysis: gradients underflow in "
                "fp16 and longhaul has no loss scaler: use bf16 or fp32"
            )

    @property
    def half(self) -> str:
        """The compute precision by its short name."""
        return DTYPES[self.dtype]

    def training(self) -> TrainConfig:
        """The trainer's settings."""
        specs = dataclasses.fields(self.SETTINGS)
        values = {spec.name: getattr(self, spec.name) for spec in specs}
        values["dtype"] = "bf16" if self.half == "fp16" else self.half
        return self.SETTINGS(**values)

    def model(self) -> ModelConfig:
        """The trainer's model."""
        return self.training().model()


@dataclass(frozen=True)
class ProfileConfig(Profiler, TrainConfig):
    """The flags of train.py and the profiler's."""

    SETTINGS: ClassVar[type[TrainConfig]] = TrainConfig
    EXAMPLES: ClassVar[str] = """examples:
  python profile_memory.py --context_length 131072 --gradient_checkpointing --gpu H100
  python profile_memory.py --step mine.py --svg memory.svg   the step of a file, and its timeline
  python profile_memory.py --hf FOLDER --gpu H100            a model of Hugging Face
`--hf FOLDER --help` lists the flags of --step and --hf, which docs/FOOTPRINT.md explains."""


@dataclass(frozen=True)
class ProfileAnalysis(Profiler, Measures, TrainConfig):
    """What lab.run_full_analysis measures, of a model that the flags of train.py describe, and
    the profiler's flags.
    """

    SETTINGS: ClassVar[type[TrainConfig]] = TrainConfig

    init_from: str = flag(
        "",
        "folder of the model: a run or step-* folder of longhaul, or a Hugging Face model",
        aliases=("checkpoint",),
        group="model",
    )

    def __post_init__(self):
        if self.compare:  # it begins with the model in float32
            object.__setattr__(self, "dtype", "fp32")
        super().__post_init__()
        self.check_model(self.model())
        for name in ("measure", "snapshot", "html", "length_schedule"):
            if getattr(self, name):
                raise ValueError(
                    f"--{name} is about training; the report of an analysis has what was measured "
                    f"next to what was planned: drop --{name}"
                )
        if self.solve != "none":
            raise ValueError(
                "--solve is about training: drop --solve, and --advise finds what an analysis can "
                "change"
            )
        if self.nproc > 1 or self.gpus > 1:
            raise ValueError("one process analyses a model: drop --nproc and --gpus")

    def analysed(self) -> Analysed:
        """What is planned."""
        return Analysed(
            dataclasses.replace(self.model(), compute_dtype=PRECISIONS[self.half]),
            analysis.measures_of(self),
            self.batch_size,
            self.context_length,
            checkpoint=self.init_from,
            data=self.data,
            device="cpu" if self.device == "cpu" else "cuda",
        )


def profiled(settings: type[TrainConfig]) -> type[Profiler]:
    """The flags of a program and the profiler's."""
    name = f"Profile{settings.__name__}"
    return dataclass(frozen=True)(type(name, (Profiler, settings), {"SETTINGS": settings}))


# --task -> its flags; others have those of train.py
CONFIGS = {program.TASK: profiled(program) for program in PROGRAMS}
CONFIGS["analysis"] = ProfileAnalysis


def flags_of(words: Sequence[str]) -> type[Profiler]:
    """The flags that a command line may have, by its --task."""
    parser = RaisingParser(add_help=False)
    parser.add_argument("--task", default="train")
    known, _ = parser.parse_known_args(list(words))
    return CONFIGS.get(known.task, ProfileConfig)


def main(args: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        words = sys.argv[1:] if args is None else args
        if SCRIPT in words:  # the first one; another is a flag of the script
            place = words.index(SCRIPT)
            return script_memory([*words[:place], *words[place + 1 :]])
        if is_about_step(words):
            return door.main(words)
        cfg = cli.parse(flags_of(words), words, __doc__.splitlines()[0], start.completed)
        check_question(cfg)
        check_kernels(cfg)
        with door.apart_from_json(cfg.json):
            return answer(cfg)
    except ValueError as error:
        return refuse(str(error))
    except OSError as error:  # mostly of a file that cannot be written
        return refuse(f"{error}: name another file")


def refuse(words: str) -> int:
    """Say in one line why there is no answer; the exit code."""
    print(f"profile_memory.py: error: {' '.join(words.split())}", file=sys.stderr)
    return 2


def answer(cfg: Profiler) -> int:
    """Predict, search or advise, as it is asked for; the exit code."""
    note = note_on_size(cfg.gpu_memory_gib)
    if note:
        door.shown(note)
    if cfg.advise:
        return give_advice(cfg)
    if isinstance(cfg, ProfileAnalysis):
        return plan_analysis(cfg)
    if cfg.solve != "none":
        return solve(cfg)
    return predict(cfg)


def check_question(cfg: Profiler):
    """ValueError for a flag that is about another question than the one that is asked."""
    if cfg.json and cfg.solve != "none":
        raise ValueError("--json has no results of --solve: drop --json")
    if cfg.gpus and not cfg.searches:
        raise ValueError("--gpus is for --solve and --advise: give --nproc for a number of ranks")
    if cfg.length_schedule:
        raise ValueError(
            "--length_schedule: one length is predicted: give --context_length, or plan every "
            f"stage by `python {cfg.PROGRAM} --plan`"
        )
    if cfg.device == "cpu" and cfg.has_card and not cfg.searches:
        raise ValueError("--gpu and --vram say what a GPU holds: drop them, or --device cpu")
    if cfg.device == "cpu" and cfg.searches:
        raise ValueError(
            f"{cfg.searches} looks for what fits a GPU, and `python {cfg.PROGRAM} --plan` says "
            "what a CPU holds: drop --device cpu"
        )


def check_kernels(cfg: Profiler):
    """ValueError for a card that has no kernel for what would run on it."""
    if not cfg.has_card or cfg.device == "cpu":
        return
    card = cfg.card()
    if card.cc >= HALF_SINCE:
        return
    which = f"compute capability 8.0, and {card.name} has {card.cc / 10}"
    trains = not isinstance(cfg, ProfileAnalysis)
    remedy = "--dtype fp32 --kernels torch" if trains else "--dtype fp32"
    if PRECISIONS[cfg.dtype] == "bfloat16":
        raise ValueError(f"--dtype {cfg.dtype}: its attention needs {which}: give {remedy}")
    if trains and cfg.kernels != "torch":
        raise ValueError(f"--kernels {cfg.kernels}: longhaul's need {which}: give {remedy}")


def predict(cfg: ProfileConfig) -> int:
    """Simulate the step, print its tables, and write what is asked for; the exit code."""
    target = "cpu" if cfg.device == "cpu" else "cuda"
    check_measure(cfg, target)
    on = cfg.card() if cfg.has_card else None
    training = largest(cfg.training(), cfg.nproc)

    if cfg.dense_steps:
        kind = "of the indexer's dense warm-up" if training.dense_steps else "behind the warm-up"
        print(f"of two kinds of step the larger one, {kind}:")

    # tensors are counted next to those of a CPU; a GPU waits while all layers are simulated
    full = cfg.measure and target == "cpu"
    found = profile(training, cfg.nproc, target, full=full)
    demand = Demand.of(found.trace, cfg.nproc) if target == "cuda" else None
    plan = on_ranks(cfg.training(), cfg.nproc, cfg.target)
    tables = report.table(found, training, cfg.nproc, demand)
    tables += f"\ntime: {plan.time()}"
    print(tables)
    result = report.machine_readable(found, training, cfg.nproc, demand)

    if cfg.measure:
        if target == "cuda":
            measured = reconcile.measure_cuda(training, cfg.snapshot)
        else:
            measured = reconcile.measure(training)
        result["measured"] = measured
        print(reconcile.table(found, measured, demand))

    if cfg.html:
        text = f"{tables}\ncommand: {plan.command()}"
        write_page(cfg, found.trace, demand, text)
    if cfg.snapshot and not cfg.measure:
        write_snapshot(cfg.snapshot, found.trace)
    verdict = Verdict.FITS
    if on is not None:
        placement = reserve.placement(demand, int(on.gib * GIB))
        door.shown(f"on {on.name} ({on.gib:g} GiB): {placement}")
        result |= {"card": on.name, "placement": placement}
        verdict = VERDICTS[placement]
    if cfg.json:
        door.write_json(cfg.json, result)
    return verdict.exit_code


def write_page(cfg: ProfileConfig, trace: Trace, demand: Demand | None, text: str):
    """The step as an HTML page: its timeline, and what is printed."""
    title = f"{cfg.model_size}, {cfg.batch_size} x {cfg.row_tokens:,} tokens"
    replays = (demand.classic, demand.expandable) if demand else None
    page.write(cfg.html, page.page(trace, title, text, replays))


def check_measure(cfg: ProfileConfig, target: str):
    """ValueError if this machine cannot measure what was asked for."""
    if cfg.measure and cfg.nproc > 1:
        raise ValueError("--measure runs one process: drop --nproc")
    if cfg.measure and target == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--measure: this machine has no CUDA device: give --device cpu to measure on its CPU"
        )
    if cfg.snapshot and target != "cuda":
        raise ValueError("--snapshot is what a GPU's allocator records: drop --device cpu")


def plan_analysis(cfg: ProfileAnalysis) -> int:
    """Predict the parts of an analysis."""
    asked = cfg.analysed()
    plan = analysis.planned(asked)
    print(
        f"{heading(plan.target, 1)}: {cfg.model_size}, {asked.words()}; tensors at the peak "
        "of each part"
    )
    print(plan.table())
    print(f"  {'device':<20}{plan.gib:>9.2f} GiB, with the process or the CUDA context")
    if cfg.json:
        found = {"torch": torch.__version__, "peaks": plan.peaks, "device_gib": plan.gib}
        door.write_json(cfg.json, found)
    if not cfg.has_card or plan.gib <= cfg.card().gib:
        return 0
    door.shown(f"{cfg.card().name} ({cfg.card().gib:g} GiB) is too small: --advise finds what fits")
    return Verdict.NOTHING.exit_code


def solve(cfg: ProfileConfig) -> int:
    """Find what fits; print the candidates and a command."""
    room = cfg.card().gib
    gpus = cfg.gpus or cfg.nproc
    if cfg.solve == "world_size" and not cfg.gpus:
        gpus = max(cfg.nproc, MOST_GPUS)
    return solver.solve(cfg.training(), cfg.solve, room, gpus, door.shown, cfg.target).exit_code


def give_advice(cfg: ProfileConfig) -> int:
    """Print what to change so that the task fits the card."""
    if cfg.nproc > 1:
        raise ValueError(
            "--advise counts cards by --gpus: give that instead of --nproc, or use --solve "
            "world_size to find the ranks that fit"
        )
    if isinstance(cfg, ProfileAnalysis):
        asked, task = cfg.analysed(), analysis.TASK
    else:
        asked, task = on_ranks(cfg.training(), cfg.gpus or 1, cfg.target), advise.RUN
    host_gib = host_available_bytes() / GIB
    found = advise.advise(cfg.task, asked, cfg.card(), host_gib, door.shown, task)

    if cfg.json:
        door.write_json(cfg.json, found.as_json)
    return found.verdict.exit_code


if __name__ == "__main__":
    # end quietly if the reader of a pipe has had enough
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
