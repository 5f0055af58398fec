"""Speed and memory, measured: each program refuses to time what fails its own check, and prints the
table that docs/BENCHMARKS.md or docs/FITTING.md shows.
"""

import base.installed  # noqa: F401  (first: a missing package is answered in one line)
