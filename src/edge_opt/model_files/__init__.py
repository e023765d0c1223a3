"""Files of models that are not Python: read, never run."""
