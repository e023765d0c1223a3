"""What happens on this machine: latency, memory and energy, measured."""
