"""What a benchmark finds, written as soon as it is there: results.json (numbers) and results.md
(the same as tables) in one folder.

A table is a name, a title and columns, each with the kind of its figures; a row is a dict of them.
Where a figure could not be had its place holds the reason.
"""

import gc
import importlib.util
import json
import logging
import math
import os
import platform
import shutil
import subprocess
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from longhaul.memory.watch import out_of_memory

# Every error that a table shows in a few words goes here whole. A run that keeps errors gives it a
# file (`keep_errors`); otherwise nobody listens.
ERRORS = logging.getLogger("benchmarks.errors")
ERRORS.setLevel(logging.INFO)
ERRORS.propagate = False

KINDS = {
    "text": "{}",
    "count": "{:,}",
    "ms": "{:,.3f}",
    "seconds": "{:,.2f}",
    "ratio": "{:.2f}x",
    "gib": "{:,.3f}",
    "mb": "{:,.1f}",
    "error": "{:.1e}",
    "percent": "{:+.2f}%",
    "share": "{:.1%}",
    "rate": "{:,.0f}",
    "tera": "{:,.1f}",
    "giga": "{:,.0f}",
}
SCALES = {"tera": 1e12, "giga": 1e9}  # these figures are stored per second, without a prefix
# what a kernel, a compiler or a peer's call raises when it cannot serve; anything else ends the run
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    ImportError,
    KeyError,
    IndexError,
)
if importlib.util.find_spec(
    "triton"
):  # its compiler's errors, and shared memory that does not suffice, are none of these
    from triton.errors import TritonError

    FAILURES += (TritonError,)


@dataclass(frozen=True)
class Table:
    """Columns: heading -> kind of its figures (a key of KINDS)."""

    name: str
    title: str
    columns: dict[str, str]


def shown(kind: str, value) -> str:
    """A figure as its column shows it; a dash where there is none, a reason as it is."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return KINDS[kind].format(value / SCALES[kind] if kind in SCALES else value)


def markdown(columns: dict[str, str], rows: list[dict]) -> str:
    """A Markdown table."""
    lines = [
        list(columns),
        ["---"] * len(columns),
        *([shown(kind, row.get(name)) for name, kind in columns.items()] for row in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def filled(table: dict) -> dict[str, str]:
    """The columns of a stored table in which a row has something."""
    return {
        name: kind
        for name, kind in table["columns"].items()
        if any(row.get(name) is not None for row in table["rows"])
    }


class Run:
    """One run's results. `label` says what they are worth; `echo` prints each line as it comes."""

    def __init__(
        self,
        folder: str | Path,
        label: str,
        command: str,
        where: dict,
        toy: bool,
        echo=print,
        earlier: dict | None = None,
    ):
        self.folder, self.echo = Path(folder), echo
        self.earlier = earlier or {}  # tables of the jobs before this one
        self.data = dict(
            label=label,
            toy=toy,
            command=command,
            where=where,
            tables={},
            notes=[],
            skipped=[],
            failures=[],
            jobs=[],
        )
        self.write()

    def row(self, table: Table, **figures):
        """Add a row to its table, print it, write everything; a figure that is not finite becomes
        its name.
        """
        unknown = set(figures) - set(table.columns)
        assert not unknown, f"{table.name} has no columns {unknown}"
        figures = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }
        stored = self.data["tables"].setdefault(
            table.name, dict(title=table.title, columns=table.columns, rows=[])
        )
        stored["rows"].append(figures)
        self.echo(
            f"{table.name}: "
            + ", ".join(
                f"{name} {shown(table.columns[name], value)}" for name, value in figures.items()
            )
        )
        self.write()

    def note(self, line: str):
        """A sentence of the record."""
        if line not in self.data["notes"]:
            self.data["notes"].append(line)
            self.echo(line)
            self.write()

    def skip(self, line: str):
        """What there was no time for."""
        self.data["skipped"].append(line)
        self.echo(f"skipped: {line}")
        self.write()

    def fail(self, line: str):
        """Something of ours that is wrong: the run goes on and ends with exit code 1."""
        self.data["failures"].append(line)
        self.echo(f"FAILED: {line}")
        self.write()

    def timing(self, name: str, seconds: float, clocks: dict):
        """How long a job took, and the device's clocks right after it."""
        self.data["jobs"].append({"job": name, "seconds": round(seconds, 1)} | clocks)
        self.write()

    def write(self):
        """Both files."""
        write(self.folder, self.data)


