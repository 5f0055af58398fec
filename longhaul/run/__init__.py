"""What surrounds a run: preflight, guard, heartbeat, health and log."""
