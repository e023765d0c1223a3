"""time_operators(): each distinct operator of a model timed here, without the model."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import numpy as np
import torch

from edge_opt.devices.assembling import Parts, prediction
from edge_opt.devices.calibration.alone import rounds, undisturbed
from edge_opt.devices.calibration.distances import read_distances
from edge_opt.devices.calibration.heap import hole_for, kept_heap
from edge_opt.devices.calibration.inplace import visit_reference
from edge_opt.devices.calibration.operands import Runnable, Unrunnable
from edge_opt.devices.calibration.overheads import Overheads
from edge_opt.devices.calibration.references import REFERENCES
from edge_opt.devices.features import FAR_BYTES, NOMINAL, describe
from edge_opt.errors import InvalidInput, MeasurementFailed
from edge_opt.measure.environment import read_environment
from edge_opt.records import ModelProfile, Prediction, Trace

_ROUNDS = 7
# Nine in ten of the models of benchmarks/prediction_accuracy.py lay within 1.645 of these of what was measured.
_DEVIATION = 0.06
_REFERENCES = (("residual-56", 1), ("mobile-hardswish", 1), ("mobile-hardswish", 8), ("text-384", 1), ("dense-28", 1))


def time_operators(profile: ModelProfile, *, threads: int | None = None) -> Prediction:
    """What the model would take here, from timing each of its distinct operators alone; the model is not run.

    Weights are cold and activations warm, as they are in a forward. What a forward adds to its operators is measured
    on a few reference models, once per process.
    """
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise InvalidInput(f"threads is {threads!r}; it must be a whole number of at least 1")
    trace = profile.trace
    with undisturbed(threads):
        machine = read_environment()
        scale, operator_s = _in_place(machine.threads)
        alone_s = _signature_seconds(trace)
    distances = read_distances(trace)
    described = [describe(trace.signatures[call.signature], distances[call.index], NOMINAL) for call in trace.ops]
    seconds = scale * np.array([alone_s[call.signature] for call in trace.ops])
    parts = Parts(seconds, np.full(len(seconds), _DEVIATION), described, (False,) * len(seconds))
    remark = f"every distinct operator was timed alone on {machine.cpu} with {machine.threads} thread(s)"
    overheads = Overheads(operator_s, 0.0)
    return prediction(trace, parts, overheads, _DEVIATION, "this machine", "timed", "fp32", (remark,))


@lru_cache(maxsize=8)
def _in_place(threads: int) -> tuple[float, float]:
    """How much longer operators take inside a model than alone, as a factor, and seconds on top of each."""
    references = {reference.name: reference for reference in REFERENCES}
    rows = []
    for name, batch in _REFERENCES:
        visit = visit_reference(references[name], batch, 3)
        alone_s = _signature_seconds(visit.trace)
        total_s = sum(alone_s[call.signature] for call in visit.trace.ops)
        # Each model counts the same, however long it takes.
        rows.append((total_s / visit.seconds, len(visit.trace.ops) / visit.seconds))
    table = np.array(rows)
    scale, operator_s = np.linalg.lstsq(table, np.ones(len(table)), rcond=None)[0]
    if operator_s < 0:
        return float(np.median(1 / table[:, 0])), 0.0
    return float(scale), float(operator_s)


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
            # Arguments are made from shapes alone; what an operator says to values it cannot use is its own choice.
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
