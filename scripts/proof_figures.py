"""The figures of scripts/long_context_proof.sh: `python -m scripts.proof_figures OUTPUT_DIR`.

Gathers what the evaluations found for every seed and the seconds of every part, writes them to
OUTPUT_DIR/proof.json and prints them as a table in Markdown. With --docs DIR they also become the
documented ones: DIR/proof.json, the heatmap of the first seed, and the table in DIR/EVALUATION.md.
Exit codes: 0 every figure passes its bar, 1 one does not, 2 bad input, 6 storage.
"""

import base.installed  # noqa: F401  (first: a missing package is answered in one line)

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from base import durable
from base.flags import RaisingParser
from base.untrusted import parse_json, read_json

SCRIPT = "bash scripts/long_context_proof.sh"
EXIT_MISSED = 1
EXIT_BAD_INPUT = 2
EXIT_STORAGE = 6


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
        attention = "sparse attention, " if self.folder == "sparse-retrieval" else ""
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


class Figure(NamedTuple):
    """One figure of a seed, and whether it passes its bar; without a value it was not measured."""

    what: str
    bar: str
    remedy: str
    passed: bool = False
    value: float | None = None
    interval: tuple[float, float] | None = None
    counted: str = ""
    reason: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
        folder = Path(options.folder)
        proof = proof_of(folder, options.seeds or seeds_in(folder))
        durable.write_json(folder / "proof.json", proof)
        if options.docs:
            publish(folder, proof, Path(options.docs))
    except ValueError as error:
        return _fail(error, EXIT_BAD_INPUT)
    except OSError as error:
        return _fail(
            f"{error}: check the permissions and the free space, then run the same command again",
            EXIT_STORAGE,
        )

    print(table(proof))
    print(f"written to {folder / 'proof.json'}")
    return report_missed(folder, proof)


def _fail(message: object, code: int) -> int:
    print(f"scripts.proof_figures: {message}", file=sys.stderr)
    return code


def report_missed(folder: Path, proof: dict[str, Any]) -> int:
    """Name each missed figure and the command that repeats its seed; returns the exit code."""
    missed = []
    for one in proof["seeds"]:
        for figure in one["figures"]:
            if not figure["passed"]:
                missed.append(one["seed"])
                print(f"seed {one['seed']}, {missed_words(figure)}", file=sys.stderr)
    if not missed:
        return 0

    seeds = " ".join(str(seed) for seed in dict.fromkeys(missed))
    settings = " ".join(shlex.quote(word) for word in [f"SEEDS={seeds}", *proof["settings"]])
    print(
        "to repeat only what was missed, with the settings changed that are named above: "
        f"{settings} {SCRIPT} {shlex.quote(f'{folder}-again')}",
        file=sys.stderr,
    )
    return EXIT_MISSED


def missed_words(figure: dict[str, Any]) -> str:
    """Which bar was missed, and what may help."""
    found = figure["reason"] or f"{value_of(figure)}, the bar is {figure['bar']}"
    return f"{figure['what']}: {found}: {figure['remedy']}"


def more_steps(setting: str) -> str:
    """What may help a model that misses its bar."""
    return f"more steps in {setting} may help"


# ---- what the folder has


