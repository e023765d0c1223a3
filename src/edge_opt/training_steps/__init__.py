"""A training step: forward, backward and optimizer as one trace, without computing anything."""
