"""The rows of the fault matrix, a module per group; `scripts.fault_matrix` runs them."""
