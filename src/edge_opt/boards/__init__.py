"""What happens on another machine: devices with their figures, rooflines, estimates, what fits there."""
