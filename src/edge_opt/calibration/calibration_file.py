"""The file of a calibration: written as JSON, read and checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_opt._support.files import config_folder, write_named
from edge_opt._support.json import from_plain, read_document, to_plain
from edge_opt.errors import CalibrationMissing, InvalidCalibration, InvalidInput, UnreadableProfile
from edge_opt.records.costs import TensorInfo
from edge_opt.records.predictions import Calibration, RuntimeCalibration

SCHEMA = "edge-opt calibration"
# Version 1 had a layout of its own, and no work of the backward. It is refused: a new calibration takes two minutes,
# and an old one is of an older torch anyway.
VERSION = 2


def host_file() -> Path:
    """Return where this host's own calibration stands; it need not exist."""
    return config_folder() / "calibrations" / "host.json"


def save_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> Path:
    """Write a calibration as JSON; a reader sees the old file or the new one."""
    document = {"schema": SCHEMA, "version": VERSION, "calibration": to_plain(calibration)}
    return write_named(path, json.dumps(document, separators=(",", ":"), allow_nan=False), InvalidCalibration)


def load_calibration(path: str | os.PathLike[str] | None = None) -> Calibration:
    """Read a calibration file, or this host's own calibration.

    Args:
        path: The file; None takes the one that `calibrate` wrote for this host.
    """
    file = host_file() if path is None else Path(path)
    if path is None and not file.is_file():
        raise CalibrationMissing(
            "this host has not been calibrated; run `edge-opt calibrate` (about two minutes), or name a "
            "calibration file"
        )
    if not file.exists():
        raise CalibrationMissing(f"no calibration file {str(path)!r}; `edge-opt calibrate -o FILE` makes one")
    return calibration_from(read_document(file, InvalidCalibration, "`edge-opt calibrate -o FILE` makes one"), file)


def calibration_from(data: Any, file: Path) -> Calibration:
    """Return the calibration that a document holds; `file` is its name, for errors."""
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        raise InvalidCalibration(f"{file} is not a calibration; `edge-opt calibrate -o FILE` makes one")
    if data.get("version") != VERSION:
        raise InvalidCalibration(
            f"{file} is a calibration of version {data.get('version')!r}, and this edge-opt reads {VERSION}; "
            "calibrate again, which takes about two minutes"
        )
    try:
        calibration = from_plain(Calibration, data.get("calibration"))
    except UnreadableProfile as error:
        raise InvalidCalibration(f"{file} is a damaged calibration ({error}); calibrate again") from error
    fault = _contradiction(calibration)
    if fault is not None:
        raise InvalidCalibration(f"{file} is a damaged calibration ({fault}); calibrate again")
    return calibration


def _contradiction(calibration: Calibration) -> str | None:
    """Return what in a calibration does not fit together; None where all does."""
    if not calibration.samples or not calibration.bandwidths:
        return "it has no samples or no bandwidths"
    for bandwidth in calibration.bandwidths:
        if not 0 < bandwidth.bytes_per_s < float("inf"):
            return f"a bandwidth is {bandwidth.bytes_per_s} bytes per second"
    for position, sample in enumerate(calibration.samples):
        if not 0 < sample.seconds < float("inf"):
            return f"samples[{position}] took {sample.seconds} s"
        for tensor in sample.signature.outputs:
            if isinstance(tensor, TensorInfo) and bool(tensor.nbytes) != all(tensor.shape):
                return f"samples[{position}] has an output of shape {list(tensor.shape)} and {tensor.nbytes} bytes"
    return None


def calibrated_runtime(
    calibration: Calibration, precision: str, runtime: str | None, threads: int | None
) -> RuntimeCalibration | None:
    """Return what answers for a runtime on a calibrated machine; None: eager torch. What was not sampled is refused."""
    eager = calibration.machine.threads
    if precision == "fp32" and runtime in (None, "torch") and threads in (None, eager):
        return None
    fitting = [
        item
        for item in calibration.runtimes
        if item.precision == precision and runtime in (None, item.runtime) and threads in (None, item.threads)
    ]
    if fitting:
        # As many threads as torch was calibrated with come first.
        return min(fitting, key=lambda item: (item.threads != eager, item.check.expected_error))
    known = ", ".join([f"torch/fp32, threads: {eager}", *(item.name for item in calibration.runtimes)])
    wanted = "/".join(filter(None, [runtime, precision])) + ("" if threads is None else f", threads: {threads}")
    raise InvalidInput(
        f"{calibration.name} was not calibrated for {wanted}; it has {known}. `edge-opt calibrate --runtime "
        "onnxruntime,openvino --precision fp32,int8 --threads N` adds others"
    )
