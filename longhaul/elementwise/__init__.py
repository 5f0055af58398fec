"""Triton twins of functions of model.py: taken when the setting `kernels` asks for them."""
