"""The file of a calibration, and the device it describes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from edge_opt._support.files import write_named
from edge_opt.boards.catalog import normalized, user_folder
from edge_opt.errors import CalibrationMissing, InvalidCalibration
from edge_opt.records.costs import OpSignature, TensorInfo
from edge_opt.records.devices import Bandwidth, DeviceSpec, Figure, Peak
from edge_opt.records.measurements import Environment
from edge_opt.records.predictions import (
    Calibration,
    FreshOutput,
    GroupDeviation,
    MeasuredBandwidth,
    MeasuredPeak,
    OperatorSample,
    ReferenceRun,
)

SCHEMA = "edge-opt calibration"
VERSION = 1
R = TypeVar("R")


def host_file() -> Path:
    """Where this host's own calibration stands; it need not exist."""
    return user_folder().parent / "calibrations" / "host.json"


def save_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> Path:
    """Write a calibration as JSON; a reader sees the old file or the new one."""
    plain = json.dumps(_plain(calibration), separators=(",", ":"), allow_nan=False)
    return write_named(path, plain, InvalidCalibration)


def load_calibration(path: str | os.PathLike[str] | None = None) -> Calibration:
    """The calibration in a file, or this host's own; a file of something else is refused in one sentence.

    Args:
        path: The file; None takes the one that `calibrate` wrote for this host.
    """
    file = host_file() if path is None else Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path is None:
            raise CalibrationMissing(
                "this host has not been calibrated; run `edge-opt calibrate` (about two minutes), or name a "
                "calibration file"
            ) from None
        raise CalibrationMissing(f"no calibration file {str(path)!r}; `edge-opt calibrate -o FILE` makes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidCalibration(f"cannot read {str(file)!r}: {error}") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidCalibration(f"{file} is not JSON, or is cut off: {error}") from error
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        raise InvalidCalibration(f"{file} is not a calibration; `edge-opt calibrate -o FILE` makes one")
    if data.get("version") != VERSION:
        raise InvalidCalibration(
            f"{file} is a calibration of version {data.get('version')!r}, and this edge-opt reads {VERSION}; "
            "calibrate again"
        )
    try:
        found = _calibration(data)
        fault = _contradiction(found)
        if fault is not None:
            raise ValueError(fault)
        return found
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InvalidCalibration(
            f"{file} is a damaged calibration ({type(error).__name__}: {error}); calibrate again"
        ) from error


def _contradiction(calibration: Calibration) -> str | None:
    """What in a calibration does not fit together; None where all does."""
    if not calibration.samples or not calibration.bandwidths:
        return "it has no samples or no bandwidths"
    for bandwidth in calibration.bandwidths:
        if not 0 < bandwidth.bytes_per_s < float("inf"):
            return f"a bandwidth is {bandwidth.bytes_per_s} bytes per second"
    for position, sample in enumerate(calibration.samples):
        for tensor in sample.signature.outputs:
            if isinstance(tensor, TensorInfo) and bool(tensor.nbytes) != all(tensor.shape):
                return f"samples[{position}] has an output of shape {list(tensor.shape)} and {tensor.nbytes} bytes"
    return None


def _plain(calibration: Calibration) -> dict[str, Any]:
    names = {sample.signature.op: list(sample.signature.names) for sample in calibration.samples}
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "name": calibration.name,
        "created": calibration.created,
        "machine": asdict(calibration.machine),
        "versions": dict(calibration.versions),
        "cpu_seconds": calibration.cpu_seconds,
        "overhead_per_operator_s": calibration.overhead_per_operator_s,
        "overhead_per_module_s": calibration.overhead_per_module_s,
        "whole_deviation": calibration.whole_deviation,
        "deviations": [asdict(item) for item in calibration.deviations],
        "bandwidths": [asdict(item) for item in calibration.bandwidths],
        "peaks": [asdict(item) for item in calibration.peaks],
        "fresh_outputs": [asdict(item) for item in calibration.fresh_outputs],
        "references": [asdict(item) for item in calibration.references],
        # Forms of one operator differ in their parameters, so a name alone does not say which was called.
        "parameters": names,
        "samples": [_plain_sample(sample, names) for sample in calibration.samples],
        **({"remarks": list(calibration.remarks)} if calibration.remarks else {}),
    }


