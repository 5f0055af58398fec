"""What only a GPU can answer, for somebody who has one for ten minutes.

    python -m benchmarks.on_gpu --output runs/gpu [--rehearse]

ROWS run one after the other, the most important first, each as a process that is ended at its
limit: a crash or a hang costs one row. After each row OUTPUT/results.json has what it printed last,
next to the machine and the versions, and OUTPUT/NAME.txt all of it. The same command again skips
rows that have a result, however they ended. --rehearse runs the same programs at toy sizes on a
CPU, which shows that they run and says nothing of a GPU. Exit code 0: every row ended well; 1: one
did not; 2: bad input, or a GPU that torch cannot use.
"""

import contextlib
import ctypes
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from base import durable
from base.flags import Parser
from base.untrusted import read_json
from benchmarks import record

ROOT = Path(__file__).parent.parent
TICK = 0.1  # seconds between two looks at what runs
BURIAL = 10.0  # seconds for the driver to end a process that was killed
LAST_LINES = 60
SIGNAL_OF_PARENT = 1  # PR_SET_PDEATHSIG of Linux


@dataclass(frozen=True)
class Row:
    """A Python command, the seconds after which it is ended, and the same at toy size on a CPU.

    `needs` is a module without which the row is left out. A `light` row runs next to others.
    """

    name: str
    command: str
    seconds: float
    toy: str
    needs: str = "torch"
    light: bool = False


# ---- the rows

KERNELS = (
    "choose_blocks_kernel",
    "choose_kernel",
    "combine_kernel",
    "delta_kernel",
    "fold_kernel",
    "gradient_kernel",
    "importance_kernel",
    "merge_kernel",
    "merge_parts_kernel",
    "move_kernel",
    "norm_rotate_backward_kernel",
    "pair_backward_kernel",
    "pair_forward_kernel",
    "put_kernel",
    "rotate_kernel",
    "segment_sum_kernel",
    "swiglu_backward_kernel",
    "swiglu_kernel",
    "tile_kernel",
)
TESTS = "tests/test_cuda_paths.py tests/test_fused_linear_ce.py tests/test_fused_nsa.py"
NSA = "--attention_type nsa --kernels triton"  # without Triton it fails instead of taking minutes
LONG = "--context_length 131072 --gradient_checkpointing full"
FITS_80_GB = f"{LONG} --offload_activations --mlp_tiles 0"  # 73.6 GiB, and 36 of the host's
LOSSES = (
    '"longhaul, two passes" "longhaul, triton bodies" "longhaul, eager bodies" '
    '"torch, full logits" "Liger-Kernel" "cut-cross-entropy"'
)


def kernel(name: str) -> Row:
    """One Triton kernel alone, compiled; interpreted in a rehearsal."""
    command = f"-m benchmarks.kernels {name} --device"
    return Row(name, f"{command} cuda", 90, f"{command} cpu", needs="triton", light=True)


def attention(name: str, seconds: float, tokens: str) -> Row:
    """Dense, sparse and indexed attention, which are not timed if they are wrong."""
    command = "-m benchmarks.attention --dtypes bf16 --device"
    toy = f"{command} cpu --tokens 300 --what training decode"
    return Row(name, f"{command} cuda --tokens {tokens}", seconds, toy)


def measured(name: str, seconds: float, flags: str, toy: str = "") -> Row:
    """A training step: its memory predicted and measured, and its time."""
    command = "profile_memory.py --measure --device"
    small = f"{command} cpu --model_size tiny --model_overrides num_layers=1 --context_length 128"
    return Row(name, f"{command} cuda {flags}", seconds, f"{small} {toy}")


def decoding(name: str, seconds: float, attention_type: str) -> Row:
    """Decoding after a long prompt, with CUDA graphs and without."""
    command = f"-m benchmarks.decoding --attention_type {attention_type} --device"
    toy = f"{command} cpu --context_length 64"
    return Row(name, f"{command} cuda --model_size 4B --context_length 131072", seconds, toy)


