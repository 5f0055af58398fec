"""Group A of the fault matrix: process. Imports scripts.faults.rows of ours."""

from scripts.faults.rows import Row

ROWS: list[Row] = []
