"""Which tests are fast: `scripts/test.sh` runs those that are not marked slow, and CI runs all.

Mark a test slow if it takes more than about 5 seconds of CPU time, or if faster tests of the same
file would notice most of its faults. Of many similar cases, a few are fast.
"""

from collections.abc import Iterable

import pytest


def slow(*values):
    """A case of a parametrised test that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def few_fast(cases: Iterable, every: int) -> list:
    """Cases of a parametrised test: the first and each `every`-th after it are fast, the others are
    marked slow. A tuple is the values of one case.
    """
    params = []
    for index, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        params.append(pytest.param(*values) if index % every == 0 else slow(*values))
    return params
