"""Every snippet of the published documents, letter by letter."""

# ruff: noqa: W291

from __future__ import annotations

LAYERWISE_SIGNATURE = """\
from edge_opt.hardware import estimate_layerwise_stats

layerwise_df = estimate_layerwise_stats(
    model=model,
    batch_size=32,
    input_shape=(1, 28, 28)
)
"""

LAYERWISE_EXAMPLE = """\
import torch
from edge_opt.model import SmallCNN
from edge_opt.hardware import estimate_layerwise_stats

model = SmallCNN(conv1_channels=16, conv2_channels=32)
layerwise_df = estimate_layerwise_stats(model, batch_size=32)
print(layerwise_df)
"""

LAYERWISE_OUTPUT_SHAPE = """\
def _conv2d_output_shape(height, width, kernel, padding, stride=1):
    out_h = (height + (2 * padding) - kernel) // stride + 1
    out_w = (width + (2 * padding) - kernel) // stride + 1
    return out_h, out_w
"""

LAYERWISE_BOTTLENECKS = """\
# Find layers with highest activation memory
top_activation_layers = layerwise_df.nlargest(3, 'activation_bytes')
print("Top memory consumers:")
print(top_activation_layers[['layer', 'activation_bytes']])
"""

LAYERWISE_DISTRIBUTION = """\
# Calculate percentage of total MACs per layer
layerwise_df['mac_percentage'] = (
    layerwise_df['macs'] / layerwise_df['macs'].sum() * 100
)
print(layerwise_df[['layer', 'mac_percentage']])
"""

LAYERWISE_BATCHES = """\
import matplotlib.pyplot as plt

batch_sizes = [1, 8, 16, 32, 64]
total_memory = []

for bs in batch_sizes:
    df = estimate_layerwise_stats(model, batch_size=bs)
    total_mb = df['activation_bytes'].sum() / (1024**2)
    total_memory.append(total_mb)

plt.plot(batch_sizes, total_memory, marker='o')
plt.xlabel('Batch Size')
plt.ylabel('Total Activation Memory (MB)')
plt.title('Memory Scaling with Batch Size')
plt.show()
"""

LAYERWISE_PIPELINE = """\
layerwise_df = estimate_layerwise_stats(baseline_model, batch_size=cfg.batch_size)
hardware_summary = summarize_hardware(
    layerwise_df,
    latency_ms=baseline_metrics.latency_ms,
    memory_bandwidth_gbps=cfg.memory_bandwidth_gbps,
)
"""

BANDWIDTH_SIGNATURE = """\
from edge_opt.hardware import summarize_hardware

hardware_summary = summarize_hardware(
    layerwise_df=layerwise_df,
    latency_ms=baseline_metrics.latency_ms,
    memory_bandwidth_gbps=cfg.memory_bandwidth_gbps
)
"""

BANDWIDTH_EXAMPLE = """\
import torch
from edge_opt.model import SmallCNN
from edge_opt.hardware import estimate_layerwise_stats, summarize_hardware
from edge_opt.metrics import collect_metrics
from torch.utils.data import DataLoader, TensorDataset

# Setup
model = SmallCNN()
device = torch.device("cpu")
dummy_data = TensorDataset(
    torch.randn(100, 1, 28, 28),
    torch.randint(0, 10, (100,))
)
val_loader = DataLoader(dummy_data, batch_size=32)

# Collect metrics
metrics = collect_metrics(
    model, val_loader, device,
    power_watts=2.0,
    precision="fp32",
    latency_multiplier=1.0,
    benchmark_repeats=5
)

# Analyze hardware characteristics
layerwise_df = estimate_layerwise_stats(model, batch_size=32)
summary = summarize_hardware(
    layerwise_df,
    latency_ms=metrics.latency_ms,
    memory_bandwidth_gbps=4.3  # Raspberry Pi 4
)

print(f"Achieved bandwidth: {summary['achieved_bandwidth_gbps']:.2f} GB/s")
print(f"Utilization: {summary['bandwidth_utilization']*100:.1f}%")
print(f"Compute throughput: {summary['achieved_gmacs']:.2f} GMAC/s")
"""

