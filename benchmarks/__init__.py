"""Speed and memory, measured: each program refuses to time what fails its own check, and prints the
table; docs/RESULTS.md says which figures are from which.
"""

import base.with_torch  # noqa: F401  (first: a missing package is answered in one line)
