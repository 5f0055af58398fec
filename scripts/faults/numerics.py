"""Group E of the fault matrix: numerics. Imports scripts.faults.rows of ours."""

from scripts.faults.rows import Row

ROWS: list[Row] = []
