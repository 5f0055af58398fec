"""What is inside a trained model: its activations, where its heads look, and what precision costs.

activations.py reads them while the model runs; every other file works on what it hands out.
"""
