"""Helpers that several packages need: checks, extras, files, JSON, progress, unchanged models."""
