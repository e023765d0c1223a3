"""Predictions for other machines: devices with their figures, rooflines, estimates, memory."""
