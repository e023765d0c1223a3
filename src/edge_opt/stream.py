"""The operator profile of a feature stream: costs of each step of tabular inference, with advice."""

from __future__ import annotations

import csv
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from edge_opt._support.checks import check_positive, check_whole, is_number, is_whole
from edge_opt.errors import InvalidInput
from edge_opt.records.fields import described, field, record
from edge_opt.units import MIB

if TYPE_CHECKING:
    from torch import nn

# The earlier tool invented these figures. They are kept, and labelled so, to reproduce its published tables.
FALLBACK_MS_PER_ROW = {
    "input_normalization": 0.01,
    "linear_projection": 0.03,
    "activation": 0.008,
    "decision_head": 0.012,
}
PUBLISHED = "published"
FALLBACK_SOURCE = "published: invented constants of the earlier tool, not measured anywhere"
# Bytes of each feature, and bytes of a row beside them.
_BYTES = {"input_normalization": (8, 0), "linear_projection": (12, 0), "activation": (4, 0), "decision_head": (0, 8)}
_KIB = 1024
# Above this batch a row's weights are used often enough per load for a cache to pay.
_SMALL_BATCH = 4

StreamPrecision = Literal["fp32", "fp16", "int8"]


# Not frozen and without slots: the published one can be changed, and taken apart with vars().
@described
@dataclass
class HardwareProfile:
    """The memory and compute that a stream may use."""

    memory_limit_mb: float = field("Most memory that a batch may take, in MiB; above zero.")
    compute_budget: float = field("Operations that the device can do in one interval; above zero.")


@record
class PrecisionAdvice:
    """The widest precision that fits the memory, and why."""

    precision: StreamPrecision | None = field("The precision; None where not even int8 fits.")
    memory_kb: float | None = field("KiB of a batch in it; None where none fits.")
    reason: str = field("One sentence with the figures: what fits, and what does not.")


def build_hardware_profile_table(
    feature_count: int,
    batch_size: int,
    stream_interval_ms: float,
    *,
    latency_ms_per_row: Mapping[str, float] | Literal["published"] | None = None,
    latency_source: str | None = None,
) -> dict[str, Any]:
    """Return latency and memory of each operator of a batch, their totals, and hints about precision and cache.

    kb and mb mean KiB and MiB. `estimate_source` in the result says where the latencies come from, and `remarks`
    which arguments were changed.

    Args:
        feature_count: Features of a row; 0 is taken as 1, as it was published, with a remark.
        batch_size: Rows of a batch; 0 is taken as 1, likewise.
        stream_interval_ms: Milliseconds between two batches.
        latency_ms_per_row: Milliseconds that each of the four operators takes for a row. None, the default: predicted
            from this host's calibration (`edge-opt calibrate`), or where there is none, timed here in a few
            milliseconds. "published": the invented constants of the earlier tool.
        latency_source: Where your own figures are from; said in the result. None says "given by the caller".

    >>> table = build_hardware_profile_table(64, 32, stream_interval_ms=10, latency_ms_per_row="published")
    >>> table["totals"]["memory_kb"], round(table["totals"]["latency_ms"], 3)
    (48.25, 1.92)
    """
    remarks: list[str] = []
    feature_count = _at_least_one("feature_count", feature_count, remarks)
    batch_size = _at_least_one("batch_size", batch_size, remarks)
    check_positive("stream_interval_ms", stream_interval_ms)
    per_row, source = _latencies(latency_ms_per_row, latency_source, feature_count, batch_size)
    rows: list[dict[str, Any]] = [
        {
            "operator": operator,
            "latency_ms": batch_size * ms,
            "memory_kb": batch_size * (per_feature * feature_count + beside) / _KIB,
        }
        for operator, ms in per_row.items()
        for per_feature, beside in (_BYTES[operator],)
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
        "remarks": remarks,
    }


