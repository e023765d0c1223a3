"""Predictions in a profile, memory at a precision, and targets side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt._support.json import from_plain, to_plain
from edge_opt.boards.capacity import peak_memory
from edge_opt.boards.estimate import estimate
from edge_opt.errors import InvalidDevice, InvalidInput, UnknownDevice, UnreadableProfile
from edge_opt.model import SmallCNN
from edge_opt.records.predictions import TargetComparison
from edge_opt.records.profiles import ModelProfile
from rendering import render

SHAPE = (1, 1, 28, 28)
BOARD = """
name = "my-board"
engine = "cpu"
ram_bytes = { value = 65536, source = "test", kind = "derived" }
[measured_bandwidth_bytes_per_s.cpu]
traffic = { value = 1.0e9, source = "test", kind = "measured" }
[peak_ops_per_s.cpu]
fp32 = { value = 1.0e9, source = "test", kind = "derived" }
"""


@pytest.fixture
def board(tmp_path: Path) -> Path:
    path = tmp_path / "my-board.toml"
    path.write_text(BOARD)
    return path


@pytest.fixture(scope="module")
def predicted() -> ModelProfile:
    return eo.profile(SmallCNN(), SHAPE, target="raspberry-pi-4")


def test_a_target_is_a_name_a_file_or_a_record(board: Path) -> None:
    model = SmallCNN()
    for target, name in (
        ("Raspberry Pi 4", "raspberry-pi-4"),
        (str(board), "my-board"),
        (board, "my-board"),
        (eo.device("jetson-nano"), "jetson-nano"),
    ):
        found = eo.profile(model, SHAPE, target=target)
        assert [prediction.target for prediction in found.predictions] == [name]
        assert found.prediction == estimate(eo.profile(model, SHAPE), target)


def test_several_targets_stand_in_the_order_asked_for(board: Path) -> None:
    found = eo.profile(SmallCNN(), SHAPE, target=["jetson-nano", board, "raspberry-pi-4"], precision="fp16")
    assert [item.target for item in found.predictions] == ["jetson-nano", "my-board", "raspberry-pi-4"]
    assert found.prediction is found.predictions[0]
    assert {item.precision for item in found.predictions} == {"fp16"}
    # Only the Nano has a peak in fp16.
    assert [item.seconds is None for item in found.predictions] == [False, True, True]


def test_bytes_of_layers_are_those_of_the_precision_on_the_target() -> None:
    found = eo.profile(nn.Linear(8, 4), (2, 8), target="raspberry-pi-4", precision="int8")
    row = found.to_dataframe().iloc[0]
    # 8 × 4 weights of one byte and 4 biases of four; 2 × 4 outputs of one byte
    assert (row.param_bytes, row.activation_bytes, row.peak_live_bytes) == (8 * 4 + 4 * 4, 2 * 4, 2 * 4)
    assert "bytes are those of int8" in str(found)
    assert found.totals.param_bytes == 4 * (8 * 4 + 4)  # the profile itself stays in float


def test_without_a_target_there_is_no_prediction() -> None:
    found = eo.profile(SmallCNN(), SHAPE)
    assert (found.predictions, found.prediction) == ((), None)
    assert not [name for name in found.to_dataframe() if name.startswith("predicted")]


def test_a_prediction_does_not_change_with_the_convention() -> None:
    ours = eo.profile(SmallCNN(), SHAPE, target="raspberry-pi-4")
    theirs = eo.profile(SmallCNN(), SHAPE, target="raspberry-pi-4", convention="fvcore")
    assert theirs.convention == "fvcore"
    assert theirs.predictions == ours.predictions


def test_a_board_of_ones_own_is_asked_by_its_file_and_says_whether_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    figure = '{ value = %s, source = "a sheet", kind = "vendor" }'
    # The catalogue's board of this name has 1 GiB and more; the file says 65536 bytes.
    (tmp_path / "mine.toml").write_text(
        f'name = "raspberry-pi-4"\nengine = "cpu"\nram_bytes = {figure % 65536}\n'
        f"[bandwidth_bytes_per_s]\ndatasheet = {figure % 8e9}\n[peak_ops_per_s.cpu]\nfp32 = {figure % 4e10}\n"
    )
    assert eo.profile(SmallCNN(), SHAPE, target="mine.toml").prediction.ram_bytes == (65536,)
    with pytest.raises(UnknownDevice, match=r"'mine'; there is a file of that name here: .*'mine.toml'"):
        eo.profile(SmallCNN(), SHAPE, target="mine")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": "raspbery-pi-4"}, UnknownDevice, "no device named 'raspbery-pi-4'; closest: raspberry-pi-4"),
        ({"target": "orange-pi-zero2"}, UnknownDevice, "no device named 'orange-pi-zero2'; closest: orange-pi-zero-2"),
        ({"target": "absent.toml"}, UnknownDevice, "no file 'absent.toml'"),
        ({"target": 4}, UnknownDevice, "a device is a name, a file or a DeviceSpec; got 4"),
        ({"target": []}, InvalidInput, "no target is given"),
        ({"target": ["pi4", "raspberry-pi-4"]}, InvalidInput, "the target raspberry-pi-4 is given twice"),
        ({"target": "pi4", "precision": "int3"}, InvalidInput, "precision is 'int3'; it must be one of fp32"),
        ({"precision": "int3"}, InvalidInput, "precision is 'int3'"),
        ({"precision": "int8"}, InvalidInput, "precision='int8' requires target="),
    ],
)
def test_wrong_targets_are_refused_before_any_work(options: Any, error: type[Exception], message: str) -> None:
    class Untouched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the model was run")

    with pytest.raises(error, match=message):
        eo.profile(Untouched(), (1, 4), **options)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("traffic = { value = 1.0e9, ", "bandwidth_bytes_per_s is missing"),
        ("fp32 = { value = 1.0e9, ", None),
    ],
)
def test_a_file_without_a_bandwidth_is_refused_and_one_without_a_peak_says_so(
    board: Path, line: str, message: str | None
) -> None:
    board.write_text("\n".join(text for text in BOARD.splitlines() if not text.startswith(line)))
    if message:
        with pytest.raises(InvalidDevice, match=message):
            eo.profile(SmallCNN(), SHAPE, target=board)
    else:
        found = eo.profile(SmallCNN(), SHAPE, target=board).prediction
        assert found is not None and found.seconds is not None and found.high is None
        assert any("the peak of my-board in fp32 (cpu) is unknown" in remark for remark in found.remarks)


@pytest.mark.parametrize("value", ["0", "-1.0e9", "nan"])
def test_a_peak_of_zero_or_less_is_refused(board: Path, value: str) -> None:
    board.write_text(BOARD.replace("fp32 = { value = 1.0e9", f"fp32 = {{ value = {value}"))
    with pytest.raises(InvalidDevice, match=r"peak_ops_per_s\.cpu\.fp32\.value is"):
        eo.profile(SmallCNN(), SHAPE, target=board)


# In tables and files.


def test_layers_of_the_table_add_up_to_the_prediction(predicted: ModelProfile) -> None:
    prediction = predicted.prediction
    assert prediction is not None
    for level in ("leaves", "root"):
        table = predicted.to_dataframe(level)
        assert table["predicted_s"].sum() == pytest.approx(prediction.seconds)
        assert table["predicted_energy_j"].sum() == pytest.approx(prediction.energies[0].joules)
    whole = predicted.to_dataframe("modules").iloc[0]
    assert whole["predicted_s"] == pytest.approx(prediction.seconds)
    assert whole["predicted_bound"] == prediction.bound
    assert "predicted_s" not in predicted.to_dataframe("operators")


def test_a_module_is_bound_by_what_most_of_its_time_goes_to(board: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.ReLU(), nn.Identity()))
    found = eo.profile(model, (1, 8), target=board)
    bounds = found.to_dataframe("modules").set_index("path")["predicted_bound"]
    times = found.to_dataframe("modules").set_index("path")["predicted_s"]
    assert bounds["0"] == bounds["0.0"] == "memory"
    assert times["1"] == times["1.0"] > 0
    assert (times["1.1"], bounds["1.1"]) == (0.0, "unknown")  # known to take nothing


def test_an_unknown_time_is_unknown_in_every_view() -> None:
    found = eo.profile(SmallCNN(), SHAPE, target="rp2040")
    table = found.to_dataframe()
    assert table[table["flops"] > 0]["predicted_s"].isna().all()
    text = " ".join(str(found).split())
    assert "not known on rp2040 in fp32" in text
    assert "the bandwidth of rp2040 is unknown" in text


def test_the_terminal_states_target_interval_bound_energy_and_remarks(predicted: ModelProfile) -> None:
    text = " ".join(render(predicted, is_verbose=True).split())
    for part in ("on raspberry-pi-4 in fp32", "90 % interval", "bound by overhead", "from costs fitted to times"):
        assert part in text
    assert "a proxy, not measured: 6 W (load; vendor: Raspberry Pi documentation" in text
    assert "a model, not measured: operations by Horowitz" in text
    assert "platform raspberry-pi-4/cpu-4/ncnn/fp32: fitted to 23 published times" in text
    assert "only whole models could be checked" in text
    roof = " ".join(render(eo.profile(SmallCNN(), SHAPE, target="intel-n100"), is_verbose=True).split())
    assert "an uncalibrated estimate" in roof
    assert "uncalibrated: a roofline with usual efficiencies" in roof


def test_one_line_speaks_of_energy_and_none_of_sources_until_more_are_asked_for(predicted: ModelProfile) -> None:
    labels = [line.split()[0] for line in str(predicted).splitlines() if line[:1].isalpha()]
    # the one note names the platform that answers
    assert (labels.count("Energy"), labels.count("Note"), labels.count("More")) == (1, 1, 1)
    every = [line.split()[0] for line in render(predicted, is_verbose=True).splitlines() if line[:1].isalpha()]
    assert (every.count("Energy"), every.count("More")) == (2, 0)
    header = str(predicted).splitlines()[0]
    assert "Predicted" in header and "Bound by" in header


def test_a_list_can_be_sorted_by_predicted_time(predicted: ModelProfile) -> None:

    assert render(predicted, sort="predicted", top=1).splitlines()[2].startswith("conv2")
    with pytest.raises(InvalidInput, match="cannot sort by predicted.*profile with target="):
        render(eo.profile(SmallCNN(), SHAPE), sort="predicted")
    with pytest.raises(InvalidInput, match="choose another level"):
        render(predicted, sort="predicted", level="operators")


def test_a_saved_profile_equals_the_one_read_back(tmp_path: Path) -> None:
    found = eo.profile(SmallCNN(), SHAPE, target=["raspberry-pi-4", "rp2040"])
    assert eo.load(found.save(tmp_path / "p.json")) == found
    csv = found.save(tmp_path / "p.csv").read_text()
    assert "predicted_s,predicted_low_s,predicted_high_s,predicted_bound,predicted_energy_j" in csv.splitlines()[0]
    markdown = found.save(tmp_path / "p.md").read_text()
    assert "| Predicted |" in markdown and "Bound by" in markdown


def test_files_from_before_predictions_are_read(tmp_path: Path) -> None:
    found = eo.profile(SmallCNN(), SHAPE)
    path = found.save(tmp_path / "p.json")
    data = json.loads(path.read_text())
    del data["predictions"]
    path.write_text(json.dumps(data))
    assert eo.load(path) == found


def test_a_prediction_of_a_layer_that_is_not_there_is_refused(tmp_path: Path, predicted: ModelProfile) -> None:
    path = predicted.save(tmp_path / "p.json")
    data = json.loads(path.read_text())
    data["predictions"][0]["layers"][0]["module"] = 99
    path.write_text(json.dumps(data))
    with pytest.raises(UnreadableProfile, match=r"predictions\[0\] names a layer that is not there"):
        eo.load(path)


# Memory at a precision.


class Tagged(nn.Module):
    """Token ids, which no precision touches, an embedding, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.linear = nn.Linear(8, 4, bias=False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(ids)) * self.scale


