"""Attributes of PyTorch that are others for a while."""

import contextlib
import sys
from collections.abc import Iterator, Mapping

from footprint.refusal import HERE, LIBRARY, PACKAGES, TORCH

Place = tuple[object, str]  # a module or a class, and the name of an attribute


@contextlib.contextmanager
def patched(patches: Mapping[Place, object]) -> Iterator[None]:
    """The attributes have these values inside the `with` block, also where a file of the user's
    has imported them by name.
    """
    own = [(owner, name) for owner, name in patches if name in vars(owner)]
    originals = {(owner, name): vars(owner)[name] for owner, name in own}
    _put(patches)
    imported = _imported({id(originals[place]): patches[place] for place in own})
    taken = {(module, name): vars(module)[name] for module, name in imported}
    _put(imported)
    try:
        yield
    finally:
        for owner, name in patches.keys() - originals.keys():  # a method that is inherited
            delattr(owner, name)
        _put(originals)
        _put(taken)


def _put(values: Mapping[Place, object]) -> None:
    for (owner, name), value in values.items():
        setattr(owner, name, value)


def _imported(replacements: Mapping[int, object]) -> dict[Place, object]:
    """What the user's modules call by names of their own."""
    found: dict[Place, object] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or PACKAGES
        if file.startswith((PACKAGES, LIBRARY, HERE, TORCH)):
            continue
        for name, value in vars(module).items():
            if id(value) in replacements:
                found[module, name] = replacements[id(value)]
    return found
