"""What a PyTorch model costs on limited hardware, layer by layer, before and after it is shrunk."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_opt import compress
    from edge_opt.checking import check
    from edge_opt.comparing import compare
    from edge_opt.compress.explaining import explain
    from edge_opt.compress.sensitivity import sensitivity
    from edge_opt.cost.conventions import reconcile
    from edge_opt.cost.registry import Work, cost_rule, free_operators
    from edge_opt.devices.calibrate import calibrate
    from edge_opt.devices.calibrated import calibrated_device
    from edge_opt.devices.calibration_files import load_calibration
    from edge_opt.devices.catalog import device, devices
    from edge_opt.devices.estimate import estimate
    from edge_opt.devices.predict import predict
    from edge_opt.devices.roofline import roofline
    from edge_opt.devices.timed import time_operators
    from edge_opt.devices.utilization import explain_utilization, layer_utilizations, utilization
    from edge_opt.errors import EdgeOptError
    from edge_opt.fitting.batches import fit_batch
    from edge_opt.fitting.targets import compare_targets
    from edge_opt.measure.api import measure
    from edge_opt.pipeline.sweeping import sweep
    from edge_opt.profiling import clear_caches, profile
    from edge_opt.records import ModelProfile, OpCost, TensorInfo
    from edge_opt.report.drawing import bar_chart
    from edge_opt.report.writers import load
    from edge_opt.search.space import Space
    from edge_opt.search.sweep import run_sweep
    from edge_opt.stream import (
        HardwareProfile,
        PrecisionAdvice,
        auto_adjust_batch_size,
        build_hardware_profile_table,
        compute_utilization,
        estimate_batch_memory_mb,
        find_bottleneck,
        recommend_precision,
        stream_advice,
        utilization_advice,
        write_hardware_profile_artifacts,
    )
    from edge_opt.trace.inputs import InputSpec

__version__ = "0.1.0"

__all__ = [
    "EdgeOptError",
    "HardwareProfile",
    "InputSpec",
    "ModelProfile",
    "OpCost",
    "PrecisionAdvice",
    "Space",
    "TensorInfo",
    "Work",
    "auto_adjust_batch_size",
    "bar_chart",
    "build_hardware_profile_table",
    "calibrate",
    "calibrated_device",
    "check",
    "clear_caches",
    "compare",
    "compare_targets",
    "compress",
    "compute_utilization",
    "cost_rule",
    "device",
    "devices",
    "estimate",
    "estimate_batch_memory_mb",
    "explain",
    "explain_utilization",
    "find_bottleneck",
    "fit_batch",
    "free_operators",
    "layer_utilizations",
    "load",
    "load_calibration",
    "measure",
    "predict",
    "profile",
    "recommend_precision",
    "reconcile",
    "roofline",
    "run_sweep",
    "sensitivity",
    "stream_advice",
    "sweep",
    "time_operators",
    "utilization",
    "utilization_advice",
    "write_hardware_profile_artifacts",
]

# Where each public name lives. Nothing is imported until it is asked for, so that `import edge_opt` costs nothing.
_HOMES = {
    "EdgeOptError": "errors",
    "HardwareProfile": "stream",
    "InputSpec": "trace.inputs",
    "ModelProfile": "records",
    "OpCost": "records",
    "PrecisionAdvice": "stream",
    "Space": "search.space",
    "TensorInfo": "records",
    "Work": "cost.registry",
    "auto_adjust_batch_size": "stream",
    "bar_chart": "report.drawing",
    "build_hardware_profile_table": "stream",
    "check": "checking",
    "calibrate": "devices.calibrate",
    "calibrated_device": "devices.calibrated",
    "clear_caches": "profiling",
    "compare": "comparing",
    "compare_targets": "fitting.targets",
    "compute_utilization": "stream",
    "cost_rule": "cost",
    "device": "devices.catalog",
    "devices": "devices",
    "estimate": "devices.estimate",
    "estimate_batch_memory_mb": "stream",
    "explain": "compress.explaining",
    "explain_utilization": "devices.utilization",
    "find_bottleneck": "stream",
    "fit_batch": "fitting.batches",
    "free_operators": "cost",
    "layer_utilizations": "devices.utilization",
    "load": "report.writers",
    "load_calibration": "devices.calibration_files",
    "measure": "measure.api",
    "predict": "devices.predict",
    "profile": "profiling",
    "recommend_precision": "stream",
    "reconcile": "cost.conventions",
    "roofline": "devices.roofline",
    "sensitivity": "compress.sensitivity",
    "run_sweep": "search.sweep",
    "stream_advice": "stream",
    "time_operators": "devices.timed",
    "sweep": "pipeline.sweeping",
    "utilization": "devices.utilization",
    "utilization_advice": "stream",
    "write_hardware_profile_artifacts": "stream",
}


# Packages that are used by their own name, as in `eo.compress.prune`.
_PACKAGES = ("compress",)


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _PACKAGES:
        raise AttributeError(f"module 'edge_opt' has no attribute {name!r}")
    if name in _PACKAGES:
        return import_module(f"edge_opt.{name}")
    value = getattr(import_module(f"edge_opt.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
