"""longhaul: pretraining transformers at very long context. `docs/LOG.md` tells what was tried;
`README.md` where to start.
"""
