"""Joules per forward, each figure with its source: sensors, a proxy, a model."""

# Importing a family of meters registers it.
from edge_opt.measure.energy import estimates, jetson, nvml, rapl
from edge_opt.measure.energy.bench import Bench
from edge_opt.measure.energy.measuring import measure_energy
from edge_opt.measure.energy.registry import Meter, Workload, meter, meters

__all__ = [
    "Bench",
    "Meter",
    "Workload",
    "estimates",
    "jetson",
    "measure_energy",
    "meter",
    "meters",
    "nvml",
    "rapl",
]
