"""Every view of awkward models: rows add up, files hold the same numbers, JSON comes back equal."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.records.profiles import ModelProfile
from rendering import render


class Masked(nn.Module):
    """Functional attention with a boolean mask and an infinite argument."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.project(batch["x"])
        scores = (x @ x.transpose(1, 2)).masked_fill(batch["mask"], float("-inf"))
        return scores.softmax(-1) @ x


class Shared(nn.Module):
    """One layer called from two places, tied weights, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.second = nn.Sequential(self.first[0], nn.Linear(4, 4, bias=False))
        self.second[1].weight = self.first[0].weight
        self.unused = nn.Linear(4, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.first(x)))


class Unpriced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.matrix_exp(self.layer(x))


class LooksAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 1e9 else self.layer(x) + 1


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, key_padding_mask=mask)[0]


def _masked() -> ModelProfile:
    return eo.profile(Masked(), [{"x": torch.zeros(2, 5, 8), "mask": torch.zeros(2, 5, 5, dtype=torch.bool)}])


AWKWARD: dict[str, Callable[[], ModelProfile]] = {
    "lstm": lambda: eo.profile(nn.LSTM(6, 5, num_layers=2, bidirectional=True), (3, 2, 6)),
    "attention": lambda: eo.profile(Attention(), [(2, 5, 8), ((2, 5), "bool")]),
    "encoder": lambda: eo.profile(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    "masked, inputs in a dict": _masked,
    "shared": lambda: eo.profile(Shared(), (2, 4)),
    "unpriced": lambda: eo.profile(Unpriced(), (4, 4)),
    "looks at values": lambda: eo.profile(LooksAtValues(), (2, 4)),
    "one layer": lambda: eo.profile(nn.Linear(4, 4), (2, 4)),
    "no work": lambda: eo.profile(nn.Identity(), (2, 4)),
    "train": lambda: eo.profile(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 8, 8), mode="train"),
}

COSTS = ["macs", "flops", "other_ops", "bytes_read", "bytes_written", "activation_bytes"]
PARAMS = ["params", "trainable_params", "param_bytes"]


@pytest.fixture(params=AWKWARD, scope="module")
def profile(request: pytest.FixtureRequest) -> ModelProfile:
    return AWKWARD[request.param]()


@pytest.mark.parametrize("level", ["leaves", "operators", "root"])
def test_rows_add_up_to_the_totals(profile: ModelProfile, level: Any) -> None:
    table = profile.to_dataframe(level)
    for name in COSTS if level == "operators" else COSTS + PARAMS:
        assert table[name].sum() == getattr(profile.totals, name), name


def test_the_first_module_row_is_the_whole_model(profile: ModelProfile) -> None:
    table = profile.to_dataframe("modules")
    assert table.path.is_unique
    assert table.depth.tolist()[:1] == [0]
    for name in COSTS + PARAMS:
        assert table[name][0] == getattr(profile.totals, name), name
    assert table.peak_live_bytes[0] == profile.peak.live_bytes


def test_counts_and_peaks_agree_at_every_level(profile: ModelProfile) -> None:
    leaves, operators, root = (profile.to_dataframe(level) for level in ("leaves", "operators", "root"))  # type: ignore[arg-type]
    missing = sum(item.count for item in profile.unpriced)
    assert leaves.operators.sum() == len(operators) == root.operators[0] == len(profile.trace.ops)
    assert leaves.unpriced.sum() == (operators.status == "unpriced").sum() == root.unpriced[0] == missing
    assert root.peak_live_bytes[0] == profile.peak.live_bytes
    if len(operators):
        assert operators.live_bytes.max() == leaves.peak_live_bytes.max() == profile.peak.live_bytes


def test_json_comes_back_equal(profile: ModelProfile, tmp_path: Path) -> None:
    path = profile.save(tmp_path / "profile.json")
    again = eo.load(path)
    assert again == profile
    assert hash(again) == hash(profile)
    assert again.to_dataframe("leaves").equals(profile.to_dataframe("leaves"))


def test_json_is_standard_and_holds_the_numbers_of_the_table(profile: ModelProfile, tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads(profile.save(tmp_path / "profile.json").read_text(), parse_constant=refuse)
    assert data["format"] == "edge_opt.profile"
    assert data["schema_version"] == 1
    table = profile.to_dataframe("root")
    for name in COSTS + PARAMS + ["buffer_bytes", "input_bytes"]:
        assert data["totals"][name] == table[name][0]
    rows = {(layer["call"]["path"], layer["call"]["call_number"]): layer for layer in data["layers"]}
    for row in profile.to_dataframe("leaves").itertuples():
        layer = rows[row.path, row.call_number]
        assert layer["cost"]["macs"] == row.macs
        assert layer["cost"]["bytes_read"] == row.bytes_read
        assert layer["call"]["params"] == row.params


@pytest.mark.parametrize("level", ["leaves", "modules", "operators", "root"])
def test_csv_holds_the_numbers_of_the_table(profile: ModelProfile, level: Any, tmp_path: Path) -> None:
    with profile.save(tmp_path / "profile.csv", level).open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    table = profile.to_dataframe(level)
    assert len(lines) == len(table)
    for name in ("macs", "bytes_written", "activation_bytes"):
        known = [int(line[name]) if line[name] else None for line in lines]
        assert known == table[name].astype("object").where(table[name].notna(), None).tolist()


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize(
    "view",
    [{}, {"depth": 0}, {"depth": 1}, {"sort": "params"}, {"top": 2}, {"level": "leaves"}, {"level": "operators"}],
)
def test_the_terminal_shows_every_model_within_its_width(
    profile: ModelProfile, width: int, view: dict[str, Any]
) -> None:
    text = render(profile, width=width, **view)
    assert max(map(len, text.splitlines())) <= width
    text = " ".join(text.split())
    assert "Coverage" in text
    assert ("lower bounds" in text) == profile.totals.is_lower_bound
    assert all(note.split()[0] in text for note in profile.trace.notes)


def test_every_suffix_takes_every_level(profile: ModelProfile, tmp_path: Path) -> None:
    for suffix in ("json", "csv", "md", "txt"):
        for level in ("leaves", "modules", "operators", "root"):
            path = profile.save(tmp_path / f"{level}.{suffix}", level)  # type: ignore[arg-type]
            assert path.read_text(encoding="utf-8").endswith("\n")
