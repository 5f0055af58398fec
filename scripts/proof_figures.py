"""The figures of scripts/long_context_proof.sh: `python -m scripts.proof_figures OUTPUT_DIR`.

Gathers what the evaluations found for every seed and the seconds of every part, writes them to
OUTPUT_DIR/proof.json and prints them as a table in Markdown. With the word `convert` behind the
folder they are of PROOF=convert: what sparse and indexed attention keep of a model's retrieval
(conversion.json). Exit codes: 0 every figure passes its bar, 1 one does not, 2 bad input, 6
storage.
"""

import base.installed  # noqa: F401  (first: a missing package is answered in one line)

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from base import durable
from base.flags import RaisingParser
from base.untrusted import parse_json, read_json

SCRIPT = "bash scripts/long_context_proof.sh"


class Bar(NamedTuple):
    """What retrieval must show in a task at a length: a score of at least `score`, which may be 0.
    `setting` has the steps that a model which misses it may lack.
    """

    folder: str
    task: str
    tokens: int
    score: float
    setting: str

    @property
    def what(self) -> str:
        name = self.folder.split("-")[0]
        attention = f"{name} attention, " if name in ("sparse", "indexed") else ""
        return f"retrieval at {self.tokens:,} tokens, {attention}{NOISES[self.task]}"

    def words(self) -> str:
        return f"at least {self.score:.0%}" if self.score else "-"


NOISES = {  # what stands between the pairs, by the task
    "multikey": "noise of ids of its own",
    "multikey-values": "noise of values",
    "multikey-keys": "noise of keys that are not in a pair",
    "multikey-all": "noise of all ids but the pairs' keys",
    "multikey-constant": "noise of one id",
    "newest": "the newest of two values, noise of ids of its own",
}

RETRIEVAL = (
    Bar("standard", "multikey", 16_384, 0.98, "FAR"),
    Bar("standard", "multikey-values", 16_384, 0.98, "FAR"),
    Bar("standard", "multikey-keys", 16_384, 0.95, "FAR"),
    Bar("standard", "multikey-all", 16_384, 0.98, "FAR"),
    Bar("standard", "multikey-constant", 16_384, 0.0, "FAR"),
    Bar("standard", "newest", 16_384, 0.0, "FAR"),
    Bar("farthest-retrieval", "multikey-all", 32_768, 0.90, "FARTHEST"),
    Bar("sparse-retrieval", "multikey", 4_096, 0.95, "SPARSE"),
)

# The gain of this context over the short one must not be 0 by chance.
GAIN = "text-gain"
SHORT = 64
CONTEXT = 256

