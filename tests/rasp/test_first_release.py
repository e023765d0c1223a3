"""`rasp.CFG.counting = "2020"`: the rule of the first release, and the table of 34 models it published."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rasp
import rasp.addons.energy
from edge_opt.errors import InvalidInput
from zoo import torchvision_models

with (Path(__file__).parent.parent / "reference" / "rasp_torchvision_models.csv").open(newline="") as file:
    PUBLISHED = list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def first_release() -> Iterator[None]:
    rasp.CFG.counting = "2020"
    yield
    rasp.CFG.counting = "latest"


def figures(model: nn.Module, *shape: int) -> dict[str, Any]:
    inputs = torch.empty(shape, device="meta")
    totals: dict[str, Any] = rasp.stat(
        model, inputs=inputs, print_stat=False, returns="totals", includes=["macc", "energy"]
    )
    return totals


def published_model(name: str) -> nn.Module:
    """The model as it was when the table was made."""
    options: dict[str, Any] = {"init_weights": False} if name == "googlenet" else {}
    with torch.device("meta"):
        model: nn.Module = getattr(torchvision_models(), name)(**options)
        if name.startswith("mnasnet") and name != "mnasnet1_0":
            _put_the_old_stem_back(model)
    return model


def _put_the_old_stem_back(model: Any) -> None:
    """The first version of torchvision's MNASNet did not scale its first layers with the width."""
    parts = import_module("torchvision.models.mnasnet")
    first_stack = parts._stack(16, parts._get_depths(model.alpha)[2], 3, 2, 3, 3, parts._BN_MOMENTUM)
    model.layers[0], model.layers[1] = nn.Conv2d(3, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32)
    model.layers[3] = nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False)
    model.layers[4] = nn.BatchNorm2d(32)
    model.layers[6], model.layers[7] = nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16)
    model.layers[8] = first_stack


def two_decimals(value: float) -> str:
    unit, size = ("G", 1e9) if value >= 1e9 else ("M", 1e6)
    return f"{round(value / size, 2):g}{unit}"


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["Model"])
def test_params_flops_and_energy_equal_the_published_table(row: dict[str, str]) -> None:
    found = figures(published_model(row["Model"]), 1, 3, 224, 224)
    assert f"{round(found['params'] / 1e6, 2):g}M" == row["Params"]
    assert two_decimals(found["flops"]) == row["FLOPs"]
    assert two_decimals(found["energy"]) == row["Energy (pJ)"]


def test_the_table_has_34_models() -> None:
    assert len(PUBLISHED) == 34


@pytest.mark.parametrize("bias", [0, 1])
def test_a_convolution_does_not_round_its_outputs_down(bias: int) -> None:
    # Stride 2 on 8 with a kernel of 3: (8 - 3) / 2 + 1 = 3.5 outputs a side; 3 are really written.
    found = figures(nn.Conv2d(4, 6, 3, stride=2, bias=bool(bias)), 2, 4, 8, 8)
    outputs, taps, params = 2 * 6 * 3.5 * 3.5, 4 * 9, 6 * 4 * 9 + 6 * bias
    assert found["flops"] == outputs * (taps - 1 + bias)
    assert found["mem_w"] == outputs * 4
    assert found["mem_r"] == 2 * (4 * 8 * 8 + params) * 4
    assert found["macc"] == 2 * 6 * 3 * 3 * (taps + bias)


def test_linear() -> None:
    assert figures(nn.Linear(16, 8), 4, 16)["flops"] == 4 * 8 * (16 - 1 + 1)
    assert figures(nn.Linear(16, 8, bias=False), 4, 16)["flops"] == 4 * 8 * (16 - 1)


def test_batch_norm_counts_three_and_one_for_the_scale() -> None:
    assert figures(nn.BatchNorm2d(6), 3, 6, 4, 4)["flops"] == 4 * 3 * 6 * 16
    assert figures(nn.BatchNorm2d(6, affine=False), 3, 6, 4, 4)["flops"] == 3 * 3 * 6 * 16


def test_a_square_pooling_kernel_counts_one_side() -> None:
    outputs = 2 * 4 * 4 * 4
    assert figures(nn.MaxPool2d(3, stride=2), 2, 4, 9, 9)["flops"] == outputs * (3 - 1)
    assert figures(nn.AvgPool2d(3, stride=2), 2, 4, 9, 9)["flops"] == outputs * (3 - 1 + 1)
    # Sides that differ were given as a pair, and counted as one.
    assert figures(nn.MaxPool2d((3, 1), stride=2), 2, 4, 9, 9)["flops"] == 2 * 4 * 4 * 5 * (3 - 1)
    assert figures(nn.AdaptiveAvgPool2d(1), 2, 4, 9, 9)["flops"] == 2 * 4 * (81 - 1 + 1)


def test_another_word_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"counting.*'2021'.*'latest', '2020'"):
        rasp.CFG.counting = "2021"  # type: ignore[assignment]


def test_the_latest_rule_is_the_default() -> None:
    assert type(rasp.CFG)().counting == "latest"
