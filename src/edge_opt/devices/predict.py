"""predict(): what a model takes on a calibrated machine, layer by layer, without running it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edge_opt import units
from edge_opt.devices.assembling import Parts, prediction
from edge_opt.devices.calibration.distances import read_distances
from edge_opt.devices.calibration.overheads import Overheads
from edge_opt.devices.features import FRESH_BYTES, describe
from edge_opt.devices.operator_times import operator_times
from edge_opt.devices.timed import time_operators
from edge_opt.errors import InvalidInput
from edge_opt.measure.environment import read_environment
from edge_opt.records import Calibration, ModelProfile, Precision, Prediction, Trace

__all__ = ["predict", "time_operators"]

_NEGLIGIBLE = 1e-3
_OUTSIDE = 3.0  # how much wider an operator's interval is where nothing like it was sampled
_UNKNOWN = 0.3


def predict(profile: ModelProfile, calibration: Calibration, precision: Precision = "fp32") -> Prediction:
    """What the profiled model would take on the calibrated machine, with a 90 % interval; nothing is run.

    Operators unlike anything that was sampled are named in `outside`, and make the interval wider.
    """
    if precision != "fp32":
        raise InvalidInput(
            f"precision is {precision!r}, and a calibration has operator times at fp32 only; "
            "eo.calibrated_device(calibration) gives a roofline at the others"
        )
    times = operator_times(calibration)
    trace = profile.trace
    distances = read_distances(trace)
    described = [describe(trace.signatures[call.signature], distances[call.index], times.scales) for call in trace.ops]
    seconds = times.seconds(described)
    # An operator that takes next to nothing is no reason to doubt the rest.
    floor_s = _NEGLIGIBLE * float(seconds.sum())
    is_outside = [value > floor_s and times.is_outside(item) for value, item in zip(seconds, described, strict=True)]
    usual = {item.group: item.deviation for item in calibration.deviations}
    deviations = [
        usual.get(item.group, _UNKNOWN) * (_OUTSIDE if outside else 1.0)
        for item, outside in zip(described, is_outside, strict=True)
    ]
    parts = Parts(seconds, np.array(deviations), described, is_outside)
    overheads = Overheads(calibration.overhead_per_operator_s, calibration.overhead_per_module_s)
    remarks = (*differences(calibration), *_fresh_memory(trace, calibration))
    return prediction(
        trace, parts, overheads, calibration.whole_deviation, calibration.name, "calibrated", precision, remarks
    )


def _fresh_memory(trace: Trace, calibration: Calibration) -> Iterator[str]:
    """What the C library may add where it maps large outputs anew in each forward."""
    large = sum(
        storage.nbytes
        for storage in trace.storages
        if storage.role == "activation" and storage.born is not None and storage.nbytes >= FRESH_BYTES
    )
    if large and calibration.fresh_outputs:
        item = max(calibration.fresh_outputs, key=lambda item: item.nbytes)
        extra_s = max(0.0, item.fresh_s - item.reused_s) / item.nbytes * large
        yield (
            f"{units.size(large)} of outputs are so large that the C library may map them anew in each forward, which "
            f"would take up to {units.duration(extra_s)} more; the figures are for memory that is kept"
        )


def differences(calibration: Calibration) -> Iterator[str]:
    """What the calibration was made with that is different here, one sentence each; none on the machine itself."""
    here, there = read_environment(), calibration.machine
    if (here.cpu, here.cores, here.system.split()[0]) != (there.cpu, there.cores, there.system.split()[0]):
        yield (
            f"the calibration is of another machine: {there.cpu}, {there.cores} core(s), {there.system}; "
            f"the figures are for that one, not for {here.cpu}"
        )
        return
    if here.torch != there.torch:
        yield f"the calibration was made with torch {there.torch}, and this is {here.torch}; calibrate again"
    if here.threads != there.threads:
        yield (
            f"the calibration was made with {there.threads} thread(s), and torch now uses {here.threads}; "
            f"the figures are for {there.threads}"
        )
