"""A training step compared with a plain loop over transformers' Qwen3ForCausalLM: same weights,
data, dtype and optimizer.

    python -m benchmarks.train_step [--sizes tiny 30M] [--context_length 2048] [--dtypes bf16 fp32]
    [--steps 6] [--device cuda]

Each side is a process of its own, as a user would start it, on one CPU thread or one GPU; their
steps alternate. Both start from the same weights and must give the same first loss, else nothing is
timed. The figure is the median of the ratios of process CPU time, on a GPU of the time between CUDA
events. Ours is `longhaul.step` after
`dist.start`; theirs is the loop of the transformers documentation: fp32 weights under autocast for
bf16, fused AdamW, clipping.
"""

import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from base.flags import precision
from benchmarks.clock import seconds
from longhaul import dist, qwen3, step
from longhaul.cli import Parser
from longhaul.config import TrainConfig
from longhaul.dist import named_device

WIDTH_30M = ("hidden_size=448", "num_heads=7", "num_kv_heads=7", "head_dim=64", "ffn_size=1344")
SIZES = {
    "tiny": dict(model_size="tiny", vocab_size=8192),
    "30M": dict(model_size="tiny", model_overrides=("num_layers=8", *WIDTH_30M), vocab_size=16_384),
    "0.6B": dict(model_size="0.6B"),
}
SMALL = ["tiny", "30M"]  # one CPU thread is enough for these
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # of the first loss


def arguments(args: list[str] | None = None):
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m benchmarks.train_step")
    parser.add_argument(
        "--sizes", nargs="+", choices=tuple(SIZES), default=SMALL, help="model sizes"
    )
    parser.add_argument("--context_length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--batch_size", type=int, default=2, help="rows of a step")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        type=precision,
        choices=("bf16", "fp32"),
        default=["bf16", "fp32"],
        help="compute precision",
    )
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each, alternating")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run"
    )
    parser.add_argument(
        "--side",
        choices=tuple(SIDES),
        help="internal: run one side, a step per line of standard input",
    )
    parser.add_argument("--weights", help="internal: folder of the common weights")
    given = parser.parse_args(args)
    try:
        given.device = named_device(given.device).type
    except ValueError as error:
        parser.refuse(error)
    return given


def main(args: list[str] | None = None):
    given = arguments(args)
    if given.side:
        serve(given)
        return
    where = "one CPU thread; process CPU time" if given.device == "cpu" else "one GPU; CUDA events"
    print(
        f"torch {torch.__version__}, context {given.context_length:,}, {given.batch_size} rows, "
        f"{where}\n"
        "| size | dtype | transformers, tokens/s | longhaul, tokens/s | ratio "
        "|\n|---|---|---|---|---|"
    )
    for size in given.sizes:
        for dtype in given.dtypes:
            compare(size, dtype, given)


# ---- the two sides


def settings(size: str, dtype: str, given) -> TrainConfig:
    return TrainConfig(
        **SIZES[size],
        device=given.device,
        context_length=given.context_length,
        batch_size=given.batch_size,
        dtype=dtype,
        warmup_steps=0,
        schedule="constant",
        lr=1e-4,
    )


def longhaul_step(cfg: TrainConfig, weights: Path, tokens: torch.Tensor):
    """Our step on the common weights."""
    dist.start(dist.World(), torch.device(cfg.device))
    torch.set_num_threads(1)
    state = step.build(cfg, cfg.model(), cfg.device)
    qwen3.load_into(state.model, weights)
    batch = [dict(tokens_BT=tokens[:, :-1].contiguous(), labels_BT=tokens[:, 1:].contiguous())]
    return lambda: float(step.train_step(state, batch).loss)


def transformers_step(cfg: TrainConfig, weights: Path, tokens: torch.Tensor):
    """The training loop of transformers' documentation on the common weights."""
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = Qwen3ForCausalLM.from_pretrained(weights, dtype=torch.float32)
    one_step = plain_loop(model.to(cfg.device), cfg)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return lambda: float(one_step(inputs, targets))


def plain_loop(model, cfg: TrainConfig):
    """step(inputs, targets) -> loss: fp32 weights, autocast for bf16, fused AdamW, clipping."""
    model.train()
    adam = cfg.adam_numbers()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=cfg.lr,
        betas=(adam.beta1, adam.beta2),
        weight_decay=cfg.weight_decay,
        fused=True,
    )

    def one_step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(cfg.device, torch.bfloat16, enabled=cfg.dtype == "bf16"):
            loss = model(
                input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False
            ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return one_step


SIDES = {"longhaul": longhaul_step, "transformers": transformers_step}


def serve(given):
    """One side: a step per line of standard input, answered by its loss and seconds."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cfg = settings(given.sizes[0], given.dtypes[0], given)
    tokens = torch.randint(
        0,
        cfg.model().vocab_size,
        (given.batch_size, given.context_length + 1),
        generator=torch.Generator().manual_seed(0),
    )
    one_step = SIDES[given.side](cfg, Path(given.weights), tokens.to(cfg.device))
    for _ in sys.stdin:
        losses = []
        taken = seconds(lambda losses=losses: losses.append(one_step()), torch.device(cfg.device))
        print(*losses, taken, flush=True)


# ---- the comparison


class Side:
    """A running side: `step()` -> (loss, seconds)."""

    def __init__(self, name: str, size: str, dtype: str, weights: Path, given):
        command = [
            sys.executable,
            "-m",
            "benchmarks.train_step",
            "--side",
            name,
            "--weights",
            str(weights),
            "--sizes",
            size,
            "--dtypes",
            dtype,
            "--context_length",
            str(given.context_length),
            "--batch_size",
            str(given.batch_size),
            "--device",
            given.device,
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self) -> tuple[float, float]:
        print(file=self.process.stdin, flush=True)
        loss, taken = self.process.stdout.readline().split()
        return float(loss), float(taken)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(size: str, dtype: str, given):
    """One row of the table."""
    cfg = settings(size, dtype, given)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights"
        model = step.build(cfg, cfg.model(), "cpu").model
        qwen3.to_hf(model, weights)
        sides = [Side(name, size, dtype, weights, given) for name in SIDES]
        (loss, _), (their_loss, _) = (side.step() for side in sides)
        if abs(loss - their_loss) > TOLERANCE[dtype] * their_loss:
            raise SystemExit(
                f"{size} {dtype}: first losses {loss} and {their_loss} differ: not timed"
            )
        times = [[side.step()[1] for side in sides] for _ in range(given.steps)]
    for side in sides:
        side.close()
    tokens = given.batch_size * given.context_length
    ours, theirs = (tokens / statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    print(
        f"| {size} ({model.num_params() / 1e6:.0f}M) | {dtype} | {theirs:,.0f} | "
        f"{ours:,.0f} | {ratio:.2f}x |",
        flush=True,
    )


if __name__ == "__main__":
    main()
