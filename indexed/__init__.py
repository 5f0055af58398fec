"""Indexed attention that skips what it does not read: the faster twin of model.py's plain one.

model.py holds the layer, the operators and the plain version, and takes this package when it can be
imported. Results are the same within the tolerances of the tests.

engine.py   which queries are computed how, forward and backward
choice.py   scores of blocks, and the best ones of each query
reading.py  attention of a few queries over the blocks that they chose, and its gradients
triton/     the kernels for GPUs
"""

from indexed.engine import backward as backward
from indexed.engine import forward as forward
