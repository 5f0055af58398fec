"""Sparse attention whose time is that of what is read: for CPUs, and as Triton kernels for GPUs.

`engine` is exact attention over chosen blocks, however they were chosen, and `plain` the same by
masks; `streams` and `tiles` are the parts of its work. `choose` takes the best blocks by the scores
of a selector. `nsa` is Native Sparse Attention; `layer` and `selectors` choose blocks without
weights, and `indexer` by a trained indexer, which learns from `index_loss`. All decode by `decode`.
"""

from longhaul.sparse.engine import block_sparse_attention as block_sparse_attention
from longhaul.sparse.nsa import nsa_attention as nsa_attention
