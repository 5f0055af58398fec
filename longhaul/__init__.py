"""longhaul: pretraining transformers at very long context. `docs/LOG.md` tells what was tried;
`README.md` where to start.

It runs from a clone. Code of your own that imports it has the clone on PYTHONPATH, and finds there
the modules and packages of NEIGHBOURS, too: `model` has the decoder and the loss.
"""

import importlib.util
from pathlib import Path

# Imported under these names, from the folder that this package lies in.
NEIGHBOURS = (
    "base",
    "data",
    "footprint",
    "model",
)


def _find_neighbours():
    """ImportError if a module of the user's own hides one of ours."""
    here = Path(__file__).resolve().parent.parent
    for name in NEIGHBOURS:
        found = importlib.util.find_spec(name)
        origin = None if found is None else found.origin
        if origin is None or here not in Path(origin).resolve().parents:
            raise ImportError(
                f"longhaul needs its own module {name!r} of {here}, and import finds "
                f"{origin or 'none'}: rename yours, or copy model.py, which needs only torch"
            )


_find_neighbours()
