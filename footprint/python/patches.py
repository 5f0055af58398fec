"""Attributes of PyTorch that are others for a while."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Mapping

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from footprint.python.refusal import HERE, LIBRARY, PACKAGES, TORCH

Place = tuple[object, str]  # a module or a class, and the name of an attribute
Patches = dict[Place, object]

# It is made of the address, as `id` is. Each `id` also asks the audit hooks, of which transformers
# brings one, and then takes four times as long.
identity = object.__hash__


@contextlib.contextmanager
def patched(patches: Mapping[Place, object]) -> Iterator[None]:
    """The attributes have these values inside the `with` block, also where a file of the user's
    has imported them by name. Behind it, what the block has imported has those of before, too.
    """
    before = {(owner, name): vars(owner)[name] for owner, name in patches if name in vars(owner)}
    own = {identity(old): patches[place] for place, old in before.items()}
    loaded = set(sys.modules)
    try:
        with _exchanged(patches), _exchanged(_imported(own)):
            yield
    finally:
        _put(_imported_meanwhile(loaded, patches, before))


@contextlib.contextmanager
def _exchanged(patches: Mapping[Place, object]) -> Iterator[None]:
    own = [(owner, name) for owner, name in patches if name in vars(owner)]
    originals = {(owner, name): vars(owner)[name] for owner, name in own}
    _put(patches)
    try:
        yield
    finally:
        for owner, name in patches.keys() - originals.keys():  # a method that is inherited
            delattr(owner, name)
        _put(originals)


@contextlib.contextmanager
def defaults_kept() -> Iterator[None]:
    """What a step inside the `with` block sets for the whole process ends with the block."""
    before = _default_device()
    dtype = torch.get_default_dtype()
    random = torch.get_rng_state()
    environment = dict(os.environ)
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        if _default_device() is not before:
            torch.set_default_device(before and before.device)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(random)
        os.environ.clear()
        os.environ.update(environment)


def _default_device() -> DeviceContext | None:
    """The mode that torch.set_default_device has put on."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _put(values: Mapping[Place, object]) -> None:
    for (owner, name), value in values.items():
        setattr(owner, name, value)


def _imported(replacements: Mapping[int, object]) -> Patches:
    """What the user's modules call by names of their own."""
    found: Patches = {}
    for module in list(sys.modules.values()):
        if not _is_users(module):
            continue
        if replacements.keys().isdisjoint(map(identity, vars(module).values())):
            continue
        for name, value in vars(module).items():
            if identity(value) in replacements:
                found[module, name] = replacements[identity(value)]
    return found


def _imported_meanwhile(
    loaded: set[str], patches: Mapping[Place, object], before: Patches
) -> Patches:
    """What modules that were not there have taken by name, with the values of before.

    Only under the same name, because a new value may be a public function, which a module may well
    want. Ours are left out: they define the new values.
    """
    found: Patches = {}
    for module in [module for name, module in list(sys.modules.items()) if name not in loaded]:
        if (getattr(module, "__file__", None) or "").startswith(HERE):
            continue
        names = getattr(module, "__dict__", {})
        for (owner, name), old in before.items():
            if name in names and names[name] is patches[owner, name]:
                found[module, name] = old
    return found


@functools.cache
def _is_users(module: object) -> bool:
    """Whether it is not PyTorch's, a package's or Python's, of which there are thousands."""
    file = getattr(module, "__file__", None) or PACKAGES
    return not file.startswith((PACKAGES, LIBRARY, HERE, TORCH))


@contextlib.contextmanager
def switched_on(modes: list[TorchFunctionMode]) -> Iterator[None]:
    """The modes for functions are on, and also whenever the autograd engine runs.

    `backward` is itself a function that a mode may replace, so PyTorch has all modes off while it
    runs. A checkpointed forward runs again there, and must see what the first one saw. Layers that
    ask whether somebody watches, before they take PyTorch's fast path, are not told of them.
    """
    run = torch.autograd._engine_run_backward

    def run_with_modes(*args, **kwargs):
        with missing(modes):
            return run(*args, **kwargs)

    def has_torch_function(given) -> bool:
        active = _get_current_function_mode_stack()
        others = [mode for mode in active if mode not in modes]
        subclasses = [value for value in given if type(value) is not torch.Tensor]
        return bool(others or torch.overrides._get_overloaded_args(subclasses))

    patches = {
        (torch.autograd, "_engine_run_backward"): run_with_modes,
        (torch.overrides, "has_torch_function"): has_torch_function,
    }
    with _exchanged(patches), missing(modes):  # no file of a user's has imported these by name
        yield


@contextlib.contextmanager
def missing(modes: list[TorchFunctionMode]) -> Iterator[None]:
    """Those of the modes that are off are on."""
    active = _get_current_function_mode_stack()
    with contextlib.ExitStack() as stack:
        for mode in modes:
            if mode not in active:
                stack.enter_context(mode)
        yield
