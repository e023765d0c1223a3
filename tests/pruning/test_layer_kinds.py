"""The table of layer kinds: channels, tensors and attributes agree with each other for every kind."""

from __future__ import annotations

import pytest
from torch import nn

from edge_opt.pruning.layer_kinds import (
    LAYER_KINDS,
    channels,
    counted_attributes,
    depth_multiplier,
    refusal_of,
    tensor_entries,
    tied_positions,
)

LAYERS: dict[str, nn.Module] = {
    "convolution": nn.Conv2d(4, 6, 3),
    "grouped convolution": nn.Conv2d(4, 6, 3, groups=2),
    "depthwise convolution": nn.Conv2d(4, 8, 3, groups=4),
    "transposed convolution": nn.ConvTranspose2d(4, 6, 3),
    "linear": nn.Linear(4, 6),
    "batch norm": nn.BatchNorm2d(6),
    "layer norm": nn.LayerNorm(6),
    "group norm": nn.GroupNorm(2, 6),
    "PReLU": nn.PReLU(6),
    "embedding": nn.Embedding(10, 6),
    "LSTM": nn.LSTM(4, 6, num_layers=2, bidirectional=True),
    "attention": nn.MultiheadAttention(6, 2),
}


def test_every_kind_of_the_table_is_tested() -> None:
    assert all(any(isinstance(layer, types) for layer in LAYERS.values()) for types, _ in LAYER_KINDS)


@pytest.mark.parametrize("name", LAYERS)
def test_entries_of_a_channel_are_inside_their_tensors(name: str) -> None:
    layer = LAYERS[name]
    state = layer.state_dict()
    for side in ("in", "out"):
        for entries in tensor_entries(layer, side):
            assert len(entries.indices) == channels(layer, side)
            assert 0 <= entries.indices.min() <= entries.indices.max() < state[entries.tensor].shape[entries.dim]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_loses_nothing_keeps_its_counts(name: str) -> None:
    layer = LAYERS[name]
    for attribute, value in counted_attributes(layer, channels(layer, "in"), channels(layer, "out")).items():
        assert getattr(layer, attribute) == value


def test_groups_lose_the_same_positions_and_depthwise_inputs_have_outputs_of_their_own() -> None:
    labels = tied_positions(LAYERS["grouped convolution"], "out")
    # 6 outputs in 2 groups of 3
    assert labels is not None and labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert tied_positions(LAYERS["convolution"], "out") is None
    # 8 outputs of 4 inputs
    assert depth_multiplier(LAYERS["depthwise convolution"], "in") == 2


def test_one_parameter_for_all_channels_counts_none_of_them() -> None:
    shared = nn.PReLU(1)
    assert channels(shared, "out") == 0 and tensor_entries(shared, "out") == []
    assert counted_attributes(shared, 0, 0) == {}


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.LSTM(4, 6, proj_size=2), "LSTM that projects its outputs"),
        (nn.LayerNorm((4, 6)), "LayerNorm normalizes over 2 dimensions"),
        (nn.MultiheadAttention(6, 2, kdim=3), "MultiheadAttention with key, value or bias of its own size"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), "its weight is computed from other parameters"),
    ],
)
def test_layers_that_cannot_be_pruned_say_why(layer: nn.Module, reason: str) -> None:
    why = refusal_of(layer)
    assert why is not None and reason in why
