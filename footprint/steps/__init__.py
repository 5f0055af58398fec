"""The doors for a step, and the search for what fits."""
