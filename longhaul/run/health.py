"""What watches the numbers of a run: skipped steps and loss spikes.

A step whose gradient is NaN or infinite on any rank changes no weight on any (step.train_step);
here it is counted, and its rows are written to a file. A loss spike is reported with the command
that trains around it. A step without targets tells nothing of the weights.
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from base.tensors import write_tensors
from data.loader import Order
from data.order import format_ranges, merged, parse_ranges, ranges_of
from longhaul.checkpoint.format import last_taken
from longhaul.checkpoint.resume import names_checkpoint
from longhaul.config import TrainConfig
from longhaul.exits import NumericalHalt
from longhaul.step import StepResult, TrainState

WINDOW = 64  # losses that a spike is measured against
ENOUGH = 16  # with fewer than these nothing is called a spike
FLOOR = 0.01  # of the median: a flat curve's deviation is taken as at least this

Say = Callable[[str], None]  # prints a line


# ---- loss spikes


class Spikes:
    """How far each loss lies above the recent ones: (loss - median) / (1.4826 MAD) over the last
    WINDOW steps.

    The median absolute deviation (MAD), unlike the standard deviation, is not widened by the spike
    that it should find.
    """

    def __init__(self, losses: Iterable[float] = ()):
        self.window = deque((loss for loss in losses if math.isfinite(loss)), WINDOW)

    def score(self, loss: float) -> float:
        """Robust deviations above the median, 0.0 while there are too few losses to compare with;
        the loss then joins the window.
        """
        if not math.isfinite(loss):
            return 0.0
        score = 0.0
        if len(self.window) >= ENOUGH:
            median = self.median()
            deviation = 1.4826 * statistics.median(abs(other - median) for other in self.window)
            score = (loss - median) / max(deviation, FLOOR * abs(median), 1e-12)
        self.window.append(loss)
        return score

    def median(self) -> float:
        return statistics.median(self.window)


def recent_losses(log: Path, step: int) -> list[float]:
    """The last losses of metrics.jsonl up to `step`, for a resumed run's window."""
    losses: deque[float] = deque(maxlen=WINDOW)
    lines = log.read_bytes().splitlines() if log.exists() else []
    for line in lines:
        if not line.endswith(b"}"):  # cut where a run was killed
            continue
        record = json.loads(line)
        # a validation has none, nor has a step without targets
        if record.get("loss") is not None and record["step"] <= step:
            losses.append(record["loss"])
    return list(losses)


# ---- the watch over a run


