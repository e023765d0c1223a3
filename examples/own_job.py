"""Sweep with a job of your own: candidates are only profiled, to show the interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_opt.records.sweeps import Candidate, TrialMetrics


@dataclass(frozen=True)
class StaticJob:
    """Prunes a network and counts what is left; accuracy and latency are stand-ins that follow from the counts."""

    width: int = 32

    def build(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        import edge_opt as eo
        from edge_opt.model import SmallCNN

        model, shape = SmallCNN(16, self.width), (1, 1, 28, 28)
        whole = eo.profile(model, shape).totals
        if candidate.pruning:
            model = eo.compress.prune(model, shape, candidate.pruning).model
        left = eo.profile(model, shape)
        return {
            "macs": left.totals.macs,
            "params": left.totals.params,
            "peak": left.peak_activation_bytes,
            "whole": [whole.macs, whole.params],
        }

    def measure(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> TrialMetrics:
        accuracy, latency_s = 0.95 - 0.1 * candidate.pruning, built["macs"] / 1e9
        return TrialMetrics(
            accuracy=accuracy, accuracy_low=accuracy, accuracy_high=accuracy, accuracy_drop=0.1 * candidate.pruning,
            latency_s=latency_s, latency_low_s=latency_s, latency_high_s=latency_s, latency_std_s=0.0,
            latency_p95_s=latency_s, cpu_latency_s=latency_s, batch_size=1, throughput=1 / latency_s,
            model_bytes=4 * built["params"], size_bytes=4 * built["params"], peak_memory_bytes=built["peak"],
            energy_j=None, energy_source="none", macs=built["macs"], params=built["params"],
            macs_ratio=built["macs"] / built["whole"][0], params_ratio=built["params"] / built["whole"][1],
            effective_precision=candidate.precision, remarks=("a stand-in: nothing was run",),
        )  # fmt: skip
