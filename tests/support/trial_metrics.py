"""Figures of one candidate."""

from __future__ import annotations

from edge_opt.records.sweeps import TrialMetrics

METRICS = TrialMetrics(
    accuracy=0.93, accuracy_low=0.91, accuracy_high=0.95, accuracy_drop=0.02,
    latency_s=0.015, latency_low_s=0.014, latency_high_s=0.016, latency_std_s=0.001, latency_p95_s=0.018,
    cpu_latency_s=0.014, batch_size=32, throughput=32 / 0.015, model_bytes=3 * 2**20, size_bytes=2 * 2**20,
    peak_memory_bytes=48 * 2**20, energy_j=None, energy_source="none", macs=500_000_000, params=4_000_000,
    macs_ratio=0.5, params_ratio=0.4, effective_precision="fp32",
)  # fmt: skip