def merged(run: dict, pieces: list[dict]) -> dict:
    """A run's results with those of its jobs behind them, in their order."""
    whole = run | {"tables": {name: dict(table) for name, table in run["tables"].items()}}
    for key in ("notes", "skipped", "failures", "jobs"):
        whole[key] = list(run[key])

    for piece in pieces:
        for name, table in piece["tables"].items():
            before = whole["tables"].get(name, {"rows": []})
            whole["tables"][name] = table | {"rows": before["rows"] + table["rows"]}
        whole["failures"] += piece["failures"]
        whole["skipped"] += piece["skipped"]
        whole["notes"] += [line for line in piece["notes"] if line not in whole["notes"]]
    return whole


def write(folder: Path, data: dict) -> None:
    """results.json and results.md in `folder`, each appearing whole."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "results.json", json.dumps(data, indent=1, allow_nan=False) + "\n")
    replace_text(folder / "results.md", page(data))


def replace_text(path: Path, text: str) -> None:
    """Write a file that appears whole."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def keep_errors(path: Path) -> None:
    """Append every error that is caught from here on to the file, with its traceback."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    ERRORS.addHandler(handler)


def page(data: dict) -> str:
    """The whole run as Markdown."""
    parts = [
        f"# {data['label']}\n",
        f"`{data['command']}`\n",
        "".join(f"- {name}: {value}\n" for name, value in data["where"].items()),
    ]
    parts += [
        f"## {table['title']}\n\n{markdown(filled(table), table['rows'])}"
        for table in data["tables"].values()
    ]
    if data["jobs"]:
        columns = {"job": "text", "estimate": "count", "seconds": "rate", "ended": "text"}
        parts.append(f"## Jobs, in seconds\n\n{markdown(columns, data['jobs'])}")
    for title, key in (("Failed", "failures"), ("Skipped", "skipped"), ("Notes", "notes")):
        if data[key]:
            parts.append(f"## {title}\n\n" + "".join(f"- {line}\n" for line in data[key]))
    return "\n".join(parts)


def attempt(function, *args):
    """(what `function` returns, "") or (None, why it does not): memory that ran out, or a kernel or
    peer that cannot serve.

    A CUDA error that leaves the process without its device is raised: nothing after it could be
    trusted.
    """
    try:
        return function(*args), ""
    except FAILURES as error:
        if isinstance(error, torch.AcceleratorError):
            raise
        ERRORS.info("%s", traceback.format_exc())
        words = " ".join(str(error).split())
        reason = (
            "out of memory" if out_of_memory(error) else f"{type(error).__name__}: {words[:160]}"
        )
    free()
    return None, reason


def free():
    """Give back what a finished or failed job held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- where it ran


def where(device: torch.device) -> dict[str, str]:
    """Hardware, driver, clocks and versions."""
    found = {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} thread(s): {cpu_name()}",
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
            "L2": f"{properties.L2_cache_size / 2**20:.0f} MiB",
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
        } | nvidia_smi(device)
    return found


def cpu_name() -> str:
    """The processor's model where the system says it."""
    path = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":", 1)[1].strip()
            for line in path.read_text().splitlines()
            if line.startswith("model name")
        ]
        if path.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def version(package: str) -> str:
    """An installed package's version."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The commit that is measured, with "-dirty" where files differ from it."""
    if shutil.which("git") is None:
        return "unknown: git is not on the path"
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown: not a git clone"


SMI = {
    "driver": "driver_version",
    "SM clock now": "clocks.sm",
    "SM clock at most": "clocks.max.sm",
    "memory clock now": "clocks.mem",
    "power limit": "power.limit",
    "temperature": "temperature.gpu",
}


def nvidia_smi(device: torch.device) -> dict[str, str]:
    """Driver, clocks, power and temperature as the driver's own tool tells them."""
    if shutil.which("nvidia-smi") is None:
        return {"driver": "unknown: nvidia-smi is not on the path"}
    identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    done = subprocess.run(
        [
            "nvidia-smi",
            f"--id={identity}",
            f"--query-gpu={','.join(SMI.values())}",
            "--format=csv,noheader",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    values = done.stdout.strip().split(", ")
    if len(values) != len(SMI):
        return {
            "driver": f"unknown: nvidia-smi said {done.stdout.strip() or done.stderr.strip()!r}"
        }
    return dict(zip(SMI, values, strict=True))
