"""longhaul: pretraining transformers at very long context. `docs/LOG.md` tells what was tried;
`README.md` where to start.

`pip install -e .` installs this package, with the planner in longhaul.memory, and next to it the
modules and packages of NEIGHBOURS. Own code imports `model` for the decoder and the loss.
"""

import importlib.util
import sys
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
    # Installed with -e, ours would otherwise be hidden by any folder called data.
    if str(here) not in sys.path:
        sys.path.append(str(here))

    for name in NEIGHBOURS:
        found = importlib.util.find_spec(name)
        origin = None if found is None else found.origin
        if origin is None or here not in Path(origin).resolve().parents:
            raise ImportError(
                f"longhaul needs its own module {name!r} of {here}, and import finds "
                f"{origin or 'none'}: rename yours, or copy model.py, which needs only torch"
            )


_find_neighbours()
