"""Prove it on your machine: fuzzed readers, injected faults."""

import base.installed  # noqa: F401  (first: a missing package is answered in one line)