@pytest.mark.parametrize(("precision", "size"), [(None, 4), ("fp32", 4), ("fp16", 2), ("bf16", 2), ("int8", 1)])
def test_floating_tensors_take_the_precision_s_size_and_integers_stay(precision: Any, size: int) -> None:
    need = peak_memory(eo.profile(Tagged(), [((5,), "int64")]), precision)
    assert need.weight_bytes == size * (100 * 8 + 8 * 4)
    # One dimension stays wide in int8: biases, norms, scales.
    assert need.buffer_bytes == (4 if precision == "int8" else size) * 4
    assert need.input_bytes == 5 * 8
    # The embedded tokens beside their products, then products beside scaled products: 5 × 8 + 5 × 4 against 2 × 5 × 4.
    assert need.activation_bytes == size * (5 * 8 + 5 * 4)
    assert need.total_bytes == size * (832 + 60) + need.buffer_bytes + 40


def test_at_its_own_precision_a_model_needs_what_its_profile_says() -> None:
    profile = eo.profile(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 8, 16))
    need = peak_memory(profile, "fp32")
    assert need == peak_memory(profile)
    assert need.activation_bytes == profile.peak_activation_bytes


# Side by side.


@pytest.fixture(scope="module")
def compared() -> TargetComparison:
    return eo.compare_targets(SmallCNN(), SHAPE, ["raspberry-pi-4", "rp2040", "radeon-780m"])


