"""Training after pretraining: policies that learn from rewards of what they sample."""
