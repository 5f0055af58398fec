"""Predict the peak memory of a training step: `python profile_memory.py --context_length 131072`.

Every flag of train.py is a flag here and means the same. No GPU is needed, because the real step
runs on fake tensors. Sizes are in GiB (2^30 bytes) and per rank. Exit code 0: done, or the request
fits; 2: bad input, or the request fits after changes; 3: nothing fits.
"""

import installed  # noqa: F401  (first: a missing package is answered in one line)

import dataclasses
import json
import sys
from dataclasses import dataclass

import torch

from longhaul import cli, dist
from longhaul.cli import flag
from longhaul.config import TrainConfig
from longhaul.flops import step_seconds
from longhaul.memory import advise, page, reconcile, report
from longhaul.memory import solve as solver
from longhaul.memory.advise import DTYPES, SCRIPTS
from longhaul.memory.deep import Profile, profile
from longhaul.memory.device import Demand, card
from longhaul.memory.plan import command, host_available_bytes, shutdown_timeout
from longhaul.run import start
from model import GIB, ModelConfig

MOST_RANKS = 2**16  # that are planned for
MOST_GPUS = 8  # that --solve world_size tries unless --gpus or --nproc asks for more
DEFAULT_GIB = 80.0  # of one GPU, if --solve is given neither --gpu nor --gpu_memory_gib


@dataclass(frozen=True)
class ProfileConfig(TrainConfig):
    """The trainer's flags and the profiler's own.

    `--device cpu` predicts a run on a CPU, any other device a run on CUDA.
    """

    dtype: str = flag(
        "bf16",
        "compute precision; fp16 only with --advise --task analysis",
        ("precision",),
        tuple(DTYPES),
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
    full: bool = flag(
        False, "simulate every layer instead of extending five layers to all", group="profiler"
    )
    measure: bool = flag(
        False,
        "also run two real steps on this machine (with --device cuda: on its GPU) and compare",
        group="profiler",
    )
    snapshot: str = flag(
        "",
        "file to write for PyTorch's memory visualiser, with --measure on CUDA",
        group="profiler",
    )
    html: str = flag(
        "", "HTML file to write: the step's timeline and tables on one page", group="profiler"
    )
    json: str = flag("", "JSON file to write, with every result", group="profiler")
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
        "train", "the task to run, with --advise", (), tuple(SCRIPTS), group="profiler"
    )
    gpu: str = flag("", "name of the card, with --solve and --advise", group="profiler")
    gpu_memory_gib: float = flag(
        0.0,
        f"memory of one GPU, instead of --gpu; --solve assumes {DEFAULT_GIB:g} if neither is given",
        ("vram",),
        group="profiler",
    )
    cc: int = flag(
        0,
        "compute capability x 10 of the GPU, such as 86; 0: that of --gpu, or 80",
        at_least=0,
        at_most=999,
        group="profiler",
    )
    gpus: int = flag(
        0,
        f"most GPUs, with --solve; 0: as many as --nproc, or {MOST_GPUS} for world_size",
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
        if self.half == "fp16" and not (self.advise and self.task == "analysis"):
            raise ValueError(
                "--dtype fp16 works only with --advise --task analysis: gradients underflow in "
                "fp16 and longhaul has no loss scaler: use bf16 or fp32"
            )

    @property
    def half(self) -> str:
        """The compute precision by its short name."""
        return DTYPES[self.dtype]

    def training(self) -> TrainConfig:
        """The trainer's settings."""
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(TrainConfig)}
        values["dtype"] = "bf16" if self.half == "fp16" else self.half
        return TrainConfig(**values)

    def model(self) -> ModelConfig:
        """The trainer's model."""
        return self.training().model()


