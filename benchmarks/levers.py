"""What each memory lever costs in time: a training step with it and the same step without it,
timed alternately.

    python -m benchmarks.levers [--tokens 8192] [--rounds 5] [--out benchmarks/results/levers]

The step is that of longhaul.step, as in training, on one row of random tokens. The clock is the
process CPU time of one thread on a CPU, and CUDA events on a GPU. A lever whose first loss or
gradient norm differs from the plain step's is not timed; scripts.equivalence shows whether the
updates are right.
"""

import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch

from benchmarks import clock, record
from longhaul import cli, dist, step
from longhaul.cli import flag
from longhaul.config import TrainConfig

FULL = dict(gradient_checkpointing="full")
IN_BACKWARD = dict(optimizer_in_backward=True, grad_clip=0.0)


class Lever(NamedTuple):
    """Settings, and the lever or "plain" whose step it is compared with."""

    changes: dict
    base: str = "plain"


LEVERS = {
    "plain": Lever({}),
    "checkpointing": Lever(FULL),
    "selective checkpointing": Lever(dict(gradient_checkpointing="selective")),
    "tiled MLP": Lever(dict(mlp_tiles=4)),
    "head groups": Lever(FULL | dict(attention_head_groups=2), "checkpointing"),
    "offloaded activations": Lever(FULL | dict(offload_activations=True), "checkpointing"),
    "offloaded optimizer": Lever(dict(master_weights="host")),
    "optimizer in backward": Lever(IN_BACKWARD),
    "bf16 moments": Lever(dict(optimizer="adamw_bf16")),
    "8-bit moments": Lever(dict(optimizer="adamw_8bit")),
    "no master weights": Lever(dict(master_weights="none")),
    "Muon": Lever(dict(optimizer="muon")),
}
TABLE = record.Table(
    "levers",
    "A training step with a lever over one without",
    {
        "lever": "text",
        "compared with": "text",
        "tokens": "count",
        "step ms": "ms",
        "time": "ratio",
        "loss off by": "error",
        "gradient norm off by": "error",
    },
)
CLOSE = 2e-3  # of loss and gradient norm in bf16, where sums in another order round differently


@dataclass(frozen=True)
class LeversConfig:
    """Sizes of the benchmark."""

    tokens: int = flag(8192, "tokens of the row", ("context_length",), group="benchmark")
    model_size: str = flag("tiny", "preset", group="benchmark")
    rounds: int = flag(5, "rounds; figures are their medians", group="benchmark")
    only: tuple = flag(
        (),
        "levers, by name; their bases are added",
        many=True,
        choices=tuple(LEVERS),
        group="benchmark",
    )
    device: str = flag("auto", "device", (), ("auto", "cpu", "cuda"), group="benchmark")
    out: str = flag(
        "benchmarks/results/levers", "folder for results.json and results.md", group="benchmark"
    )

    def __post_init__(self):
        for name in ("tokens", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name} {getattr(self, name)} is out of range: give a number of at least 1"
                )

    def names(self) -> list[str]:
        """The levers that are asked for and those that they are compared with."""
        asked = self.only or tuple(LEVERS)
        return [
            name
            for name in LEVERS
            if name in (*asked, "plain") or any(LEVERS[other].base == name for other in asked)
        ]

    def training(self, name: str) -> TrainConfig:
        """A lever's settings."""
        return TrainConfig(
            **dict(
                model_size=self.model_size,
                context_length=self.tokens,
                loss="chunked",
                kernels="torch",
            )
            | LEVERS[name].changes
        )


def main(args: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        cfg = cli.parse(LeversConfig, args, __doc__.splitlines()[0])
        command = (
            f"python -m benchmarks.levers --tokens {cfg.tokens} --model_size {cfg.model_size} "
            f"--rounds {cfg.rounds}"
        )
        print(command, flush=True)
        states = {name: build(cfg, name) for name in cfg.names()}
    except ValueError as error:
        print(f"benchmarks.levers: error: {error}", file=sys.stderr)
        return 2
    device = states["plain"].device
    run = record.Run(
        cfg.out,
        "Time of memory levers",
        command,
        record.where(device),
        toy=False,
        echo=lambda line: None,
    )
    batch = batch_of(cfg, device)
    found = {
        name: step.train_step(state, batch) for name, state in states.items()
    }  # also the warm-up
    errors = {name: off(result, found["plain"]) for name, result in found.items()}
    wrong = [name for name, (loss, norm) in errors.items() if not (loss < CLOSE and norm < CLOSE)]
    for name in wrong:
        run.fail(f"{name}: loss and gradient norm are off by {errors[name]}")
    calls = {
        name: lambda state=state: step.train_step(state, batch)
        for name, state in states.items()
        if name not in wrong
    }
    times = clock.interleaved(calls, tuple, device, cfg.rounds, cold=False)
    for name in times:
        base = LEVERS[name].base
        run.row(
            TABLE,
            lever=name,
            tokens=cfg.tokens,
            time=clock.ratio(times, name, base),
            **{
                "compared with": base,
                "step ms": clock.milliseconds(times[name]),
                "loss off by": errors[name][0],
                "gradient norm off by": errors[name][1],
            },
        )
    print((run.folder / "results.md").read_text(encoding="utf-8"))
    return int(bool(wrong))


def build(cfg: LeversConfig, name: str) -> step.TrainState:
    """A state of its own, all with the same weights."""
    training = cfg.training(name)
    device = dist.choose_device(cfg.device, dist.World())
    if device.type == "cpu":
        torch.set_num_threads(1)
        dist.keep_freed_memory()
    return step.build(training, training.model(), device)


def batch_of(cfg: LeversConfig, device: torch.device) -> list[dict]:
    """One micro-batch of one document."""
    ids = torch.randint(
        cfg.training("plain").model().vocab_size,
        (1, cfg.tokens + 1),
        generator=torch.Generator().manual_seed(0),
    )
    return [dict(tokens_BT=ids[:, :-1].to(device), labels_BT=ids[:, 1:].to(device))]


def off(result: step.StepResult, plain: step.StepResult) -> tuple[float, float]:
    """Relative differences of loss and gradient norm."""
    return abs(float(result.loss) / float(plain.loss) - 1), abs(
        float(result.grad_norm) / float(plain.grad_norm) - 1
    )


if __name__ == "__main__":
    sys.exit(main())
