"""This machine sampled into a file, and a model's time predicted from it."""
