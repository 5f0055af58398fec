"""Files on disk: durable writes (durable), untrusted JSON (untrusted), safetensors (tensors).

The lowest level: nothing in it depends on models, datasets or runs. `durable` and `untrusted` need
only the standard library, so that data can be prepared without loading torch.
"""
