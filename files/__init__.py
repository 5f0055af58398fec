"""Files: durable writes, bytes from strangers, tensors on disk. The ground floor: it knows nothing of models or data."""
