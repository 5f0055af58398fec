"""Whether a model uses its context: measures by log-likelihood, in the loop and after training.

score.py asks the model; every other file works on what it returns, and never sees a model.
"""
