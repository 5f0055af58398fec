"""`python -m benchmarks.gpu`: see command.py."""

from benchmarks.gpu.command import main

main()
