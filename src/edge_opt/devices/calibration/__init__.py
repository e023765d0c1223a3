"""Calibrating a machine: what is timed there, under which conditions, and the file it ends up in."""
