"""A step without values on a machine that has no GPU: what it is told, and where it is."""