ROWS = (
    *map(kernel, KERNELS),
    Row("tests", f"-m pytest -q -m gpu {TESTS}", 180, f"-m pytest -q -m gpu {TESTS}", "pytest"),
    attention("attention-131k", 150, "131072"),
    measured(
        "step-4b-nsa-131k",
        240,
        f"--model_size 4B {NSA} {FITS_80_GB}",
        "--attention_type nsa --gradient_checkpointing full",
    ),
    measured(
        "step-0.6b-nsa-131k",
        120,
        f"--model_size 0.6B {NSA} {LONG}",
        "--attention_type nsa",
    ),
    measured("step-0.6b-8k", 90, "--model_size 0.6B --context_length 8192"),
    Row(
        "loss",
        f"-m benchmarks.vocab_loss --device cuda --cases 2560x8192 2560x32768 --only {LOSSES} "
        "--out {output}/loss",
        180,
        "-m benchmarks.vocab_loss --device cpu --cases 64x256 --vocab_size 2048 --rounds 1 "
        '--only "longhaul, two passes" --out {output}/loss',
    ),
    decoding("decoding-nsa-131k", 120, "nsa"),
    decoding("decoding-standard-131k", 150, "standard"),
    # those above take about nine minutes of an H100 (estimated)
    attention("attention-8k-32k", 150, "8192 32768"),
    Row(
        "step-0.6b-transformers",
        "-m benchmarks.train_step --device cuda --sizes 0.6B --context_length 8192 --batch_size 1 "
        "--dtypes bf16",
        180,
        "-m benchmarks.train_step --device cpu --sizes tiny --context_length 64 --batch_size 1 "
        "--dtypes bf16 --steps 1",
        needs="transformers",
    ),
    measured(
        "step-0.6b-8k-torch",
        90,
        "--model_size 0.6B --context_length 8192 --kernels torch",
        "--kernels torch",
    ),
    measured("step-4b-131k", 300, f"--model_size 4B {FITS_80_GB}", "--gradient_checkpointing full"),
)


# ---- a row's process


class Child:
    """A row that runs. Everything that it starts ends with it, and it ends with this process."""

    def __init__(self, row: Row, words: Sequence[str], log: Path, environment: dict[str, str]):
        self.row = row
        self.log = log
        self.began = time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its number is then that of its group, too
                preexec_fn=end_with_parent,
            )

    def end(self) -> str:
        """How it ended; empty while it runs. At its limit it is ended."""
        code = self.process.poll()
        seconds = time.monotonic() - self.began
        if code is None and seconds < self.row.seconds:
            return ""
        gone = self.kill()
        if code is None:
            words = f"ended at its limit of {self.row.seconds:g} s"
            return words if gone else f"{words}, and still there"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return "well" if code == 0 else f"exit code {code}"

    def kill(self) -> bool:
        """End the whole group; whether the process itself is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(BURIAL)
        except subprocess.TimeoutExpired:  # the driver holds on to it: a kernel that never ends
            return False
        return True

    def result(self, ended: str) -> dict:
        """What is kept of it."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return {
            "command": shlex.join(["python", *self.process.args[1:]]),
            "ended": ended,
            "seconds": round(time.monotonic() - self.began, 1),
            "limit": self.row.seconds,
            "output": lines[-LAST_LINES:],
        }