BANDWIDTH_FORMULAS = """\
# From src/edge_opt/hardware.py:78-91
total_bytes = float(
    layerwise_df["parameter_bytes"].sum() + 
    layerwise_df["activation_bytes"].sum()
)
total_macs = float(layerwise_df["macs"].sum())
latency_s = max(latency_ms / 1000.0, 1e-9)  # Prevent division by zero

achieved_bandwidth_gbps = (total_bytes / latency_s) / 1e9
bandwidth_utilization = achieved_bandwidth_gbps / max(memory_bandwidth_gbps, 1e-9)
achieved_gmacs = (total_macs / latency_s) / 1e9
"""

BANDWIDTH_DEVICES = """\
devices = [
    {"name": "Raspberry Pi 4", "bandwidth_gbps": 4.3},
    {"name": "Jetson Nano", "bandwidth_gbps": 25.6},
    {"name": "Desktop CPU", "bandwidth_gbps": 50.0},
]

for device in devices:
    summary = summarize_hardware(
        layerwise_df,
        latency_ms=metrics.latency_ms,
        memory_bandwidth_gbps=device["bandwidth_gbps"]
    )
    print(f"{device['name']}: {summary['bandwidth_utilization']*100:.1f}% utilization")
"""

BANDWIDTH_TRACKING = """\
baseline_summary = summarize_hardware(baseline_df, latency_ms=100, memory_bandwidth_gbps=4.3)
pruned_summary = summarize_hardware(pruned_df, latency_ms=75, memory_bandwidth_gbps=4.3)

print(f"Baseline: {baseline_summary['achieved_bandwidth_gbps']:.2f} GB/s")
print(f"Pruned: {pruned_summary['achieved_bandwidth_gbps']:.2f} GB/s")
print(f"Reduction: {(1 - pruned_summary['estimated_total_bytes']/baseline_summary['estimated_total_bytes'])*100:.1f}%")
"""

BANDWIDTH_PIPELINE = """\
hardware_summary = summarize_hardware(
    layerwise_df,
    latency_ms=baseline_metrics.latency_ms,
    memory_bandwidth_gbps=cfg.memory_bandwidth_gbps,
)
"""

RASP = [
    """\
import rasp
from torchvision.models import AlexNet
model = AlexNet()
""",
    """\
rasp.stat(model, input_shape=(1, 3, 224, 224))
""",
    """\
rasp.stat(model, input_shape=(1, 3, 224, 224), timing=True)
""",
    """\
rasp.stat(model, input_shape=(1, 3, 224, 224), device='cuda', timing=True)
""",
    """\
rasp.stat(model, input_shape=(1, 3, 224, 224), device='cuda', memory=True)
""",
    """\
rasp.stat(model, input_shape=(1, 3, 224, 224), includes=['macc'], excludes=['flops'])
""",
    """\
df = rasp.stat(model, input_shape=(1, 3, 224, 224), device='cuda', timing=True, print_stat=False, returns='data')
""",
    """\
rasp.CFG.profile.num_batches=200
rasp.CFG.profile.warmup_batches=20
rasp.stat(model, input_shape=(1, 3, 224, 224), timing=True)
""",
    """\
inputs = torch.randn(8, 3, 224, 224)
rasp.stat(model, inputs=inputs, timing=True)
""",
    """\
for report_type in ['tape', 'node', 'leaves', 'root', None]:
    rasp.stat(model, input_shape=(1, 3, 224, 224), report_type=report_type, timing=True)
""",
    """\
rasp.stat(model, input_shape=(1, 3, 224, 224), timing=True, save_path='./reports')
""",
    """\
import rasp
import rasp.addons.energy
rasp.stat(model, input_shape=(1, 3, 224, 224), includes=['energy'])
""",
]
