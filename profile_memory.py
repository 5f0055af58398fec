"""Know the peak memory of a training step before launching it: `python profile_memory.py --model_size 4B --context_length 131072`.

Every flag of train.py is known here and means the same. No GPU is needed: the real step runs on fake tensors. Sizes are in GiB
(2^30 bytes) and per rank. Exit code 0: done, or what is asked for fits; 2: bad input, or it fits only after changes; 3: nothing fits.
Imports longhaul of ours.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass

from longhaul import cli, dist
from longhaul.cli import flag
from longhaul.config import TrainConfig


@dataclass(frozen=True)
class ProfileConfig(TrainConfig):
    """The profiler's flags beside the trainer's; `--device cpu` predicts a CPU run, anything else a CUDA run."""

    nproc: int = flag(1, "ranks that share the model (FSDP2)", ("nproc_per_node",), group="profiler")
    full: bool = flag(False, "simulate every layer, not a few that stand for all", group="profiler")
    measure: bool = flag(False, "also run two real steps on this machine's CPU, and compare", group="profiler")
    json: str = flag("", "file for everything that was found, machine-readable", group="profiler")
    solve: str = flag("none", "what to find: the longest context, the cheapest levers, or the fewest ranks that fit", (),
                      ("none", "context", "levers", "world_size"), group="profiler")
    gpu_memory_gib: float = flag(80.0, "memory of one GPU, with --solve", ("vram",), group="profiler")
    gpus: int = flag(1, "GPUs that there are, with --solve", group="profiler")

    def __post_init__(self):
        super().__post_init__()
        for name, least in dict(nproc=1, gpus=1).items():
            if getattr(self, name) < least:
                raise ValueError(f"--{name} {getattr(self, name)} is out of range: give a number of at least {least}")
        if not 0 < self.gpu_memory_gib < 1e6:
            raise ValueError(f"--gpu_memory_gib {self.gpu_memory_gib} is out of range: give GiB above 0")
        dist.check_replicas(dist.World(size=self.nproc), self.dp_replicate)
        self.accumulation(self.nproc)
        if self.compile:
            raise ValueError("--compile: compiled layers are not simulated; leave it out: what runs eagerly is an upper bound")

    def training(self) -> TrainConfig:
        """The trainer's part."""
        return TrainConfig(**{spec.name: getattr(self, spec.name) for spec in dataclasses.fields(TrainConfig)})


def main(args: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        cfg = cli.parse(ProfileConfig, args, __doc__.splitlines()[0])
        return solve(cfg) if cfg.solve != "none" else predict(cfg)
    except ValueError as error:
        print(f"profile_memory.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def predict(cfg: ProfileConfig) -> int:
    """Simulate, print, write."""
    from longhaul.memory import report
    from longhaul.memory.extrapolate import profile
    target = "cpu" if cfg.device == "cpu" else "cuda"
    if cfg.measure and (cfg.nproc > 1 or target == "cuda"):
        raise ValueError("--measure runs one process on this machine's CPU: give --device cpu and no --nproc")
    found = profile(cfg.training(), cfg.nproc, target, cfg.full or cfg.measure)
    print(report.table(found, cfg, cfg.nproc))
    result = report.machine_readable(found, cfg, cfg.nproc)
    if cfg.measure:
        from longhaul.memory import reconcile
        result["measured"] = reconcile.measure(cfg.training())
        print(reconcile.table(found, result["measured"]))
    if cfg.json:
        write(cfg.json, result)
    return 0


def write(path: str, result: dict):
    """The result as JSON; ValueError where the file cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written: {error}") from None


def solve(cfg: ProfileConfig) -> int:
    """Find what fits, print the ladder and a command."""
    from longhaul.memory import solve as solver
    answer = solver.solve(cfg.training(), cfg.solve, cfg.gpu_memory_gib, cfg.gpus)
    print(answer.text)
    return answer.code


if __name__ == "__main__":
    sys.exit(main())
