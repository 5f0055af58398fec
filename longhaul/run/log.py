"""What a run reports: metrics.jsonl, TensorBoard, progress, tokens/s, MFU and memory.

metrics.jsonl has an object per line, of two kinds: one of every step, which has the key "loss", and
one of every validation, which has "validation_loss" instead. The loss of a step is null if it has
no targets ("targets" is 0), or if it is no finite number. eval.jsonl has an object for every
evaluation, with all its figures. Progress is a bar on a terminal, and plain lines in a file or a
pipe.

Only rank 0 reports. If the disk refuses the log, rank 0 says so once, and training goes on.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from numpy.typing import NDArray

from base import durable
from data.loader import Batch
from data.progress import duration
from footprint.cards.device import installed_card
from longhaul.evals.measures import Report
from longhaul.flops import keys_read, train_flops
from model import ModelConfig

# Figures of policies and indexers that progress shows.
OF_A_POLICY = ("reward", "reward_label", "accuracy", "truncated", "kl")
WATCHED = (*OF_A_POLICY, "indexer_kl", "indexer_recall")


# Lines of progress in a file: of so many first steps, then so many seconds apart.
FIRST_LINES = 10
BETWEEN_LINES = 1.0


# ---- figures


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the device in FLOP/s, None if it is not known."""
    card = installed_card(device)
    return card and card.peak_flops


def mfu(
    config: ModelConfig,
    rows: Batch,
    ranks_per_row: int,
    seconds: float,
    device: torch.device,
) -> float | None:
    """Model FLOPs utilisation: useful FLOP/s of a step over the device's peak, counting only the
    keys of a query's own document; None if the peak is not known.
    """
    peak = peak_flops(device)
    if peak is None:
        return None
    pairs = float(keys_read(config, torch.from_numpy(rows.positions)).sum())
    flops = train_flops(config, rows.tokens.size, pairs) / ranks_per_row
    return flops / seconds / peak


def perplexity(loss: float) -> float:
    """exp(loss), infinite if that is more than a float can hold."""
    return float(torch.tensor(loss, dtype=torch.float64).exp())


def watched(record: dict) -> str:
    """The figures by which a policy or an indexer is watched, with a comma behind each; nothing for
    other runs, whose records have none of them.
    """
    found = [f"{name} {record[name]:.3f}, " for name in WATCHED if name in record]
    return "".join(found)


def loss_in_words(record: dict, digits: int) -> str:
    """The loss of a step, unless it has no targets."""
    if record["loss"] is None:
        return "no targets"
    return f"loss {record['loss']:.{digits}f}"


# ---- progress on screen


class Bar:
    """Progress on a terminal: a bar that moves below the lines that are said."""

    def __init__(self, first_step: int, last_step: int):
        from tqdm import tqdm  # here, because only rank 0 needs it

        self.bar = tqdm(
            total=last_step,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.2,
            maxinterval=3600,
        )

    def step(self, record: dict):
        """Move on to the step of this record."""
        self.bar.set_postfix_str(
            f"{loss_in_words(record, 3)}, {watched(record)}"
            f"{record['tokens_per_s']:,.0f} tokens/s, "
            f"{record['mem_gib']:.2f} GiB",
            refresh=False,
        )
        self.bar.update(record["step"] - self.bar.n)

    def say(self, line: str):
        """Print a line above the bar."""
        self.bar.write(line)

    def close(self):
        """Leave the bar as it is."""
        self.bar.close()


class Lines:
    """Progress in a file or pipe: a line for each of the first steps and for the last one, and for
    those between them one a second at most.
    """

    def __init__(self, first_step: int, last_step: int):
        self.first_step = first_step
        self.last_step = last_step
        self.start = self.shown = time.perf_counter()

    def step(self, record: dict):
        """Print the step of this record, and the time that remains, unless one was just shown."""
        step = record["step"]
        now = time.perf_counter()
        is_first = step <= self.first_step + FIRST_LINES
        if not is_first and step < self.last_step and now - self.shown < BETWEEN_LINES:
            return
        self.shown = now
        self.say(
            f"step {step} of {self.last_step}: {loss_in_words(record, 4)}, "
            f"{watched(record)}lr {record['lr']:.3g}, "
            f"{record['tokens_per_s']:,.0f} tokens/s, {record['mem_gib']:.2f} GiB, "
            f"{self._time_left(step)} left"
        )

    def _time_left(self, step: int) -> str:
        """As the steps so far took on average, with the validations and saves between them."""
        seconds = (time.perf_counter() - self.start) / (step - self.first_step)
        return duration(seconds * (self.last_step - step))

    def say(self, line: str):
        """Print a line."""
        print(line, flush=True)

    def close(self):
        """Nothing is open."""


# ---- the log of a run


class Validation(NamedTuple):
    """The mean loss of a corpus in nats over so many tokens, and the corpus's share of the data."""

    name: str
    share: float
    loss: float
    tokens: int


