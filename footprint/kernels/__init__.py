"""What operators return on fake tensors, and hold inside."""
