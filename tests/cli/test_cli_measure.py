"""`edge-opt profile --measure` and `edge-opt doctor`, as users call them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from edge_opt.cli import app

SHORT = ["--measure", "--min-time", "0.02", "--threads", "1"]
MODEL = ["profile", "edge_opt.model:SmallCNN", "-i", "2x1x28x28"]


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_measured_figures_stand_beside_the_estimates() -> None:
    code, out, err = run(*MODEL, *SHORT)
    assert code == 0, err
    assert "Time" in out.splitlines()[0]
    for label in ("Compute", "Latency", "Layers", "Measured"):
        assert any(line.startswith(label) for line in out.splitlines()), label


def test_json_has_the_samples_and_their_environment() -> None:
    code, out, _ = run(*MODEL, *SHORT, "--json")
    assert code == 0
    measurement = json.loads(out)["measurement"]
    assert measurement["latency"]["batch_size"] == 2
    assert min(measurement["latency"]["samples_s"]) == measurement["latency"]["minimum_s"] > 0
    assert measurement["environment"]["threads"] == 1
    parts = sum(layer["seconds"] for layer in measurement["layers"]["layers"])
    whole = measurement["layers"]["whole_s"]
    assert parts + measurement["layers"]["between_layers_s"] == pytest.approx(whole, rel=1e-3)
    assert measurement["memory"]["peak_bytes"] >= measurement["memory"]["tensor_peak_bytes"] > 0


def test_layers_can_be_sorted_by_time() -> None:
    code, out, _ = run(*MODEL, *SHORT, "--sort", "time", "--top", "2")
    assert code == 0
    assert "Time %" in out.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--threads", "2"], "add --measure"),
        (["--sort", "time"], "cannot sort by time: layers were not measured"),
        (["--measure", "--min-time", "0"], "--min-time is 0"),
        (["--measure", "--threads", "0"], "--threads is 0"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str) -> None:
    code, out, err = run(*MODEL, *words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_the_doctor_says_why_each_meter_is_or_is_not_usable() -> None:
    code, out, err = run("doctor", "--seconds", "0.1", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert {meter["name"] for meter in found["meters"]} >= {"rapl", "nvml", "jetson"}
    assert all(meter["refusal"] is None or meter["refusal"].strip() for meter in found["meters"])
    assert found["environment"]["cores"] >= 1
    code, out, _ = run("doctor", "--seconds", "0.1")
    assert code == 0
    assert all(title in out for title in ("Machine", "Versions", "Energy meters", "Noise"))
