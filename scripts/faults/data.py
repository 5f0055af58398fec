"""Group D of the fault matrix: data. Imports scripts.faults.rows of ours."""

from scripts.faults.rows import Row

ROWS: list[Row] = []
