"""Modes for functions that stay on in the backward.

`backward` is itself a function that a mode may replace, so PyTorch has all modes off while it runs.
A checkpointed forward runs again there, and must see what the first one saw.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from footprint.patches import patched


@contextlib.contextmanager
def switched_on(modes: list[TorchFunctionMode]) -> Iterator[None]:
    """The modes are on inside the `with` block, and whenever the autograd engine runs."""
    run = torch.autograd._engine_run_backward

    def run_with_modes(*args, **kwargs):
        with _missing(modes):
            return run(*args, **kwargs)

    with patched({(torch.autograd, "_engine_run_backward"): run_with_modes}), _missing(modes):
        yield


@contextlib.contextmanager
def _missing(modes: list[TorchFunctionMode]) -> Iterator[None]:
    """Those of the modes that are off are on."""
    active = _get_current_function_mode_stack()
    with contextlib.ExitStack() as stack:
        for mode in modes:
            if mode not in active:
                stack.enter_context(mode)
        yield