class Health:
    """The watch over one run. `command(**changes)` is its shell command with other settings."""

    def __init__(
        self,
        state: TrainState,
        loader: Order,
        folder: Path,
        command: Callable[..., str],
        skipped: Iterable[int] = (),
    ):
        self.state = state
        self.loader = loader
        self.folder = folder
        self.command = command
        # steps, counted from 1 as the log does; in the checkpoint's manifest
        self.skipped = list(skipped)
        self.idle: list[int] = []  # steps without targets, since the run went on
        self.spikes = Spikes(recent_losses(folder / "metrics.jsonl", state.step))

    def after(self, result: StepResult, say: Say) -> dict[str, float | None]:
        """Look at the step that was just done; returns figures for the log. NumericalHalt if the
        run must not go on.
        """
        step = self.state.step
        if result.skipped:
            self._skip(say)
        if result.loss is None:
            self.idle.append(step)
            return {"spike": None}

        loss = float(result.loss)
        score = self.spikes.score(loss)
        if score > self.state.cfg.LOSS_SPIKE:
            rows = self.rows(step)
            say(
                f"LOSS SPIKE at step {step}: {loss:.4f}, {score:.1f} robust deviations above the "
                f"median {self.spikes.median():.4f}, rows {' '.join(rows)}; if the loss does not "
                f"recover, train around these rows: {self.way_back(rows)}"
            )
        return {"spike": score}

    def way_back(self, rows: Sequence[str]) -> str:
        """The command that goes back to the newest good checkpoint before the last of these rows,
        skips those that come after it, and lowers the learning rate if the weights may be broken.

        It writes to another folder next to this one, so it stays right when this run has saved
        newer checkpoints.
        """
        ranges = parse_ranges(rows)
        resume = "auto"
        start = 0
        for path in self._good_checkpoints():
            first = self.loader.first_position(int(path.name[5:]))
            if first < ranges[-1][1]:
                start = first
                resume = str(path)

        skipped = [(max(begin, start), end) for begin, end in ranges if end > start]
        changes = dict(
            resume=resume,
            output_dir=f"{self.folder}-around-{skipped[0][0]}",
            skip_rows=format_ranges(merged([*self.loader.skip, *skipped])),
        )
        if self._may_be_broken():
            changes["lr"] = lower_rate(self.state.cfg)
        return self.command(**changes)

    def _good_checkpoints(self) -> list[Path]:
        """Those from whose weights a step was taken, oldest first: the one that --resume names and
        those before it, then this run's.
        """
        found = []
        if names_checkpoint(self.state.cfg.resume):
            named = Path(self.state.cfg.resume)
            others = sorted(named.parent.glob("step-????????"))
            found = [path for path in others if path.name <= named.name]
        found += sorted(self.folder.glob("step-????????"))
        taken = self._last_taken()
        return [path for path in found if int(path.name[5:]) < taken]

    def _last_taken(self) -> int:
        """The newest step that had targets and a finite gradient."""
        return last_taken(self.state.step, {*self.skipped, *self.idle})

    def _may_be_broken(self) -> bool:
        """Whether the weights may be at fault and not the rows: several steps were skipped one
        after the other, or the first one that was.
        """
        taken = self._last_taken()
        in_turn = [step for step in self.skipped if step > taken]
        return len(in_turn) > 1 or self.skipped == [self.state.step]

    def rows(self, *steps: int) -> tuple[str, ...]:
        """The rows of these steps as ranges of the order."""
        positions = [row for step in steps for row in self.loader.positions(step - 1)]
        return format_ranges(ranges_of(positions))

    # ---- steps without a finite gradient

    def _skip(self, say: Say):
        """Count a step that no rank took, and write its rows to a file."""
        cfg = self.state.cfg
        step = self.state.step
        self.skipped.append(step)

        written = self._dump(step) if self.state.world.rank == 0 else ""
        say(
            f"step {step}: the gradient is NaN or infinite, so no rank changed a weight "
            f"({len(self.skipped)} of {cfg.max_skipped_steps} such steps allowed); "
            f"rows {' '.join(self.rows(step))} {written}"
        )

        if cfg.optimizer_in_backward:
            self._halt("after --optimizer_in_backward had changed other weights")
        if len(self.skipped) > cfg.max_skipped_steps:
            self._halt(f"more than --max_skipped_steps {cfg.max_skipped_steps}")
        if step == cfg.max_steps:
            self._halt("and the run ends with the last of them")

    def _halt(self, why: str):
        """NumericalHalt naming all skipped steps and their rows."""
        rows = self.rows(*self.skipped)
        steps = ", ".join(str(step) for step in self.skipped)
        fault = ""
        if self._may_be_broken():
            rate = lower_rate(self.state.cfg)
            fault = f"; the weights may be broken, so this command lowers --lr to {rate:g}"
        raise NumericalHalt(
            f"steps {steps} had a NaN or infinite gradient, {why}; rows {' '.join(rows)}, written "
            f"to {self.folder / 'skipped'}{fault}: {self.way_back(rows)}"
        )

    def _dump(self, step: int) -> str:
        """Write the rows of a step to skipped/step-NNNNNNNN.safetensors. Says where, or why not:
        the run goes on without this file.
        """
        path = self.folder / "skipped" / f"step-{step:08d}.safetensors"
        positions = list(self.loader.positions(step - 1))
        batch = self.loader.rows(positions)
        tensors = {
            name: torch.from_numpy(getattr(batch, name)).int()
            for name in ("tokens", "labels", "doc_ids")
        }
        about = {
            "step": step,
            "rows": positions,
            "plan_rows": [self.loader.row_index(position) for position in positions],
            "dataset": self.loader.fingerprint,
        }
        metadata = {name: json.dumps(value) for name, value in about.items()}
        try:
            path.parent.mkdir(exist_ok=True)
            write_tensors(path, tensors, metadata)
        except OSError as error:
            return f"could not be written down ({error})"
        return f"are in {path}"


def lower_rate(cfg: TrainConfig) -> float:
    """A learning rate for weights that the given one may have broken: a tenth, and no more than
    the default.
    """
    return float(f"{min(cfg.lr / 10, type(cfg).lr):.3g}")