def test_targets_side_by_side_agree_with_their_parts(compared: TargetComparison) -> None:
    profile = eo.profile(SmallCNN(), SHAPE)
    totals = profile.totals
    needed = totals.param_bytes + totals.buffer_bytes + totals.input_bytes + profile.peak_activation_bytes
    assert compared.memory.total_bytes == needed
    pi, microcontroller, phone = compared.targets
    for fit in (pi, phone):
        assert fit.needed_bytes == needed
        assert fit.prediction == estimate(profile, fit.prediction.target)
    assert (pi.fits, pi.fitting_ram_bytes) == (True, pi.ram_bytes)
    assert pi.batch == eo.fit_batch(SmallCNN(), SHAPE[1:], target="raspberry-pi-4")
    mcu = eo.mcu_memory(SmallCNN(), SHAPE, core="rp2040", kernels="cmsis-nn", precision="fp32")
    assert microcontroller.prediction == replace(estimate(profile, "rp2040"), mcu=mcu)
    assert (microcontroller.fits, microcontroller.needed_bytes, microcontroller.batch) == (True, mcu.arena_bytes, None)
    assert (phone.fits, phone.ram_bytes, phone.batch) == (None, (), None)
    assert phone.remarks == ("the RAM of radeon-780m is unknown, so whether the model fits is too",)


