"""RAM and flash of TensorFlow Lite Micro, beside its own interpreter and beside arithmetic."""

from __future__ import annotations

from pathlib import Path

import litert_torch
import numpy as np
import pytest
import torch
from ai_edge_quantizer import quantizer, recipe
from torch import nn

import edge_opt as eo
from edge_opt import units
from edge_opt.boards.mcu_memory import CORES, RAM_MARGIN_BYTES
from edge_opt.budgets.budget_metrics import TRIAL_METRICS, parse_budget
from edge_opt.errors import ConversionFailed, InvalidInput, UnknownDevice, UnreadableModel
from edge_opt.model import SmallCNN
from edge_opt.model_files.tflm_arena import replanned_head, tflm_arena
from edge_opt.model_files.tflm_graph import read_tflm
from edge_opt.model_files.tflm_kernels import TflmBuild
from edge_opt.model_files.tflm_support import code_size
from tflite_graphs import Graph, Op, Scaled, State, conv, write
from tflm import SINE, recorded


def int8(*shape: int) -> Scaled:
    return Scaled(shape, "int8", 0.05, 0)


def weights(*shape: int) -> np.ndarray:
    return np.ones(shape, np.int8)


def two_convolutions(folder: Path) -> Path:
    """An int8 net: 3x3 convolution, depthwise 5x5, pool, fully connected."""
    tensors = {
        "x": int8(1, 8, 8, 3), "w": weights(8, 3, 3, 3), "a": int8(1, 8, 8, 8), "d": weights(1, 5, 5, 8),
        "b": int8(1, 8, 8, 8), "p": int8(1, 1, 1, 8), "s": np.array([1, 8], np.int32), "r": int8(1, 8),
        "f": weights(10, 8), "y": int8(1, 10),
    }  # fmt: skip
    pool = {"strideW": 8, "strideH": 8, "filterHeight": 8, "filterWidth": 8}
    ops = [
        conv("CONV_2D", "x w", "a"), conv("DEPTHWISE_CONV_2D", "a d", "b", depthMultiplier=1),
        Op("AVERAGE_POOL_2D", "b", "p", "Pool2DOptions", pool), Op("RESHAPE", "p s", "r"),
        Op("FULLY_CONNECTED", "r f", "y", "FullyConnectedOptions"),
    ]  # fmt: skip
    return Path(write(folder / "net.tflite", Graph(ops, tensors, "x", "y")))


def several_graphs(folder: Path) -> Path:
    """Variables that a graph sets once, and a graph that nobody calls."""
    handle = Op("VAR_HANDLE", "", "h", "VarHandleOptions", {"container": "", "sharedName": "v"})
    once = Op("CALL_ONCE", "", "", "CallOnceOptions", {"initSubgraphIndex": 1})
    value = ((1, 20), "float32")
    main = Graph(
        [once, handle, Op("READ_VARIABLE", "h", "r"), Op("ADD", "r x", "y", "AddOptions"),
         Op("ASSIGN_VARIABLE", "h y", "")],
        {"x": value, "h": ((), "resource"), "r": value, "y": value}, "x", "y",
    )  # fmt: skip
    start = Graph([handle, Op("ASSIGN_VARIABLE", "h z", "")],
                  {"h": ((), "resource"), "z": np.zeros((1, 20), np.float32)}, "", "")  # fmt: skip
    unused = Graph([Op("RELU", "u", "v")], {"u": ((1, 900), "float32"), "v": ((1, 900), "float32")}, "u", "v")
    return Path(write(folder / "graphs.tflite", main, start, unused))


def many_small(folder: Path) -> Path:
    """Thirty additions of four numbers: planning needs more than the plan."""
    tensors = {f"t{number}": ((1, 4), "float32") for number in range(31)}
    ops = [Op("ADD", f"t{number} t{number}", f"t{number + 1}", "AddOptions") for number in range(30)]
    return Path(write(folder / "many.tflite", Graph(ops, tensors, "t0", "t30")))


