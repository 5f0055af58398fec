"""Checkpoints: their format on disk, saving, loading, and which run they belong to."""
