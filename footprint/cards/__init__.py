"""What a GPU's allocator makes of a record, and which cards hold it."""
