"""Sweeps and runs of models that are no classifiers."""

from __future__ import annotations

import csv
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.errors import InvalidConfig, InvalidInput
from edge_opt.records.sweeps import SweepResult
from edge_opt.run.config import read_config
from edge_opt.run.model_and_data import ModelAndData
from edge_opt.runtimes.agreement import sized

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.usefixtures("one_fork_server")
@pytest.mark.parametrize(
    ("name", "metric"),
    [("regression", "mae"), ("segmentation", "miou"), ("text_classifier", "f1"), ("keyword_spotting", "missed")],
)
def test_the_examples_ship_what_keeps_their_metric(
    name: str, metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is shipped is looked at here, not its time: one process of the comparison is as good as seven.
    monkeypatch.setattr("edge_opt.run.time_finalists._PROCESSES", 1)
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](str(tmp_path))
    rows = list(csv.DictReader((tmp_path / "sweep_results.csv").open(encoding="utf-8")))
    assert [row["status"] for row in rows] == ["done", "done"]
    assert "accuracy" not in "".join(rows[0]) and rows[0]["metric_direction"] in ("higher", "lower")
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["metric"] == metric
    assert summary["best"]["metrics"][f"{metric}_drop"] <= 0.1


def regression(**settings: Any) -> SweepResult:
    file = EXAMPLES / "regression.py"
    return eo.sweep(f"{file}:trained", f"{file}:loaders", output="unused", **settings)


def test_numbers_are_not_scored_by_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="set metric to mae, rmse or r2"):
        regression()
    assert not (tmp_path / "unused").exists()


def test_a_loss_that_does_not_fit_is_told_before_anything_is_built(tmp_path: Path) -> None:
    batches = [(torch.ones(4, 3), torch.ones(4))]
    with pytest.raises(InvalidInput, match="do not fit a classifier"):
        eo.sweep(
            nn.Linear(3, 1),
            {"train": batches, "validation": batches},
            output=tmp_path / "unused",
            metric="mae",
            loss="cross_entropy",
        )
    assert not (tmp_path / "unused").exists()


class Shared(nn.Module):
    """Classes and a temperature come with the call, and have no samples."""

    def forward(self, x: torch.Tensor, classes: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        return x @ classes.T / temperature


def test_inputs_that_hold_no_samples_are_never_cut() -> None:
    batch = (torch.ones(16, 8), torch.ones(5, 8), torch.tensor(2.0), torch.arange(16) % 5)
    inputs, labels = ModelAndData(Shared(), {}).samples([batch], Shared(), 4)
    assert [tuple(value.shape) for value in (*inputs, *labels)] == [(4, 8), (5, 8), (), (4,)]
    assert [tuple(value.shape) for value in sized([tuple(inputs)], 1)] == [(1, 8), (5, 8), ()]


FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.noise = torch.rand(4)
        {hook}

    def forward(self, x):
        return self.linear(x) + self.noise

def net():
    with open(__file__ + ".calls", "a") as log:
        log.write("x")
    return Net()
"""


@pytest.mark.parametrize(("hook", "calls"), [("", 1), ("self.local = lambda: 0", 2)])
def test_a_factory_is_called_once_where_its_model_can_be_carried(hook: str, calls: int, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(FACTORY.format(hook=hook), encoding="utf-8")
    source = ModelAndData(f"{file}:net", {})
    first = source.build()
    again = source.holding(first).build()
    assert type(again).__name__ == "Net" and again is not first
    assert torch.equal(again.linear.weight, first.linear.weight)
    # What no state dict holds is the same, too: carried, or drawn again under the same seed.
    assert torch.equal(again.noise, first.noise)
    assert len((tmp_path / "net.py.calls").read_text(encoding="utf-8")) == calls


def test_a_function_that_cannot_be_sent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="metric is <lambda>, which other processes cannot import"):
        regression(metric=lambda outputs, targets: 0.0, metric_direction="lower")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["metric=mae", "budgets=[accuracy_drop <= 1%]"], "unknown metric 'accuracy_drop'"),
        (["metric=dice"], "unknown metric 'dice'; metrics are accuracy"),
        (["metric=3"], "metric is 3; it must be a name, or a function"),
        (["metric=net.py:latency"], "a metric cannot be called 'latency'"),
    ],
)
def test_a_metric_and_its_constraints_must_fit(settings: list[str], sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        read_config(settings=settings)


@pytest.mark.parametrize(
    ("metric", "budgets"),
    [
        ("accuracy", ("accuracy_drop <= 0.01",)),
        ("miou", ("miou_drop <= 0.01",)),
        ("mae", ()),
        ("net.py:own", ()),
        ("net.py:dice", ("dice_drop <= 0.01",)),
    ],
)
def test_the_default_constraint_speaks_of_the_metric(metric: str, budgets: tuple[str, ...]) -> None:
    assert read_config(settings=[f"metric={metric}"]).all_budgets == budgets
