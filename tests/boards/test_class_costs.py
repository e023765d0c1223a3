"""Quantities of classes: from a trace, from ncnn's layers, and from written-down nets."""

from __future__ import annotations

import numpy as np
import published_nets as nets
import pytest
import torch
from board_priors import PARENTS
from torch import nn

import edge_opt as eo
from edge_opt.boards.class_costs import CLASSES, KernelConventions
from edge_opt.boards.fused_layers import model_work
from edge_opt.errors import InvalidInput
from zoo import torchvision_models

PLAIN = KernelConventions(cache_elements=0.0)


def amounts(model: nn.Module, shape: tuple[int, ...], conventions: KernelConventions = PLAIN) -> dict[str, float]:
    row = model_work(eo.profile(model, shape)).quantities(conventions)
    return {name: float(value) for name, value in zip(CLASSES, row, strict=True) if value}


def test_a_convolution_with_norm_and_relu_is_one_layer() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    found = amounts(model.eval(), (1, 8, 8, 8))
    # 8x8 is two whole tiles each way: 64 places x 16 filters x 8 channels x 9 taps, in millions
    assert found["conv3x3_macs"] == pytest.approx(64 * 16 * 8 * 9 / 1e6)
    assert found["conv3x3_elements"] == pytest.approx((8 * 64 + 16 * 64) / 1e6)
    assert found["weights"] == pytest.approx(16 * 8 * 9 / 1e6)
    assert found["layers"] == 1
    assert set(found) == {"conv3x3_macs", "conv3x3_elements", "weights", "layers"}


def test_seven_by_seven_counts_as_two_tiles_of_four_each_way() -> None:
    found = amounts(nn.Conv2d(8, 8, 3, padding=1, bias=False), (1, 8, 7, 7))
    assert found["conv3x3_macs"] == pytest.approx(8 * 8 * 8 * 8 * 9 / 1e6)


def test_a_tensor_of_the_size_of_the_cache_counts_half() -> None:
    found = amounts(nn.Conv2d(8, 8, 1, bias=False), (1, 8, 4, 4), KernelConventions(cache_elements=8 * 16))
    assert found["conv1x1_elements"] == pytest.approx(2 * (8 * 16) / 2 / 1e6)


@pytest.mark.parametrize(
    ("layer", "channels", "name"),
    [
        (nn.Conv2d(8, 8, 3, groups=8), 8, "depthwise_macs"),
        (nn.Conv2d(3, 8, 3), 3, "first_macs"),
        (nn.Conv2d(8, 8, 3, stride=2), 8, "conv_macs"),
        (nn.Conv2d(8, 8, 5), 8, "conv_macs"),
        (nn.Conv2d(8, 8, 1), 8, "conv1x1_macs"),
        (nn.ConvTranspose2d(8, 8, 3), 8, "conv_macs"),
    ],
)
def test_convolutions_by_their_class(layer: nn.Module, channels: int, name: str) -> None:
    found = amounts(layer, (1, channels, 12, 12))
    assert name in found
    assert sum(key.endswith("_macs") for key in found) == 1


def test_groups_are_calls_of_their_own_or_a_class_of_their_own() -> None:
    layer = nn.Conv2d(32, 32, 1, groups=4, bias=False)
    # 4 places x 32 filters x 32/4 channels
    assert amounts(layer, (1, 32, 2, 2)) == pytest.approx(
        {"conv1x1_macs": 4 * 32 * 8 / 1e6, "conv1x1_elements": 2 * 128 / 1e6, "weights": 256 / 1e6, "layers": 4}
    )
    apart = amounts(layer, (1, 32, 2, 2), KernelConventions(0.0, splits_groups=False))
    assert apart["grouped_macs"] == pytest.approx(4 * 32 * 8 / 1e6)
    assert apart["layers"] == 1


def test_one_row_reads_weights_and_many_rows_compute() -> None:
    layer = nn.Linear(16, 8, bias=False)
    assert amounts(layer, (1, 16)) == pytest.approx({"linear_weights": 128 / 1e6, "layers": 1})
    many = amounts(layer, (5, 16))
    assert many["product_macs"] == pytest.approx(5 * 128 / 1e6)
    assert "linear_weights" not in many


