"""The doctor: what a measurement here would rest on, on replayed meters and time."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from importlib.metadata import version
from types import ModuleType

import pytest
import torch
import typer
from typer.testing import CliRunner

from edge_opt.cli import app
from edge_opt.cli.device_commands import doctor
from edge_opt.errors import InvalidInput
from edge_opt.measuring.latency import Clock
from edge_opt.measuring.session import diagnose, machine_noise
from edge_opt.measuring.statistics import compare_latencies, latency_of
from edge_opt.records.measurements import Diagnosis, Facility
from edge_opt.report.sheets import record_text
from timings import environment, steady


@pytest.fixture(autouse=True)
def meters(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("edge_opt.measuring.energy")
    fake.meters = lambda: (Facility("rapl", "no powercap folder"), Facility("proxy", None))
    monkeypatch.setitem(sys.modules, "edge_opt.measuring.energy", fake)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that passes only while matrices are multiplied: about a millisecond each."""
    numbers, now = random.Random(0), [0.0]

    def product(left: torch.Tensor, right: torch.Tensor) -> None:
        now[0] += numbers.uniform(0.95e-3, 1.05e-3)

    monkeypatch.setattr("edge_opt.measuring.session.torch.mm", product)
    clock = Clock(lambda: now[0], lambda: now[0], lambda: now[0])
    monkeypatch.setattr("edge_opt.measuring.latency.Clock", lambda: clock)
    return clock


def diagnosis() -> Diagnosis:
    noise = latency_of(steady(1e-3), steady(1e-3))
    return Diagnosis(
        environment=environment(governor="ondemand", load_1min=None, memory_bytes=4 * 2**30),
        interop_threads=2,
        cpu_capability="AVX2",
        versions=(("torch", "2.6"), ("timm", None)),
        devices=(Facility("cpu", None),),
        meters=(Facility("rapl", "no powercap folder"), Facility("proxy", None)),
        noise=noise,
        repetition=compare_latencies(noise, noise, paired=True),
    )


def test_a_diagnosis_names_packages_devices_and_meters(clock: Clock) -> None:
    found = diagnose(0.5)
    versions = dict(found.versions)
    assert versions["torch"] == version("torch")  # of the package; a build may say more of itself
    assert versions["edge-opt"]
    assert found.devices[0] == Facility("cpu", None)
    assert found.meters == (Facility("rapl", "no powercap folder"), Facility("proxy", None))
    assert found.environment.threads == torch.get_num_threads()


def test_noise_is_the_same_work_against_itself_within_the_time(clock: Clock) -> None:
    noise, again = machine_noise(2.0, environment())
    assert again.verdict == "equal"
    assert clock.wall() <= 2.0
    assert noise.median_s == pytest.approx(1e-3, rel=0.02)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_time_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidInput, match="it must be above 0"):
        machine_noise(seconds, environment())


def test_the_text_says_what_a_measurement_would_rest_on() -> None:
    text = record_text(diagnosis(), width=200)
    assert "1 inside an operator, 2 between operators" in text
    assert "ondemand" in text and "not known in the last minute" in text and "4.00 GiB" in text
    assert "rapl: no powercap folder" in text and "proxy: usable" in text
    assert "quiet: good to measure on" in text


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [({"is_noisy": True}, "noisy: expect wide"), ({"is_contended": True, "is_noisy": True}, "busy: other programs")],
)
def test_the_verdict_says_what_is_wrong(changed: dict[str, bool], verdict: str) -> None:
    found = diagnosis()
    text = record_text(replace(found, noise=replace(found.noise, remarks=("a remark",), **changed)), width=200)
    assert verdict in text and "a remark" in text


def command() -> typer.Typer:
    app = typer.Typer()
    app.command("doctor")(doctor)
    return app


def test_the_command_prints_all_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_opt.measuring.session.diagnose", lambda seconds: diagnosis())
    shown = CliRunner().invoke(command(), [])
    assert shown.exit_code == 0, shown.output
    for word in ("Machine", "Versions", "Devices", "Energy meters", "Noise", "no powercap folder", "not installed"):
        assert word in shown.stdout


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr("edge_opt.measuring.session.diagnose", lambda seconds: asked.append(seconds) or diagnosis())
    shown = CliRunner().invoke(app, ["doctor", "--json", "--seconds", "2"])
    assert json.loads(shown.stdout)["meters"][0] == {"name": "rapl", "refusal": "no powercap folder"}
    assert asked == [2.0]


def test_the_doctor_takes_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_opt.measuring.session.diagnose", lambda seconds: diagnosis())
    assert CliRunner().invoke(app, ["doctor", "--debug"]).exit_code == 0
