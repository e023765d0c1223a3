"""Profiles, sweeps, calibrations and configurations whose figures cannot be: one sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import edge_opt as eo
from calibrations import imaginary
from edge_opt.calibration.calibration_file import load_calibration, save_calibration
from edge_opt.errors import InvalidCalibration, InvalidConfig, UnreadableProfile, UnreadableSweep
from edge_opt.records.sweeps import Candidate, SweepResult, Trial
from edge_opt.report.sweep_files import read_sweep, sweep_document
from edge_opt.run.config import read_config
from sweep_jobs import figures

Change = Callable[[dict[str, Any]], None]


def put(*steps: Any, to: Any) -> Change:
    """Set the value at a path of keys and indices."""

    def change(data: dict[str, Any]) -> None:
        place: Any = data
        for step in steps[:-1]:
            place = place[step]
        place[steps[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("totals", "params", to="5"), r"totals\.params is '5'; expected a whole number"),
        (put("totals", "macs", to=1), r"totals\.macs is not the sum of its layers"),
        (put("trace", "ops", 0, "live_bytes", to=0.5), r"trace\.ops\[0\]\.live_bytes is 0\.5; expected a whole number"),
        (put("trace", "ops", 0, "reads", to=[0]), r"trace\.ops\[0\]\.reads has not one storage per tensor"),
    ],
)
def test_a_profile_with_a_figure_that_cannot_be_is_refused(change: Change, said: str, tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    eo.profile(nn.Linear(4, 4), (2, 4)).save(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UnreadableProfile, match=said):
        eo.load(path)


def sweep() -> dict[str, Any]:
    rows = [
        Trial(candidate, "done", figures(candidate), None, "", (), 1.0)
        for candidate in (Candidate(0.0, "fp32", "torch"), Candidate(0.5, "fp32", "torch"))
    ]
    result = SweepResult("net", rows[0], tuple(rows), (), (), rows[1].candidate.key, "")
    data: dict[str, Any] = json.loads(sweep_document(result))
    return data


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            put("trials", 0, "metrics", "latency_s", to="1"),
            r"trials\[0\]\.metrics\.latency_s is '1'; expected a num",
        ),
        (put("trials", 1, "metrics", to=None), "is 'done' and has no figures"),
        (put("trials", 1, "candidate", "pruning", to=0.0), "a candidate has two rows"),
        (put("best", to="nobody"), "the best is 'nobody', which is not a row"),
        (put("frontiers", to=[["latency", ["nobody"]]]), "names candidates that are not rows"),
        (put("trials", 1, "metrics", "latency_high_s", to=1e-9), "is outside its own interval"),
        (put("trials", 0, "attempts", to=None), "attempts is None; expected a whole number"),
    ],
)
def test_a_sweep_with_a_figure_that_cannot_be_is_refused(change: Change, said: str) -> None:
    data = sweep()
    read_sweep(json.dumps(data))
    change(data)
    with pytest.raises(UnreadableSweep, match=said):
        read_sweep(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("calibration", "bandwidths", 0, "bytes_per_s", to=float("inf")), "a bandwidth is inf bytes per second"),
        (put("calibration", "samples", to=[]), "it has no samples"),
    ],
)
def test_a_calibration_with_a_figure_that_cannot_be_is_refused(change: Change, said: str, tmp_path: Path) -> None:
    path = save_calibration(imaginary(count=3), tmp_path / "host.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(InvalidCalibration, match=said):
        load_calibration(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [*a]\n", "unknown key 'a'"),
        ("a: " + "[" * 3000, "50 brackets inside each other"),
        ("epochs: 1000000000000\n", "epochs is 1000000000000; it should be less than or equal to 100000"),
        ("learning_rate: .inf\n", "learning_rate is inf; it should be a finite number"),
        ("learning_rate: .nan\n", "learning_rate is nan; it should be"),
        ("threads: 100000\n", "threads is 100000; it should be less than or equal to 1024"),
        ("batch_size: -1\n", "batch_size is -1; it should be greater than or equal to 1"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidConfig, match=said) as caught:
        read_config(path)
    assert len(str(caught.value).splitlines()) == 1
