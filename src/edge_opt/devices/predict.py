"""predict(): what a model takes on a calibrated machine, layer by layer, without running it."""

from __future__ import annotations

from collections.abc import Iterator

from edge_opt.devices.assembling import Parts, prediction
from edge_opt.devices.calibration.distances import read_distances
from edge_opt.devices.calibration.overheads import Overheads
from edge_opt.devices.features import describe
from edge_opt.devices.operator_times import operator_times
from edge_opt.devices.timed import time_operators
from edge_opt.errors import InvalidInput
from edge_opt.measure.environment import read_environment
from edge_opt.records import Calibration, ModelProfile, Precision, Prediction

__all__ = ["predict", "time_operators"]


def predict(profile: ModelProfile, calibration: Calibration, precision: Precision = "fp32") -> Prediction:
    """What the profiled model would take on the calibrated machine, with a 90 % interval; nothing is run.

    Operators unlike anything that was sampled are named in `outside`, and make the interval wider.
    """
    if precision != "fp32":
        raise InvalidInput(
            f"precision is {precision!r}, and a calibration has operator times at fp32 only; the roofline of "
            "to_device(calibration) covers the others"
        )
    times = operator_times(calibration)
    trace = profile.trace
    distances = read_distances(trace)
    described = [describe(trace.signatures[call.signature], distances[call.index], times.scales) for call in trace.ops]
    is_outside = [times.is_outside(item) for item in described]
    parts = Parts(times.seconds(described), times.deviations(described, is_outside), described, is_outside)
    overheads = Overheads(calibration.overhead_per_operator_s, calibration.overhead_per_module_s)
    shared = times.shared_deviation(parts)
    remarks = tuple(differences(calibration))
    return prediction(trace, parts, overheads, shared, calibration.name, "calibrated", precision, remarks)


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
