"""Triton kernels of Native Sparse Attention: the twin of nsa/engine.py for GPUs."""
