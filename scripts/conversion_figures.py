"""The figures of `PROOF=convert bash scripts/long_context_proof.sh`: how much of the retrieval of a
model sparse and indexed attention keep.

    python -m scripts.conversion_figures OUTPUT_DIR [--seeds SEED ...]

Prints a table in Markdown and writes OUTPUT_DIR/conversion.json. Exit codes: 0 indexed attention
keeps 95% of the scores of the model that it starts from, 1 it does not, 2 bad input, 6 storage.
"""

import base.installed  # noqa: F401  (first: a missing package is answered in one line)

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from base import durable
from base.flags import Parser
from base.untrusted import read_json
from scripts.proof_figures import seconds_of, seeds_in

LENGTHS = (4_096, 16_384)
KEPT = 0.95  # of the scores of standard attention
LAST = 10  # steps of the warm-up whose recall counts
ATTENTIONS = {  # name -> (folder of its evaluation, the run that converted)
    "standard": ("far-converted", "far"),
    "sparse (NSA)": ("sparse-converted", "sparse"),
    "indexed": ("indexed-converted", "indexed"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="python -m scripts.conversion_figures", description=__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="OUTPUT_DIR", type=Path, help="folder of the proof")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        metavar="SEED",
        help="only these (default: all in OUTPUT_DIR)",
    )
    options = parser.parse_args(arguments)
    try:
        seeds = options.seeds or seeds_in(options.folder)
        found = {f"seed {seed}": figures_of(options.folder, seed) for seed in seeds}
        durable.write_json(options.folder / "conversion.json", found)
    except (ValueError, KeyError, TypeError) as error:
        print(f"scripts.conversion_figures: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"scripts.conversion_figures: {error}: check the folder", file=sys.stderr)
        return 6

    print(table(found))
    return report_missed(found)


def figures_of(folder: Path, seed: int) -> dict[str, Any]:
    """{attention: {"scores": {length: score}, "cpu": seconds of the conversion}}, and the recall
    of the indexer.
    """
    own = folder / f"seed-{seed}"
    if (own / "not-learned").exists():
        words = durable.read_text(own / "not-learned").strip()
        raise ValueError(f"{own}: {words}: more steps in SHORT may help")
    seconds = {part["part"]: part["cpu"] for part in seconds_of(folder, seed)}
    figures: dict[str, Any] = {
        name: {"scores": scores_of(own / evaluation / "eval.json"), "cpu": seconds[run]}
        for name, (evaluation, run) in ATTENTIONS.items()
    }
    return figures | {"recall": recall_of(own / "indexed" / "metrics.jsonl")}


def scores_of(path: Path) -> dict[str, float]:
    """The share of right answers in noise with ids of its own, at each of LENGTHS."""
    found = read_json(path)["retrieval"]["scores"]
    scores = {one["length"]: float(one["score"]) for one in found if one["task"] == "multikey"}
    missing = [str(length) for length in LENGTHS if length not in scores]
    if missing:
        raise ValueError(f"{path} has no score at {', '.join(missing)} tokens: let FAR end there")
    return {str(length): scores[length] for length in LENGTHS}


def recall_of(path: Path) -> dict[str, float]:
    """The indexer's recall and its limit at the end of the warm-up, whose last step is not read."""
    lines = durable.read_text(path).splitlines()
    records = [json.loads(line) for line in lines]
    measured = [record for record in records if "indexer_recall" in record][-LAST - 1 : -1]
    if not measured:
        raise ValueError(f"{path} has no recall: give INDEXED a length above the budget")
    names = ("indexer_recall", "indexer_recall_limit")
    found, limit = (sum(record[name] for record in measured) / len(measured) for name in names)
    return {"found": found, "limit": limit}


def table(found: dict[str, dict[str, Any]]) -> str:
    """A row for each attention and seed."""
    lengths = [f"retrieval at {length:,}" for length in LENGTHS]
    rows = [["attention", "", *lengths, "CPU seconds of its last run"]]
    rows.append(["---"] * len(rows[0]))
    for seed, figures in found.items():
        for name in ATTENTIONS:
            scores = [f"{figures[name]['scores'][str(length)]:.1%}" for length in LENGTHS]
            rows.append([name, seed, *scores, f"{figures[name]['cpu']:.0f}"])

    lines = [f"| {' | '.join(row)} |" for row in rows]
    for seed, figures in found.items():
        recall = figures["recall"]
        lines.append(
            f"\n{seed}: the indexer reads {recall['found']:.3f} of full attention's mass; the best "
            f"choice of as many blocks would read {recall['limit']:.3f}."
        )
    return "\n".join(lines)


def report_missed(found: dict[str, dict[str, Any]]) -> int:
    """Name each score of indexed attention that misses its bar; returns the exit code."""
    missed = []
    for seed, figures in found.items():
        standard = figures["standard"]["scores"]
        missed += [
            f"{seed}, retrieval at {length} tokens: {score:.1%}, the bar is {KEPT:.0%} of "
            f"{standard[length]:.1%}: more steps in INDEXED may help"
            for length, score in figures["indexed"]["scores"].items()
            if score < KEPT * standard[length]
        ]
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