def write_hardware_profile_artifacts(profile: Mapping[str, Any], output_dir: str | Path) -> dict[str, Any]:
    """Write `operator_profile.csv` and `hardware_totals.csv` (UTF-8) and return where they are.

    The paths stand as text under `operator_profile_csv` and `hardware_totals_csv`, as published, and as `Path` under
    `operator_profile` and `hardware_totals`.

    Args:
        profile: What `build_hardware_profile_table` returned.
        output_dir: The folder; it is made where it is not there.
    """
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
    return {**{f"{name}_csv": str(path) for name, path in paths.items()}, **paths}


def estimate_batch_memory_mb(batch_size: int, feature_count: int, bytes_per_feature: int = 8) -> float:
    """Return the MiB of a batch of features.

    Args:
        batch_size: Rows of the batch, at least 1.
        feature_count: Features of a row, at least 1.
        bytes_per_feature: Bytes of one feature; 8, as NumPy's float64 has.

    >>> estimate_batch_memory_mb(1024, 128)
    1.0
    """
    check_whole("batch_size", batch_size)
    check_whole("feature_count", feature_count)
    check_whole("bytes_per_feature", bytes_per_feature)
    return batch_size * feature_count * bytes_per_feature / MIB


def auto_adjust_batch_size(initial_batch: int, feature_count: int, profile: HardwareProfile) -> int:
    """Halve the batch until its memory fits the limit; never below 1, even if one row does not fit.

    Args:
        initial_batch: Rows of the batch to begin with, at least 1.
        feature_count: Features of a row, 8 bytes each; at least 1.
        profile: What the device grants; its memory limit counts.

    >>> auto_adjust_batch_size(1024, 128, HardwareProfile(memory_limit_mb=0.3, compute_budget=1e6))
    256
    """
    check_positive("memory_limit_mb", profile.memory_limit_mb)
    batch = initial_batch
    while estimate_batch_memory_mb(batch, feature_count) > profile.memory_limit_mb and batch > 1:
        batch //= 2
    return batch


def compute_utilization(operations: float, profile: HardwareProfile) -> float:
    """Return the share of the compute budget that the operations take, at most 1.0.

    Args:
        operations: Operations of one interval, zero or more.
        profile: What the device grants; its compute budget counts.

    >>> compute_utilization(250, HardwareProfile(memory_limit_mb=64, compute_budget=1000))
    0.25
    """
    check_positive("compute_budget", profile.compute_budget)
    if not is_number(operations) or operations < 0:
        raise InvalidInput(f"operations is {operations!r}; it must be a number, zero or more")
    return min(1.0, operations / profile.compute_budget)


def find_bottleneck(profile: Mapping[str, Any]) -> str:
    """Return what limits the stream: the second step of the workflow, after profiling the baseline.

    Args:
        profile: What `build_hardware_profile_table` returned.
    """
    return str(_section(profile, "edge_constraints")["bottleneck"])


def recommend_precision(profile: Mapping[str, Any], memory_limit_kb: float) -> PrecisionAdvice:
    """Return the widest precision whose memory fits, with the reason; None if not even int8 fits.

    Args:
        profile: What `build_hardware_profile_table` returned.
        memory_limit_kb: Most memory that a batch may take, in KiB; above zero.

    >>> table = build_hardware_profile_table(64, 32, stream_interval_ms=10, latency_ms_per_row="published")
    >>> recommend_precision(table, memory_limit_kb=30).precision
    'fp16'
    """
    check_positive("memory_limit_kb", memory_limit_kb)
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
    """Return advice for a utilization of the interval or of the compute budget: the last step of the workflow.

    Args:
        utilization: The share in use, zero or more; 1.0 is all of it. Below 0.2 is over-provisioned, above 0.8 close
            to the limit, from 1.0 on too much.

    >>> utilization_advice(0.05)
    '5.0 % used: over-provisioned; a smaller or slower device would do, or a larger model'
    """
    if not is_number(utilization) or utilization < 0:
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
    """Return advice for edge devices, each with the figure of this profile that it follows from.

    Args:
        profile: What `build_hardware_profile_table` returned.
    """
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


