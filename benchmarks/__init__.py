"""Speed and memory, measured: each program refuses to time what fails its own check, and prints the
table that the README shows.
"""
