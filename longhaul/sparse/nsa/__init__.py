"""Native Sparse Attention (arXiv 2502.11089), block-major: it skips the blocks that are not read.

model.py holds the layer (compression, gates, plain attention by masks, plain decoding), and
longhaul/kernels.py puts these functions in place of the plain ones. Results are the same within the
tolerances of the tests.

engine.py    nsa_attention, forward and backward as custom operators
branches.py  one document under one KV head: compressed branch and window
selected.py  which blocks the selected branch reads; the engine of all selectors computes it
decode.py    what a layer keeps while decoding, and the attention of one token
../triton/   the kernels for GPUs
"""

from longhaul.sparse.nsa.decode import NSAState as NSAState
from longhaul.sparse.nsa.engine import nsa_attention as nsa_attention
