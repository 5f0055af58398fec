"""The planner: what a training step needs, what is there, and what would fit."""