def proof_of(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Everything for JSON. ValueError if anything is missing or damaged."""
    return {
        "settings": settings_of(folder),
        "seeds": [
            {
                "seed": seed,
                "figures": [figure._asdict() for figure in figures_of(folder, seed)],
                "seconds": seconds_of(folder, seed),
            }
            for seed in seeds
        ],
    }


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


def repeat(folder: Path, seed: int, damaged: str) -> str:
    """The remedy for a part of a seed that is missing or cannot be read."""
    where = shlex.quote(str(folder / f"seed-{seed}" / damaged))
    settings = " ".join(shlex.quote(word) for word in [f"SEEDS={seed}", *settings_of(folder)])
    return f"rm -rf {where}; {settings} {SCRIPT} {shlex.quote(str(folder))}"


def figures_of(folder: Path, seed: int) -> list[Figure]:
    """The figures of a seed, in the order of the proof. ValueError if an evaluation is missing."""
    not_learned = folder / f"seed-{seed}" / "not-learned"
    if not_learned.exists():
        reason = "not measured, " + durable.read_text(not_learned).strip()
        found = [
            Figure(bar.what, bar.words(), more_steps("SHORT"), reason=reason) for bar in RETRIEVAL
        ]
    else:
        found = [evaluated(folder, seed, bar.folder, bar) for bar in RETRIEVAL]
    return [*found, evaluated(folder, seed, GAIN)]


def evaluated(folder: Path, seed: int, name: str, bar: Bar | None = None) -> Figure:
    """The figure of an evaluation: of retrieval if it has a bar of its own, or else the gain.

    Raises ValueError if it is missing or damaged.
    """
    path = folder / f"seed-{seed}" / name / "eval.json"
    if not path.exists():
        raise ValueError(
            f"{path} is missing, so the proof has not ended: {repeat(folder, seed, name)}"
        )
    try:
        record = read_json(path)
        return retrieval(bar, record) if bar else gain(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): {repeat(folder, seed, name)}") from None


def retrieval(bar: Bar, record: dict[str, Any]) -> Figure:
    """The score at the length of the bar."""
    found = record["retrieval"]["scores"]
    scores = {score["length"]: score for score in found if score["task"] == bar.task}
    figure = Figure(bar.what, bar.words(), more_steps(bar.setting))
    if bar.tokens not in scores:
        lengths = " and ".join(f"{length:,}" for length in sorted(scores))
        return figure._replace(
            reason=f"not measured at this length, only at {lengths} tokens",
            remedy=f"let {bar.setting} end at {bar.tokens}",
        )

    score = scores[bar.tokens]
    value = float(score["score"])
    low, high = map(float, score["interval"])
    return figure._replace(
        passed=value >= bar.score,
        value=value,
        interval=(low, high),
        counted=f"{score['answers']} answers",
    )


def gain(record: dict[str, Any]) -> Figure:
    """The context gain over all compared tokens."""
    (found,) = record["gain"].values()
    what = f"context gain, {SHORT} -> {CONTEXT} tokens, nats per token"
    figure = Figure(what, "interval above 0", more_steps("TEXT"))
    lengths = (found["short"], found["context"])
    if lengths != (SHORT, CONTEXT):
        return figure._replace(
            reason=f"not measured so, only {lengths[0]} -> {lengths[1]} tokens",
            remedy=f"train on text with a context of {CONTEXT}",
        )

    low, high = map(float, found["all"]["interval"])
    return figure._replace(
        passed=low > 0,
        value=float(found["all"]["gain"]),
        interval=(low, high),
        counted=f"{found['all']['documents']} documents",
    )


def seconds_of(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Wall and CPU seconds of each part, in the order in which they began.

    `stopped` counts the processes that did not end, as after a kill; their seconds are unknown.
    """
    path = folder / f"seed-{seed}" / "seconds.jsonl"
    if not path.exists():
        raise ValueError(f"{path} is missing: {repeat(folder, seed, path.name)}")
    parts: dict[str, dict[str, Any]] = {}
    try:
        for line in path.read_bytes().splitlines():
            add_seconds(parts, parse_json(line))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): {repeat(folder, seed, path.name)}"
        ) from None
    if not parts:
        raise ValueError(f"{path} is empty: {repeat(folder, seed, path.name)}")
    return list(parts.values())


def add_seconds(parts: dict[str, dict[str, Any]], record: dict[str, Any]) -> None:
    """Add a line of seconds.jsonl: a part has begun, or it has ended."""
    if "begun" in record:
        name = record["begun"]
        new = {"part": name, "wall": 0.0, "cpu": 0.0, "cores": 0, "stopped": 0}
        part = parts.setdefault(name, new)
        part["cores"] = max(part["cores"], int(record["cores"]))
        part["stopped"] += 1
        return

    part = parts[record["ended"]]
    part["stopped"] -= 1
    part["wall"] = round(part["wall"] + record["wall"], 3)
    part["cpu"] = round(part["cpu"] + record["user"] + record["system"], 3)


# ---- the table


def table(proof: dict[str, Any]) -> str:
    """The figures, a column for each seed, and the seconds of all parts, in Markdown."""
    seeds = proof["seeds"]
    rows = [
        ["", "bar", *(f"seed {one['seed']}" for one in seeds)],
        ["---"] * (2 + len(seeds)),
    ]
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


# ---- the document

BEGIN = (
    "<!-- the table of docs/proof.json: python -m scripts.proof_figures OUTPUT_DIR --docs docs -->"
)
END = "<!-- end of the table -->"


def publish(folder: Path, proof: dict[str, Any], docs: Path) -> None:
    """Make these the documented figures. Raises ValueError if there is no place for them."""
    document = docs / "EVALUATION.md"
    if not document.exists():
        raise ValueError(f"{document} does not exist: give --docs the docs folder of longhaul")
    text = with_table(document.read_text(encoding="utf-8"), table(proof))

    heatmap = folder / f"seed-{proof['seeds'][0]['seed']}" / RETRIEVAL[0].folder / "heatmap.png"
    if heatmap.exists():
        (docs / "heatmap.png").write_bytes(heatmap.read_bytes())
    document.write_text(text, encoding="utf-8")
    durable.write_json(docs / "proof.json", proof)


def with_table(text: str, new: str) -> str:
    """The document with another table between its two comments."""
    before, begin, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"the document has no place for the table: add the lines {BEGIN} and {END}"
        )
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def _parser() -> RaisingParser:
    parser = RaisingParser(
        prog="python -m scripts.proof_figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="OUTPUT_DIR", help="folder of the proof")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        metavar="SEED",
        help="only these (default: all in OUTPUT_DIR)",
    )
    parser.add_argument("--docs", metavar="DIR", help="write them into the documentation, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