def reducers(folder: Path) -> Path:
    """Operators that request scratch with TFLM's own kernels, and a state."""
    tensors = {
        "x": int8(1, 6, 6, 4), "axes": np.array([1, 2], np.int32), "m": int8(1, 4), "w": weights(4, 4),
        "z": int8(1, 4), "state": State((1, 40), "int8"), "y": int8(1, 4),
    }  # fmt: skip
    ops = [
        Op("MEAN", "x axes", "m", "ReducerOptions"), Op("FULLY_CONNECTED", "m w", "z", "FullyConnectedOptions"),
        Op("RELU", "z", "y"),
    ]  # fmt: skip
    return Path(write(folder / "reducers.tflite", Graph(ops, tensors, "x", "y")))


@pytest.mark.parametrize("made", [None, two_convolutions, several_graphs, many_small, reducers])
def test_a_host_needs_what_the_recording_interpreter_records(made: object, tmp_path: Path) -> None:
    path = made(tmp_path) if callable(made) else SINE
    memory = eo.mcu_memory(path, core="x86-64")
    assert recorded(path) == (memory.arena_used_bytes, memory.head_bytes, memory.tail_bytes)
    assert recorded(path, memory.arena_bytes) is not None
    assert recorded(path, memory.arena_bytes - 16) is None


