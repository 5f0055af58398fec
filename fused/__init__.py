"""Triton twins, torch and triton only: of functions of model.py, used where `kernels` asks for
them, and of nsa/engine.py.
"""
