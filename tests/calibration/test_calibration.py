"""Calibrations: a real one in a few seconds, the plan, the file, and files that are something else."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import edge_opt as eo
from calibrations import imaginary
from edge_opt.boards.targets import calibrated_device
from edge_opt.calibration.calibrate import validated
from edge_opt.calibration.calibration_file import host_file, load_calibration, save_calibration
from edge_opt.calibration.operator_bench import (
    Overheads,
    Runnable,
    closed,
    measured_overheads,
    reuse_distances,
    undisturbed,
)
from edge_opt.calibration.operator_draws import last_operator, plan, tensor
from edge_opt.calibration.reference_networks import REFERENCES
from edge_opt.cli import app
from edge_opt.errors import CalibrationMissing, InvalidCalibration, InvalidInput
from edge_opt.measuring import latency
from edge_opt.measuring.latency import Clock, busy_remark
from edge_opt.records.predictions import Calibration, OperatorSample, ReferenceRun
from edge_opt.trace import trace


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Calibration, Path]:
    path = tmp_path_factory.mktemp("calibration") / "host.json"
    return eo.calibrate(threads=1, seconds=3, path=path, progress=False), path


@pytest.mark.slow
def test_a_real_calibration_predicts_a_model(quick: tuple[Calibration, Path]) -> None:
    calibration, path = quick
    assert load_calibration(path) == calibration
    assert len(calibration.samples) > 30
    assert {sample.origin is None for sample in calibration.samples} == {True, False}
    assert all(sample.seconds > 0 for sample in calibration.samples)
    prediction = eo.predict(eo.profile(nn.Linear(64, 64), (8, 64)), calibration)
    assert prediction.seconds is not None
    assert 0 < prediction.low < prediction.seconds < prediction.high


@pytest.mark.slow
def test_every_precision_with_a_kernel_has_peaks(quick: tuple[Calibration, Path]) -> None:
    calibration, _ = quick
    for precision in ("fp32", "bf16", "fp16"):
        for work in ("gemm", "conv3x3", "conv1x1", "depthwise", "strided"):
            assert calibration.peak(work, precision) > 0
    sizes = [item.working_set_bytes for item in calibration.bandwidths]
    assert sizes == sorted(sizes) and sizes[-1] >= 64 << 20


@pytest.mark.slow
def test_the_file_says_what_it_is_of(quick: tuple[Calibration, Path]) -> None:
    data = json.loads(quick[1].read_text())
    assert (data["schema"], data["version"]) == ("edge-opt calibration", 2)
    machine = data["calibration"]["machine"]
    assert (machine["threads"], machine["torch"]) == (1, torch.__version__)
    assert {"cpu", "cores", "load_1min", "system"} <= set(machine)


def test_calibrating_leaves_the_process_as_it_was() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with pytest.raises(RuntimeError), undisturbed(1):
        torch.randn(3)
        raise RuntimeError("in the middle")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert gc.isenabled()


@pytest.mark.parametrize("wrong", [{"seconds": 0}, {"seconds": 500}, {"seconds": "long"}, {"threads": 0}])
def test_wrong_options_are_refused_before_anything_runs(wrong: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        eo.calibrate(path=tmp_path / "x.json", **wrong)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_the_same_seed_is_the_same_plan() -> None:
    first, again, other = ([item.signature for item in plan(seed, count=60)] for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_every_planned_operator_runs_and_gives_what_the_plan_says() -> None:
    for operator in plan(seed=5, count=80):
        runnable = Runnable(operator)
        with torch.inference_mode():
            runnable.touch()
            result = runnable.run()
        first = result[0] if isinstance(result, (tuple, list)) else result
        assert tuple(first.shape) == operator.signature.outputs[0].shape


def test_operands_are_laid_out_as_recorded() -> None:
    transposed = tensor(2, 5, 3).transpose(1, 2)
    clone = last_operator(lambda: transposed.clone(memory_format=torch.contiguous_format))
    assert clone.signature.strides == ((15, 1, 3),)
    operand = Runnable(clone).args[0]
    assert operand.shape == (2, 3, 5) and operand.stride() == (15, 1, 3)


def test_an_operator_is_drawn_with_the_form_that_ran() -> None:
    operator = last_operator(lambda: torch.mul(tensor(2, 2), tensor(2, 2)))
    assert operator.function is torch.ops.aten.mul.Tensor


def test_values_stay_ordinary_however_often_an_operator_writes_in_place() -> None:
    runnable = Runnable(last_operator(lambda: torch.Tensor.mul_(tensor(64), tensor(64))))
    for _ in range(300):
        runnable.touch()
        runnable.run()
    assert runnable.args[0].abs().max() < 100


def test_weights_are_as_far_back_as_a_whole_forward() -> None:
    # Each forward moves: 4x8 in, 8x8 weights, 4x8 out, then the same again on the result; 4 bytes each.
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    recorded = trace(model, (4, 8))
    first, second = reuse_distances(recorded)
    forward = 2 * (4 * 8 + 8 * 8 + 4 * 8) * 4
    assert second[0] == 0  # just made
    # Between two uses of a weight everything else is moved, but for the input that comes before it.
    assert first[1] == forward - 8 * 8 * 4 - 4 * 8 * 4
    assert first[1] == second[1]


def test_a_module_call_costs_something_and_an_operator_never_less_than_nothing() -> None:
    found = measured_overheads()
    assert 0 < found.module_s < 1e-3
    assert 0 <= found.operator_s < 1e-3


def test_samples_of_a_run_are_scaled_to_the_whole_of_it() -> None:
    signature = last_operator(lambda: torch.mul(tensor(2, 2), tensor(2, 2))).signature
    samples = [OperatorSample(signature, (0, 0), 1e-3, "r"), OperatorSample(signature, (0, 0), 1e-3)]
    run = ReferenceRun("r", "f", 1, operators=10, modules=5, operators_s=1e-2, seconds=1.1e-2)
    inside, alone = closed(samples, [run], Overheads(operator_s=1e-5, module_s=2e-5))
    # 11 ms less 10 x 10 us and 5 x 20 us are 10.8 ms for what the clock has as 10 ms.
    assert inside.seconds == pytest.approx(1.08e-3)
    assert alone.seconds == 1e-3


def test_reference_models_have_names_of_their_own_and_run() -> None:
    assert len({reference.name for reference in REFERENCES}) == len(REFERENCES)
    assert len({reference.family for reference in REFERENCES}) >= 8
    for reference in REFERENCES:
        recorded = trace(reference.build().eval(), reference.inputs(1))
        assert recorded.ops and not recorded.used_real_tensors


def test_without_references_the_error_is_wide_not_zero() -> None:
    found = validated(imaginary())
    assert found.whole_deviation >= 0.2
    assert all(item.deviation >= 0.2 for item in found.deviations)


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    calibration = imaginary()
    assert load_calibration(save_calibration(calibration, tmp_path / "a.json")) == calibration


def test_the_host_has_no_calibration_until_it_is_calibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(CalibrationMissing, match="edge-opt calibrate"):
        load_calibration()
    save_calibration(imaginary(), host_file())
    assert load_calibration().name == "imaginary"
    assert host_file().is_relative_to(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationMissing, match="nowhere.json"):
        load_calibration(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "cut off"),
        (lambda text: "[1, 2]", "not a calibration"),
        (lambda text: '{"name": "my board"}', "not a calibration"),
        (lambda text: text.replace('"version":2', '"version":99'), "version 99"),
        (lambda text: text.replace('"references"', '"reverences"'), "damaged"),
        (lambda text: text.replace('"seconds":', '"seconds":-'), "damaged"),
        (lambda text: "\udcff", "cannot read"),
    ],
)
def test_a_file_of_something_else_is_refused_in_one_sentence(damage: object, message: str, tmp_path: Path) -> None:
    path = save_calibration(imaginary(count=20), tmp_path / "a.json")
    text = damage(path.read_text())  # type: ignore[operator]
    path.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(InvalidCalibration, match=message):
        load_calibration(path)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidCalibration, match="cannot write"):
        save_calibration(imaginary(count=20), tmp_path / "file" / "a.json")


def test_a_file_that_cannot_be_written_is_refused_before_two_minutes_of_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot write"):
        eo.calibrate(path=tmp_path / "file" / "a.json", seconds=60)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_calibrated_machine_is_a_device() -> None:
    calibration = imaginary()
    spec = calibrated_device(calibration)
    assert spec.bandwidth("traffic", "cpu").value == calibration.memory_bytes_per_s
    assert spec.peak("cpu", "fp32").value == 50e9
    assert spec.overhead_s.value == 2e-6
    # 2 FLOPs for each of 8x64x64 MACs at 50 GFLOP/s; reads and writes at 20 GB/s are shorter or longer, as bytes say.
    roof = eo.roofline(eo.profile(nn.Linear(64, 64, bias=False), (8, 64)), spec)
    moved = (8 * 64 + 64 * 64 + 8 * 64) * 4
    assert roof.total.seconds == pytest.approx(max(2 * 8 * 64 * 64 / 50e9, moved / 20e9) + 2e-6)


@pytest.mark.slow
def test_the_command_saves_and_says_where(tmp_path: Path) -> None:
    path = tmp_path / "board.json"
    done = CliRunner().invoke(app, ["calibrate", "-o", str(path), "--threads", "1", "--seconds", "2", "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["threads"] == 1 and figures["samples"] == len(load_calibration(path).samples)
    assert str(path) in done.stderr


def test_the_command_refuses_a_wrong_time() -> None:
    done = CliRunner().invoke(app, ["calibrate", "--seconds", "900"])
    assert done.exit_code == 2 and "120" in done.stderr


def test_a_busy_machine_is_noticed_and_the_file_and_its_predictions_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall, busy = [0.0], [0.0]

    def sleep(seconds: float) -> None:
        wall[0] += seconds
        busy[0] += 1.5 * seconds  # others keep a core and a half busy

    with monkeypatch.context() as patches:
        patches.setattr("time.sleep", sleep)
        patches.setattr(latency, "usable_cores", lambda: 4)
        patches.setattr(latency, "Clock", lambda: Clock(lambda: wall[0], lambda: 0.0, lambda: busy[0]))
        remark = busy_remark()
        assert remark == "other programs keep 1.5 of 4 cores busy"
        patches.setattr(latency, "Clock", lambda: Clock(lambda: wall[0], lambda: 0.0, lambda: 0.0))
        assert busy_remark() is None
    path = save_calibration(replace(imaginary(count=60), remarks=(remark,)), tmp_path / "busy.json")
    assert load_calibration(path).remarks == (remark,)
    found = eo.profile(nn.Linear(8, 8), (1, 8), target=str(path)).prediction
    assert found is not None and f"the calibration was disturbed: {remark}" in found.remarks