def main(args: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        cfg = cli.parse(ProfileConfig, args, __doc__.splitlines()[0], start.completed)
        if cfg.length_schedule:
            return predict_stages(cfg)
        if cfg.advise:
            return give_advice(cfg)
        if cfg.solve != "none":
            return solve(cfg)
        return predict(cfg)
    except ValueError as error:
        print(f"profile_memory.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def predict_stages(cfg: ProfileConfig) -> int:
    """Predict every stage of a length schedule; a JSON file has a list with one result of each."""
    for name in ("solve", "advise", "html", "snapshot"):
        if name in cfg.changed_settings():
            raise ValueError(
                f"--{name} is about one length: drop --length_schedule, and give --context_length"
            )
    results = []
    for stage in cfg.training().stages():
        print(stage.in_words(), flush=True)
        own = {spec.name: getattr(stage.cfg, spec.name) for spec in dataclasses.fields(stage.cfg)}
        results.append(predicted(dataclasses.replace(cfg, **own)))
    if cfg.json:
        write(cfg.json, results)
    return 0


def predict(cfg: ProfileConfig) -> int:
    """Predict the step, and write the results if a file is named."""
    result = predicted(cfg)
    if cfg.json:
        write(cfg.json, result)
    return 0


def predicted(cfg: ProfileConfig) -> dict:
    """Simulate the step, print its tables, write its page if one is named, and return the results
    for a JSON file.
    """
    target = "cpu" if cfg.device == "cpu" else "cuda"
    check_measure(cfg, target)
    training = cfg.training()

    found = profile(training, cfg.nproc, target, cfg.full or cfg.measure)
    demand = Demand.of(found.trace, cfg.nproc) if target == "cuda" else None
    print(report.table(found, training, cfg.nproc, demand))
    result = report.machine_readable(found, training, cfg.nproc, demand)

    if cfg.measure and target == "cuda":
        result["measured"] = reconcile.measure_cuda(training, cfg.snapshot)
    elif cfg.measure:
        result["measured"] = reconcile.measure(training)
    if cfg.measure:
        print(reconcile.table(found, result["measured"], demand))

    if cfg.html:
        write_page(cfg, found, demand)
    return result


def write_page(cfg: ProfileConfig, found: Profile, demand: Demand | None):
    """The step as an HTML page."""
    device = "a CPU" if demand is None else "a GPU (CUDA)"
    title = (
        f"{cfg.model_size}, {cfg.batch_size} x {cfg.context_length:,} tokens, "
        f"one of {cfg.nproc} rank(s) on {device}"
    )
    facts = {}
    replays = None
    if demand:
        facts["cards"] = demand.cards_text()
        replays = demand.classic, demand.expandable
    facts["time"] = report.run_time(cfg, cfg.nproc, demand)
    training = cfg.training()
    seconds = step_seconds(training, training.model(), cfg.nproc, "cuda" if demand else "cpu")
    timeout = shutdown_timeout(training, cfg.nproc, seconds)
    world = dist.World(size=cfg.nproc, local_size=cfg.nproc)
    facts["command"] = command(training, world, timeout)

    note = f"predicted for {device}: nothing was run"
    page.write(
        cfg.html,
        page.page(found.trace, title, note, cfg.nproc, found.stages, replays, facts),
    )


def check_measure(cfg: ProfileConfig, target: str):
    """ValueError if this machine cannot measure what was asked for."""
    if cfg.measure and cfg.nproc > 1:
        raise ValueError("--measure runs one process: drop --nproc")
    if cfg.measure and target == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--measure: this machine has no CUDA device: give --device cpu to measure on its CPU"
        )
    if cfg.snapshot and not (cfg.measure and target == "cuda"):
        raise ValueError(
            "--snapshot is written by --measure on CUDA: give both, on a machine with a GPU"
        )


def write(path: str, result: dict | list):
    """Write the result as JSON; ValueError if the file cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written ({error}): name another file") from None


def solve(cfg: ProfileConfig) -> int:
    """Find what fits; print the candidates and a command."""
    gib = cfg.gpu_memory_gib
    if not cfg.gpu and not gib:
        gib = DEFAULT_GIB
    room = card(cfg.gpu, gib, cfg.cc).gib

    gpus = cfg.gpus or cfg.nproc
    if cfg.solve == "world_size" and not cfg.gpus:
        gpus = max(cfg.nproc, MOST_GPUS)
    return solver.solve(cfg.training(), cfg.solve, room, gpus, say).verdict.exit_code


def say(line: str):
    """Print a line at once: a search takes seconds for each."""
    print(line, flush=True)


def give_advice(cfg: ProfileConfig) -> int:
    """Print what to change so that the task fits the card."""
    if cfg.nproc > 1:
        raise ValueError(
            "--advise is about one GPU: drop --nproc, or use --solve world_size to find the ranks "
            "that fit"
        )
    request = advise.request(cfg.task, cfg.training(), cfg.dtype)
    on = card(cfg.gpu, cfg.gpu_memory_gib, cfg.cc)
    found = advise.advise(request, on, host_available_bytes() / GIB)

    print(found.text())
    if cfg.json:
        write(cfg.json, found.as_json())
    return found.verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
