"""The operator profile of a feature stream: what each step of tabular inference costs, and what to do about it."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edge_opt.errors import InvalidInput

# Invented by the earlier tool, not measured anywhere: kept so that its tables come out the same, and labelled so.
FALLBACK_MS_PER_ROW = {
    "input_normalization": 0.01,
    "linear_projection": 0.03,
    "activation": 0.008,
    "decision_head": 0.012,
}
FALLBACK_SOURCE = (
    "fallback: invented constants of the earlier tool, not measured; pass latency_ms_per_row= with your own"
)
_BYTES_PER_FEATURE = {"input_normalization": 8, "linear_projection": 12, "activation": 4}
_HEAD_BYTES_PER_ROW = 8
_KIB = 1024
_MIB = 1024 * 1024
# Above this batch a row's weights are used often enough per load for a cache to pay.
_SMALL_BATCH = 4

StreamPrecision = Literal["fp32", "fp16", "int8"]


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """What a device grants a stream: memory in MiB, and operations per interval."""

    memory_limit_mb: float
    compute_budget: float


@dataclass(frozen=True, slots=True)
class PrecisionAdvice:
    """The widest precision that fits the memory, or None where not even int8 does, and why."""

    precision: StreamPrecision | None
    memory_kb: float | None
    reason: str


def build_hardware_profile_table(
    feature_count: int,
    batch_size: int,
    stream_interval_ms: float,
    *,
    latency_ms_per_row: Mapping[str, float] | None = None,
    latency_source: str | None = None,
) -> dict[str, Any]:
    """Latency and memory of each operator of a batch, their totals, and what they say about precision and cache.

    Without `latency_ms_per_row` the latencies are predicted from this host's calibration (`edge-opt calibrate`), or
    where there is none, invented constants; `estimate_source` says which. Give a figure for each of the four operators
    to use your own, and `latency_source` for where they are from. KiB and MiB are meant by kb and mb.

    >>> table = build_hardware_profile_table(feature_count=64, batch_size=32, stream_interval_ms=10)
    >>> table["totals"]["memory_kb"], round(table["totals"]["latency_ms"], 3)
    (48.25, 1.92)
    """
    _whole("feature_count", feature_count)
    _whole("batch_size", batch_size)
    _positive("stream_interval_ms", stream_interval_ms)
    if latency_ms_per_row is None:
        latency_ms_per_row, latency_source = _calibrated(feature_count, batch_size)
    per_row, source = _latencies(latency_ms_per_row, latency_source)
    rows: list[dict[str, Any]] = [
        {
            "operator": operator,
            "latency_ms": batch_size * ms,
            "memory_kb": batch_size * _bytes_per_row(operator, feature_count) / _KIB,
        }
        for operator, ms in per_row.items()
    ]
    latency_ms = sum(row["latency_ms"] for row in rows)
    memory_kb = sum(row["memory_kb"] for row in rows)
    return {
        "operator_profile": rows,
        "totals": {
            "latency_ms": latency_ms,
            "memory_kb": memory_kb,
            "estimated_bandwidth_mb_s": memory_kb / _KIB / (latency_ms / 1000),
            "stream_utilization": min(1.0, latency_ms / stream_interval_ms),
        },
        "precision_tradeoffs": {
            "fp32_memory_kb": memory_kb,
            "fp16_memory_kb": memory_kb / 2,
            "int8_memory_kb": memory_kb / 4,
            "note": "memory follows from the width alone; latency at fp16 and int8 depends on the device's kernels, "
            "so measure it there",
        },
        "edge_constraints": {
            "cache_sensitivity": _cache_sensitivity(batch_size),
            "bottleneck": _bottleneck(rows, latency_ms, memory_kb),
        },
        "estimate_source": source,
    }


def write_hardware_profile_artifacts(profile: Mapping[str, Any], output_dir: str | Path) -> dict[str, Path]:
    """Write `operator_profile.csv` and `hardware_totals.csv` (UTF-8) and return their paths by name."""
    folder = Path(output_dir)
    tables = {
        "operator_profile": list(_section(profile, "operator_profile")),
        "hardware_totals": [dict(_section(profile, "totals"))],
    }
    paths = {name: folder / f"{name}.csv" for name in tables}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in tables.items():
            _write(paths[name], rows)
    except OSError as error:
        raise InvalidInput(f"cannot write to {str(output_dir)!r}: {error.strerror or error}") from error
    return paths


def estimate_batch_memory_mb(batch_size: int, feature_count: int, bytes_per_feature: int = 8) -> float:
    """MiB of a batch of features; 8 bytes each (float64) unless told otherwise.

    >>> estimate_batch_memory_mb(1024, 128)
    1.0
    """
    _whole("batch_size", batch_size)
    _whole("feature_count", feature_count)
    _whole("bytes_per_feature", bytes_per_feature)
    return batch_size * feature_count * bytes_per_feature / _MIB


def auto_adjust_batch_size(initial_batch: int, feature_count: int, profile: HardwareProfile) -> int:
    """The batch, halved until its memory fits the limit; never below 1, also where one row does not fit.

    >>> auto_adjust_batch_size(1024, 128, HardwareProfile(memory_limit_mb=0.3, compute_budget=1e6))
    256
    """
    _positive("memory_limit_mb", profile.memory_limit_mb)
    batch = initial_batch
    while estimate_batch_memory_mb(batch, feature_count) > profile.memory_limit_mb and batch > 1:
        batch //= 2
    return batch


def compute_utilization(operations: float, profile: HardwareProfile) -> float:
    """Share of the compute budget that the operations take, at most 1.0.

    >>> compute_utilization(250, HardwareProfile(memory_limit_mb=64, compute_budget=1000))
    0.25
    """
    _positive("compute_budget", profile.compute_budget)
    if not _is_number(operations) or operations < 0:
        raise InvalidInput(f"operations is {operations!r}; it must be a number, zero or more")
    return min(1.0, operations / profile.compute_budget)


def find_bottleneck(profile: Mapping[str, Any]) -> str:
    """What limits the stream: the second step of the workflow, after profiling the baseline."""
    return str(_section(profile, "edge_constraints")["bottleneck"])


def recommend_precision(profile: Mapping[str, Any], memory_limit_kb: float) -> PrecisionAdvice:
    """The widest precision whose memory fits, with the reason; `precision` is None where not even int8 does.

    >>> table = build_hardware_profile_table(feature_count=64, batch_size=32, stream_interval_ms=10)
    >>> recommend_precision(table, memory_limit_kb=30).precision
    'fp16'
    """
    _positive("memory_limit_kb", memory_limit_kb)
    sizes = _section(profile, "precision_tradeoffs")
    precisions: tuple[StreamPrecision, ...] = ("fp32", "fp16", "int8")
    too_large: list[str] = []
    for precision in precisions:
        memory_kb = float(sizes[f"{precision}_memory_kb"])
        if memory_kb <= memory_limit_kb:
            wider = f"; {', '.join(too_large)} would not" if too_large else ", and no accuracy is given up"
            return PrecisionAdvice(
                precision, memory_kb, f"{precision} takes {memory_kb:g} kB of {memory_limit_kb:g} kB{wider}"
            )
        too_large.append(f"{precision} ({memory_kb:g} kB)")
    missing_kb = float(sizes["int8_memory_kb"]) - memory_limit_kb
    return PrecisionAdvice(
        None, None, f"nothing fits {memory_limit_kb:g} kB: int8 is {missing_kb:g} kB too large; use a smaller batch"
    )


def utilization_advice(utilization: float) -> str:
    """What a utilisation of the interval or of the compute budget calls for: the last step of the workflow.

    >>> utilization_advice(0.05)
    '5.0 % used: over-provisioned; a smaller or slower device would do, or a larger model'
    """
    if not _is_number(utilization) or utilization < 0:
        raise InvalidInput(f"utilization is {utilization!r}; it must be a share, zero or more")
    if utilization >= 1:
        text = "under-provisioned: the work does not fit; reduce the batch or the precision, or lengthen the interval"
    elif utilization > 0.8:
        text = "close to the limit: a slow moment will miss the interval"
    elif utilization < 0.2:
        text = "over-provisioned; a smaller or slower device would do, or a larger model"
    else:
        text = "well matched"
    return f"{utilization * 100:.1f} % used: {text}"


def stream_advice(profile: Mapping[str, Any]) -> tuple[str, ...]:
    """The advice for edge devices, each with the figure of this profile that it follows from."""
    totals, sizes = _section(profile, "totals"), _section(profile, "precision_tradeoffs")
    constraints = _section(profile, "edge_constraints")
    return (
        f"batch: {totals['memory_kb']:g} kB per batch; process 1 to {_SMALL_BATCH} samples at a time on small devices",
        f"precision: fp16 takes {sizes['fp16_memory_kb']:g} kB and int8 {sizes['int8_memory_kb']:g} kB "
        f"instead of {sizes['fp32_memory_kb']:g} kB",
        f"cache: {constraints['cache_sensitivity']}",
        f"bandwidth: {totals['estimated_bandwidth_mb_s']:.3g} MB/s are moved; moving data often takes longer than "
        "computing with it",
        f"utilisation: {utilization_advice(totals['stream_utilization'])}",
    )


def _calibrated(feature_count: int, batch_size: int) -> tuple[dict[str, float] | None, str | None]:
    """Milliseconds per row of each operator as this host's calibration has them; nothing where there is none."""
    import edge_opt as eo
    from edge_opt.errors import CalibrationMissing

    try:
        calibration = eo.load_calibration()
    except CalibrationMissing:
        return None, None
    from torch import nn

    layers: dict[str, nn.Module] = {
        "input_normalization": nn.BatchNorm1d(feature_count),
        "linear_projection": nn.Linear(feature_count, feature_count),
        "activation": nn.ReLU(),
        "decision_head": nn.Linear(feature_count, 1),
    }
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    found = eo.predict(eo.profile(model, (batch_size, feature_count)), calibration)
    seconds = {layer.path: layer.seconds for layer in found.layers if layer.seconds is not None}
    source = f"predicted from the calibration of {calibration.name} on {calibration.created[:10]}"
    return {name: 1000 * seconds[name] / batch_size for name in layers}, source


