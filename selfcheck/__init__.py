"""Prove it on your machine: equivalence of the levers, fuzzed readers, injected faults."""

import base.installed  # noqa: F401  (first: a missing package is answered in one line)
