"""Prove it on your machine: equivalence of the levers, fuzzed readers, injected faults."""
