"""Group F of the fault matrix: security. Imports scripts.faults.rows of ours."""

from scripts.faults.rows import Row

ROWS: list[Row] = []
