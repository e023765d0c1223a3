"""A measured forward and backward: rows close to the whole, and the model is as found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import edge_opt as eo


def test_layers_close_to_the_whole_and_gradients_are_as_found() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), nn.Linear(128, 8))
    gradient = model[0].weight.grad = torch.ones(128, 64)
    state = torch.get_rng_state()
    found = eo.measure(model, (16, 64), mode="train", min_time_s=0.02, memory=False, energy=None).training
    assert found is not None and found.recorded > 0
    assert found.between_s + sum(row.forward_s + row.backward_s for row in found.layers) == pytest.approx(found.whole_s)
    assert found.forward_s + found.backward_s == pytest.approx(found.whole_s)
    rows = {row.path: row for row in found.layers}
    assert all(rows[path].forward_s > 0 and rows[path].backward_s > 0 for path in ("0", "1.0", "1.1", "2"))
    assert rows["0"].kind == "Linear"
    assert model[0].weight.grad is gradient and model[2].weight.grad is None
    assert torch.equal(state, torch.get_rng_state()) and "forward" not in vars(model[0])


def test_without_a_gradient_there_is_no_step() -> None:
    model = nn.Linear(8, 4).requires_grad_(False)
    found = eo.measure(model, (2, 8), mode="train", min_time_s=0.01, memory=False, energy=None)
    assert found.training is None and found.latency.median_s > 0
