"""The static peak: bytes alive along the tape, from dimensions."""

from __future__ import annotations

import torch
from torch import nn

import edge_opt as eo

F32 = 4


def test_a_chain_holds_input_and_output_of_one_layer() -> None:
    # while the second layer runs, its input (8) and output (16) are alive; the model's input is apart
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 16), nn.Linear(16, 2))
    profile = eo.profile(model, (1, 4))
    assert profile.peak_activation_bytes == F32 * (8 + 16)
    assert profile.peak.module == "1"
    assert profile.peak.planner_bytes == F32 * (8 + 16)
    assert profile.totals.activation_bytes == F32 * (8 + 16 + 2)
    assert profile.totals.input_bytes == F32 * 4


def test_a_residual_keeps_its_input_alive() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return x + self.b(self.a(x))

    # x, a's output and b's output at once; a planner may drop a's output before the sum is made, but not before b ran
    profile = eo.profile(Residual(), (1, 8))
    assert profile.peak_activation_bytes == F32 * 3 * 8
    assert profile.peak.planner_bytes == F32 * 3 * 8


def test_names_kept_in_forward_cost_memory_that_a_planner_saves() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.layers[0](x)
            b = self.layers[1](a)
            c = self.layers[2](b)
            return self.layers[3](c)

    profile = eo.profile(Keeps(), (1, 8))
    assert profile.peak_activation_bytes == F32 * 4 * 8
    assert profile.peak.planner_bytes == F32 * 2 * 8


def test_in_place_work_and_views_allocate_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Unflatten(1, (2, 4)), nn.Flatten())
    profile = eo.profile(model, (1, 4))
    assert profile.totals.activation_bytes == F32 * 8
    assert profile.peak_activation_bytes == F32 * 8


def test_views_of_a_constant_that_forward_writes_allocate_nothing() -> None:
    class Table(nn.Module):
        def forward(self, x):
            table = torch.zeros(200, 200, 3)
            for column in range(3):
                table[:, :, column] = torch.ones(200, 200)
            return x + table.sum()

    # The table, three matrices of ones, the sum and the two outputs.
    assert eo.profile(Table(), (2,)).totals.activation_bytes == F32 * (200 * 200 * 3 + 3 * 200 * 200 + 1 + 2)


def test_max_pooling_holds_its_indices_while_it_runs() -> None:
    # 16 outputs with 8-byte indices beside them, and the convolution's 64 values
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.MaxPool2d(2))
    assert eo.profile(model, (1, 1, 8, 8)).peak_activation_bytes == F32 * 64 + 16 * (F32 + 8)


def test_rows_of_layers_add_up_to_the_totals() -> None:
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    profile = eo.profile(model, (2, 5, 16))
    assert sum(layer.activation_bytes for layer in profile.layers) == profile.totals.activation_bytes
    assert sum(layer.cost.flops for layer in profile.layers) == profile.totals.flops
    assert sum(layer.cost.bytes_moved for layer in profile.layers) == (
        profile.totals.bytes_read + profile.totals.bytes_written
    )
    assert sum(layer.operators for layer in profile.layers) == len(profile.operators)
    assert max(layer.peak_live_bytes for layer in profile.layers) == profile.peak_activation_bytes
    assert profile.peak.planner_bytes <= profile.peak_activation_bytes
