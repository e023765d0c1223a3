"""The energy add-on: 4.5 pJ per flop and 132 pJ per 32-bit word, for float32."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rasp
import rasp.addons.energy
from edge_opt.errors import InvalidInput
from rasp.table import StatColumn, add_column, columns

WORD_PJ = 0.8 * 5 + 0.2 * 640


def totals(model: nn.Module, inputs: torch.Tensor, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = rasp.stat(
        model, inputs=inputs, includes=["energy"], print_stat=False, returns="totals", **options
    )
    return found


def linear_pj(multiply_pj: float, words_per_element: float) -> float:
    """Linear(16, 8) on 4 rows: 2 x 16 operations per output; each row reads its weights again."""
    elements = 4 * (16 + 16 * 8 + 8) + 4 * 8
    return multiply_pj * (4 * 8 * 2 * 16) + elements * words_per_element * WORD_PJ


@pytest.mark.parametrize(
    ("dtype", "multiply_pj", "words_per_element"), [(torch.float32, 4.5, 1), (torch.float16, 1.1, 0.5)]
)
def test_energy_of_a_linear_layer(dtype: torch.dtype, multiply_pj: float, words_per_element: float) -> None:
    found = totals(nn.Linear(16, 8).to(dtype), torch.ones(4, 16, dtype=dtype))
    assert found["energy"] == pytest.approx(linear_pj(multiply_pj, words_per_element))


def test_rows_add_up_to_the_total() -> None:
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2))
    data = rasp.stat(net, inputs=torch.ones(4, 16), includes=["energy"], print_stat=False, returns="data")
    assert data["energy"].iloc[0] == pytest.approx(linear_pj(4.5, 1))
    assert data["energy"].iloc[2] == 0
    assert data["energy"].iloc[:-1].sum() == pytest.approx(data.loc["total", "energy"])


def test_a_type_without_a_figure_has_no_energy(tmp_path: Path) -> None:
    model, inputs = nn.Linear(16, 8).to(torch.bfloat16), torch.ones(4, 16, dtype=torch.bfloat16)
    assert math.isnan(totals(model, inputs, save_path=tmp_path / "x.json")["energy"])
    assert json.loads((tmp_path / "x.json").read_text())["total"]["energy"] is None


def test_importing_again_changes_nothing() -> None:
    known = list(columns())
    before = totals(nn.Linear(16, 8), torch.ones(4, 16))
    for _ in range(2):
        importlib.reload(rasp.addons.energy)
        assert totals(nn.Linear(16, 8), torch.ones(4, 16)) == before
    assert list(columns()) == known


def test_another_column_of_the_same_name_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"'energy'.*rasp\.addons\.energy\.energy_pj"):
        add_column(StatColumn("energy", lambda row: 0.0))
    assert totals(nn.Linear(16, 8), torch.ones(4, 16))["energy"] == pytest.approx(linear_pj(4.5, 1))


def test_energy_is_left_out_unless_asked_for() -> None:
    data = rasp.stat(nn.Linear(16, 8), inputs=torch.ones(4, 16), print_stat=False, returns="data")
    assert "energy" not in data
    with pytest.raises(InvalidInput, match="'energy'.*compute=True"):
        totals(nn.Linear(16, 8), torch.ones(4, 16), compute=False)
