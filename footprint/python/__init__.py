"""The user's program: its files, what is patched around it, and refusals that name its lines."""
