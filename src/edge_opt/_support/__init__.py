"""Helpers that several rooms need: checks, extras, files, JSON, state."""
