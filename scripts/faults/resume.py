"""Group C of the fault matrix: what a resume means. Imports scripts.faults of ours."""

from pathlib import Path

from scripts.faults import runs
from scripts.faults.rows import Row, require


def completed(trials: int, folder: Path) -> str:
    """Row 29."""
    args = runs.arguments(runs.dataset(folder / "data"), folder / "run", "--max_steps", "3")
    runs.finish(args, folder / "log")
    before = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}
    again = runs.finish(args, folder / "again")
    require("nothing to do" in again.words(), again.words())
    require(before == {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}, "files were touched")
    return "exit code 0, nothing to do, no file touched"


ROWS: list[Row] = [
    Row(29, "a completed run started again", "0, nothing to do, files untouched", completed),
]