class Logger:
    """Rank 0's log of a run; on other ranks (`active` is false) every call does nothing."""

    def __init__(
        self,
        folder: Path,
        first_step: int,
        last_step: int,
        active: bool,
        config_text: str = "",
    ):
        self.active = active
        self.warned = False
        self.board = None
        if not active:
            return
        on_terminal = sys.stdout.isatty() and sys.stderr.isatty()
        progress = Bar if on_terminal else Lines
        self.progress = progress(first_step, last_step)
        self.metrics = folder / "metrics.jsonl"
        self.evaluations = folder / "eval.jsonl"
        for path in (self.metrics, self.evaluations):
            self._attempt(truncate_log, path, first_step)
        self.board = self._attempt(_open_board, folder, first_step)
        self.text(first_step, "config", config_text)

    def step(self, record: dict):
        """Write one step's record: a line of metrics.jsonl, the scalars, progress on screen."""
        if not self.active:
            return
        self._attempt(_append_line, self.metrics, record)
        figures = {f"train/{key}": record[key] for key in record if key not in ("step", "time")}
        self.scalars(record["step"], figures)
        self.progress.step(record)

    def validation(self, step: int, found: Sequence[Validation]):
        """Report a validation: the loss of each corpus, and their mean with the corpora's shares as
        weights.
        """
        if not self.active:
            return
        total = sum(one.share for one in found)
        loss = sum(one.share * one.loss for one in found) / total
        tokens = sum(one.tokens for one in found)
        figures = {"loss": loss, "perplexity": perplexity(loss)}
        if len(found) > 1:
            figures |= {f"loss/{one.name}": one.loss for one in found}

        self._write_figures(step, "validation", figures, {"validation_tokens": tokens})
        self.say(f"step {step}: validation loss {loss:.4f} nats over {tokens:,} tokens")
        if len(found) > 1:
            of_each = ", ".join(f"{one.name} {one.loss:.4f}" for one in found)
            self.say(f"  validation loss: {of_each}")

    def figures(self, step: int, name: str, found: dict[str, float]):
        """Report other figures of a validation: a line of metrics.jsonl, the scalars, a line."""
        if not self.active:
            return
        self._write_figures(step, name, found, {})
        words = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
        self.say(f"step {step}: {name}: {words}")

    def _write_figures(
        self,
        step: int,
        name: str,
        found: dict[str, float],
        more: dict,
    ):
        named = {f"{name}_{key}": value for key, value in found.items()}
        record = {"step": step} | named | more | {"time": time.time()}
        self._attempt(_append_line, self.metrics, record)
        self.scalars(step, {f"{name}/{key}": value for key, value in found.items()})

    def evaluation(self, step: int, report: Report):
        """Report what else was measured: a line of eval.jsonl, the scalars, lines on screen."""
        if not self.active:
            return
        record = {"step": step, "time": time.time()} | report.record()
        self._attempt(_append_line, self.evaluations, record)
        self.scalars(step, report.scalars())
        if report.retrieved:
            self.images(step, report.retrieved.images())
        for line in "\n".join(report.lines(loss=False)).splitlines():
            self.say(f"  {line}")

    def scalars(self, step: int, values: dict):
        """TensorBoard scalars; None and text are left out."""
        for name, value in values.items():
            if self.board is not None and isinstance(value, (int, float)):
                self._attempt(self.board.add_scalar, name, value, step)

    def images(self, step: int, named: dict[str, NDArray]):
        """TensorBoard images [H, W, 3]."""
        for name, image in named.items():
            if self.board is not None:
                self._attempt(self.board.add_image, name, image.transpose(2, 0, 1), step)

    def text(self, step: int, name: str, text: str):
        """A text in TensorBoard, unless it is empty."""
        if self.board is not None and text:
            self._attempt(self.board.add_text, name, f"```\n{text}\n```", step)

    def say(self, line: str):
        """Print a line."""
        if self.active:
            self.progress.say(line)

    def flush(self):
        """Have everything on the disk that was reported so far."""
        if self.board is not None:
            self._attempt(self.board.flush)

    def close(self):
        """Close the progress and TensorBoard's files."""
        if self.active:
            self.progress.close()
        if self.board is not None:
            self._attempt(self.board.close)

    def _attempt(self, function: Callable, *args):
        """`function(*args)`, or None if the disk refuses, with a warning the first time."""
        try:
            return function(*args)
        except OSError as error:
            if not self.warned:
                self.say(
                    f"warning: the log cannot be written ({error}), and training goes on without "
                    "it: free space"
                )
            self.warned = True
            return None


def _append_line(path: Path, record: dict):
    """Add a record as a line of JSON, in one write."""
    line = json.dumps(durable.without_nan(record), allow_nan=False) + "\n"
    with open(path, "ab", buffering=0) as file:
        file.write(line.encode())


def _open_board(folder: Path, first_step: int):
    from torch.utils.tensorboard import SummaryWriter  # here, because it takes seconds to import

    return SummaryWriter(folder / "tensorboard", purge_step=first_step + 1)


def truncate_log(path: Path, last_step: int):
    """Drop the steps after `last_step` from a file of records, atomically: a killed run has logged
    more steps than it saved.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        step = _step_of(line)
        if step is not None and step <= last_step:
            kept.append(line + "\n")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)


def _step_of(line: str) -> int | None:
    """The step of a line, None for the torn last line of a killed run."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):
        return None
