"""What a benchmark finds, written as soon as it is there: results.json (numbers) and results.md
(the same as a table) in one folder; and where it ran.

A row is a dict of figures by the table's columns. Where a figure could not be had its place holds
the reason.
"""

import gc
import importlib.util
import math
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from base import durable
from longhaul.planner.watch import out_of_memory

KINDS = {
    "text": "{}",
    "count": "{:,}",
    "ms": "{:,.3f}",
    "ratio": "{:.2f}x",
    "mb": "{:,.1f}",
    "error": "{:.1e}",
    "share": "{:.1%}",
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
if importlib.util.find_spec("triton"):  # whose compiler's errors are none of these
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
    if kind in SCALES:
        value /= SCALES[kind]
    return KINDS[kind].format(value)


def markdown(table: Table, rows: list[dict]) -> str:
    """A Markdown table of the columns in which a row has something."""
    columns = {
        name: kind
        for name, kind in table.columns.items()
        if any(row.get(name) is not None for row in rows)
    }
    lines = [list(columns), ["---"] * len(columns)]
    for row in rows:
        lines.append([shown(kind, row.get(name)) for name, kind in columns.items()])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


class Run:
    """One run's results, a table. `label` says what they are worth."""

    def __init__(
        self,
        folder: str | Path,
        label: str,
        command: str,
        where: dict,
        table: Table,
    ):
        self.folder = Path(folder)
        self.label = label
        self.command = command
        self.where = where
        self.table = table
        self.rows: list[dict] = []
        self.notes: list[str] = []
        self.write()

    def row(self, **figures) -> None:
        """Add a row, print it, write everything; a figure that is not finite becomes its name."""
        unknown = set(figures) - set(self.table.columns)
        assert not unknown, f"{self.table.name} has no columns {unknown}"
        for name, value in figures.items():
            if isinstance(value, float) and not math.isfinite(value):
                figures[name] = str(value)
        self.rows.append(figures)

        kinds = self.table.columns
        words = [f"{name} {shown(kinds[name], value)}" for name, value in figures.items()]
        print(f"{self.table.name}: {', '.join(words)}")
        self.write()

    def note(self, line: str) -> None:
        """A sentence of the record."""
        if line not in self.notes:
            self.notes.append(line)
            print(line)
            self.write()

    def write(self) -> None:
        """Both files, each of which appears whole."""
        durable.make_folder(self.folder)
        numbers = {name: value for name, value in vars(self).items() if name != "folder"}
        numbers["table"] = vars(self.table)
        durable.write_json(self.folder / "results.json", numbers)
        with durable.replacing(self.folder / "results.md") as temporary:
            durable.write_bytes(temporary, self.page().encode())

    def page(self) -> str:
        """The whole run as Markdown."""
        parts = [
            f"# {self.label}\n",
            f"`{self.command}`\n",
            "".join(f"- {name}: {value}\n" for name, value in self.where.items()),
            f"## {self.table.title}\n\n{markdown(self.table, self.rows)}",
        ]
        if self.notes:
            parts.append("## Notes\n\n" + "".join(f"- {line}\n" for line in self.notes))
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
        words = " ".join(str(error).split())
        reason = f"{type(error).__name__}: {words[:160]}"
        if out_of_memory(error):
            reason = "out of memory"

    gc.collect()  # what the error held
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None, reason


# ---- where it ran


def where(device: torch.device) -> dict[str, str]:
    """Hardware and versions."""
    found = {
        "device": f"CPU, {torch.get_num_threads()} thread(s): {cpu_name()}",
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
        found["CUDA"] = str(torch.version.cuda)
    return found


def cpu_name() -> str:
    """The processor's model where the system says it."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str:
    """An installed package's version."""
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
