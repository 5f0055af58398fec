"""The profiler's tracker compared with torch.distributed._tools' MemTracker, over two steps on fake
tensors: time and what each finds.

Refuses to print times where the two disagree by more than 2% on the peak. MemTracker knows no
kernel's workspace, so ours runs
without them too. Seconds of process CPU time, one thread; GiB = 2^30 bytes.

    python -m benchmarks.memory_tracker [--layers 4 36] [--context_length 131072]
"""

import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from base.flags import Parser
from benchmarks.clock import seconds
from footprint.tracker import Tracker
from longhaul import step
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.memory.batches import fake_batch
from longhaul.memory.deep import profile
from longhaul.memory.platforms import predicting
from model import GIB

TOLERANCE = 0.02  # of the peak: MemTracker rounds to 512 bytes and cannot add gradients in place


def state_of(cfg: TrainConfig, skeleton):
    """The training state on fake tensors, ready to step."""
    state = step.fill(skeleton, cfg, "cpu", World(), None)
    state.model.validate = False
    return state


def two_steps(state, batch, between=lambda: None):
    """What a training step does, without what asks a fake tensor for its value (clipping);
    `between` is called after each.
    """
    for _ in range(2):
        for micro in batch:
            state.model(**micro, num_valid=1.0).backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        between()


def ours(cfg: TrainConfig) -> int:
    """Peak bytes by our tracker."""
    skeleton = step.skeleton(cfg, cfg.model())
    tracker = Tracker(fake=True)
    with FakeTensorMode(allow_non_fake_inputs=True), predicting("cuda", tracker), tracker:
        two_steps(state_of(cfg, skeleton), fake_batch(cfg, 1))
    return tracker.trace.peak()[0]


def theirs(cfg: TrainConfig) -> int:
    """Peak bytes by MemTracker."""
    from torch.distributed._tools.mem_tracker import MemTracker

    skeleton = step.skeleton(cfg, cfg.model())
    with FakeTensorMode(allow_non_fake_inputs=True), predicting("cuda", Tracker()):
        state = state_of(cfg, skeleton)
        batch = fake_batch(cfg, 1)
        tracker = MemTracker()
        tracker.track_external(
            state.model,
            state.optimizer,
            *(value for micro in batch for value in micro.values() if value is not None),
        )
        with tracker:
            two_steps(state, batch, tracker.reset_mod_stats)
        snapshot = tracker.get_tracker_snapshot("peak")
    return max(sizes["Total"] for sizes in snapshot.values())


def timed(function, *args):
    """(what the function returns, its seconds)."""
    found = []
    spent = seconds(lambda: found.append(function(*args)))
    return found[0], spent


def row(cfg: TrainConfig) -> str:
    """A line of the table; SystemExit where the trackers disagree."""
    (a, ours_s) = timed(ours, cfg)
    (b, theirs_s) = timed(theirs, cfg)
    (_, profile_s) = timed(profile, cfg)
    if abs(a / b - 1) > TOLERANCE:
        sys.exit(f"not timed: our peak is {a:,} bytes, MemTracker's {b:,}")
    return (
        f"| {cfg.model_size}, {cfg.model().num_layers} layers, {cfg.context_length:,} "
        f"tokens | {theirs_s:.2f} | {ours_s:.2f} | {theirs_s / ours_s:.1f}x | "
        f"{profile_s:.2f} | {b / GIB:.3f} | {a / GIB:.3f} |"
    )


def main(args: list[str] | None = None):
    """Print the table."""
    parser = Parser(prog="python -m benchmarks.memory_tracker", description=__doc__)
    parser.add_argument("--model_size", default="4B")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 36])
    parser.add_argument("--context_length", type=int, default=131072)
    given = parser.parse_args(args)
    torch.set_num_threads(1)
    print(
        "| step | MemTracker, s | our tracker, s | ratio | whole profile, s | MemTracker's "
        "peak, GiB | ours, GiB |\n|---|---|---|---|---|---|---|"
    )
    small = TrainConfig(model_size="tiny", context_length=512)
    for run in (ours, theirs, profile):  # what only a first call does
        run(small)
    for layers in given.layers:
        print(
            row(
                TrainConfig(
                    model_size=given.model_size,
                    context_length=given.context_length,
                    gradient_checkpointing="full",
                    model_overrides=(f"num_layers={layers}",),
                )
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
