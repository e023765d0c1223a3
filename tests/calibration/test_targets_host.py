"""Machines that were calibrated, as targets: found by name and file, with their measured figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import edge_opt as eo
from calibrations import imaginary
from edge_opt.boards.targets import calibrated_device, named_target, resolve_targets
from edge_opt.calibration.calibration_file import host_file, save_calibration
from edge_opt.calibration.operator_bench import reuse_distances
from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.model import SmallCNN
from edge_opt.records.measurements import Environment
from edge_opt.records.predictions import Calibration, FreshOutput, MeasuredBandwidth, MeasuredPeak, OperatorSample
from edge_opt.records.profiles import ModelProfile

MACHINE = Environment("a CPU", 2, 1, None, None, 2**30, "Linux", "3.11", "2.13", "cpu")


@pytest.fixture
def calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calibration:
    """10 and 5 GB/s from caches and 2 GB/s from memory, 30 GFLOP/s in fp32, 1 µs per operator; one sampled."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Calibration(
        name="bench",
        created="2026-01-01T00:00:00+00:00",
        machine=MACHINE,
        versions=(("torch", "2.13"),),
        cpu_seconds=1.0,
        bandwidths=(MeasuredBandwidth(2**16, 10e9), MeasuredBandwidth(2**22, 5e9), MeasuredBandwidth(2**28, 2e9)),
        peaks=(MeasuredPeak("gemm", "fp32", 30e9), MeasuredPeak("depthwise", "fp32", 5e9)),
        overhead_per_operator_s=1e-6,
        overhead_per_module_s=1e-6,
        fresh_outputs=(FreshOutput(2**25, 0.02, 0.01),),
        references=(),
        samples=imaginary(count=1).samples,
        whole_deviation=0.1,
        deviations=(),
    )


def test_host_is_this_host_s_own_calibration(calibration: Calibration) -> None:
    save_calibration(calibration, host_file())
    assert named_target("host") == calibration


def test_without_one_the_error_names_the_command(calibration: Calibration) -> None:
    with pytest.raises(EdgeOptError, match="run `edge-opt calibrate`"):
        eo.profile(nn.Linear(4, 4), (1, 4), target="host")


def test_a_calibration_is_found_by_its_file_and_taken_as_it_is(calibration: Calibration, tmp_path: Path) -> None:
    path = save_calibration(calibration, tmp_path / "bench.json")
    machine, board = resolve_targets([path, "pi4"])
    assert (machine.calibration, board.spec) == (calibration, eo.device("pi4"))
    assert named_target(str(path)) == named_target(calibration) == calibration
    with pytest.raises(InvalidInput, match="the target bench is given twice"):
        resolve_targets([path, calibration])


def test_a_device_in_json_is_still_a_device(tmp_path: Path) -> None:
    path = tmp_path / "board.json"
    bandwidth = {"datasheet": {"value": 1e9, "source": "test", "kind": "derived"}}
    path.write_text(json.dumps({"name": "board", "engine": "cpu", "bandwidth_bytes_per_s": bandwidth}))
    assert named_target(path).name == "board"


def test_truncated_and_foreign_files_are_refused_in_one_sentence(calibration: Calibration, tmp_path: Path) -> None:
    path = save_calibration(calibration, tmp_path / "bench.json")
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(EdgeOptError, match="is not JSON, or is cut off"):
        named_target(path)
    path.write_text(json.dumps({"schema": "somebody else's"}))
    with pytest.raises(EdgeOptError, match="is not a calibration"):
        named_target(path)


def test_a_roofline_stands_on_the_measured_figures(calibration: Calibration) -> None:
    save_calibration(calibration, host_file())
    profile = eo.profile(nn.Linear(64, 32, bias=False), (16, 64))
    moved, flops = 4 * (16 * 64 + 64 * 32 + 16 * 32), 2 * 16 * 64 * 32
    roof = eo.roofline(profile, "host")
    assert (roof.device, roof.engine) == ("bench", "cpu")
    assert roof.total.memory_s == moved / 2e9
    assert roof.total.compute_s == flops / 30e9
    assert roof.total.seconds == pytest.approx(max(moved / 2e9, flops / 30e9) + 1e-6)
    assert roof.bandwidth is not None and "calibration of 2026-01-01" in roof.bandwidth.figure.source
    assert eo.roofline(profile, calibration, "int8").total.seconds is None  # nobody measured that


def test_its_ram_limits_the_batch(calibration: Calibration) -> None:
    spec = calibrated_device(calibration)
    assert [figure.value for figure in spec.ram_bytes] == [2**30]
    fit = eo.fit_batch(nn.Linear(4, 4), (4,), target=calibration, max_batch=2)
    assert (fit.limit_bytes, fit.limit_source) == (2**30, "RAM of bench")


def sampled(calibration: Calibration, profile: ModelProfile) -> Calibration:
    """The calibration with each operator of a profile as a sample that moves 1 GB/s; nothing is timed."""
    distances = reuse_distances(profile.trace)
    samples = tuple(
        OperatorSample(
            signature := profile.trace.signatures[call.signature],
            tuple(distances[call.index]),
            1e-6 + sum(tensor.nbytes for tensor in signature.inputs) / 1e9,
        )
        for call in profile.trace.ops
    )
    return replace(calibration, samples=samples)


def test_a_calibrated_machine_is_predicted_beside_a_device_that_is_not(
    calibration: Calibration, tmp_path: Path
) -> None:
    machine = sampled(calibration, eo.profile(SmallCNN(), (1, 1, 28, 28)))
    save_calibration(machine, host_file())
    found = eo.profile(SmallCNN(), (1, 1, 28, 28), target=["host", "raspberry-pi-4"])
    assert [(item.target, item.basis) for item in found.predictions] == [
        ("bench", "calibrated"),
        ("raspberry-pi-4", "fitted"),
    ]
    here = found.prediction
    assert here is not None and here.low is not None and here.high is not None and here.seconds is not None
    assert here.low < here.seconds < here.high
    assert here.seconds == pytest.approx(sum(layer.seconds or 0 for layer in here.layers))
    # No power of the machine is known, so the energy is the table's, and layers carry their part of it.
    assert [energy.source for energy in here.energies] == ["model"]
    assert sum(layer.energy_j or 0 for layer in here.layers) == pytest.approx(here.energies[0].joules)
    assert eo.load(found.save(tmp_path / "p.json")) == found
    assert "from operators sampled there" in " ".join(str(found).split())
    table = found.to_dataframe("root")
    assert table["predicted_s"].item() == here.seconds


def test_a_calibrated_machine_stands_beside_devices(calibration: Calibration) -> None:
    machine = sampled(calibration, eo.profile(SmallCNN(), (1, 1, 28, 28)))
    here, board = eo.compare_targets(SmallCNN(), (1, 1, 28, 28), [machine, "raspberry-pi-4"], max_batch=64).targets
    assert (here.prediction.basis, board.prediction.basis) == ("calibrated", "fitted")
    assert (here.fits, here.ram_bytes) == (True, (2**30,))
    assert here.batch is not None and here.batch.batch == 64


def test_a_precision_that_was_not_sampled_is_refused(calibration: Calibration) -> None:
    with pytest.raises(InvalidInput, match="was not calibrated for int8"):
        eo.profile(nn.Linear(4, 4), (1, 4), target=calibration, precision="int8")
