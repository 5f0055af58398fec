"""Everything that is measured on one GPU, in ten minutes: `python -m benchmarks.gpu`."""
