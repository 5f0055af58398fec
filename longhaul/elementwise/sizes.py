"""Sizes of the kernels of elementwise.py that its results' shapes depend on; needs no Triton."""

ROWS = 16  # heads of tokens that a program has in registers at once
PROGRAMS = 2048  # of a backward at most: about four for each place on 132 multiprocessors


def programs(rows: int) -> int:
    """Programs of the backward of a norm over so many rows."""
    return min(-(-rows // ROWS), PROGRAMS)
