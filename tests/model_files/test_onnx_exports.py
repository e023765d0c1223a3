"""Exports of models cost what the models cost; what an exporter folded away is the only difference."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.loading import load_model


class Mixed(nn.Module):
    """Convolutions with a norm, a residual, attention, recurrence and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.ConvTranspose2d(8, 8, 1)])
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.gru = nn.GRU(8, 6, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.block[1](nn.functional.gelu(self.block[0](x)))
        x = x.flatten(2).transpose(1, 2)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        found: torch.Tensor = self.head(self.gru(x)[0][:, -1])
        return found


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, str]:
    torch.manual_seed(0)
    model = Mixed().eval()
    with torch.no_grad():  # equal weights would be stored once, and those that are zero left out
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 1.0)
    path = tmp_path_factory.mktemp("export") / "mixed.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, (torch.zeros(2, 3, 8, 8),), dynamo=True, verbose=False)
    assert program is not None
    program.save(str(path))
    return model, str(path)


def test_macs_equal_those_of_the_model(mixed: tuple[nn.Module, str]) -> None:
    model, path = mixed
    theirs, ours = eo.profile(model, (2, 3, 8, 8)), eo.profile(load_model(path).model, (2, 3, 8, 8))
    assert ours.totals.macs == theirs.totals.macs
    assert not ours.unpriced


def test_parameters_equal_those_of_the_model_but_for_the_folded_norm(mixed: tuple[nn.Module, str]) -> None:
    model, path = mixed
    found = eo.profile(load_model(path).model, (2, 3, 8, 8)).totals.params
    # The norm's weight and bias, 2 x 8, became the convolution's bias, 8. The recurrent state, 2 x 6 zeros, came in.
    assert found == sum(one.numel() for one in model.parameters()) - 8 + 2 * 6


def test_layers_are_found_under_the_paths_of_the_model(mixed: tuple[nn.Module, str]) -> None:
    model, path = mixed
    read = {one.path: one for one in eo.profile(load_model(path).model, (2, 3, 8, 8)).trace.modules}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.LayerNorm, nn.GRU)):
            assert read[name].kind == type(module).__name__
    assert "stem.1" not in read  # the norm that was folded into stem.0


def test_a_file_says_which_inputs_it_takes(mixed: tuple[nn.Module, str]) -> None:
    example = load_model(mixed[1]).example
    assert example is not None
    assert [tuple(one.shape) for one in example[0]] == [(2, 3, 8, 8)]


def test_our_own_export_keeps_paths_and_any_batch(tmp_path: Path) -> None:
    from edge_opt.runtimes.export import export_onnx

    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    export_onnx(model, (1, 1, 8, 8), tmp_path / "m.onnx")
    found = eo.profile(load_model(str(tmp_path / "m.onnx")).model, (5, 1, 8, 8))
    assert found.totals.macs == 5 * (36 * 4 * 9 + 144 * 3)
    assert {one.path for one in found.trace.modules} >= {"0", "3"}


def test_a_file_is_measured_by_its_runtime(tmp_path: Path) -> None:
    from onnx_graphs import node, write

    path = write(tmp_path / "m.onnx", [node("MatMul", "x w", "y")], {"x": (2, 4)}, ["y"], {"w": (4, 3)})
    found = eo.measure(load_model(path).model, (2, 4), min_time_s=0.01, energy=None)
    assert found.latency.median_s > 0
    assert found.layers is None
    assert "run by ONNX Runtime" in found.latency.remarks[-1]
