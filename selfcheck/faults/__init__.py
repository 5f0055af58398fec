"""The rows of the fault matrix, a module per group; `selfcheck.fault_matrix` runs them."""