def _latencies(given: Mapping[str, float] | None, source: str | None) -> tuple[dict[str, float], str]:
    if given is None:
        return dict(FALLBACK_MS_PER_ROW), FALLBACK_SOURCE
    if set(given) != set(FALLBACK_MS_PER_ROW):
        raise InvalidInput(
            f"latency_ms_per_row has {', '.join(sorted(given)) or 'nothing'}; it must have one figure for each of "
            f"{', '.join(FALLBACK_MS_PER_ROW)}"
        )
    for operator, ms in given.items():
        _positive(f"latency_ms_per_row[{operator!r}]", ms)
    return {operator: float(given[operator]) for operator in FALLBACK_MS_PER_ROW}, source or "given by the caller"


def _bytes_per_row(operator: str, feature_count: int) -> int:
    return _BYTES_PER_FEATURE[operator] * feature_count if operator in _BYTES_PER_FEATURE else _HEAD_BYTES_PER_ROW


def _cache_sensitivity(batch_size: int) -> str:
    if batch_size <= _SMALL_BATCH:
        return f"high: with a batch of {batch_size}, weights are loaded for few rows, so cache reuse is low"
    return f"moderate: with a batch of {batch_size}, weights are reused across rows while they stay in the cache"


def _bottleneck(rows: Sequence[Mapping[str, Any]], latency_ms: float, memory_kb: float) -> str:
    slowest = max(rows, key=lambda row: row["latency_ms"])
    largest = max(rows, key=lambda row: row["memory_kb"])
    return (
        f"{slowest['operator']} takes {slowest['latency_ms'] / latency_ms * 100:.0f} % of the latency; "
        f"{largest['operator']} moves {largest['memory_kb'] / memory_kb * 100:.0f} % of the memory"
    )


def _section(profile: Mapping[str, Any], name: str) -> Any:
    if not isinstance(profile, Mapping) or name not in profile:
        raise InvalidInput(f"the profile has no {name!r}; pass what build_hardware_profile_table returns")
    return profile[name]


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        lines.writeheader()
        lines.writerows(rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _positive(name: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise InvalidInput(f"{name} is {value!r}; it must be a number above zero")


def _whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInput(f"{name} is {value!r}; it must be a whole number of at least 1")
