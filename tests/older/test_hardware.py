"""The layer-wise table of `edge_opt.hardware`: the formulas, for SmallCNN and for any other model."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pandas as pd
import pytest
import torch
from torch import nn

from edge_opt.errors import InvalidInput
from edge_opt.hardware import (
    LayerEstimate,
    estimate_layerwise_stats,
    explain_utilization,
    precision_tradeoff_table,
    save_hardware_artifacts,
    summarize_hardware,
)
from edge_opt.model import SmallCNN

COLUMNS = ["layer", "output_elements", "parameter_bytes", "activation_bytes", "macs"]


def test_small_cnn_at_batch_32_follows_the_formulas() -> None:
    table = estimate_layerwise_stats(model=SmallCNN(16, 32), batch_size=32, input_shape=(1, 28, 28))
    assert list(table.columns) == COLUMNS
    conv1, conv2, linear = 32 * 16 * 28 * 28, 32 * 32 * 14 * 14, 32 * 10
    assert table.values.tolist() == [
        ["conv1", conv1, 4 * (16 * 9 + 16), 4 * conv1, conv1 * 9],
        ["conv2", conv2, 4 * (32 * 16 * 9 + 32), 4 * conv2, conv2 * 16 * 9],
        ["classifier", linear, 4 * (1568 * 10 + 10), 4 * linear, linear * 1568],
    ]


def test_bytes_follow_the_dtype_unless_told_otherwise() -> None:
    half = estimate_layerwise_stats(SmallCNN().half(), batch_size=1)
    single = estimate_layerwise_stats(SmallCNN(), batch_size=1)
    told = estimate_layerwise_stats(SmallCNN(), batch_size=1, activation_bytes_per_value=1)
    assert (half["parameter_bytes"] * 2).tolist() == single["parameter_bytes"].tolist()
    assert (half["activation_bytes"] * 2).tolist() == single["activation_bytes"].tolist()
    assert told["activation_bytes"].tolist() == single["output_elements"].tolist()
    assert told["parameter_bytes"].tolist() == single["parameter_bytes"].tolist()


def test_functional_products_and_attention_have_rows() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 4, batch_first=True)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.weight = nn.Parameter(torch.zeros(4, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, _ = self.lstm(x)
            x, _ = self.attention(x, x, x, need_weights=False)
            return x @ self.weight

    table = estimate_layerwise_stats(Mixed(), batch_size=2, input_shape=(5, 8)).set_index("layer")
    assert table.loc["lstm", "macs"] == 10 * 16 * (8 + 4)
    assert table.loc["attention", "macs"] == 4 * 10 * 4 * 4 + 2 * (2 * 2 * 5 * 5 * 2)
    assert table.loc["Mixed", "macs"] == 10 * 4 * 3
    assert table.loc["Mixed", "parameter_bytes"] == 4 * 12


def test_a_layer_estimate_is_a_record() -> None:
    assert LayerEstimate("conv1", 4, 3, 2, 1).macs == 1


@pytest.mark.parametrize("batch", [0, -3, 2.5, True])
def test_a_bad_batch_is_refused(batch: object) -> None:
    with pytest.raises(InvalidInput, match="batch_size is"):
        estimate_layerwise_stats(SmallCNN(), batch_size=batch)


def test_the_published_use_cases_run_as_written() -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    model = SmallCNN(conv1_channels=16, conv2_channels=32)
    layerwise_df = estimate_layerwise_stats(model, batch_size=32)

    top_activation_layers = layerwise_df.nlargest(3, "activation_bytes")
    assert top_activation_layers["layer"].tolist() == ["conv1", "conv2", "classifier"]

    layerwise_df["mac_percentage"] = layerwise_df["macs"] / layerwise_df["macs"].sum() * 100
    assert layerwise_df["mac_percentage"].sum() == pytest.approx(100)

    batch_sizes = [1, 8, 16, 32, 64]
    total_memory = []
    for bs in batch_sizes:
        df = estimate_layerwise_stats(model, batch_size=bs)
        total_mb = df["activation_bytes"].sum() / (1024**2)
        total_memory.append(total_mb)
    assert total_memory[-1] == pytest.approx(64 * total_memory[0])
    plt.plot(batch_sizes, total_memory, marker="o")
    plt.close()


def table(parameter_bytes: int, activation_bytes: int, macs: int) -> pd.DataFrame:
    return pd.DataFrame(
        [{"layer": "a", "parameter_bytes": parameter_bytes, "activation_bytes": activation_bytes, "macs": macs}]
    )


def test_summary_follows_the_formulas() -> None:
    # 3 MB and 12 MMAC in 2 ms: 1.5 GB/s and 6 GMAC/s, 4 MACs per byte
    summary = summarize_hardware(table(1_000_000, 2_000_000, 12_000_000), latency_ms=2, memory_bandwidth_gbps=6)
    assert summary == {
        "estimated_total_bytes": 3e6,
        "estimated_total_macs": 12e6,
        "achieved_bandwidth_gbps": pytest.approx(1.5),
        "configured_memory_bandwidth_gbps": 6,
        "bandwidth_utilization": pytest.approx(0.25),
        "achieved_gmacs": pytest.approx(6.0),
        "arithmetic_intensity_macs_per_byte": pytest.approx(4.0),
    }


@pytest.mark.parametrize(("peak", "regime"), [(60, "memory-bound"), (12, "compute-bound")])
def test_a_peak_tells_the_side_of_the_knee(peak: float, regime: str) -> None:
    # knee at peak / 6 GB/s: 10 or 2 MACs per byte, and the model has 4
    summary = summarize_hardware(table(1_000_000, 2_000_000, 12_000_000), 2, 6, peak_compute_gmacs=peak)
    assert summary["roofline_knee_macs_per_byte"] == pytest.approx(peak / 6)
    assert summary["bound_regime"] == regime


def test_zero_latency_and_bandwidth_are_clamped() -> None:
    summary = summarize_hardware(table(1, 0, 1), latency_ms=0, memory_bandwidth_gbps=0)
    assert summary["achieved_bandwidth_gbps"] == pytest.approx(1 / 1e-9 / 1e9)
    assert summary["bandwidth_utilization"] == pytest.approx(1 / 1e-9)


@pytest.mark.parametrize(
    ("share", "word"), [(0.81, "memory-bound"), (0.8, "balanced"), (0.21, "balanced"), (0.2, "compute-bound")]
)
def test_utilization_is_read_with_its_limits(share: float, word: str) -> None:
    assert f"% of the bandwidth: {word}" in explain_utilization(share)


def test_more_than_the_whole_bandwidth_is_explained_by_the_cache() -> None:
    assert "came from a cache" in explain_utilization(1.5)
    assert "cache" not in explain_utilization(1.0)


def test_precisions_are_averaged_and_sorted_by_latency() -> None:
    sweep = pd.DataFrame(
        {
            "precision": ["fp32", "int8", "fp32"], "accuracy": [0.9, 0.8, 0.7], "latency_ms": [4.0, 1.0, 2.0],
            "memory_mb": [8.0, 2.0, 4.0], "energy_proxy_j": [0.4, 0.1, 0.2], "accepted": [True, True, False],
        }
    )  # fmt: skip
    found = precision_tradeoff_table(sweep)
    assert list(found.columns) == [
        "precision", "accuracy_mean", "latency_ms_mean", "memory_mb_mean", "energy_proxy_j_mean", "accepted_ratio",
    ]  # fmt: skip
    assert found["precision"].tolist() == ["int8", "fp32"]
    assert found.loc[1].tolist() == ["fp32", pytest.approx(0.8), 3.0, 6.0, pytest.approx(0.3), 0.5]


@pytest.mark.parametrize("layers", [1, 3, 300])
def test_artifacts_are_written_and_readable(layers: int, tmp_path: Path) -> None:
    layerwise = pd.DataFrame(
        {
            "layer": [f"block.{index}.größe" for index in range(layers)], "output_elements": 1, "parameter_bytes": 4,
            "activation_bytes": range(1, layers + 1), "macs": range(layers, 0, -1),
        }
    )  # fmt: skip
    summary = summarize_hardware(layerwise, 1, 4.3)
    folder = tmp_path / "new" / "folder"
    written = save_hardware_artifacts(folder, layerwise, pd.DataFrame({"precision": ["fp32"]}), summary)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in written)
    assert pd.read_csv(folder / "layerwise_breakdown.csv", encoding="utf-8").equals(layerwise)
    assert pd.read_csv(folder / "hardware_summary.csv").loc[0].to_dict() == pytest.approx(summary)
    for name in ("layerwise_activation_memory.png", "layerwise_macs.png"):
        from PIL import Image

        with Image.open(folder / name) as image:
            assert round(image.info["dpi"][0]) == 180
            assert image.height < 4000


def test_the_published_bandwidth_example_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    from edge_opt.metrics import collect_metrics

    model = SmallCNN()
    device = torch.device("cpu")
    dummy_data = TensorDataset(torch.randn(100, 1, 28, 28), torch.randint(0, 10, (100,)))
    val_loader = DataLoader(dummy_data, batch_size=32)
    metrics = collect_metrics(
        model, val_loader, device, power_watts=2.0, precision="fp32", latency_multiplier=1.0, benchmark_repeats=5
    )
    layerwise_df = estimate_layerwise_stats(model, batch_size=32)
    summary = summarize_hardware(layerwise_df, latency_ms=metrics.latency_ms, memory_bandwidth_gbps=4.3)
    print(f"Achieved bandwidth: {summary['achieved_bandwidth_gbps']:.2f} GB/s")
    print(f"Utilization: {summary['bandwidth_utilization'] * 100:.1f}%")
    print(f"Compute throughput: {summary['achieved_gmacs']:.2f} GMAC/s")

    devices = [
        {"name": "Raspberry Pi 4", "bandwidth_gbps": 4.3},
        {"name": "Jetson Nano", "bandwidth_gbps": 25.6},
        {"name": "Desktop CPU", "bandwidth_gbps": 50.0},
    ]
    shares = []
    for candidate in devices:
        summary = summarize_hardware(
            layerwise_df, latency_ms=metrics.latency_ms, memory_bandwidth_gbps=candidate["bandwidth_gbps"]
        )
        shares.append(summary["bandwidth_utilization"])
        print(f"{candidate['name']}: {summary['bandwidth_utilization'] * 100:.1f}% utilization")
    assert shares[0] > shares[1] > shares[2]

    pruned_df = estimate_layerwise_stats(SmallCNN(8, 16), batch_size=32)
    baseline_summary = summarize_hardware(layerwise_df, latency_ms=100, memory_bandwidth_gbps=4.3)
    pruned_summary = summarize_hardware(pruned_df, latency_ms=75, memory_bandwidth_gbps=4.3)
    reduction = 1 - pruned_summary["estimated_total_bytes"] / baseline_summary["estimated_total_bytes"]
    print(f"Reduction: {reduction * 100:.1f}%")
    assert 0 < reduction < 1
    assert capsys.readouterr().out.count("\n") == 7
