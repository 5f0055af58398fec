"""Native Sparse Attention (arXiv 2502.11089): torch alone, exact, linear in memory. model.py
reaches it lazily.

module.py    SparseBranches: what a layer adds to grouped-query attention
compress.py  keys and values of blocks; where the documents of a batch lie
plain.py     nsa_attention by masks: the obvious version, quadratic in time
engine.py    nsa_attention block-major, forward and backward as custom operators: what runs
branches.py  the mathematics of the three branches for one document and one KV head
decode.py    what a layer keeps while decoding, and the attention of one token
"""

from nsa.compress import layout as layout
from nsa.decode import layer_cache as layer_cache
from nsa.engine import nsa_attention as nsa_attention
from nsa.module import SparseBranches as SparseBranches
from nsa.module import choose_core as choose_core