def test_a_model_that_is_too_large_does_not_fit_and_int8_makes_it(board: Path) -> None:
    model = nn.Linear(128, 128, bias=False)  # 64 KiB of weights, 0.5 KiB in and 0.5 KiB out; the board has 64 KiB
    (fit,) = eo.compare_targets(model, (1, 128), board).targets
    assert (fit.fits, fit.fitting_ram_bytes, fit.needed_bytes) == (False, (), 65536 + 1024)
    assert fit.batch is not None
    assert (fit.batch.batch, fit.batch.shortfall_bytes) == (0, 1024)
    (fit,) = eo.compare_targets(model, (1, 128), board, precision="int8").targets
    # a quarter of the weights and of the outputs; the inputs stay as they are given: 128 float32
    assert (fit.fits, fit.needed_bytes) == (True, 65536 // 4 + 128 + 128 * 4)
    assert fit.batch is not None
    assert fit.batch.batch == (65536 - 16384) // 640  # a sample is 512 bytes in and 128 out


def test_of_several_sizes_of_ram_those_that_hold_the_model_are_named(board: Path) -> None:
    board.write_text(BOARD.replace("value = 65536", "value = [65536, 131072, 262144]"))
    (fit,) = eo.compare_targets(nn.Linear(128, 128, bias=False), (1, 128), board).targets
    assert (fit.fits, fit.fitting_ram_bytes) == (False, (131072, 262144))
    assert "from 128 KiB on" in str(eo.compare_targets(nn.Linear(128, 128, bias=False), (1, 128), board))


def test_batches_are_profiled_once_for_all_targets() -> None:
    batches: list[int] = []

    class Noted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batches.append(x.shape[0])
            return super().forward(x)

    eo.compare_targets(Noted(256, 256, bias=False), (1, 256), ["rp2350", "stm32h747", "raspberry-pi-4"], max_batch=64)
    assert batches.count(1) <= 2  # the profile itself, and the search
    assert all(batches.count(batch) == 1 for batch in batches if batch > 1)


def test_tensors_and_named_inputs_lose_their_first_dimension_in_the_search() -> None:
    ids = torch.zeros(1, 5, dtype=torch.int64)
    for inputs in (ids, [ids], {"ids": ids}):
        (fit,) = eo.compare_targets(Tagged(), inputs, "raspberry-pi-4", max_batch=4).targets
        assert fit.batch is not None
        assert (fit.batch.batch, fit.batch.input_bytes) == (4, 4 * 5 * 8)


def test_a_model_of_one_batch_only_is_compared_without_a_search() -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(3, 4) + 1

    (fit,) = eo.compare_targets(Fixed(), (3, 4), "raspberry-pi-4").targets
    assert (fit.fits, fit.batch) == (True, None)
    assert fit.remarks[0].startswith("the largest batch is unknown, because the model refuses another batch: ")


def test_the_comparison_reads_well_and_goes_into_tables(compared: TargetComparison) -> None:
    text = str(compared)
    header, _, *rows = text.splitlines()
    assert header.split("  ")[0] == "Target"
    assert [row.split()[0] for row in rows[:3]] == ["raspberry-pi-4", "rp2040", "radeon-780m"]
    assert rows[1].split()[1:3] == ["yes", "unknown"]
    assert "rp2040: the bandwidth is unknown" in text
    assert any(note.startswith("rp2040: the bandwidth of rp2040 is unknown") for note in compared.notes)
    table = compared.to_dataframe().set_index("target")
    assert table.loc["raspberry-pi-4", "predicted_s"] == compared.targets[0].prediction.seconds
    # Without a time there is no energy, and a datacenter's picojoules are not those of a microcontroller.
    assert table["energy_source"].isna()["rp2040"]
    assert from_plain(TargetComparison, to_plain(compared)) == compared


def test_the_model_is_left_as_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    eo.compare_targets(model, (2, 4), ["raspberry-pi-4", "rp2040"], max_batch=8)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(InvalidInput, match="precision is 'int3'"):
        eo.compare_targets(SmallCNN(), SHAPE, "pi4", precision="int3")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="precision is 'int3'"):
        eo.fit_batch(SmallCNN(), SHAPE[1:], memory_limit_mb=1, precision="int3")  # type: ignore[arg-type]


