"""Columns that are there once their module is imported."""
