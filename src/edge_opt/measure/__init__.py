"""What a model takes on this machine: latency, layer by layer, memory and energy, each with how sure it is."""

import sys
from types import ModuleType

from edge_opt.measure.api import measure
from edge_opt.measure.latency import interleaved, measure_latency
from edge_opt.measure.statistics import compare_latencies
from edge_opt.measure.stopwatch import Clock

__all__ = ["Clock", "compare_latencies", "interleaved", "measure", "measure_latency"]


class _CallablePackage(ModuleType):
    """Importing a part of this package puts the package where `edge_opt.measure`, the function, is looked for."""

    __call__ = staticmethod(measure)


sys.modules[__name__].__class__ = _CallablePackage
