"""Sensitivity: each layer alone, pruned for real or quantized in simulation."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import edge_opt as eo
from edge_opt.compress import apply_spec, prune
from edge_opt.errors import InvalidInput
from edge_opt.model import SmallCNN
from edge_opt.quantization.fake_quantization import quantized_activation, quantized_weight
from pruned_nets import Residual


def data(count: int = 16, shape: tuple[int, ...] = (1, 28, 28)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(count, *shape, generator=generator), torch.arange(count) % 10) for _ in range(2)]


def test_a_row_for_every_layer_and_change_that_is_possible() -> None:
    found = eo.sensitivity(SmallCNN(), data(), prune=(0.25, 0.5), precisions=("int8", "bf16"))
    # the classifier's channels are the output: it is quantized, and not pruned
    assert len(found.rows) == 2 * 2 + 3 * 2
    assert found.samples == 32
    assert found.unchanged == (("classifier", "not pruned: classifier is the model's output"),)
    for row in found.rows:
        assert row.score == pytest.approx(found.baseline + row.score_change)
        assert (row.removed is None) == (row.change == "quantize")


def test_pruning_one_layer_is_what_prune_does_to_it() -> None:
    torch.manual_seed(0)
    model, batches = SmallCNN(), data()
    row = next(row for row in eo.sensitivity(model, batches, layers=["conv2"], prune=(0.5,), precisions=()).rows)
    spec = prune(model, (1, 1, 28, 28), {"conv2": 0.5}, round_to=1).spec
    pruned = apply_spec(model, spec)
    with torch.no_grad():
        before = torch.cat([model(images) for images, _ in batches])
        after = torch.cat([pruned(images) for images, _ in batches])
    assert row.output_error == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-5)
    assert row.disagreement == pytest.approx(float((after.argmax(1) != before.argmax(1)).float().mean()))
    assert row.removed == 0.5


def test_coupled_layers_are_pruned_together_and_say_so() -> None:
    rows = eo.sensitivity(Residual(), data(shape=(3, 16, 16)), prune=(0.5,), precisions=()).rows
    by_path = {row.path: row for row in rows}
    assert by_path["stem"].note == "together with down"
    assert by_path["stem"].output_error == by_path["down"].output_error
    assert by_path["up"].note == ""


def test_the_layer_that_matters_is_the_one_to_spare() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
    with torch.no_grad():
        # Half of the second layer is silent: pruning it costs nothing.
        model[2].weight[:8] = 0
        model[2].bias[:8] = 0
    x = torch.randn(64, 8)
    with torch.no_grad():
        labels = model(x).argmax(1)
    found = eo.sensitivity(model, [(x, labels)], prune=(0.5,), precisions=())
    by_path = {row.path: row for row in found.rows}
    assert found.baseline == 1.0
    assert by_path["2"].output_error < 1e-6
    assert by_path["0"].score_change < 0
    assert found.spare("prune") == ("0",)
    assert "do not change these, they lose most when pruned: 0" in str(found)


def test_int8_is_closer_than_pruning_and_weights_come_back() -> None:
    model = SmallCNN()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = eo.sensitivity(model, data(), prune=(0.5,))
    errors = {(row.path, row.change): row.output_error for row in found.rows}
    assert 0 < errors["conv1", "quantize"] < 0.05 < errors["conv1", "prune"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


@given(st.lists(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), min_size=1, max_size=4))
def test_weights_are_rounded_to_the_nearest_step_of_their_channel(rows: list[list[float]]) -> None:
    weight = torch.tensor(rows, dtype=torch.float64)
    rounded = quantized_weight(weight, 0)
    for before, after in zip(weight, rounded, strict=True):
        step = float(before.abs().max()) / 127
        assert float((before - after).abs().max()) <= step / 2 * (1 + 1e-9)
        assert len({round(float(value) / step) for value in after} if step else {0}) <= 3


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20))
def test_activations_lie_on_256_steps_with_zero_among_them(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    low, high = float(x.min()), float(x.max())
    rounded = quantized_activation(x, low, high)
    step = (max(high, 0) - min(low, 0)) / 255 or 1.0
    assert float((x - rounded).abs().max()) <= step * (1 + 1e-9)
    assert float(quantized_activation(torch.zeros(1, dtype=torch.float64), low, high)) == 0.0


def test_tables_and_json_hold_every_row() -> None:
    found = eo.sensitivity(SmallCNN(), data(), prune=(0.5,))
    frame = found.to_dataframe()
    assert list(frame["path"]) == [row.path for row in found.rows]
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["path"] == "conv1"
    changes = [row.score_change for row in found.worst_first()]
    assert changes == sorted(changes)


def test_a_metric_of_ones_own() -> None:
    def stillness(model: nn.Module) -> float:
        return -float(model(torch.ones(1, 1, 28, 28)).abs().sum())

    found = eo.sensitivity(SmallCNN(), data(), prune=(), metric=stillness, batches=1)
    assert (found.metric, found.samples) == ("stillness", 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loader": []}, "the loader has no batches"),
        ({"prune": (1.5,)}, "a ratio in prune is 1.5"),
        ({"precisions": ("int4",)}, "precision is 'int4'; it must be one of int8, fp16, bf16"),
        ({"layers": ["conv9"]}, "SmallCNN has no layer 'conv9'; closest: conv2, conv1"),
        ({"loader": [(torch.zeros(2, 1, 28, 28), torch.zeros(2, 3))]}, "do not fit accuracy"),
    ],
)
def test_bad_input_is_refused(arguments: dict, message: str) -> None:
    options = {"loader": data(), **arguments}
    with pytest.raises(InvalidInput, match=message):
        eo.sensitivity(SmallCNN(), options.pop("loader"), **options)