# PROOF=convert: the last ones are held to the first ones, of standard attention.
CONVERTED = tuple(
    Bar(f"{run}-converted", "multikey", tokens, 0.0, setting)
    for run, setting in (("far", "FAR"), ("sparse", "SPARSE"), ("indexed", "INDEXED"))
    for tokens in (4_096, 16_384)
)
KEPT = 0.95
LAST = 10  # steps of the warm-up of an indexer whose recall counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = RaisingParser(prog="python -m scripts.proof_figures", description=__doc__)
    parser.add_argument("folder", metavar="OUTPUT_DIR", type=Path, help="folder of the proof")
    parser.add_argument("proof", nargs="?", choices=("context", "convert"), default="context")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="only these")
    try:
        given = parser.parse_args(arguments)
        folder = given.folder
        name = "conversion" if given.proof == "convert" else "proof"
        proof = proof_of(folder, given.seeds or seeds_in(folder), given.proof)
        durable.write_json(folder / f"{name}.json", proof)
    except ValueError as error:
        print(f"scripts.proof_figures: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"scripts.proof_figures: {error}: check the folder", file=sys.stderr)
        return 6

    print(table(proof))
    print(f"written to {folder / name}.json")
    missed = []
    for one in proof["seeds"]:
        for figure in one["figures"]:
            if not figure["passed"]:
                missed.append(str(one["seed"]))
                print(f"seed {one['seed']}, {missed_words(figure)}", file=sys.stderr)
    if not missed:
        return 0
    words = [f"SEEDS={' '.join(dict.fromkeys(missed))}", *proof["settings"]]
    words += ["PROOF=convert"] if given.proof == "convert" else []
    again = f"env {shlex.join(words)} {SCRIPT} {shlex.quote(f'{folder}-again')}"
    print(f"to repeat only these, with the settings changed: {again}", file=sys.stderr)
    return 1


def missed_words(figure: dict[str, Any]) -> str:
    """Which bar was missed, and what may help."""
    found = figure["reason"] or f"{value_of(figure)}, the bar is {figure['bar']}"
    return f"{figure['what']}: {found}: {figure['remedy']}"


# ---- what the folder has


def seeds_in(folder: Path) -> list[int]:
    """The seeds whose proofs are in the folder. ValueError if there is none."""
    names = [path.name.removeprefix("seed-") for path in folder.glob("seed-*")]
    found = sorted(int(name) for name in names if name.isdecimal())
    if not found:
        raise ValueError(f"{folder} has no seed-* folder, so no proof: run {SCRIPT} {folder} first")
    return found


def settings_of(folder: Path) -> list[str]:
    """NAME=VALUE of the settings that were not the default ones."""
    path = folder / "settings"
    return durable.read_text(path).splitlines() if path.exists() else []


def read(path: Path, make: Callable[[Path], Any]) -> Any:
    """What `make` makes of a file. ValueError if that is missing or damaged."""
    try:
        return make(path)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
        part = path if path.name == "seconds.jsonl" else path.parent
        raise ValueError(
            f"{path} is missing or damaged ({error}): remove {part}, and run {SCRIPT} with the "
            "same folder and settings again"
        ) from None


def seconds_of(path: Path) -> list[dict[str, Any]]:
    """Wall and CPU seconds of each part, in the order in which they began.

    `stopped` counts the processes that did not end, as after a kill; their seconds are unknown.
    """
    parts: dict[str, dict[str, Any]] = {}
    for line in path.read_bytes().splitlines():
        record = parse_json(line)
        if "begun" in record:
            name = record["begun"]
            new = {"part": name, "wall": 0.0, "cpu": 0.0, "cores": 0, "stopped": 0}
            part = parts.setdefault(name, new)
            part["cores"] = max(part["cores"], int(record["cores"]))
            part["stopped"] += 1
            continue
        part = parts[record["ended"]]
        part["stopped"] -= 1
        part["wall"] = round(part["wall"] + record["wall"], 3)
        part["cpu"] = round(part["cpu"] + record["user"] + record["system"], 3)
    if not parts:
        raise ValueError("it is empty")
    return list(parts.values())


# ---- figures


def proof_of(
    folder: Path,
    seeds: Sequence[int],
    proof: str,
) -> dict[str, Any]:
    """Everything for JSON. ValueError if anything is missing or damaged."""
    figures_of = conversion if proof == "convert" else context
    found = []
    for seed in seeds:
        own = folder / f"seed-{seed}"
        seconds = read(own / "seconds.jsonl", seconds_of)
        found.append({"seed": seed, "figures": figures_of(own), "seconds": seconds})
    return {"settings": settings_of(folder), "seeds": found}


def context(own: Path) -> list[dict[str, Any]]:
    """Retrieval of a seed, and the gain of the context on text."""
    return [*retrieval(own, RETRIEVAL), read(own / GAIN / "eval.json", gain)]


def conversion(own: Path) -> list[dict[str, Any]]:
    """Retrieval of a seed by each attention, and the recall of the indexer."""
    found = retrieval(own, CONVERTED)
    if found[0]["value"] is None:
        return found
    for figure, standard in zip(found[-2:], found, strict=False):
        figure["bar"] = f"{KEPT:.0%} of standard attention's"
        figure["passed"] = figure["value"] >= KEPT * standard["value"]
    return [*found, read(own / "indexed" / "metrics.jsonl", recall)]


def retrieval(own: Path, bars: Sequence[Bar]) -> list[dict[str, Any]]:
    """The figures of retrieval of a seed, which may have learned nothing."""
    reason = own / "not-learned"
    if reason.exists():
        words = "not measured, " + durable.read_text(reason).strip()
        return [new_figure(bar.what, bar.words(), "SHORT") | {"reason": words} for bar in bars]
    return [
        read(own / bar.folder / "eval.json", lambda path, bar=bar: score(path, bar)) for bar in bars
    ]


def new_figure(
    what: str,
    bar: str,
    setting: str,
) -> dict[str, Any]:
    """A figure that was not measured, unless it gets a value."""
    return {
        "what": what,
        "bar": bar,
        "remedy": f"more steps in {setting} may help",
        "passed": False,
        "value": None,
        "interval": None,
        "counted": "",
        "reason": "",
    }


def score(path: Path, bar: Bar) -> dict[str, Any]:
    """The score of retrieval at the length of the bar."""
    found = read_json(path)["retrieval"]["scores"]
    scores = {one["length"]: one for one in found if one["task"] == bar.task}
    figure = new_figure(bar.what, bar.words(), bar.setting)
    if bar.tokens not in scores:
        lengths = " and ".join(f"{length:,}" for length in sorted(scores))
        return figure | {"reason": f"not measured at this length, only at {lengths} tokens"}

    one = scores[bar.tokens]
    counted = f"{one['answers']} answers"
    return figure | valued(one["score"], one["interval"], counted, one["score"] >= bar.score)


def valued(
    value: float,
    interval: Sequence[float],
    counted: str,
    passed: bool,
) -> dict[str, Any]:
    low, high = map(float, interval)
    return {"passed": passed, "value": float(value), "interval": (low, high), "counted": counted}


def gain(path: Path) -> dict[str, Any]:
    """The context gain over all compared tokens."""
    (found,) = read_json(path)["gain"].values()
    what = f"context gain, {SHORT} -> {CONTEXT} tokens, nats per token"
    figure = new_figure(what, "interval above 0", "TEXT")
    lengths = (found["short"], found["context"])
    if lengths != (SHORT, CONTEXT):
        return figure | {"reason": f"not measured so, only {lengths[0]} -> {lengths[1]} tokens"}
    of_all = found["all"]
    counted = f"{of_all['documents']} documents"
    return figure | valued(of_all["gain"], of_all["interval"], counted, of_all["interval"][0] > 0)


def recall(path: Path) -> dict[str, Any]:
    """What the indexer reads of full attention's mass, up to what the best choice of as many blocks
    would read, at the end of the warm-up, whose last step is not read.
    """
    records = [parse_json(line) for line in path.read_bytes().splitlines()]
    measured = [record for record in records if "indexer_recall" in record][-LAST - 1 : -1]
    names = ("indexer_recall", "indexer_recall_limit")
    found, limit = (sum(record[name] for record in measured) / len(measured) for name in names)
    figure = new_figure("the indexer's recall, up to the limit", "-", "INDEXED")
    return figure | valued(found, (found, limit), f"{len(measured)} steps", True)


# ---- the table


def table(proof: dict[str, Any]) -> str:
    """The figures, a column for each seed, and the seconds of all parts, in Markdown."""
    seeds = proof["seeds"]
    rows = [["", "bar", *(f"seed {one['seed']}" for one in seeds)], ["---"] * (2 + len(seeds))]
    for figures in zip(*(one["figures"] for one in seeds), strict=True):
        rows.append([figures[0]["what"], figures[0]["bar"], *map(cell, figures)])
    for name, words in (("wall", "seconds"), ("cpu", "CPU seconds")):
        totals = [total(one["seconds"], name) for one in seeds]
        rows.append([f"{words} of all parts", "-", *totals])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cell(figure: dict[str, Any]) -> str:
    """A figure with its interval and number of items, and whether it misses its bar."""
    if figure["value"] is None:
        return "not measured"
    missed = "" if figure["passed"] else " below the bar"
    return f"{value_of(figure)}{missed}"


def value_of(figure: dict[str, Any]) -> str:
    """A share in percent, a gain in nats."""
    low, high = figure["interval"]
    if "gain" in figure["what"]:
        return f"{figure['value']:.4f} ({low:.4f} to {high:.4f}; {figure['counted']})"
    return f"{figure['value']:.1%} ({low:.1%} to {high:.1%}; {figure['counted']})"


def total(parts: Sequence[dict[str, Any]], name: str) -> str:
    """Seconds of all parts, and on how many cores."""
    seconds = sum(part[name] for part in parts)
    cores = max(part["cores"] for part in parts)
    stopped = sum(part["stopped"] for part in parts)
    words = f" and those of {stopped} that did not end" if stopped else ""
    return f"{seconds:,.0f} on {cores} cores{words}"


if __name__ == "__main__":
    sys.exit(main())
