"""Sparse attention whose time is that of what is read: for CPUs, and as Triton kernels for GPUs.

`nsa` is Native Sparse Attention, `indexed` attention whose blocks an indexer chooses.
"""
