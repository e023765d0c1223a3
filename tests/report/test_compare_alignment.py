"""Layers find each other by name, by what they are, and by where they stand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import edge_opt as eo
from edge_opt.model_comparison import align
from edge_opt.records.profiles import LayerFigures, ModelComparison
from zoo import torchvision_models

SHAPE = (1, 3, 64, 64)


def layer(path: str, kind: str = "Conv2d", params: int = 0, size: int = 4, call: int = 1) -> LayerFigures:
    shape = ((1, size),)
    return LayerFigures(path, kind, call, shape, shape, params, 4 * params, params, 2 * params, 0, 0, 0)


def pairs(old: list[LayerFigures], new: list[LayerFigures]) -> list[tuple[str | None, str | None]]:
    return [(None if i is None else old[i].label, None if j is None else new[j].label) for i, j in align(old, new)]


def test_a_path_and_a_type_are_enough() -> None:
    old, new = [layer("a", params=8), layer("b", "Linear", 9)], [layer("a", params=4), layer("b", "Linear", 5)]
    assert pairs(old, new) == [("a", "a"), ("b", "b")]


def test_another_root_is_no_other_layer() -> None:
    old = [layer("conv", params=8), layer("head.fc", "Linear", 9)]
    new = [layer("module.conv", params=4), layer("module.head.fc", "Linear", 5)]
    assert pairs(old, new) == [("conv", "module.conv"), ("head.fc", "module.head.fc")]


def test_a_layer_that_kept_its_figures_was_renamed() -> None:
    old = [layer("stem", params=8), layer("fc", "Linear", 50)]
    new = [layer("entry", params=8), layer("classifier", "Linear", 50)]
    assert pairs(old, new) == [("stem", "entry"), ("fc", "classifier")]


def test_an_inserted_layer_shifts_the_numbers_of_a_sequence_and_nothing_else() -> None:
    def sequence(*kinds: str) -> list[LayerFigures]:
        return [layer(str(place), kind) for place, kind in enumerate(kinds)]

    old = sequence("Conv2d", "BatchNorm2d", "ReLU", "Linear", "Sigmoid", "Tanh")
    new = sequence("Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "Linear", "Sigmoid", "Tanh")
    assert pairs(old, new) == [
        ("0", "0"), ("1", "1"), ("2", "2"), (None, "3"), ("3", "4"), ("4", "5"), ("5", "6"),
    ]  # fmt: skip


def test_a_replaced_layer_keeps_its_place() -> None:
    assert pairs([layer("conv", params=3), layer("act", "ReLU")], [layer("conv", params=3), layer("act", "GELU")]) == [
        ("conv", "conv"),
        ("act", "act"),
    ]


def test_calls_of_one_module_are_apart() -> None:
    old = [layer("relu", "ReLU"), layer("relu", "ReLU", call=2)]
    assert pairs(old, old[:1]) == [("relu", "relu"), ("relu (call 2)", None)]


LAYERS = st.lists(
    st.builds(layer, st.sampled_from("abcde0123"), st.sampled_from(["X", "Y", "Z"]), st.integers(0, 2)),
    max_size=8,
    unique_by=lambda found: found.path,
)


@given(LAYERS, LAYERS)
def test_every_layer_stands_in_exactly_one_row(old: list[LayerFigures], new: list[LayerFigures]) -> None:
    found = align(old, new)
    assert sorted(i for i, _ in found if i is not None) == list(range(len(old)))
    assert sorted(j for _, j in found if j is not None) == list(range(len(new)))
    assert [i for i, _ in found if i is not None] == list(range(len(old)))
    for i, j in found:
        if i is not None and j is not None:
            assert old[i].kind == new[j].kind or old[i].path == new[j].path


@given(LAYERS)
def test_a_model_aligns_with_itself(layers: list[LayerFigures]) -> None:
    assert align(layers, layers) == [(place, place) for place in range(len(layers))]


def resnet(change: Callable[[nn.Module], None] = lambda _: None) -> nn.Module:
    model: nn.Module = torchvision_models().resnet18()
    change(model)
    return model


def pruned() -> nn.Module:
    """resnet18 with half of its channels, pruned by the library that people use for it."""
    import torch
    import torch_pruning

    model = resnet()
    pruner = torch_pruning.pruner.MagnitudePruner(
        model, torch.zeros(SHAPE), torch_pruning.importance.MagnitudeImportance(p=2), pruning_ratio=0.5,
        ignored_layers=[model.fc],
    )  # fmt: skip
    pruner.step()
    return model


@pytest.mark.slow
def test_a_pruned_twin_aligns_layer_by_layer() -> None:
    found = eo.compare(resnet(), pruned(), inputs=SHAPE)
    assert found.aligned_share() == 1.0
    assert found.aligned() == found.layer_count(0) == found.layer_count(1)
    assert {row.change() for row in found.layers} <= {"same", "changed"}
    macs = found.figure("macs").relative()
    assert macs is not None and -0.8 < macs < -0.6  # half of the channels in and out: about a quarter of the work
    assert not found.is_empty


def test_a_model_does_not_differ_from_itself() -> None:
    model = resnet()
    found = eo.compare(model, model, inputs=SHAPE)
    assert found.is_empty and found.aligned_share() == 1.0
    assert "no differences" in str(found)


def test_unrelated_models_have_nothing_in_common() -> None:
    models = torchvision_models()
    found = eo.compare(models.resnet18(), models.mobilenet_v2(), inputs=SHAPE)
    assert found.aligned() == 0 and found.aligned_share() == 0.0
    assert f"nothing in common: 0 of {found.layer_count(1)} layers align" in str(found)
    assert found.figure("params").values == (11_689_512, 3_504_872)  # as published for both


def test_a_wrapped_model_is_renamed_and_not_changed() -> None:
    found = eo.compare(resnet(), nn.Sequential(resnet()), inputs=SHAPE)
    assert found.aligned_share() == 1.0
    assert {row.change() for row in found.layers} == {"renamed"}
    assert all(figure.difference() == 0 for figure in found.totals)


def net(width: int, *more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *more, nn.Flatten(), nn.Linear(width * 64 * 64, 10))


@pytest.fixture(scope="module")
def three() -> ModelComparison:
    models = (net(8), net(4), net(8, nn.ReLU()))
    return eo.compare(*models, inputs=SHAPE, names=["wide", "narrow", "active"])


def test_the_first_of_several_is_the_baseline(three: ModelComparison) -> None:
    # 64 x 64 outputs, 3 x 3 x 3 weights for each of 8 or 4 channels; then a row of weights for each of 10 classes
    wide, narrow = (64 * 64 * 27 * width + width * 64 * 64 * 10 for width in (8, 4))
    assert three.figure("macs").values == (wide, narrow, wide)
    assert three.figure("macs").difference(1) == narrow - wide
    assert three.figure("macs").relative(1) == -0.5
    assert [row.change(2) for row in three.layers] == ["same", "added", "renamed", "renamed"]
    assert [row.change(1) for row in three.layers] == ["changed", "absent", "changed", "changed"]


def test_two_models_may_share_an_added_layer() -> None:
    found = eo.compare(net(8), net(8, nn.ReLU()), net(8, nn.ReLU()), inputs=SHAPE)
    (added,) = [row for row in found.layers if row.layers[0] is None]
    assert [row is not None for row in added.layers] == [False, True, True]


def test_rows_add_up_to_the_totals(three: ModelComparison) -> None:
    for model in range(3):
        layers = [row.layers[model] for row in three.layers]
        assert sum(layer.macs for layer in layers if layer) == three.figure("macs").values[model]
        assert sum(layer.params for layer in layers if layer) == three.figure("params").values[model]


def test_profiles_that_were_made_differently_say_so() -> None:
    model = nn.Conv2d(3, 4, 3)
    found = eo.compare(eo.profile(model, (1, 3, 8, 8)), eo.profile(model, (1, 3, 16, 16), name="large"))
    assert any("inputs 1×3×16×16 instead of 1×3×8×8" in remark for remark in found.remarks)
