"""What a run reports: metrics.jsonl (one object per step), TensorBoard, one progress bar, tokens/s,
MFU and memory.

Imports nothing of ours. TensorBoard and tqdm are loaded by rank 0 alone.
"""

import json
import math
import os
import resource
import sys
from pathlib import Path

import torch

GIB = 2**30
# Dense bf16 peak in FLOP/s by the vendors' data sheets; a device that is not here has no MFU.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A6000": 154.8e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the device, FLOP/s, where it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process so far: the allocator's on CUDA, resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    # not ru_maxrss, which a process inherits from the one that started it
    if sys.platform == "linux":
        with open("/proc/self/status") as status:
            return (
                next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
                * 1024
                / GIB
            )
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024)
        / GIB
    )  # bytes there, else KiB


def truncate_log(path: Path, last_step: int):
    """Drop the steps after `last_step` from metrics.jsonl (a killed run logged further than it
    saved), atomically.
    """
    if not path.exists():
        return
    kept = [
        line
        for line in path.read_text().splitlines()
        if _step_of(line) is not None and _step_of(line) <= last_step
    ]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept))
    os.replace(temporary, path)


def _step_of(line: str) -> int | None:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):  # the torn last line of a killed run
        return None


class Logger:
    """Rank 0's log of a run; on other ranks every call does nothing. A disk that refuses it is said
    once, and training goes on.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        last_step: int,
        active: bool,
        every: int = 1,
        config_text: str = "",
    ):
        self.active, self.every, self.warned = active, every, False
        if not active:
            return
        from tqdm import tqdm

        # a file or pipe gets a line now and then, not a film
        every_seconds = 0.2 if sys.stderr.isatty() else 15
        self.bar = tqdm(
            total=last_step,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            mininterval=every_seconds,
            maxinterval=3600,
        )
        self.file = self._tried(_open_lines, folder, first_step)
        self.board = self._tried(_open_board, folder, first_step)
        self.text(first_step, "config", config_text)

    def _tried(self, function, *args):
        """`function(*args)`; None with a warning, the first time, where the disk refuses."""
        try:
            return function(*args)
        except OSError as error:
            if not self.warned:
                self.say(
                    f"warning: the log cannot be written ({error}), training goes on without: free space"
                )
            self.warned = True

    def step(self, record: dict):
        """Write one step's record: a line of metrics.jsonl, the scalars, the bar."""
        if not self.active:
            return
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        if self.file is not None:
            self._tried(
                os.write, self.file, (json.dumps(finite, allow_nan=False) + "\n").encode()
            )  # JSON knows no NaN
        if record["step"] % self.every:
            return
        self.scalars(
            record["step"],
            {f"train/{key}": record[key] for key in record if key not in ("step", "time")},
        )
        figures = f"loss {record['loss']:.3f}, {record['tokens_per_s']:,.0f} tokens/s, {record['mem_gib']:.2f} GiB"
        self.bar.set_postfix_str(figures, refresh=False)
        self.bar.update(record["step"] - self.bar.n)

    def scalars(self, step: int, values: dict):
        """TensorBoard scalars; None and text are left out."""
        if self.active and self.board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._tried(self.board.add_scalar, name, value, step)

    def text(self, step: int, name: str, text: str):
        if self.active and self.board is not None and text:
            self._tried(self.board.add_text, name, f"```\n{text}\n```", step)

    def say(self, line: str):
        """A line above the progress bar."""
        if self.active:
            self.bar.write(line)

    def close(self):
        if self.active:
            self.bar.close()
            if self.board is not None:
                self._tried(self.board.close)
            if self.file is not None:
                os.close(self.file)


def _open_lines(folder: Path, first_step: int) -> int:
    """A descriptor at the end of metrics.jsonl; a line is one write."""
    truncate_log(folder / "metrics.jsonl", first_step)
    return os.open(folder / "metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _open_board(folder: Path, first_step: int):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder / "tensorboard", purge_step=first_step + 1)
