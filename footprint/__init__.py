"""The memory of a training step: recorded, replayed through the allocator, shown. Imports torch
only.
"""
