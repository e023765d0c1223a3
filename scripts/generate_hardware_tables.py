"""Write the hardware tables of the bundled network: layers, precisions, totals, and the operators of a stream.

Precisions are those of a run: of `sweep_results.csv` in the folder, where there is one; else that table is empty.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import torch

from edge_opt.hardware import (
    estimate_layerwise_stats,
    precision_tradeoff_table,
    save_hardware_artifacts,
    summarize_hardware,
)
from edge_opt.metrics import collect_metrics
from edge_opt.model import SmallCNN
from edge_opt.stream import build_hardware_profile_table, write_hardware_profile_artifacts

SWEEP_COLUMNS = ("precision", "accuracy", "latency_ms", "memory_mb", "energy_proxy_j", "accepted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="made where it is not there")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a batch")
    parser.add_argument("--memory-bandwidth-gbps", type=float, default=12.8, help="of the device")
    parser.add_argument("--peak-compute-gmacs", type=float, default=64.0, help="of the device")
    parser.add_argument("--power-watts", type=float, default=5.0, help="of the device; energy is a proxy")
    known = parser.parse_args()
    model = SmallCNN()
    batch = torch.zeros(known.batch_size, 1, 28, 28), torch.zeros(known.batch_size, dtype=torch.int64)
    metrics = collect_metrics(model, [batch], "cpu", known.power_watts, "fp32")
    layers = estimate_layerwise_stats(model, known.batch_size)
    summary = summarize_hardware(
        layers, metrics.latency_ms, known.memory_bandwidth_gbps, peak_compute_gmacs=known.peak_compute_gmacs
    )
    rows = known.output_dir / "sweep_results.csv"
    swept = pd.read_csv(rows) if rows.is_file() else pd.DataFrame(columns=list(SWEEP_COLUMNS))
    paths = save_hardware_artifacts(known.output_dir, layers, precision_tradeoff_table(swept), summary)
    stream = build_hardware_profile_table(feature_count=28 * 28, batch_size=known.batch_size, stream_interval_ms=10.0)
    written = write_hardware_profile_artifacts(stream, known.output_dir)
    for path in (*paths, written["operator_profile_csv"], written["hardware_totals_csv"]):
        print(path)


if __name__ == "__main__":
    main()
