"""How a model is spread over ranks and what it keeps: levers that take a model from outside.

apply.py calls them in the one order that composes.
"""
