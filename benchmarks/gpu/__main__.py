"""`python -m benchmarks.gpu`: see command.py."""

import sys

from benchmarks.gpu.command import main

sys.exit(main())
