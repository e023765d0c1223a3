"""The run: from a configuration to the model to ship, and the sweep of a model of the user's."""
