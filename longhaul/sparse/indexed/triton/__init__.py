"""Triton kernels of indexed attention: the twin of indexed/engine.py for GPUs."""
