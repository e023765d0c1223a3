"""Batch memory and compute limits of a feature stream under their published names."""

from edge_opt.stream import HardwareProfile, auto_adjust_batch_size, compute_utilization, estimate_batch_memory_mb

__all__ = ["HardwareProfile", "auto_adjust_batch_size", "compute_utilization", "estimate_batch_memory_mb"]