def test_planning_can_need_more_than_the_plan(tmp_path: Path) -> None:
    memory = eo.mcu_memory(many_small(tmp_path), core="cortex-m4")
    # Two of 16 bytes live at once. The planner has 12 requests of 12 bytes, a pointer for the graph, 24 bytes for each
    # of 31 tensors, all rounded to 16, and 40 for each of 31 buffers; below lies the tail without inputs and outputs.
    assert memory.head_bytes == 32
    ports = {part.name: part.nbytes for part in memory.tail_parts}["inputs and outputs"]
    before_ports = -(-(memory.tail_bytes - ports) // 16) * 16
    assert memory.planning_bytes == before_ports + 896 + 31 * 40  # 896: 12 * 12 + 4 + 31 * 24 = 892
    assert memory.arena_bytes == -(-memory.planning_bytes // 16) * 16 > memory.arena_used_bytes


def test_records_of_many_channels_can_need_more_than_the_plan(tmp_path: Path) -> None:
    """While a layer prepares, TFLM holds a record of each tensor with a zero point per channel."""
    model, path = nn.Linear(16, 300).eval(), tmp_path / "model.tflite"
    litert_torch.convert(model, (torch.randn(1, 16),)).export(str(tmp_path / "float.tflite"))
    quantized = quantizer.Quantizer(str(tmp_path / "float.tflite"))
    quantized.load_quantization_recipe(recipe.static_wi8_ai8())
    ranges = quantized.calibrate({"serving_default": [{"args_0": np.ones((1, 16), np.float32)}]})
    quantized.quantize(ranges).export_model(str(path))
    memory = eo.mcu_memory(path, core="x86-64")
    # Zero points of 300 weights and 300 biases are 2400 bytes, beside 300 + 16 bytes of activations.
    assert memory.arena_bytes > memory.arena_used_bytes + 1500
    assert recorded(path, memory.arena_bytes) is not None
    assert recorded(path, memory.arena_bytes - 16) is None


def test_the_tail_on_a_cortex_m4_adds_up_from_the_structures(tmp_path: Path) -> None:
    memory = eo.mcu_memory(two_convolutions(tmp_path), core="cortex-m4")
    parts = {part.name: part.nbytes for part in memory.tail_parts}
    assert parts["interpreter"] == 36 + 44 + 36 + 8 + 8
    assert parts["tensors"] == 10 * 12
    assert parts["nodes"] == 5 * 32
    # Two convolutions, a pool, a reshape with nine integers, and a fully connected layer of one-byte members.
    assert parts["operator options"] == 28 + 28 + 40 + 36 + 5
    # Each input and output: a pointer aligned to 16, a record, its scale and zero point.
    assert sum(parts.values()) == memory.tail_bytes
    # Input of 8x8x3 and two maps of 8x8x8: the input lives until the first convolution has run.
    assert memory.head_bytes == 2 * 512
    assert [part.nbytes for part in memory.peak_tensors] == [512, 512]


@pytest.mark.parametrize(
    ("core", "requests"),
    [
        # 3x3x3 columns of 28 in 16 bits, twice; 5x5 depthwise weights of 8 channels in 16 bits; 8 sums of the pool.
        ("cortex-m7", 2 * 2 * 28 + 2 * 8 * 25 + 4 * 8),
        # Four columns in lanes of 16; 124 channels of four rows.
        ("cortex-m55", 4 * 16 * 2 + 496 * 25),
        ("cortex-m0plus", 2 * 2 * 28),
    ],
)
def test_scratch_of_cmsis_nn_follows_the_core(core: str, requests: int, tmp_path: Path) -> None:
    path = two_convolutions(tmp_path)
    assert eo.mcu_memory(path, core=core, kernels="cmsis-nn").scratch_bytes == requests
    assert eo.mcu_memory(path, core=core).scratch_bytes == 0


def test_other_enums_make_other_options(tmp_path: Path) -> None:
    path = two_convolutions(tmp_path)
    arm, xtensa = (eo.mcu_memory(path, core=core) for core in ("cortex-m4", "esp32-s3"))
    options = [{part.name: part.nbytes for part in memory.tail_parts}["operator options"] for memory in (arm, xtensa)]
    # Three enums and two flags are 5 bytes with enums of one byte, 16 with enums of four, after padding before.
    assert options[1] - options[0] == 16 - 5
    with pytest.raises(InvalidInput, match="CMSIS-NN"):
        eo.mcu_memory(path, core="esp32-s3", kernels="cmsis-nn")


def test_flash_is_the_file_and_its_code_once(tmp_path: Path) -> None:
    path = two_convolutions(tmp_path)
    memory = eo.mcu_memory(path)
    assert memory.flash_bytes == sum(part.nbytes for part in memory.flash_parts)
    both, one = code_size(["CONV_2D", "ADD"], "reference"), code_size(["CONV_2D"], "reference")
    other = code_size(["ADD"], "reference")
    assert one.nbytes < both.nbytes < one.nbytes + other.nbytes - one.core_bytes
    assert memory.operators == ("AVERAGE_POOL_2D", "CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "RESHAPE")
    assert {part.name: part.nbytes for part in memory.flash_parts}["weights and constants"] == (
        8 * 27 + 25 * 8 + 10 * 8 + 2 * 4
    )


def test_a_board_gives_two_verdicts(tmp_path: Path) -> None:
    memory = eo.mcu_memory(two_convolutions(tmp_path), core="rp2040")
    ram, flash = memory.verdicts
    assert (ram.memory, ram.available_bytes, flash.memory) == ("RAM", 264 * 1024, "Flash")
    assert ram.left_bytes == 264 * 1024 - memory.arena_bytes - RAM_MARGIN_BYTES
    assert memory.fits


def test_without_execution_in_place_the_model_is_in_ram(tmp_path: Path) -> None:
    memory = eo.mcu_memory(two_convolutions(tmp_path), core="imx93-m33")
    assert memory.verdicts[0].needed_bytes == memory.arena_bytes + memory.flash_bytes


def test_the_arena_must_fit_one_bank(tmp_path: Path) -> None:
    value = ((1, 150 * 1024), "int8")
    path = write(tmp_path / "wide.tflite", Graph([Op("RELU", "x", "y")], {"x": value, "y": value}, "x", "y"))
    memory = eo.mcu_memory(path, core="stm32f746")
    assert memory.arena_bytes + RAM_MARGIN_BYTES < memory.verdicts[0].available_bytes
    assert not memory.fits, "300 KiB fit 320 KiB, but not the largest bank of 240 KiB"


@pytest.mark.parametrize(
    ("op", "dtype", "reason"), [("TILE", "float32", "operator TILE"), ("AVERAGE_POOL_2D", "uint8", "type uint8")]
)
def test_what_tflm_refuses_is_refused(op: str, dtype: str, reason: str, tmp_path: Path) -> None:
    options = "Pool2DOptions" if op.endswith("2D") else ""
    fields = {"strideW": 1, "strideH": 1, "filterHeight": 1, "filterWidth": 1} if options else {}
    shape = Scaled((1, 4, 4, 2), dtype, 0.1, 0) if dtype == "uint8" else ((1, 4, 4, 2), dtype)
    tensors = {"x": shape, "n": np.array([1, 1, 1, 1], np.int32), "y": shape}
    path = write(tmp_path / "no.tflite", Graph([Op(op, "x n" if op == "TILE" else "x", "y", options, fields)],
                                               tensors, "x", "y"))  # fmt: skip
    assert recorded(path) is None
    with pytest.raises(UnreadableModel, match=reason):
        eo.mcu_memory(path)


def test_every_controller_of_the_catalog_has_a_known_core_and_fits_its_banks() -> None:
    controllers = [spec for spec in eo.devices() if spec.microcontroller]
    assert len(controllers) >= 30
    for spec in controllers:
        assert spec.microcontroller is not None and spec.microcontroller.core in CORES, spec.name
        banks = sum(bank.figure.value for bank in spec.microcontroller.ram_banks)
        assert banks <= spec.ram_bytes[0].value, spec.name


def test_a_name_that_is_neither_core_nor_board_is_refused() -> None:
    with pytest.raises(UnknownDevice, match="cortex-m4"):
        eo.mcu_memory(SINE, core="cortex-m99")
    with pytest.raises(InvalidInput, match="microcontroller"):
        eo.mcu_memory(SINE, core="raspberry-pi-4")


def test_a_profile_of_an_int8_file_gives_both_verdicts_in_int8(tmp_path: Path) -> None:
    path = str(two_convolutions(tmp_path))
    profiled = eo.profile(path, target="rp2040")
    prediction = profiled.prediction
    assert prediction is not None and prediction.mcu is not None and prediction.precision == "int8"
    assert prediction.mcu == eo.mcu_memory(path, core="rp2040", kernels="cmsis-nn")
    text = str(profiled)
    assert "RAM " in text and "Flash " in text
    kept, broken = eo.check(profiled, "ram_kib <= 16", "flash_bytes <= 1000").budgets
    assert (kept.outcome, broken.outcome) == ("holds", "broken")
    assert kept.value == prediction.mcu.arena_bytes / 1024
    comparison = eo.compare_targets(path, targets=["rp2040", "nucleo-h743zi"])
    assert [(fit.fits, fit.prediction.precision) for fit in comparison.targets] == [(True, "int8")] * 2
    profiled.save(tmp_path / "p.json")
    assert eo.load(tmp_path / "p.json").prediction == prediction


def test_a_profile_of_several_graphs_names_no_operator_at_the_peak(tmp_path: Path) -> None:
    path = str(several_graphs(tmp_path))
    text = str(eo.profile(path, target="rp2040"))
    assert f"arena {eo.mcu_memory(path, core='rp2040', kernels='cmsis-nn').arena_bytes} bytes\n" in text


class Mixed(nn.Module):
    """What converters treat apart: a stride with padding, a shortcut, a join, a padded pool, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.Conv2d(16, 12, 1)
        self.pool, self.head = nn.MaxPool2d(3, 2, 1), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = torch.cat([x, torch.relu(x + self.depthwise(x))], 1)
        x = self.pool(torch.relu(self.pointwise(x)))
        return torch.softmax(self.head(x.mean((2, 3))), -1)


def test_a_model_needs_before_conversion_what_its_file_needs_after(tmp_path: Path) -> None:
    torch.manual_seed(1)  # which input of a concatenation is converted to the common scale depends on ranges
    model, shape = Mixed().eval(), (1, 3, 24, 24)
    source, path = tmp_path / "float.tflite", tmp_path / "model.tflite"
    litert_torch.convert(model, (torch.randn(shape),)).export(str(source))
    quantized = quantizer.Quantizer(str(source))
    quantized.load_quantization_recipe(recipe.static_wi8_ai8())
    feeds = [{"args_0": torch.randn(shape).numpy()} for _ in range(2)]
    quantized.quantize(quantized.calibrate({"serving_default": feeds})).export_model(str(path), overwrite=True)
    for core, kernels in (("cortex-m4", "reference"), ("cortex-m55", "cmsis-nn"), ("esp32-s3", "reference")):
        before = eo.mcu_memory(model, shape, core=core, kernels=kernels)
        after = eo.mcu_memory(path, core=core, kernels=kernels)
        assert (before.arena_bytes, before.operators) == (after.arena_bytes, after.operators)
        assert before.flash_bytes == pytest.approx(after.flash_bytes, rel=0.08)
    assert eo.mcu_memory(source).arena_bytes == eo.mcu_memory(model, shape, precision="fp32").arena_bytes


def image(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)


MAP = 16 * 16 * 8  # bytes of an int8 map of 8 channels


@pytest.mark.parametrize(
    ("layers", "operators", "head"),
    [
        # The quantizer leaves a leaky ReLU in float32: its input and its result have 4 bytes per value.
        ([nn.LeakyReLU()], "CONV_2D DEQUANTIZE LEAKY_RELU QUANTIZE TRANSPOSE", 2 * 4 * MAP),
        # Behind an activation a batch norm is four operators of its own; two maps live at a time.
        ([nn.ReLU(), nn.BatchNorm2d(8)], "ADD CONV_2D MUL SUB TRANSPOSE", 2 * MAP),
        # x · σ(x): the input, the gate and the result.
        ([nn.SiLU()], "CONV_2D LOGISTIC MUL TRANSPOSE", 3 * MAP),
        # Its sum and its clamp are part of the convolution; a product with 1/6 is left.
        ([nn.Hardsigmoid()], "CONV_2D MUL TRANSPOSE", 2 * MAP),
        # max(x, 0) - w · max(-x, 0): the first part waits while the second is computed.
        ([nn.PReLU(8)], "CONV_2D MUL RELU SUB TRANSPOSE", 3 * MAP),
        # Padding that counts is written; 18 x 18 values beside 16 x 16.
        ([nn.AvgPool2d(3, 1, 1)], "AVERAGE_POOL_2D CONV_2D PAD TRANSPOSE", (16 * 16 + 18 * 18) * 8),
        # Four times as many places, and the same again in the order of torch.
        ([nn.Upsample(scale_factor=2, mode="bilinear")], "CONV_2D RESIZE_BILINEAR TRANSPOSE", 8 * MAP),
        ([nn.ConvTranspose2d(8, 8, 2, 2)], "CONV_2D TRANSPOSE TRANSPOSE_CONV", None),
        ([nn.Conv2d(8, 16, 3, padding=1, groups=4)], "CONV_2D TRANSPOSE", 4 * MAP),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_int8_graph_has_the_operators_that_the_converter_writes(
    layers: list[nn.Module], operators: str, head: int | None
) -> None:
    memory = eo.mcu_memory(image(*layers), (1, 3, 16, 16))
    assert " ".join(memory.operators) == operators
    assert head is None or memory.head_bytes == head


class Rescaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x) * 2 + 1) / 3).permute(0, 2, 3, 1)


def test_constants_are_folded_into_layers_and_a_result_with_channels_last_is_not_transposed() -> None:
    assert eo.mcu_memory(Rescaled(), (1, 3, 16, 16)).operators == ("CONV_2D", "TRANSPOSE")
    # The input, 3 channels, is transposed once; then 8 channels and 4.
    assert eo.mcu_memory(Rescaled(), (1, 3, 16, 16)).head_bytes == 16 * 16 * (8 + 4)


def test_rows_get_a_height_of_one() -> None:
    net = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(256, 3))
    memory = eo.mcu_memory(net, (1, 4, 64))
    assert memory.operators == ("CONV_2D", "FULLY_CONNECTED", "MAX_POOL_2D", "RESHAPE", "TRANSPOSE")
    # 8 channels of 64 values beside 4, or beside its pool.
    assert memory.head_bytes == 64 * 8 + 64 * 4


class Twice(nn.Module):
    """A sum of two convolutions of an activation, which is written once or twice."""

    def __init__(self, is_twice: bool) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.is_twice = is_twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        active = torch.sigmoid(x)
        return self.left(active) + self.right(torch.sigmoid(x) if self.is_twice else active)


def test_what_is_computed_twice_is_written_once() -> None:
    once, twice = (eo.mcu_memory(Twice(is_twice), (1, 3, 16, 16)) for is_twice in (False, True))
    assert (once.head_bytes, once.tail_parts) == (twice.head_bytes, twice.tail_parts)
    # The activation, the left convolution, and the right one.
    assert once.head_bytes == 3 * MAP


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.transpose(1, 2), x
        return first + second


@pytest.mark.parametrize(
    ("model", "reason"),
    [(nn.Sequential(nn.Linear(16, 16), nn.ELU()), "aten.elu is not known"), (Halves(), "one of several views")],
)
def test_what_cannot_be_derived_is_refused(model: nn.Module, reason: str) -> None:
    with pytest.raises(ConversionFailed, match=reason):
        eo.mcu_memory(model, (1, 16, 16))


def test_more_tensors_than_tflm_joins_are_refused(tmp_path: Path) -> None:
    names = " ".join(f"x{index}" for index in range(11))
    tensors = {**{name: int8(1, 4) for name in names.split()}, "y": int8(1, 44)}
    op = Op("CONCATENATION", names, "y", "ConcatenationOptions", {"axis": 1})
    with pytest.raises(UnreadableModel, match="joins 11 tensors"):
        eo.mcu_memory(write(tmp_path / "net.tflite", Graph([op], tensors, names, "y")))


def test_a_module_is_judged_by_its_file_to_be() -> None:
    prediction = eo.profile(Mixed(), (1, 3, 24, 24), target="rp2040", precision="int8").prediction
    assert prediction is not None and prediction.mcu is not None and prediction.mcu.fits
    # Five maps of 12x12x8 where the join is made: both inputs, one of them converted, and the result of twice the size.
    assert prediction.mcu.head_bytes == 5 * 12 * 12 * 8


def test_an_operator_that_is_not_known_before_conversion_leaves_the_verdict_open() -> None:
    prediction = eo.profile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), (1, 8), target="rp2040").prediction
    assert prediction is not None and prediction.mcu is None and not prediction.ram_bytes
    assert any("GELU" in remark for remark in prediction.remarks)


def test_advice_names_the_layers_at_the_peak_and_plans_each_change_again() -> None:
    memory = eo.mcu_memory(SmallCNN(), (1, 1, 28, 28), core="cortex-m4")
    # The first layer's 16 channels of 28 x 28, and its pool of 14 x 14.
    first, pool = 28 * 28 * 16, 14 * 14 * 16
    assert [(part.name, part.nbytes) for part in memory.peak_tensors] == [("conv1", first), ("pool1", pool)]
    advice = dict(line.rsplit(": ", 1) for line in memory.advice)
    assert advice["half the channels of conv1"] == units.size((first + pool) // 2)  # the pool has as many
    assert advice["inputs of half the height and width"] == units.size((first + pool) // 4)


def test_a_file_in_float_is_advised_int8() -> None:
    memory = eo.mcu_memory(SmallCNN(), (1, 1, 28, 28), core="cortex-m4", precision="fp32")
    advice = dict(line.rsplit(": ", 1) for line in memory.advice)
    assert advice["int8 instead of float32, inputs included"] == units.size(28 * 28 * 16 + 14 * 14 * 16)


def test_an_unchanged_plan_has_the_same_head(tmp_path: Path) -> None:
    graph = read_tflm(many_small(tmp_path))
    arena = tflm_arena(graph, TflmBuild("reference", "dsp", 4, 1))
    assert replanned_head(arena.buffers, {}) == arena.head_bytes


def test_a_sweep_takes_the_budgets_of_a_profile() -> None:
    assert parse_budget("ram_kib <= 256", TRIAL_METRICS).metric == "target_ram_kib"
    assert parse_budget("flash_kib <= 1024", TRIAL_METRICS).metric == "target_flash_kib"
