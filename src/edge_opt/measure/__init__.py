"""What a model takes on this machine: time, memory and energy, each with its provenance."""