def test_engines_of_a_microcontroller_differ_by_their_measured_ratio() -> None:
    seconds = {}
    for runtime in ("st-edge-ai", "tflm", "tflm-reference", "tinyengine"):
        there = eo.profile(SmallCNN(), (1, 1, 28, 28), target="stm32h747", precision="int8", runtime=runtime).prediction
        assert there is not None and there.seconds is not None and there.mcu is not None
        kernels = {"tflm-reference": "reference", "st-edge-ai": "st-edge-ai"}
        assert there.mcu.kernels == kernels.get(runtime, "cmsis-nn")
        seconds[runtime] = there.seconds
    # Geometric means over the nets of tinyengine's table that both engines ran: 10, 10 and 11 of them.
    assert seconds["tflm"] / seconds["st-edge-ai"] == pytest.approx(1.673, rel=1e-3)
    assert seconds["tflm-reference"] / seconds["tflm"] == pytest.approx(17.98 / 1.673, rel=1e-3)
    assert seconds["tinyengine"] < seconds["st-edge-ai"]


def test_an_engine_on_another_core_is_less_certain() -> None:
    widths = []
    for board in ("nucleo-h743zi", "nrf52840"):
        there = eo.profile(SmallCNN(), (1, 1, 28, 28), target=board, precision="int8", runtime="tflm").prediction
        assert there is not None and there.high is not None and there.low is not None
        widths.append(there.high / there.low)
    assert widths[0] < widths[1]


def test_a_core_without_times_has_no_engines() -> None:
    with pytest.raises(InvalidInput, match="tflm"):
        eo.profile(SmallCNN(), (1, 1, 28, 28), target="esp32-s3", precision="int8", runtime="tflm")
