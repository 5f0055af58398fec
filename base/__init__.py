"""The ground that data/ and longhaul/ share: durable writes (durable), untrusted JSON (untrusted),
safetensors (tensors), the flags of every command (flags), whether the packages are there
(installed), torch itself (with_torch), and what depends on the machine (machine).

Nothing in it depends on models, datasets or runs. `durable`, `untrusted`, `flags` and `installed`
need only the standard library, so that data can be prepared without loading torch.
"""
