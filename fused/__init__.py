"""Triton twins of functions of model.py; torch and triton only. Used where `kernels` asks for them."""
