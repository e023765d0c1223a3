"""What a model takes on this machine: latency, layer by layer, memory and energy, each with how sure it is."""

from edge_opt.measuring.latency import Clock, interleaved, measure_latency
from edge_opt.measuring.session import measure
from edge_opt.measuring.statistics import compare_latencies

__all__ = ["Clock", "compare_latencies", "interleaved", "measure", "measure_latency"]
