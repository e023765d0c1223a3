"""Measure a model on this machine: latency by layer, memory and energy, with intervals."""

from typing import TYPE_CHECKING, Any

from edge_opt.measuring.latency import Clock, interleaved, measure_latency
from edge_opt.measuring.statistics import compare_latencies

if TYPE_CHECKING:
    from edge_opt.measuring.session import measure as measure

__all__ = ["Clock", "compare_latencies", "interleaved", "measure", "measure_latency"]


def __getattr__(name: str) -> Any:
    # The only one that needs torch: a board that times ONNX files has none.
    if name == "measure":
        from edge_opt.measuring.session import measure

        return measure
    raise AttributeError(f"module 'edge_opt.measuring' has no attribute {name!r}")
