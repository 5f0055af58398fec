"""The door for a whole script, unchanged."""
