"""Triton kernels of Native Sparse Attention, next to the engine that they are the twin of."""