def test_a_product_of_activations_is_attention() -> None:
    class Product(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x.transpose(1, 2)

    assert amounts(Product(), (2, 6, 4))["attention_macs"] == pytest.approx(2 * 6 * 6 * 4 / 1e6)


def test_a_relu_after_a_sum_is_a_pass_of_its_own() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + x)

    # the sum reads two and writes one, the ReLU reads and writes one
    assert amounts(Sum(), (1, 4, 5, 5))["elementwise_elements"] == pytest.approx((3 + 2) * 100 / 1e6)


def test_layers_add_up_to_the_whole() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 3 * 3, 4))
    found = model_work(eo.profile(model, (1, 3, 8, 8)))
    assert np.allclose(found.layer_quantities(KernelConventions()).sum(axis=0), found.quantities(KernelConventions()))


def test_every_parent_leads_to_a_class_that_stands_for_itself() -> None:
    for name in CLASSES:
        steps, place = 0, name
        while PARENTS[place] is not None:
            place, steps = PARENTS[place] or "", steps + 1
            assert steps < len(CLASSES)


def test_another_convention_is_refused() -> None:
    with pytest.raises(InvalidInput, match="profile again"):
        model_work(eo.profile(nn.Linear(4, 4), (1, 4), convention="thop"))


@pytest.mark.parametrize(
    ("name", "net"),
    [
        ("mobilenet_v2", nets.mobilenet_v2(1.0, 224)),
        ("squeezenet1_1", nets.squeezenet_v11(224)),
        ("mobilenet_v3_large", nets.mobilenet_v3(True)),
        ("mobilenet_v3_small", nets.mobilenet_v3(False)),
    ],
)
def test_written_down_nets_equal_torchvisions(name: str, net: nets.ModelWork) -> None:
    traced = model_work(eo.profile(getattr(torchvision_models(), name)(), (1, 3, 224, 224))).quantities(PLAIN)
    written = net.quantities(PLAIN)
    for class_name, ours, theirs in zip(CLASSES, written, traced, strict=True):
        # hard sigmoids are fused in one of them: a few layers and few elements
        assert ours == pytest.approx(theirs, rel=0.11 if class_name == "layers" else 0.01), class_name


def test_a_layer_type_that_nobody_knows_is_named() -> None:
    with pytest.raises(InvalidInput, match="'warp'"):
        nets.ncnn_workload("net", [{"t": "warp", "macs": 0, "params": 0, "iN": 1, "oN": 1}])


def test_a_cell_of_skips_has_only_the_stem_and_the_blocks_between() -> None:
    cell = "|none~0|+|none~0|none~1|+|skip_connect~0|none~1|none~2|"
    kinds = [work.kind for work in nets.nasbench201_workload(cell).works]
    # stem, two residual blocks of three convolutions, and the classifier
    assert kinds.count("conv") == 1 + 2 * 3
    assert kinds.count("linear") == 1
    assert nets.is_constant(cell) is False


def test_convolutions_of_a_cell_run_fifteen_times() -> None:
    cell = "|nor_conv_3x3~0|+|none~0|nor_conv_1x1~1|+|none~0|none~1|skip_connect~2|"
    works = nets.nasbench201_workload(cell).works
    # three stages of five cells, two convolutions each, beside the stem and six in the blocks between
    assert sum(work.kind == "conv" for work in works) == 15 * 2 + 1 + 6
    # 3x3 at 16, 32 and 64 channels on 32x32, 16x16 and 8x8 all have the same MACs
    assert sum(work.macs for work in works if work.kernel == (3, 3) and work.channels == 16 and work.stride == 1) == (
        5 * 32 * 32 * 16 * 16 * 9
    )


def test_a_cell_that_is_no_cell_is_refused() -> None:
    with pytest.raises(InvalidInput, match="edges"):
        nets.nasbench201_workload("conv")


def test_larger_convolutions_cost_more_where_weights_are_outside_the_chip() -> None:
    # 8 x 8 x 9 weights, then 8 x 4.
    net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 4, 1, bias=False))
    inside = amounts(net, (1, 8, 8, 8), KernelConventions(0.0, flash_weights=8 * 8 * 9 + 32))
    outside = amounts(net, (1, 8, 8, 8), KernelConventions(0.0, flash_weights=8 * 8 * 9 + 31))
    assert inside == amounts(net, (1, 8, 8, 8), KernelConventions(0.0))
    assert outside["conv3x3_macs"] == pytest.approx(1.75 * inside["conv3x3_macs"])
    assert outside["conv1x1_macs"] == inside["conv1x1_macs"]
