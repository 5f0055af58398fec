"""The Triton kernels of longhaul one by one, without knowing who launches them: each launched alone
on a GPU, or all compiled without one.
"""

import contextlib
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

PACKAGES = (
    "longhaul.elementwise",
    "longhaul.vocab",
    "longhaul.sparse.triton",
)
LAUNCHER = "run"  # the method of every kind of kernel that a launch calls


def found() -> dict[str, object]:
    """Name -> kernel, of all in the packages of kernels; none if triton is not installed.

    A kernel is what can be launched and whose name ends in _kernel.
    """
    if not importlib.util.find_spec("triton"):
        return {}
    from triton.runtime.jit import KernelInterface

    kernels = {}
    for module in modules():
        for name, value in vars(module).items():
            if name.endswith("_kernel") and isinstance(value, KernelInterface):
                kernels[name] = value
    return dict(sorted(kernels.items()))


def modules() -> list:
    """All modules of the packages."""
    loaded = []
    for name in PACKAGES:
        package = importlib.import_module(name)
        loaded.append(package)
        for module in pkgutil.iter_modules(package.__path__, prefix=f"{name}."):
            loaded.append(importlib.import_module(module.name))
    return loaded


@contextlib.contextmanager
def replaced(launch: Callable) -> Iterator[None]:
    """Inside the `with` block, launching a kernel calls `launch(run, kernel, args, grid, kwargs)`;
    `run` is what would have launched it.
    """
    kinds = {type(kernel) for kernel in found().values()}
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            run = getattr(kind, LAUNCHER)

            def replacement(kernel, *args, grid, warmup=False, run=run, **kwargs):
                return launch(run, kernel, args, grid, kwargs)

            stack.enter_context(mock.patch.object(kind, LAUNCHER, replacement))
        yield


# ---- one alone


@contextlib.contextmanager
def alone(name: str) -> Iterator[list[str]]:
    """Launch the kernel of that name and no other; the list gets its name for each launch.

    What the others would have filled is zero, so that every index in it is one that exists.
    """
    launches: list[str] = []

    def launch(run, kernel, args, grid, kwargs):
        if kernel.fn.__name__ != name:
            return None
        launches.append(name)
        return run(kernel, *args, grid=grid, warmup=False, **kwargs)

    with replaced(launch), zeros():
        yield launches


@contextlib.contextmanager
def zeros() -> Iterator[None]:
    """Memory that is only allocated is zero."""

    def zeroed(make):
        def made(*args, **kwargs):
            return make(*args, **kwargs).zero_()

        return made

    with contextlib.ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            replacement = zeroed(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
