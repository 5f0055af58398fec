"""The planner: what a training step needs, what the machine has, and what would fit."""
