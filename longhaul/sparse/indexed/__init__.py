"""Indexed attention: each query reads the blocks of keys that a trained indexer chose.

layer.py      settings, the indexer and its loss, the layer, what it keeps while decoding
operators.py  the operators, and what computes them
plain.py      all of it by masks
engine.py     which queries are computed how, forward and backward
choice.py     scores of blocks, and the best ones of each query
reading.py    attention of a few queries over the blocks that they chose, and its gradients
recall.py     the share of full attention that the choice reads
triton/       the kernels for GPUs
"""
