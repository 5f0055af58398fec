"""How a model is spread and what it keeps: each lever takes a model from outside, in one fixed order (apply.py)."""