def _plain_sample(sample: OperatorSample, names: Mapping[str, list[str]]) -> dict[str, Any]:
    signature = sample.signature
    found: dict[str, Any] = {
        "op": signature.op,
        "args": [_plain_value(value) for value in signature.args],
        "outputs": [_plain_value(value) for value in signature.outputs],
        "distances": list(sample.distances),
        "seconds": sample.seconds,
    }
    if list(signature.names) != names[signature.op]:
        found["parameters"] = list(signature.names)
    if signature.kwargs:
        found["kwargs"] = {name: _plain_value(value) for name, value in signature.kwargs}
    if signature.strides:
        found["strides"] = [None if item is None else list(item) for item in signature.strides]
    if signature.is_view:
        found["is_view"] = True
    if signature.scratch_bytes:
        found["scratch_bytes"] = signature.scratch_bytes
    if sample.origin is not None:
        found["origin"] = sample.origin
    return found


def _plain_value(value: Any) -> Any:
    if isinstance(value, TensorInfo):
        return {"shape": list(value.shape), "dtype": value.dtype, "nbytes": value.nbytes}
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return {"float": repr(value)}
    return value


def _calibration(data: Mapping[str, Any]) -> Calibration:
    names = {op: tuple(parameters) for op, parameters in data["parameters"].items()}
    return Calibration(
        name=str(data["name"]),
        created=str(data["created"]),
        machine=_record(Environment, data["machine"]),
        versions=tuple((str(name), str(version)) for name, version in data["versions"].items()),
        cpu_seconds=float(data["cpu_seconds"]),
        bandwidths=tuple(_record(MeasuredBandwidth, item) for item in data["bandwidths"]),
        peaks=tuple(_record(MeasuredPeak, item) for item in data["peaks"]),
        overhead_per_operator_s=float(data["overhead_per_operator_s"]),
        overhead_per_module_s=float(data["overhead_per_module_s"]),
        fresh_outputs=tuple(_record(FreshOutput, item) for item in data["fresh_outputs"]),
        references=tuple(_record(ReferenceRun, item) for item in data["references"]),
        samples=tuple(_sample(item, names) for item in data["samples"]),
        whole_deviation=float(data["whole_deviation"]),
        deviations=tuple(_record(GroupDeviation, item) for item in data["deviations"]),
        remarks=tuple(map(str, data.get("remarks", ()))),
    )


def _record(cls: type[R], data: Mapping[str, Any]) -> R:
    """A record from a file, which may be older than the record's last fields."""
    known = [field for field in fields(cls) if field.default is MISSING or field.name in data]  # type: ignore[arg-type]
    return cls(**{field.name: data[field.name] for field in known})


def _sample(data: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> OperatorSample:
    seconds = float(data["seconds"])
    if not 0 < seconds < float("inf"):
        raise ValueError(f"an operator that took {seconds} s")
    signature = OpSignature(
        op=str(data["op"]),
        names=tuple(data["parameters"]) if "parameters" in data else names[data["op"]],
        args=tuple(_value(item) for item in data["args"]),
        kwargs=tuple((name, _value(item)) for name, item in data.get("kwargs", {}).items()),
        outputs=tuple(_value(item) for item in data["outputs"]),
        is_view=bool(data.get("is_view", False)),
        scratch_bytes=int(data.get("scratch_bytes", 0)),
        strides=tuple(None if item is None else tuple(item) for item in data.get("strides", ())),
    )
    return OperatorSample(signature, tuple(data["distances"]), seconds, data.get("origin"))


def _value(item: Any) -> Any:
    if isinstance(item, Mapping):
        if "float" in item:
            return float(item["float"])
        return TensorInfo(tuple(item["shape"]), str(item["dtype"]), int(item["nbytes"]))
    return tuple(_value(entry) for entry in item) if isinstance(item, list) else item


def calibrated_device(calibration: Calibration) -> DeviceSpec:
    """The calibrated machine with its measured bandwidth, its best peak at each precision, and its overhead.

    Args:
        calibration: The machine. Of its peaks the best class of work counts, as for a roof; of its bandwidths, memory.
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
