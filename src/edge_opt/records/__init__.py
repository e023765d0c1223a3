"""Frozen records made of plain values. Tables, files and plots are views of these; import them from their topic."""
