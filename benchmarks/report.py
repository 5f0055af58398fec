"""Writes measured tables into the documents from the runs in benchmarks/results/:
`python -m benchmarks.report`. No figure is typed by hand.

The text between `<!-- results:NAME/TABLE -->` and `<!-- /results -->` becomes that table of
benchmarks/results/NAME/results.json. The text between `<!-- results:gpu -->` and the same end
becomes the tables of every run on a GPU, or a sentence that there is none yet. A test checks that
the documents are up to date.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import filled, markdown
from longhaul import cli
from longhaul.cli import flag

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SECTION = re.compile(r"(<!-- results:(\S+) -->\n)(.*?)(<!-- /results -->)", re.S)
SHOWN = (
    "smoke",
    "checks",
    "attention",
    "step",
    "loss",
    "decode",
    "profile",
    "exact",
    "memory",
    "workspaces",
    "allocator",
)  # of a GPU's run; its results.md has the stages too
NONE_YET = """Nothing has been measured on a GPU yet: no kernel has run, and no speed, memory or
exactness on one is known. On a machine with a GPU this command measures all of it in nine minutes,
next to full logits, torch's own loss, Liger-Kernel, cut-cross-entropy, SDPA, cuDNN, flash-attn, fla
and transformers, as far as they are installed:

```bash
python -m benchmarks.gpu --out benchmarks/results/NAME && python -m benchmarks.report
```

| what is not known | the job that measures it (`--job`, or `--only` its first word) |
| --- | --- |
| which Triton kernels run at all | smoke test |
| exactness of a packed row against PyTorch's operators | smoke test |
| exactness of the kernels on a GPU | attention and loss (each checks before it times), exact |
| sparse against dense attention at 131,072 tokens, forward and backward | attention |
| a step of the 4B at 131,072 tokens: time, MFU, planned and measured memory | step |
| the loss over 151,936 words next to its peers | loss |
| where the time goes, kernel by kernel, and whether the host is waited for | profile |
| attention of one token next to FlashAttention; tokens per second of the 4B | attention, decode |
| planned against measured memory by stage, workspaces, the allocator's segments | memory |
| the same for ten models of transformers (docs/FOOTPRINT.md) | memory of transformers |

"""


@dataclass(frozen=True)
class ReportConfig:
    """Which files, and whether to write them."""

    files: str = flag(
        ("docs/BENCHMARKS.md", "docs/FITTING.md"),
        "Markdown files with marked sections",
        many=True,
        group="report",
    )
    check: bool = flag(
        False,
        "write nothing; exit with code 1 if a file differs from what the results say",
        group="report",
    )


def main(args: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        cfg = cli.parse(ReportConfig, args, __doc__)
        outdated = [ROOT / name for name in cfg.files if not up_to_date(ROOT / name)]
        if cfg.check:
            return int(bool(outdated))

        for path in outdated:
            path.write_text(written(path.read_text(encoding="utf-8"), runs()), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"benchmarks.report: error: {error}", file=sys.stderr)
        return 2
    return 0


def up_to_date(path: Path) -> bool:
    """Whether the file says what the committed results say."""
    text = path.read_text(encoding="utf-8")
    return written(text, runs()) == text


def runs(folder: Path = RESULTS) -> dict[str, dict]:
    """Name of the folder -> its results."""
    return {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*/results.json"))
    }


def written(text: str, found: dict[str, dict]) -> str:
    """The text with every marked section made anew; ValueError for a section without results."""
    return SECTION.sub(lambda match: f"{match[1]}{section(match[2], found)}{match[4]}", text)


def section(name: str, found: dict[str, dict]) -> str:
    """What stands in a section."""
    if name == "gpu":
        return (
            "\n".join(of_gpu(folder, data) for folder, data in found.items() if is_gpu(data))
            or NONE_YET
        )
    folder, _, table = name.partition("/")
    if table not in found.get(folder, {}).get("tables", {}):
        known = [f"{folder}/{table}" for folder, data in found.items() for table in data["tables"]]
        raise ValueError(f"results:{name} is not there: choose from gpu, {', '.join(known)}")
    data = found[folder]
    return f"{credit(data)}\n\n{one_table(data, table)}\n"


def is_gpu(data: dict) -> bool:
    """Whether a run is one of benchmarks.gpu at full sizes."""
    return not data["toy"] and data["command"].startswith("python -m benchmarks.gpu")


def of_gpu(folder: str, data: dict) -> str:
    """A GPU's run: what it is, its tables, what failed and was skipped."""
    tables = [
        f"{data['tables'][name]['title']}:\n\n{one_table(data, name)}"
        for name in SHOWN
        if name in data["tables"]
    ]
    rest = [
        f"{title}: {'; '.join(data[key])}.\n"
        for title, key in (("Failed", "failures"), ("Skipped", "skipped"))
        if data[key]
    ]
    hardware = ", ".join(f"{name}: {value}" for name, value in data["where"].items())
    return "\n".join(
        [
            f"**{data['label']}** (`benchmarks/results/{folder}/results.md` has all). "
            f"{credit(data)}\n",
            f"{hardware}.\n",
            *tables,
            *rest,
        ]
    )


def credit(data: dict) -> str:
    """Where, with what, when and how a run was taken."""
    place = data["where"]
    versions = ", ".join(
        f"{name} {place[name]}" for name in ("torch", "triton", "driver") if name in place
    )
    return (
        f"{place['device']}, {versions}, {place['date']}, commit {place['commit']}: "
        f"`{data['command']}`"
    )


def one_table(data: dict, name: str) -> str:
    """A table of a run."""
    table = data["tables"][name]
    return markdown(filled(table), table["rows"])


if __name__ == "__main__":
    sys.exit(main())
