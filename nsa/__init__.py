"""Native Sparse Attention (arXiv 2502.11089): torch alone, exact, linear in memory. Not reached from model.py yet.

    config.py    NSAConfig: sizes and their rules
    branches.py  the mathematics of the three branches for one document and one KV head
    engine.py    nsa_attention, forward and backward as custom operators
    plain.py     the same function by masks, the compression of keys and values, the decode state
"""
