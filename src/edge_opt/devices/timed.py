"""time_operators(): each distinct operator of a model timed here, without the model."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from edge_opt.devices.assembling import Parts, prediction
from edge_opt.devices.calibration.alone import rounds, undisturbed
from edge_opt.devices.calibration.distances import read_distances
from edge_opt.devices.calibration.heap import hole_for, kept_heap
from edge_opt.devices.calibration.inplace import visit_reference
from edge_opt.devices.calibration.operands import Runnable, Unrunnable
from edge_opt.devices.calibration.overheads import Overheads, fit_overheads
from edge_opt.devices.calibration.references import REFERENCES
from edge_opt.devices.features import FAR_BYTES, NOMINAL, describe
from edge_opt.errors import InvalidInput, MeasurementFailed
from edge_opt.measure.environment import read_environment
from edge_opt.records import Calibration, ModelProfile, Prediction, Trace

_ROUNDS = 7
# Nine in ten of the models of benchmarks/prediction_accuracy.py lay within this factor of what was measured.
_SPREAD = 0.10


def time_operators(
    profile: ModelProfile, *, threads: int | None = None, calibration: Calibration | None = None
) -> Prediction:
    """What the model would take here, from timing each of its distinct operators alone; the model is not run.

    Weights are cold and activations warm, as they are in a forward. What lies between operators is taken from
    `calibration`, or measured on one reference model.
    """
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise InvalidInput(f"threads is {threads!r}; it must be a whole number of at least 1")
    with undisturbed(threads):
        seconds = _signature_seconds(profile.trace)
        if calibration is None:
            overheads = fit_overheads([visit_reference(REFERENCES[1], 1, 4).run()])
        else:
            overheads = Overheads(calibration.overhead_per_operator_s, calibration.overhead_per_module_s)
        machine = read_environment()
    distances = read_distances(profile.trace)
    described = [
        describe(profile.trace.signatures[call.signature], distances[call.index], NOMINAL) for call in profile.trace.ops
    ]
    times = np.array([seconds[call.signature] for call in profile.trace.ops])
    parts = Parts(times, np.full(len(times), _SPREAD), described, (False,) * len(times))
    remark = f"every distinct operator was timed alone on {machine.cpu} with {machine.threads} thread(s)"
    return prediction(profile.trace, parts, overheads, _SPREAD, "this machine", "timed", "fp32", (remark,))


def _signature_seconds(trace: Trace) -> list[float]:
    """Least seconds of each distinct operator, in rounds over all of them in the order in which they first run."""
    counts = Counter(call.signature for call in trace.ops)
    distances = read_distances(trace)
    first = {call.signature: call for call in reversed(trace.ops)}
    order = sorted(first, key=lambda signature: first[signature].index)
    copies: dict[int, list[Runnable]] = {}
    with torch.inference_mode():
        for signature in order:
            call = first[signature]
            is_warm = [
                trace.storages[storage].role in ("activation", "input") and distance < FAR_BYTES
                for storage, distance in zip(call.reads, distances[call.index], strict=True)
            ]
            # Layers that look alike have weights of their own; so many copies push each other out of the cache.
            wanted = min(counts[signature], _ROUNDS) if not all(is_warm) else 1
            try:
                copies[signature] = [Runnable(trace.signatures[signature], is_warm) for _ in range(wanted)]
                copies[signature][0].run()
            except (Unrunnable, RuntimeError, IndexError, TypeError, NotImplementedError) as error:
                op = trace.signatures[signature].op
                raise MeasurementFailed(
                    f"operator {op} cannot be timed alone ({error}); use a calibration instead"
                ) from error
        found: dict[int, list[float]] = {signature: [] for signature in order}
        with kept_heap(hole_for(trace)):
            for turn in range(_ROUNDS):
                runnables = [copies[signature][turn % len(copies[signature])] for signature in order]
                for signature, times in zip(order, rounds(runnables, 1), strict=True):
                    found[signature] += times
    return [min(found[index]) for index in range(len(trace.signatures))]
