"""The run: from a configuration to the model to ship, with everything that was found out on the way."""