def end_with_parent() -> None:
    """Have Linux kill this process when its parent dies, so that nothing is measured next to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SIGNAL_OF_PARENT, signal.SIGKILL)


def run_rows(
    rows: Sequence[Row],
    start: Callable[[Row], Child],
    keep: Callable[[Child, str], None],
) -> None:
    """Run the rows in their order; light ones next to each other, as many as half of the cores.

    Whatever ends this function, none of them is left.
    """
    waiting = list(rows)
    running: list[Child] = []
    try:
        while waiting or running:
            while waiting and has_room(waiting[0], running):
                running.append(start(waiting.pop(0)))
            time.sleep(TICK)
            for child in list(running):
                ended = child.end()
                if ended:
                    running.remove(child)
                    keep(child, ended)
    finally:
        for child in running:
            child.kill()


def has_room(row: Row, running: Sequence[Child]) -> bool:
    """Whether a row may begin next to those that run."""
    most = max((os.cpu_count() or 1) // 2, 1)
    light = row.light and all(child.row.light for child in running)
    return not running or light and len(running) < most


# ---- the results


def machine(rehearse: bool) -> dict[str, str]:
    """The GPU, the driver, the CPU and the versions; nothing here asks CUDA for memory."""
    return {
        "sizes": "toy sizes on a CPU, which say nothing of a GPU" if rehearse else "whole",
        "GPU, driver, memory": gpus(),
        "CPU": f"{record.cpu_name()}, {os.cpu_count()} cores",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "triton": record.version("triton"),
        "commit": record.commit(),
    }


def gpus() -> str:
    """What the driver's own tool lists."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    fields = "--query-gpu=name,driver_version,memory.total"
    command = ["nvidia-smi", fields, "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "; ".join(done.stdout.splitlines()) or "none"


def earlier(path: Path, here: dict[str, str]) -> dict[str, dict]:
    """The results that are there, of this machine and commit; ValueError for others."""
    if not path.exists():
        return {}
    try:
        content = read_json(path)
        there, rows = content["machine"], content["rows"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}): give another --output") from error
    other = [name for name in here if there.get(name) != here[name]]
    if other:
        name = other[0]
        raise ValueError(
            f"{path} is of another machine or commit ({name}: {there.get(name)}, and here "
            f"{here[name]}): give another --output"
        )
    return rows


def left_out(rows: Sequence[Row]) -> dict[str, str]:
    """Name of a row -> the module that it needs, which is not installed."""
    return {row.name: row.needs for row in rows if not importlib.util.find_spec(row.needs)}


def table(rows: dict[str, dict], missing: dict[str, str]) -> str:
    """How each row ended, and its last line."""
    lines = [f"{'row':<28} {'seconds':>8}  ended; its last line"]
    for name, row in rows.items():
        last = next((line for line in reversed(row["output"]) if line.strip()), "nothing printed")
        lines.append(f"{name:<28} {row['seconds']:>8.1f}  {row['ended']}; {last[:100]}")
    for name, module in missing.items():
        lines.append(f"{name:<28} {'-':>8}  left out: {module} is not installed")
    return "\n".join(lines)


# ---- the command


def main(args: list[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """The command line; returns the exit code."""
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m benchmarks.on_gpu")
    parser.add_argument("--output", required=True, help="folder of the results")
    parser.add_argument(
        "--rehearse", action="store_true", help="toy sizes on a CPU: show that everything runs"
    )
    given = parser.parse_args(args)
    folder = Path(given.output).absolute()
    here = machine(given.rehearse)
    try:
        check_device(given.rehearse)
        results = earlier(folder / "results.json", here)
        durable.make_folder(folder)
    except (ValueError, OSError) as error:
        parser.refuse(error)

    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if given.rehearse:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}

    def start(row: Row) -> Child:
        print(f"{row.name}, at most {row.seconds:g} s", flush=True)
        command = row.toy if given.rehearse else row.command
        words = [word.replace("{output}", str(folder)) for word in shlex.split(command)]
        return Child(row, words, folder / f"{row.name}.txt", environment)

    def keep(child: Child, ended: str) -> None:
        results[child.row.name] = child.result(ended)
        durable.write_json(folder / "results.json", {"machine": here, "rows": results})
        print(f"{child.row.name}: {ended}", flush=True)

    missing = left_out(rows)
    waiting = [row for row in rows if row.name not in results and row.name not in missing]
    run_rows(waiting, start, keep)
    print(table(results, missing))
    return 0 if all(row["ended"] == "well" for row in results.values()) else 1


def check_device(rehearse: bool) -> None:
    """ValueError if torch sees no GPU, whose figures are asked for."""
    if rehearse or torch.cuda.is_available():
        return
    raise ValueError(
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) can use no GPU, and the driver "
        f"lists {gpus()}: give --rehearse, or install a CUDA build of torch for that driver"
    )


if __name__ == "__main__":
    # ended from outside, as by a scheduler, it ends its row too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
