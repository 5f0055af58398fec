"""Attributes of modules that a script imports while it is predicted."""

import builtins
import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping

from footprint.python.patches import Patches, patched

# name of a module -> what is replaced in it
Awaited = Mapping[str, Callable[[types.ModuleType], Patches]]


@contextlib.contextmanager
def patched_when_imported(awaited: Awaited) -> Iterator[None]:
    """Each module has the attributes inside the `with` block from the moment that it is there."""
    waiting = dict(awaited)
    load = builtins.__import__

    with contextlib.ExitStack() as stack:

        def look() -> None:
            for name in [name for name in waiting if _is_loaded(name)]:
                replace = waiting.pop(name)
                stack.enter_context(patched(replace(sys.modules[name])))

        def imported(*args, **kwargs):
            module = load(*args, **kwargs)
            look()
            return module

        look()
        stack.enter_context(patched({(builtins, "__import__"): imported}))
        yield


def _is_loaded(name: str) -> bool:
    """Whether a module is there, and has run to its end."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)
