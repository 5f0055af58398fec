"""Know the peak memory of a training step before launching it: `python profile_memory.py
--model_size 4B --context_length 131072`.

Every flag of train.py is known here and means the same. No GPU is needed: the real step runs on
fake tensors. Sizes are in GiB (2^30 bytes) and per rank. Exit code 0: done, or what is asked for
fits; 2: bad input, or it fits only after changes; 3: nothing fits.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass

import torch

from longhaul import cli, dist
from longhaul.cli import flag
from longhaul.config import TrainConfig
from longhaul.memory import advise, page, reconcile, report
from longhaul.memory import solve as solver
from longhaul.memory.advise import DTYPES, SCRIPTS
from longhaul.memory.device import Demand, card
from longhaul.memory.extrapolate import profile
from longhaul.memory.plan import host_available_bytes
from model import GIB


@dataclass(frozen=True)
class ProfileConfig(TrainConfig):
    """The profiler's flags beside the trainer's; `--device cpu` predicts a CPU run, anything else a
    CUDA run.
    """

    dtype: str = flag(
        "bf16",
        "compute precision; fp16 for --advise --task analysis alone",
        ("precision",),
        tuple(DTYPES),
        group="memory and speed",
    )
    nproc: int = flag(
        1, "ranks that share the model (FSDP2)", ("nproc_per_node",), group="profiler"
    )
    full: bool = flag(False, "simulate every layer, not a few that stand for all", group="profiler")
    measure: bool = flag(
        False,
        "also run two real steps on this machine (with --device cuda: on its GPU), and compare",
        group="profiler",
    )
    snapshot: str = flag(
        "",
        "with --measure on CUDA: file to write for PyTorch's memory visualiser",
        group="profiler",
    )
    html: str = flag(
        "", "file for one page with the step's timeline and its tables", group="profiler"
    )
    json: str = flag("", "file for everything that was found, machine-readable", group="profiler")
    solve: str = flag(
        "none",
        "what to find: the longest context, the cheapest levers, or the fewest ranks that fit",
        (),
        ("none", "context", "levers", "world_size"),
        group="profiler",
    )
    advise: bool = flag(
        False, "what to change so that --task fits --gpu or --vram", group="profiler"
    )
    task: str = flag("train", "with --advise: what shall run", (), tuple(SCRIPTS), group="profiler")
    gpu: str = flag("", "card, with --solve and --advise", group="profiler")
    gpu_memory_gib: float = flag(
        0.0,
        "memory of one GPU instead of --gpu; --solve takes 80 where neither is given",
        ("vram",),
        group="profiler",
    )
    cc: int = flag(
        0, "compute capability x 10 of that GPU, such as 86; 0: the card's, or 80", group="profiler"
    )
    gpus: int = flag(1, "GPUs that there are, with --solve", group="profiler")

    def __post_init__(self):
        super().__post_init__()
        for name, least in dict(nproc=1, gpus=1).items():
            if getattr(self, name) < least:
                raise ValueError(
                    f"--{name} {getattr(self, name)} is out of range: give a number of at least {least}"
                )
        if not 0 <= self.gpu_memory_gib < 1e6:
            raise ValueError(
                f"--gpu_memory_gib {self.gpu_memory_gib} is out of range: give GiB above 0"
            )
        dist.check_replicas(dist.World(size=self.nproc), self.dp_replicate, self.context_ranks)
        self.accumulation(self.nproc)
        if self.compile:
            raise ValueError(
                "--compile: compiled layers are not simulated; leave it out: what runs eagerly is an upper bound"
            )
        if self.half == "fp16" and not (self.advise and self.task == "analysis"):
            raise ValueError(
                "--dtype fp16: gradients underflow in fp16 and there is no loss scaler here: use bf16 or fp32; fp16 is for --advise --task analysis"
            )

    @property
    def half(self) -> str:
        """The compute precision by its short name."""
        return DTYPES[self.dtype]

    def training(self) -> TrainConfig:
        """The trainer's part."""
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(TrainConfig)}
        return TrainConfig(**values | dict(dtype="bf16" if self.half == "fp16" else self.half))

    def model(self):
        """The trainer's model."""
        return self.training().model()


def main(args: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        cfg = cli.parse(ProfileConfig, args, __doc__.splitlines()[0])
        if cfg.advise:
            return give_advice(cfg)
        return solve(cfg) if cfg.solve != "none" else predict(cfg)
    except ValueError as error:
        print(f"profile_memory.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def predict(cfg: ProfileConfig) -> int:
    """Simulate, print, write."""
    target = "cpu" if cfg.device == "cpu" else "cuda"
    check_measure(cfg, target)
    training = cfg.training()
    found = profile(training, cfg.nproc, target, cfg.full or cfg.measure)
    demand = Demand.of(found.trace, cfg.nproc) if target == "cuda" else None
    print(report.table(found, training, cfg.nproc, demand))
    result = report.machine_readable(found, training, cfg.nproc, demand)
    if cfg.measure:
        result["measured"] = (
            reconcile.measure(training)
            if target == "cpu"
            else reconcile.measure_cuda(training, cfg.snapshot)
        )
        print(reconcile.table(found, result["measured"], demand))
    if cfg.html:
        title = f"{cfg.model_size}, {cfg.batch_size} x {cfg.context_length:,} tokens, one of {cfg.nproc} rank(s)"
        page.write(
            cfg.html,
            page.page(found.trace, title, "predicted: no GPU was used", cfg.nproc, found.stages),
        )
    if cfg.json:
        write(cfg.json, result)
    return 0


def check_measure(cfg: ProfileConfig, target: str):
    """ValueError where what shall be measured cannot run here."""
    if cfg.measure and cfg.nproc > 1:
        raise ValueError("--measure runs one process: give no --nproc")
    if cfg.measure and target == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--measure: no CUDA device is here: give --device cpu, which measures on this machine's CPU"
        )
    if cfg.snapshot and not (cfg.measure and target == "cuda"):
        raise ValueError(
            "--snapshot is written by --measure on CUDA: give both, on a machine with a GPU"
        )


def write(path: str, result: dict):
    """The result as JSON; ValueError where the file cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written: {error}") from None


def solve(cfg: ProfileConfig) -> int:
    """Find what fits, print the ladder and a command."""
    room = card(cfg.gpu, cfg.gpu_memory_gib or (0.0 if cfg.gpu else 80.0), cfg.cc).gib
    answer = solver.solve(cfg.training(), cfg.solve, room, cfg.gpus)
    print(answer.text)
    return answer.code


def give_advice(cfg: ProfileConfig) -> int:
    """Print what to change so that the task fits the card."""
    if cfg.nproc > 1:
        raise ValueError(
            "--advise is about one GPU: give no --nproc; --solve world_size finds the ranks that fit"
        )
    found = advise.advise(
        advise.request(cfg.task, cfg.training(), cfg.dtype),
        card(cfg.gpu, cfg.gpu_memory_gib, cfg.cc),
        host_available_bytes() / GIB,
    )
    print(found.text())
    if cfg.json:
        write(cfg.json, found.as_json())
    return found.code


if __name__ == "__main__":
    sys.exit(main())
