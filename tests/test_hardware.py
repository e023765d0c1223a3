"""The layer-wise table of `edge_opt.hardware`: the formulas, for SmallCNN and for any other model."""

from __future__ import annotations

import matplotlib
import pytest
import torch
from torch import nn

from edge_opt.errors import InvalidInput
from edge_opt.hardware import LayerEstimate, estimate_layerwise_stats
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