def _calibrated(feature_count: int, batch_size: int) -> tuple[dict[str, float], str] | None:
    """Return milliseconds per row of each operator, predicted from this host's calibration; None without one."""
    import edge_opt as eo
    from edge_opt.calibration.calibration_file import load_calibration
    from edge_opt.errors import CalibrationMissing

    try:
        calibration = load_calibration()
    except CalibrationMissing:
        return None
    layers = _layers(feature_count)
    prediction = eo.predict(eo.profile(layers, (batch_size, feature_count)), calibration)
    seconds = {layer.path: layer.seconds for layer in prediction.layers if layer.seconds is not None}
    source = f"predicted from the calibration of {calibration.name} on {calibration.created[:10]}"
    return {name: 1000 * seconds[name] / batch_size for name in FALLBACK_MS_PER_ROW}, source


def _layers(feature_count: int) -> nn.Sequential:
    """Return the four operators as named layers."""
    from torch import nn

    return nn.Sequential(
        OrderedDict(
            input_normalization=nn.BatchNorm1d(feature_count),
            linear_projection=nn.Linear(feature_count, feature_count),
            activation=nn.ReLU(),
            decision_head=nn.Linear(feature_count, 1),
        )
    ).eval()


# Calls of one operator that are timed: enough for a median, and at most two milliseconds of them.
_CALLS = 25
_TIMED_S = 2e-3


def _timed(feature_count: int, batch_size: int) -> tuple[dict[str, float], str]:
    """Return milliseconds per row of each operator: the median of some calls here, after two untimed ones."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        value = torch.zeros(batch_size, feature_count)
        ms_per_row: dict[str, float] = {}
        for name, layer in _layers(feature_count).named_children():
            for _ in range(2):
                result = layer(value)
            ms_per_row[name] = 1000 * _median_s(partial(layer, value)) / batch_size
            value = result
    threads = torch.get_num_threads()
    source = f"timed here: the median of up to {_CALLS} calls of each operator in torch, {threads} threads"
    return ms_per_row, source


def _median_s(call: Callable[[], Any]) -> float:
    seconds: list[float] = []
    while len(seconds) < _CALLS and (len(seconds) < 3 or math.fsum(seconds) < _TIMED_S):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    # A clock that did not move between two readings still leaves a time above zero to divide by.
    return max(median(seconds), 1e-9)


def _latencies(
    given: Mapping[str, float] | str | None, source: str | None, feature_count: int, batch_size: int
) -> tuple[dict[str, float], str]:
    """Return milliseconds per row of each operator, and where they come from."""
    if given is None:
        return _calibrated(feature_count, batch_size) or _timed(feature_count, batch_size)
    if given == PUBLISHED:
        return dict(FALLBACK_MS_PER_ROW), FALLBACK_SOURCE
    if not isinstance(given, Mapping) or set(given) != set(FALLBACK_MS_PER_ROW):
        names = ", ".join(sorted(given)) if isinstance(given, Mapping) else repr(given)
        raise InvalidInput(
            f"latency_ms_per_row has {names or 'nothing'}; it must have one figure for each of "
            f"{', '.join(FALLBACK_MS_PER_ROW)}, or be {PUBLISHED!r}"
        )
    for operator, ms in given.items():
        check_positive(f"latency_ms_per_row[{operator!r}]", ms)
    return {operator: float(given[operator]) for operator in FALLBACK_MS_PER_ROW}, source or "given by the caller"


def _at_least_one(name: str, value: Any, remarks: list[str]) -> int:
    """Return the value, or 1 with a remark if it is zero."""
    if is_whole(value, least=0) and value == 0:
        remarks.append(f"{name} is 0 and was taken as 1, as in the earlier tool")
        return 1
    check_whole(name, value)
    return int(value)


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
