"""A language model served: where it comes from, what a step costs, what a device makes of it, and the real loop."""
