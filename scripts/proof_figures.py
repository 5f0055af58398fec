"""The figures of scripts/long_context_proof.sh: `python -m scripts.proof_figures --folder DIR`.

Gathers what the evaluations of every seed found, writes it to DIR/proof.json (conversion.json for
PROOF=convert: what sparse and indexed attention keep of a model's retrieval) and prints it as a
table in Markdown. Exit codes: 0 every figure passes its bar, 1 one does not or was not measured, 2
bad input, 6 storage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from base import durable
from base.untrusted import parse_json, read_json
from longhaul import cli
from longhaul.cli import flag


class Bar(NamedTuple):
    """Retrieval in a task at a length must have a score of at least `score`, which may be 0."""

    folder: str
    task: str
    tokens: int
    score: float

    @property
    def what(self) -> str:
        name = self.folder.split("-")[0]
        attention = f"{name} attention, " if name in ("sparse", "indexed") else ""
        return f"retrieval at {self.tokens:,} tokens, {attention}{NOISES[self.task]}"

    @property
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
    Bar("standard", "multikey", 16_384, 0.98),
    Bar("standard", "multikey-values", 16_384, 0.98),
    Bar("standard", "multikey-keys", 16_384, 0.95),
    Bar("standard", "multikey-all", 16_384, 0.98),
    Bar("standard", "multikey-constant", 16_384, 0.0),
    Bar("standard", "newest", 16_384, 0.0),
    Bar("farthest-retrieval", "multikey-all", 32_768, 0.90),
    Bar("sparse-retrieval", "multikey", 4_096, 0.95),
)

# The gain of this context over the short one must not be 0 by chance.
GAIN = "text-gain"
SHORT = 64
CONTEXT = 128

# PROOF=convert: the last ones are held to the first ones, of standard attention.
CONVERTED = tuple(
    Bar(f"{run}-converted", "multikey", tokens, 0.0)
    for run in ("far", "sparse", "indexed")
    for tokens in (4_096, 16_384)
)
KEPT = 0.95
LAST = 10  # steps of the warm-up of an indexer whose recall counts


@dataclass(frozen=True)
class ProofConfig:
    """The flags."""

    folder: str = flag("", "OUTPUT_DIR of the proof")
    proof: str = flag("context", "which proof it is", choices=("context", "convert"))
    seeds: tuple[str, ...] = flag((), "only these; none: all of the folder", many=True)

    def __post_init__(self):
        cli.require(self, "folder")


def main(args: list[str] | None = None):
    """The command line; ends with code 1 if a figure does not pass."""
    cli.run(ProofConfig, run, args, "scripts.proof_figures", __doc__.splitlines()[0])


def run(given: ProofConfig):
    """Gather, write and print."""
    folder = Path(given.folder)
    names = [f"seed-{seed}" for seed in given.seeds]
    names = names or sorted(path.name for path in folder.glob("seed-*"))
    if not names or not all((folder / name).is_dir() for name in names):
        raise ValueError(
            f"{folder} has no such seed-* folder: run bash scripts/long_context_proof.sh {folder}"
        )
    converts = given.proof == "convert"
    figures_of = conversion if converts else context
    seeds = [
        {"seed": name.removeprefix("seed-"), "figures": figures_of(folder / name)} for name in names
    ]
    proof = {"seeds": seeds}
    path = folder / ("conversion.json" if converts else "proof.json")
    durable.write_json(path, proof)
    print(table(proof))
    print(f"written to {path}")
    if not all(figure["passed"] for one in seeds for figure in one["figures"]):
        raise SystemExit(1)


# ---- figures


def context(own: Path) -> list[dict[str, Any]]:
    """Retrieval of a seed, and the gain of the context on text."""
    return [*(retrieval(own, bar) for bar in RETRIEVAL), gain(own / GAIN / "eval.json")]


def conversion(own: Path) -> list[dict[str, Any]]:
    """Retrieval of a seed by each attention, and the recall of the indexer."""
    found = [retrieval(own, bar) for bar in CONVERTED]
    for figure, standard in zip(found[-2:], found, strict=False):
        figure["bar"] = f"{KEPT:.0%} of standard attention's"
        if figure["passed"]:
            figure["passed"] = figure["value"] >= KEPT * standard["value"]
    return [*found, recall(own / "indexed" / "metrics.jsonl")]


def new_figure(
    what: str,
    bar: str,
    value: float | None = None,
    interval: Sequence[float] = (),
    counted: str = "",
    passed: bool = False,
) -> dict[str, Any]:
    """A figure for JSON; without a value it was not measured."""
    return {
        "what": what,
        "bar": bar,
        "value": value,
        "interval": tuple(interval),
        "counted": counted,
        "passed": passed,
    }


def retrieval(own: Path, bar: Bar) -> dict[str, Any]:
    """The score at the length of the bar; a seed may have learned nothing."""
    path = own / bar.folder / "eval.json"
    if path.exists() and not (own / "not-learned").exists():
        for one in read_json(path)["retrieval"]["scores"]:
            if (one["task"], one["length"]) == (bar.task, bar.tokens):
                return new_figure(
                    bar.what,
                    bar.words,
                    one["score"],
                    one["interval"],
                    f"{one['answers']} answers",
                    one["score"] >= bar.score,
                )
    return new_figure(bar.what, bar.words)


def gain(path: Path) -> dict[str, Any]:
    """The context gain over all compared tokens."""
    what = f"context gain, {SHORT} -> {CONTEXT} tokens, nats per token"
    bar = "interval above 0"
    found = list(read_json(path)["gain"].values()) if path.exists() else []
    if not found or (found[0]["short"], found[0]["context"]) != (SHORT, CONTEXT):
        return new_figure(what, bar)
    whole = found[0]["all"]
    return new_figure(
        what,
        bar,
        whole["gain"],
        whole["interval"],
        f"{whole['documents']} documents",
        whole["interval"][0] > 0,
    )


def recall(path: Path) -> dict[str, Any]:
    """What the indexer reads of full attention's mass, up to what the best choice of as many blocks
    would read, at the end of the warm-up, whose last step is not read.
    """
    what = "the indexer's recall, up to the limit"
    records = [parse_json(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    measured = [record for record in records if "indexer_recall" in record][-LAST - 1 : -1]
    if not measured:
        return new_figure(what, "-")
    names = ("indexer_recall", "indexer_recall_limit")
    found, limit = (sum(record[name] for record in measured) / len(measured) for name in names)
    return new_figure(what, "-", found, (found, limit), f"{len(measured)} steps", True)


# ---- the table


def table(proof: dict[str, Any]) -> str:
    """The figures, a column for each seed, in Markdown."""
    seeds = proof["seeds"]
    rows = [["", "bar", *(f"seed {one['seed']}" for one in seeds)], ["---"] * (2 + len(seeds))]
    for figures in zip(*(one["figures"] for one in seeds), strict=True):
        rows.append([figures[0]["what"], figures[0]["bar"], *map(cell, figures)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cell(figure: dict[str, Any]) -> str:
    """A figure with its interval and number of items, and whether it misses its bar: a share in
    percent, a gain in nats.
    """
    if figure["value"] is None:
        return "not measured"
    form = "{:.4f}" if "gain" in figure["what"] else "{:.1%}"
    value, low, high = map(form.format, (figure["value"], *figure["interval"]))
    missed = "" if figure["passed"] else " below the bar"
    return f"{value} ({low} to {high}; {figure['counted']}){missed}"


if __name__ == "__main__":
    main()
