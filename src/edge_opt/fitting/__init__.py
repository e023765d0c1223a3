"""Whether a model fits: the largest batch that a memory holds, and targets side by side."""
