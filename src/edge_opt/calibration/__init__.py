"""Calibrate this machine: operators are timed into a file, from which the latency of a model is predicted."""
