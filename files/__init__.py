"""Files on disk: durable writes (durable), JSON from strangers (untrusted), safetensors (tensors).

The ground floor: it knows nothing of models, data sets or runs. `durable` and `untrusted` need only
the standard library, so that data can be prepared without loading torch.
"""
