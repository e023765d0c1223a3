"""Balancing and bias correction: closer int8, by arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from edge_opt import compress
from edge_opt.errors import InvalidInput
from edge_opt.quantization.balancing import balance


def differences(net: nn.Module, x: torch.Tensor, folder: Path, *variants: dict[str, Any]) -> list[float]:
    """By how much outputs differ with each set of options; the model is exported once."""
    exported = compress.export_onnx(net, x[:1], folder / "net.onnx")
    found = []
    for options in variants:
        done = compress.convert(net, x[:1], calibration=[x], scheme="static", allow=True, exported=exported, **options)
        assert done.effective_precision == "int8"
        found.append(max(entry.difference or 0.0 for entry in done.agreement.by_batch))
    return found


def outlier_net() -> nn.Sequential:
    """Of four hidden channels the first is a hundred times as large, and its readers' weights a hundredth."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.diag(torch.tensor([100.0, 1.0, 1.0, 1.0])))
        net[2].weight.copy_(torch.tensor([[0.01, 1.0, 1.0, 1.0], [-0.01, 1.0, -1.0, 1.0]]))
    return net


def test_balancing_gives_small_channels_beside_an_outlier_their_levels(tmp_path: Path) -> None:
    x = torch.rand(64, 4, generator=torch.Generator().manual_seed(0))
    # One range of 0 to 100 has steps of 100 / 255 = 0.39 for channels of 0 to 1. With s = sqrt(100 / 0.01) = 100 all
    # four lie between 0 and 1, in steps of 0.004: a hundredth of the rounding. Input and weights still round.
    plain, balanced = differences(outlier_net(), x, tmp_path, {}, {"balance": 0.5})
    assert balanced < 0.1 * plain
    done = compress.export_onnx(outlier_net(), (1, 4), tmp_path / "again.onnx")
    assert balance(Path(done.path), done.inputs, [(torch.eye(4),)], 0.5, is_big=False) == 1
    arrays = [onnx.numpy_helper.to_array(item) for item in onnx.load(done.path).graph.initializer]
    first, second = (next(a for a in arrays if sorted(a.shape) == shape) for shape in ([4, 4], [2, 4]))
    # the maker is divided by s, the readers multiplied: diag(100, 1, 1, 1) / (100, 1, 1, 1), and 0.01 * 100
    assert np.allclose(first, np.eye(4)) and np.allclose(np.abs(second), 1.0)


def test_an_activation_that_others_read_too_stays_as_it_is(tmp_path: Path) -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = outlier_net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.net[1](self.net[0](x))
            return self.net[2](hidden) + hidden[:, :2]

    done = compress.export_onnx(Skip(), (1, 4), tmp_path / "net.onnx")
    assert balance(tmp_path / "net.onnx", done.inputs, [(torch.eye(4),)], 0.5, is_big=False) == 0


def test_bias_correction_takes_out_the_mean_of_what_rounding_weights_loses(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(5, 1))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[127.0, 0.4, 0.4, 0.4, 0.4]]))
        net[0].bias.zero_()
    x = torch.cat([torch.zeros(64, 1), torch.full((64, 4), 100.0)], dim=1)
    # The scale is 127 / 127 = 1, so four weights of 0.4 round to 0: 4 * 0.4 * 100 = 160 are lost, all there is. The
    # correction adds them to the bias.
    plain, corrected = differences(
        net, x, tmp_path, {"reduce_range": False}, {"reduce_range": False, "correct_bias": True}
    )
    assert plain == pytest.approx(1.0) and corrected < 0.02


def test_options_of_static_int8_are_refused_elsewhere() -> None:
    x = torch.rand(8, 4)
    with pytest.raises(InvalidInput, match="balance is 2; it is from 0"):
        compress.convert(outlier_net(), x, calibration=[x], balance=2)
    with pytest.raises(InvalidInput, match="are for static int8"):
        compress.convert(outlier_net(), x, scheme="dynamic", correct_bias=True)
