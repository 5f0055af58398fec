"""Programs run as `python -m scripts.NAME`."""
