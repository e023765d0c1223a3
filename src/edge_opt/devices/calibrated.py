"""A calibrated machine as a device: the figures that rooflines stand on."""

from __future__ import annotations

from edge_opt.devices.spec import normalized
from edge_opt.records import Bandwidth, Calibration, DeviceSpec, Figure, Peak


def calibrated_device(calibration: Calibration) -> DeviceSpec:
    """The calibrated machine with its measured bandwidth, its best peak at each precision, and its overhead.

    A peak is that of the best class of work, as a roof has to be; a bandwidth is that of memory itself.
    """
    machine = calibration.machine
    source = f"calibration of {calibration.created[:10]}, threads: {machine.threads}, torch {machine.torch}"

    def figure(value: float) -> Figure:
        return Figure(value, source, "measured")

    best: dict[str, float] = {}
    for peak in calibration.peaks:
        best[peak.precision] = max(best.get(peak.precision, 0.0), peak.ops_per_s)
    return DeviceSpec(
        name=normalized(calibration.name),
        title=f"{calibration.name} ({machine.cpu})",
        engine="cpu",
        aliases=(),
        cores=figure(machine.cores),
        clock_hz=None,
        ram_bytes=(figure(machine.memory_bytes),),
        flash_bytes=None,
        bandwidths=(Bandwidth("traffic", "cpu", figure(calibration.memory_bytes_per_s)),),
        bandwidth_unknown=None,
        peaks=tuple(Peak("cpu", precision, figure(value)) for precision, value in best.items()),
        powers=(),
        overhead_s=figure(calibration.overhead_per_operator_s),
        latencies=(),
        note="Figures as measured by a calibration, with that many threads.",
        origin="calibration",
    )
