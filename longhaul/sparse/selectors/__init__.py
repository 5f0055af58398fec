"""The selectors: which blocks of keys a query reads, one file for each, with its equation. None
has weights, so any model of standard attention runs with them as it is.

A further one is a file like these and a row of SELECTED.
"""

from longhaul.sparse.selectors.bounds import Bounds
from longhaul.sparse.selectors.exact import Exact
from longhaul.sparse.selectors.mean import Mean
from longhaul.sparse.selectors.pooled import Pooled

SELECTED = (Exact, Bounds, Pooled, Mean)
