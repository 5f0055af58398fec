"""Group B of the fault matrix: storage. Imports scripts.faults.rows of ours."""

from scripts.faults.rows import Row

ROWS: list[Row] = []
