"""Sweeps for the tests, with figures that can be checked by eye."""

from __future__ import annotations

from edge_opt.records.compression import Change, LayerSensitivity, Sensitivity
from edge_opt.records.devices import Precision
from edge_opt.records.sweeps import Candidate, SweepResult, Trial, TrialMetrics, Violation

_SHARE_OF_BYTES = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 0.25}


def metrics(pruning: float, precision: Precision, energy_source: str = "proxy") -> TrialMetrics:
    """Latency, MACs and sizes fall with what is pruned; accuracy falls a little."""
    left = 1 - pruning
    latency_s = 8e-3 * left * (0.5 if precision == "int8" else 1.0)
    accuracy = 0.9 - 0.1 * pruning - (0.01 if precision == "int8" else 0.0)
    weights = int(4_000_000 * left * _SHARE_OF_BYTES[precision])
    return TrialMetrics(
        accuracy=accuracy,
        accuracy_low=accuracy - 0.01,
        accuracy_high=accuracy + 0.01,
        accuracy_drop=0.9 - accuracy,
        latency_s=latency_s,
        latency_low_s=0.95 * latency_s,
        latency_high_s=1.1 * latency_s,
        latency_std_s=0.02 * latency_s,
        latency_p95_s=1.2 * latency_s,
        cpu_latency_s=latency_s,
        batch_size=1,
        throughput=1 / latency_s,
        model_bytes=weights,
        size_bytes=weights + 2048,
        peak_memory_bytes=weights + 1_000_000,
        energy_j=5 * latency_s,
        energy_source=energy_source,
        macs=int(50_000_000 * left),
        params=int(1_000_000 * left),
        macs_ratio=left,
        params_ratio=left,
        effective_precision=precision,
    )


def sensitivity_of(losses: dict[str, float], change: Change = "quantize", amount: str = "int8") -> Sensitivity:
    """Accuracy that layers lose when each alone is changed, of 0.9 in all."""
    rows = (
        LayerSensitivity(path, "Conv2d", change, amount, 0.9 - loss, -loss, 0.1, None, None, "")
        for path, loss in losses.items()
    )
    return Sensitivity("accuracy", 0.9, 64, tuple(rows), ())


def done(pruning: float, precision: Precision = "fp32", limit_ms: float | None = None) -> Trial:
    """A trial that ran; with a limit on latency that it may break."""
    found = metrics(pruning, precision)
    latency_ms = found.ranked_latency_s * 1e3
    violations: tuple[Violation, ...] = ()
    if limit_ms is not None and latency_ms > limit_ms:
        violations = (Violation(f"latency_ms <= {limit_ms:g}", "latency_ms", latency_ms, limit_ms),)
    return Trial(Candidate(pruning, precision, "torch"), "done", found, None, "", violations, 1.5)


def failed(pruning: float, reason: str = "int8 left 3 of 3 layers in float32") -> Trial:
    return Trial(Candidate(pruning, "int8", "onnxruntime"), "failed", None, "raised", reason, (), 0.5)


def sweep(*trials: Trial, name: str = "net") -> SweepResult:
    """A sweep of these trials; on its frontiers are those accepted that no other beats in accuracy and speed."""
    ran = [(trial, trial.metrics) for trial in trials if trial.is_accepted and trial.metrics]
    accepted = tuple(
        trial.candidate.key
        for trial, own in ran
        if not any(it.ranked_latency_s <= own.ranked_latency_s and it.accuracy > own.accuracy for _, it in ran)
    )
    return SweepResult(
        name=name,
        baseline=done(0.0),
        trials=trials,
        constraints=("latency_ms <= 5",),
        frontiers=(("accuracy, latency", accepted), ("accuracy, energy", accepted)) if accepted else (),
        best=accepted[0] if accepted else None,
        recommendation="Take prune 0 int8 torch: every channel, a quarter of the bytes." if accepted else "",
    )


def small_sweep() -> SweepResult:
    """Six candidates: three accepted, two rejected for their latency, one failed."""
    return sweep(
        done(0.0, "fp32", 5), done(0.25, "fp32", 5), done(0.5, "fp32", 5), done(0.0, "int8", 5), done(0.5, "int8", 5),
        failed(0.75),
    )  # fmt: skip
