"""Everything that is measured on one GPU, in one run of ten minutes: `python -m benchmarks.gpu`."""

import time

# The clock of --deadline: nothing is imported before, and torch alone takes seconds to load.
BEGAN = time.monotonic()
