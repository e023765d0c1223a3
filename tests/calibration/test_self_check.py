"""Quiet rounds, the factor that whole nets have in common, and a calibration on another day."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import edge_opt as eo
from calibrations import changed, imaginary
from edge_opt.calibration import quiet_clock, self_check
from edge_opt.calibration.calibration_file import load_calibration, save_calibration
from edge_opt.calibration.quiet_clock import ReferenceKernel, SampleClock
from edge_opt.calibration.self_check import carried, summary
from edge_opt.records.predictions import Calibration, CheckedNet, SelfCheck


class StepClock(SampleClock):
    """Every call takes the next of some times."""

    def __init__(self, nanoseconds: Iterator[int]) -> None:
        self.has_cpu, self.cost_ns = True, 0
        self._times = nanoseconds

    def nanoseconds(self, run: Callable[[], object]) -> int:
        return next(self._times)


def kernel_of(times: list[int], monkeypatch: pytest.MonkeyPatch) -> ReferenceKernel:
    """A kernel that knows its best of 100 ns, and then takes these; each look takes the least of five calls."""
    monkeypatch.setattr(quiet_clock, "_LEARN_S", 0.0)
    kernel = ReferenceKernel(StepClock(iter([each for each in times for _ in range(5)])))
    kernel.best_s = 100e-9
    return kernel


def test_a_disturbed_round_is_repeated_and_the_quiet_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1.5 and 1.5 times the best beside the first round, then 1.0 and 1.0.
    kernel = kernel_of([150, 150, 100, 100], monkeypatch)
    rounds = iter([[3.0], [2.0]])
    assert kernel.quiet_round(lambda: next(rounds), repeats=2) == ([2.0], False)


def test_times_are_over_the_slowness_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # sqrt(1.21 x 1.44) = 1.32, and there is no repetition.
    kernel = kernel_of([121, 144], monkeypatch)
    times, is_disturbed = kernel.quiet_round(lambda: [1.32, 2.64], repeats=0)
    assert times == pytest.approx([1.0, 2.0]) and is_disturbed


def test_an_interruption_is_left_out_with_one_thread_only() -> None:
    assert SampleClock(1).has_cpu and not SampleClock(2).has_cpu
    assert SampleClock(1).span(lambda: "result")[2] == "result"


def nets(*ratios: float) -> tuple[CheckedNet, ...]:
    return tuple(CheckedNet(str(place), ratio, 1.0) for place, ratio in enumerate(ratios))


def test_the_common_factor_is_the_median_and_what_is_left_is_the_error() -> None:
    check = summary(nets(1.0, 1.1, 1.1, 1.1, 1.1, 1.1, 1.21), 1e-5, 0.5)
    assert check.factor == pytest.approx(1.1)
    assert check.low < 1.1 < check.high
    # Of seven nets five are right, one is 10 % faster and one 10 % slower: sqrt(2 ln(1.1)^2 / 7) = 0.051.
    assert check.deviation == pytest.approx(0.051, abs=1e-3)
    assert check.expected_error == pytest.approx(0.0, abs=1e-9)


def check_of(factor: float, created: str = "2026-01-01T00:00:00+00:00") -> SelfCheck:
    return replace(summary(nets(*[factor] * 8), 1e-5, 0.05), created=created, deviation=0.04)


def test_predictions_and_their_interval_follow_from_the_check() -> None:
    profile, calibration = eo.profile(nn.Linear(64, 64), (8, 64)), imaginary()
    plain = eo.predict(profile, calibration)
    there = eo.predict(profile, replace(calibration, check=check_of(1.25)))
    assert there.seconds == pytest.approx(1.25 * plain.seconds)
    assert sum(layer.seconds for layer in there.layers) == pytest.approx(there.seconds)
    # The deviation of the check, 0.04, replaces that of cross-validation, 0.05.
    assert there.high / there.seconds < plain.high / plain.seconds


def test_an_old_calibration_is_checked_again_scaled_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def twice_as_slow(calibration: Calibration, *_: object) -> Calibration:
        return replace(calibration, check=check_of(2.0, self_check.now()))

    monkeypatch.setattr(self_check, "checked", twice_as_slow)
    monkeypatch.setattr(self_check, "SPEED_TOLERANCE", float("inf"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    calibration = replace(imaginary(count=20), check=check_of(1.0))
    again = carried(calibration)
    assert again.factor == pytest.approx(2.0)
    assert "because it is of 2026-01-01: times are +100.0 %" in again.check.note.replace("%", " %").replace("  ", " ")
    assert load_calibration() == again
    # It is fresh now.
    assert carried(again) is again


def test_another_kind_of_machine_or_an_older_file_is_not_checked() -> None:
    calibration = imaginary(count=20)
    assert carried(calibration) is calibration
    other = changed(replace(calibration, check=check_of(1.0)), cpu="another one")
    assert carried(other) is other


def test_a_file_without_the_new_fields_is_read(tmp_path: Path) -> None:
    path = save_calibration(imaginary(count=20), tmp_path / "old.json")
    text = path.read_text()
    path.write_text(text.replace(',"check":null', "").replace(',"runtimes":[]', ""))
    assert path.read_text() != text
    assert load_calibration(path) == imaginary(count=20)
