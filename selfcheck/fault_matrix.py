"""Inject faults for real and say what came of them: `python -m selfcheck.fault_matrix [--rows
A,B,15-19] [--trials N] [--full]`.

A line per row as it ends; exit code 0 if all hold, 1 if one does not, 2 for rows that do not exist.
"""

import multiprocessing
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

from base.flags import Parser
from selfcheck.faults import data
from selfcheck.faults.rows import Failed, Row
from tests import runs

GROUPS: dict[str, list[Row]] = {
    "D": data.ROWS,
}
FORK = multiprocessing.get_context("fork")
LIMIT = 1800  # seconds that one row may take


def select(words: str) -> list[Row]:
    """The rows of "A,15-19,43", each once and in order; ValueError for a word that names none."""
    every = {row.number: row for rows in GROUPS.values() for row in rows}
    chosen: set[int] = set()
    for word in words.split(","):
        chosen |= _numbers(word.strip(), every)
    return [every[number] for number in sorted(chosen)]


def _numbers(word: str, every: dict[int, Row]) -> set[int]:
    if word.upper() in GROUPS:
        return {row.number for row in GROUPS[word.upper()]}
    first, dash, last = word.partition("-")
    if not first.isdecimal() or bool(dash) != last.isdecimal():
        raise ValueError(
            f"--rows {word!r}: give groups ({', '.join(GROUPS)}), numbers or ranges such as A,15-19"
        )
    found = every.keys() & set(range(int(first), int(last or first) + 1))
    if not found:
        raise ValueError(
            f"--rows {word!r} names no row: there are {', '.join(map(str, sorted(every)))}"
        )
    return found


def run(row: Row, trials: int) -> tuple[bool, str, float]:
    """(whether it holds, in words, seconds). In a process of its own, so that rows share nothing
    and a crash is an outcome.
    """
    folder, start = Path(tempfile.mkdtemp(prefix=f"fault-{row.number}-")), time.monotonic()
    outcome = folder.with_name(f"{folder.name}.outcome")
    child = FORK.Process(target=_inside, args=(row, trials, folder, outcome))
    child.start()
    child.join(LIMIT)
    if child.is_alive():
        child.kill()
        child.join()
    held, words = (
        child.exitcode == 0,
        outcome.read_text()
        if outcome.exists()
        else f"the check ended with code {child.exitcode}: see above",
    )
    shutil.rmtree(folder, ignore_errors=True)
    outcome.unlink(missing_ok=True)
    return held, words, time.monotonic() - start


def _inside(row: Row, trials: int, folder: Path, outcome: Path):
    torch.set_num_threads(1)
    try:
        outcome.write_text(row.check(trials, folder))
    except Failed as failure:
        outcome.write_text(str(failure))
        sys.exit(1)
    finally:  # what a failed check left running or stopped would be waited for
        for left in multiprocessing.active_children():
            left.kill()


def main(args: list[str] | None = None):
    """The command line."""
    parser = Parser(prog="fault_matrix", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows",
        default=",".join(GROUPS),
        help="groups, numbers and ranges: A,B,15-19",
    )
    parser.add_argument(
        "--trials", type=int, help="trials of every row; without it, the row's own number"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="as many trials as docs/LOG.md reports, not as few as CI has time for",
    )
    given = parser.parse_args(args)
    if given.trials is not None and given.trials < 1:
        parser.error(f"--trials {given.trials} tests nothing: give at least 1")
    try:
        rows = select(given.rows)
    except ValueError as error:
        print(f"fault_matrix: error: {error}", file=sys.stderr)
        sys.exit(2)
    runs.plan_once()
    failed = [
        row.number
        for row in rows
        if not _report(row, given.trials or (row.full if given.full else row.trials))
    ]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} rows hold"
        + (f"; not {', '.join(map(str, failed))}" if failed else "")
    )
    sys.exit(1 if failed else 0)


def _report(row: Row, trials: int) -> bool:
    print(f"{row.number:3}  {row.fault} -> {row.must}", flush=True)
    held, words, seconds = run(row, trials)
    print(
        f"     {'holds' if held else 'FAILS'}, {trials} trial(s), {seconds:.1f} s: {words}",
        flush=True,
    )
    return held


if __name__ == "__main__":
    main()
