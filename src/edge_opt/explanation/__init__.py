"""Explain why a variant is faster or is not, and measure how sensitive layers are to compression."""
