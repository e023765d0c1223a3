"""Layer-wise estimates of a model, and bandwidth and compute that it achieves: thin over `edge_opt.profile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edge_opt as eo
from edge_opt._support.checks import check_whole
from edge_opt._support.files import write_whole
from edge_opt.records.costs import TensorInfo
from edge_opt.records.fields import Record, described, field
from edge_opt.report.png import bar_chart
from edge_opt.text import spreadsheet

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

__all__ = [
    "LayerEstimate",
    "estimate_layerwise_stats",
    "explain_utilization",
    "precision_tradeoff_table",
    "save_hardware_artifacts",
    "summarize_hardware",
]


# Not frozen and without slots: the published one can be changed, and taken apart with vars().
@described
@dataclass
class LayerEstimate(Record):
    """One layer that computes, with its size and its work for the whole batch."""

    layer: str = field("Path of the module; the name of the model where the model itself computes.")
    output_elements: int = field("Numbers in its outputs.")
    parameter_bytes: int = field("Bytes of its parameters; 0 in later rows of a layer that is called more than once.")
    activation_bytes: int = field("Bytes of its outputs.")
    macs: int = field("Multiply-accumulates.")


def estimate_layerwise_stats(
    model: nn.Module,
    batch_size: int,
    input_shape: tuple[int, ...] = (1, 28, 28),
    activation_bytes_per_value: int | None = None,
) -> pd.DataFrame:
    """Return a table with one row per layer that multiplies and accumulates, in order of execution.

    Functional products stand under the module that calls them; a layer that is called twice has two rows, its
    parameters in the first.

    Args:
        model: Any model; it is not modified.
        batch_size: Samples in one forward, at least 1.
        input_shape: Shape of one sample, without the batch; the default is SmallCNN's.
        activation_bytes_per_value: Bytes of one number of an output, such as 1 for int8; None, the default, takes the
            width of the tensors themselves.

    >>> from edge_opt.model import SmallCNN
    >>> estimate_layerwise_stats(SmallCNN(), batch_size=1)[["layer", "macs"]].values.tolist()
    [['conv1', 112896], ['conv2', 903168], ['classifier', 15680]]
    """
    import pandas as pd

    check_whole("batch_size", batch_size)
    profile = eo.profile(model, (batch_size, *input_shape))
    rows = [asdict(estimate) for estimate in layer_estimates(profile, activation_bytes_per_value)]
    return pd.DataFrame(rows, columns=[column.name for column in fields(LayerEstimate)])


def layer_estimates(profile: eo.ModelProfile, bytes_per_value: int | None = None) -> list[LayerEstimate]:
    """Return the layers of a profile that multiply and accumulate, in order of execution.

    Args:
        profile: The model and its inputs.
        bytes_per_value: Bytes of one number of an output; None, the default, takes the width of the tensors themselves.
    """
    outputs: dict[int, list[TensorInfo]] = {}
    for call in profile.trace.ops:
        if profile.prices[call.signature].cost.macs:
            outputs.setdefault(call.module, []).extend(profile.trace.signatures[call.signature].outputs)
    estimates = []
    for layer in profile.layers:
        if layer.cost.macs:
            tensors, path = outputs[layer.call.index], layer.call.path or profile.name
            elements = sum(tensor.elements for tensor in tensors)
            own_bytes = sum(tensor.nbytes for tensor in tensors)
            nbytes = own_bytes if bytes_per_value is None else elements * bytes_per_value
            estimates.append(LayerEstimate(path, elements, layer.call.param_bytes, nbytes, layer.cost.macs))
    return estimates


# Keeps a latency or a bandwidth of zero from dividing by zero; such results are clamped, not measured.
_CLAMP = 1e-9


def summarize_hardware(
    layerwise_df: pd.DataFrame,
    latency_ms: float,
    memory_bandwidth_gbps: float,
    peak_compute_gmacs: float | None = None,
    machine_bandwidth_gbps: float | None = None,
) -> dict[str, Any]:
    """Return the bandwidth and compute that a model achieves at a latency, and their share of what the device offers.

    Args:
        layerwise_df: What `estimate_layerwise_stats` returned.
        latency_ms: Measured milliseconds of one forward on the same batch.
        memory_bandwidth_gbps: What the device's memory can move, in GB (10⁹ bytes) per second.
        peak_compute_gmacs: What the device can compute, in 10⁹ MACs per second. With it the result has the knee of
            the roofline (MACs per byte at which compute becomes the limit), and the side of it on which the model
            stands; None, the default, leaves both out.
        machine_bandwidth_gbps: What the memory of the machine that was timed can move, where that is another machine
            than the device: the share of the bandwidth that is used is then the share of this one's. None, the
            default, means that the device itself was timed.

    >>> from edge_opt.model import SmallCNN
    >>> summary = summarize_hardware(estimate_layerwise_stats(SmallCNN(), 1), latency_ms=1.0, memory_bandwidth_gbps=4.3)
    >>> summary["achieved_gmacs"]
    1.031744
    """
    total_bytes = float(layerwise_df["parameter_bytes"].sum() + layerwise_df["activation_bytes"].sum())
    total_macs = float(layerwise_df["macs"].sum())
    latency_s = max(latency_ms / 1000.0, _CLAMP)
    achieved_bandwidth_gbps = total_bytes / latency_s / 1e9
    timed_bandwidth_gbps = memory_bandwidth_gbps if machine_bandwidth_gbps is None else machine_bandwidth_gbps
    intensity = total_macs / max(total_bytes, _CLAMP)
    summary: dict[str, Any] = {
        "estimated_total_bytes": total_bytes,
        "estimated_total_macs": total_macs,
        "achieved_bandwidth_gbps": achieved_bandwidth_gbps,
        "configured_memory_bandwidth_gbps": memory_bandwidth_gbps,
        "bandwidth_utilization": achieved_bandwidth_gbps / max(timed_bandwidth_gbps, _CLAMP),
        "achieved_gmacs": total_macs / latency_s / 1e9,
        "arithmetic_intensity_macs_per_byte": intensity,
    }
    if machine_bandwidth_gbps is not None:
        summary["machine_memory_bandwidth_gbps"] = machine_bandwidth_gbps
    if peak_compute_gmacs is not None:
        knee = peak_compute_gmacs / max(memory_bandwidth_gbps, _CLAMP)
        summary["configured_peak_compute_gmacs"] = peak_compute_gmacs
        summary["roofline_knee_macs_per_byte"] = knee
        summary["bound_regime"] = "memory-bound" if intensity < knee else "compute-bound"
    return summary


_READINGS = (
    (
        0.8,
        "memory-bound: most of the time goes into moving data",
        ("prune channels, which shrinks activations", "use fp16 or int8, which moves fewer bytes",
         "fuse or tile layers, so that data is used more often per transfer"),
    ),
    (
        0.2,
        "balanced: compute and memory both count",
        ("look at single layers for their own bottleneck", "try other batch sizes",
         "compare precisions for accuracy against speed"),
    ),
    (
        float("-inf"),
        "compute-bound, or memory is used inefficiently",
        ("a small model may be dominated by the framework's overhead", "few or slow cores limit compute",
         "check for cache misses", "consider quantization or an accelerator"),
    ),
)  # fmt: skip
# A roofline's own time is a sum of the same quotients; a share above 1 by their rounding alone says nothing of a cache.
_WHOLE = 1 + 1e-9
_CACHED = (
    "; more than memory delivers, so part of the data came from a cache, or the figure for the bandwidth is too low"
)


def explain_utilization(bandwidth_utilization: float) -> str:
    """Explain a bandwidth utilization, with advice.

    Args:
        bandwidth_utilization: Share of the bandwidth: above 0.8 is memory-bound, up to 0.2 compute-bound, else
            balanced.

    >>> explain_utilization(0.423).partition(";")[0]
    '42.3 % of the bandwidth: balanced: compute and memory both count'
    """
    reading, advice = next(
        (text, hints) for least, text, hints in _READINGS if bandwidth_utilization > least or least == float("-inf")
    )
    cached = _CACHED if bandwidth_utilization > _WHOLE else ""
    return f"{bandwidth_utilization * 100:.1f} % of the bandwidth: {reading}{cached}; {'; '.join(advice)}"


def precision_tradeoff_table(sweep_df: pd.DataFrame) -> pd.DataFrame:
    """Return the means of a sweep by precision, fastest first, with the share of accepted configurations.

    Args:
        sweep_df: One row per variant, such as `sweep_results.csv`, with the columns `precision`, `accuracy`,
            `latency_ms`, `memory_mb`, `energy_proxy_j` and `accepted`.
    """
    grouped = sweep_df.groupby("precision", sort=False)
    table = grouped.agg(
        accuracy_mean=("accuracy", "mean"),
        latency_ms_mean=("latency_ms", "mean"),
        memory_mb_mean=("memory_mb", "mean"),
        energy_proxy_j_mean=("energy_proxy_j", "mean"),
        accepted_ratio=("accepted", "mean"),
    )
    return table.reset_index().sort_values("latency_ms_mean", ignore_index=True)


def save_hardware_artifacts(
    output_dir: str | Path,
    layerwise_df: pd.DataFrame,
    precision_df: pd.DataFrame,
    summary: Mapping[str, Any],
    draws: bool = True,
) -> list[Path]:
    """Write the three tables (UTF-8 CSV) and two bar charts (PNG, 180 DPI), and return their paths.

    Args:
        output_dir: The folder; it is made where it is not there.
        layerwise_df: What `estimate_layerwise_stats` returned; a table, and both charts.
        precision_df: What `precision_tradeoff_table` returned.
        summary: What `summarize_hardware` returned; a table of one row.
        draws: Whether to write the charts.
    """
    import pandas as pd

    folder = Path(output_dir)
    tables = {
        "layerwise_breakdown.csv": layerwise_df,
        "precision_tradeoffs.csv": precision_df,
        "hardware_summary.csv": pd.DataFrame([dict(summary)]),
    }
    for name, table in tables.items():
        safe = table.map(lambda value: spreadsheet(value) if isinstance(value, str) else value)
        write_whole(folder / name, safe.to_csv(index=False))
    charts = {
        "layerwise_activation_memory.png": ("activation_bytes", "Activation memory by layer (MiB)", 1024**2),
        "layerwise_macs.png": ("macs", "Multiply-accumulates by layer (millions)", 1e6),
    }
    charts = charts if draws else {}
    for name, (column, title, scale) in charts.items():
        names, values = layerwise_df["layer"].astype(str).tolist(), (layerwise_df[column] / scale).tolist()
        write_whole(folder / name, bar_chart(names, values, title))
    return [folder / name for name in (*tables, *charts)]
