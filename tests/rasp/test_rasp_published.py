"""rasp against its published tables."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rasp
from zoo import torchvision_models

REFERENCE = Path(__file__).parents[1] / "reference"
STATIC = ("index", "name", "type", "in_shape", "out_shape", "params", "flops", "mem_r", "mem_w", "mem_rw", "macc")


def published(name: str) -> list[dict[str, str]]:
    with (REFERENCE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def without_weights(name: str) -> nn.Module:
    # Weights that never exist take no time to fill. GoogLeNet warns unless it is told how to fill its own.
    options: dict[str, Any] = {"init_weights": False} if name == "googlenet" else {}
    with torch.device("meta"):
        model: nn.Module = getattr(torchvision_models(), name)(**options)
    return model


def test_mobilenet_equals_the_published_table_in_every_static_column() -> None:
    data = rasp.stat(
        without_weights("mobilenet_v2"), (1, 3, 224, 224), includes=["macc"], print_stat=False, returns="data"
    )
    rows = data.reset_index().iloc[:-1]
    expected = published("rasp_mobilenet_v2.csv")
    assert len(rows) == len(expected) == 141
    for column in STATIC:
        assert [str(value) for value in rows[column]] == [row[column] for row in expected], column


@pytest.mark.parametrize("row", published("rasp_torchvision_models.csv"), ids=lambda row: row["Model"])
def test_params_equal_the_published_table(row: dict[str, str]) -> None:
    totals = rasp.stat(without_weights(row["Model"]), (1, 3, 224, 224), print_stat=False, returns="totals")
    assert f"{round(totals['params'] / 1e6, 2):g}M" == row["Params"]
