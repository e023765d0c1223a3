"""Language models: their sources, the cost of a step, rates on devices, and timing on this machine."""
