"""Details that new users stumbled over."""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt._support.extras import pip_name
from edge_opt.cli import app
from edge_opt.cli.arguments import load_batches
from edge_opt.errors import EdgeOptError
from edge_opt.model import SmallCNN

MODEL = ["edge_opt.model:SmallCNN", "-i", "1x1x28x28"]


def test_tensors_in_a_dict_are_refused_with_the_way_that_works(tmp_path: Path) -> None:
    file = tmp_path / "dicts.py"
    file.write_text(
        "import torch\n\n\nclass Net(torch.nn.Linear):\n    def forward(self, batch):\n"
        "        return super().forward(batch['x'])\n\n\ndef model():\n    return Net(4, 2)\n\n\n"
        "def inputs():\n    return [{'x': torch.zeros(1, 4)}]\n"
    )
    for text in ("{'x': 1x4}", "batch={'x': '1x4'}"):
        result = CliRunner().invoke(app, ["profile", f"{file}:model", "-i", text])
        assert result.exit_code == 2 and "--inputs file.py:inputs" in result.stderr
    result = CliRunner().invoke(app, ["profile", f"{file}:model", "-i", "1x4"])
    assert result.exit_code == 2 and "def inputs(): return [{'x': ...}], -i file.py:inputs" in result.stderr
    result = CliRunner().invoke(app, ["profile", f"{file}:model", "-i", f"{file}:inputs", "--json"])
    assert json.loads(result.stdout)["totals"]["macs"] == 4 * 2


def test_several_targets_with_depth_show_the_layers_too() -> None:
    targets = ["-t", "raspberry-pi-4", "-t", "raspberry-pi-5"]
    result = CliRunner().invoke(app, ["profile", *MODEL, *targets, "--depth", "1"])
    assert result.exit_code == 0 and "classifier" in result.stdout and "raspberry-pi-5" in result.stdout
    assert "classifier" not in CliRunner().invoke(app, ["profile", *MODEL, *targets]).stdout


@pytest.mark.parametrize(
    "optimizer",
    ["SGD", "torch.optim.SGD", torch.optim.SGD, partial(torch.optim.SGD, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)],
)
def test_an_optimizer_is_what_people_write(optimizer: object) -> None:
    model = nn.Linear(8, 4)
    plain = eo.training_step(model, (2, 8), optimizer="sgd")
    assert eo.training_step(model, (2, 8), optimizer=optimizer).peak_bytes == plain.peak_bytes
    momentum = eo.training_step(model, (2, 8), optimizer="sgd_momentum")
    # one state of 4 bytes for each of 8 x 4 weights and 4 biases
    assert momentum.peak_by_kind["optimizer_state"] == 4 * (8 * 4 + 4)


def test_the_largest_batch_for_training_in_one_command() -> None:
    limit = ["--budget", "train_peak_memory_mb <= 8", "--largest-batch"]
    result = CliRunner().invoke(app, ["train-cost", *MODEL, *limit, "--json"])
    batch = json.loads(result.stdout)["batch"]
    peaks = [eo.training_step(SmallCNN(), (size, 1, 28, 28)).peak_bytes for size in (batch, batch + 1)]
    assert peaks[0] <= 8 * 2**20 < peaks[1]
    assert CliRunner().invoke(app, ["train-cost", *MODEL, "--largest-batch"]).exit_code == 2


def test_different_architectures_are_compared_by_type_of_layer() -> None:
    deep = nn.Sequential(*(nn.Conv2d(4, 4, 3) for _ in range(20)))
    shown = str(eo.compare(eo.profile(nn.Linear(8, 8), (1, 8)), eo.profile(deep, (1, 4, 64, 64))))
    row = next(line for line in shown.splitlines() if line.startswith("Conv2d"))
    assert row.split()[1:3] == ["0", "20"]


def test_pip_installs_pillow() -> None:
    assert pip_name("PIL") == "pillow"


def test_without_file_locks_run_and_sweep_say_which_systems_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delitem(sys.modules, "edge_opt.search.locks", raising=False)
    with pytest.raises(EdgeOptError, match="need Linux, macOS or WSL"):
        importlib.import_module("edge_opt.search.locks")


@pytest.mark.parametrize("returned", ["train, train", "{'train': train, 'validation': None}", "train"])
def test_calibration_takes_the_loaders_of_a_sweep(returned: str, tmp_path: Path) -> None:
    lines = ("import torch", "from torch.utils.data import DataLoader", "", "def loaders():")
    body = f"    train = DataLoader(torch.ones(4, 3), batch_size=2)\n    return {returned}\n"
    (tmp_path / "data.py").write_text("\n".join(lines) + "\n" + body)
    assert [batch.shape for batch in load_batches(f"{tmp_path}/data.py:loaders")] == [(2, 3), (2, 3)]
