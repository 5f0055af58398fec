"""The record of a step: what was allocated, when, by whom, and when it was freed."""
