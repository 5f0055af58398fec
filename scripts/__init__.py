"""Programs run as `python -m scripts.NAME`."""

import base.with_torch  # noqa: F401  (first: a missing package is answered in one line)
