"""What the published pipeline promises: its configuration as text, its commands, files, keys and columns."""

from __future__ import annotations

CONFIG = """\
seed: 7
dataloader_seed: 7
num_workers: 2
benchmark_repeats: 5
benchmark_trials: 3
benchmark_warmup: 3
memory_bandwidth_gbps: 12.8
device: cpu
quantization_backend: fbgemm
fine_tune_epochs: 0
pareto_use_ci: false
dataset: fashion-mnist
batch_size: 128
epochs: 2
learning_rate: 0.001
train_subset: 12000
val_subset: 3000
power_watts: 5.0
pruning_levels: [0.0, 0.25, 0.5, 0.7]
precisions: [fp32, fp16, int8]
calibration_batches: 8
memory_budgets_mb: [1.0, 2.0, 4.0]
active_memory_budget_mb: 2.0
cpu_frequency_scale: 0.7
output_dir: outputs
peak_compute_gmacs: 64.0
model: SmallCNN
"""

METRICS = (
    "accuracy accuracy_ci95_low accuracy_ci95_high latency_ms latency_median_ms latency_std_ms latency_p95_ms "
    "throughput_sps model_memory_mb memory_mb estimated_runtime_memory_mb energy_proxy_j energy_proxy_note"
).split()
VIOLATIONS = ["violates_1.0mb", "violates_2.0mb", "violates_4.0mb"]
BASELINE = [*METRICS, *VIOLATIONS, "accepted_under_active_budget"]
SUMMARY = (
    "baseline memory_budgets_mb active_memory_budget_mb cpu_frequency_scale latency_multiplier study_rows "
    "accepted_rows rejected_rows best_accuracy_accepted lowest_latency_ms_accepted deployment"
).split()
HARDWARE = (
    "estimated_total_bytes estimated_total_macs achieved_bandwidth_gbps configured_memory_bandwidth_gbps "
    "bandwidth_utilization achieved_gmacs arithmetic_intensity_macs_per_byte configured_peak_compute_gmacs "
    "roofline_knee_macs_per_byte bound_regime"
).split()
DEPLOYMENT = [
    *"cpu_frequency_scale latency_multiplier batch_latency_ms batch_throughput_sps".split(),
    *"stream_avg_latency_ms stream_throughput_sps".split(),
    *HARDWARE,
]
REPRODUCIBILITY = (
    "packages cpu command git_commit_hash seed dataloader_seed device_requested device_resolved model"
).split()
COLUMNS = ["pruning_level", "precision", "accepted", "error", "active_budget_mb", *METRICS, *VIOLATIONS]
FILES = (
    "sweep_results.csv pareto_frontier_latency.csv pareto_frontier_energy.csv accuracy_vs_latency.png "
    "accuracy_vs_energy.png accuracy_vs_memory.png summary.json reproducibility.json layerwise_breakdown.csv "
    "precision_tradeoffs.csv hardware_summary.csv layerwise_activation_memory.png layerwise_macs.png"
).split()
QUANTIZATION = [f"quantization_metadata_p{level}_int8.json" for level in ("0.0", "0.25", "0.5", "0.7")]

# Data of the same shape, for machines without the files of Fashion-MNIST.
LOADERS = """\
import torch


def batches(samples, batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    images = torch.rand(samples, 1, 28, 28, generator=generator) * 0.3
    for digit in range(10):
        images[labels == digit, :, 2 * digit : 2 * digit + 3] += 0.7
    return list(zip(images.split(batch_size), labels.split(batch_size)))


def loaders(batch_size, train_subset, val_subset):
    return {
        "train": batches(train_subset, batch_size, 0),
        "validation": batches(val_subset, batch_size, 1),
        "test": batches(1000, batch_size, 2),
    }
"""
