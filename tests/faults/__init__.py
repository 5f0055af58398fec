"""Faults that a run must survive: kills, stops, disks that are full or fail, another resume."""
