"""Conversions are what was asked, layer by layer, or they raise."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from convertible import Pair, Recurrent, Residual, Tokens
from edge_opt import compress
from edge_opt.errors import ConversionFailed, InvalidInput
from edge_opt.measuring import machine
from edge_opt.measuring.machine import cpu_flags, is_fast, needs_reduced_range, vector_bytes
from edge_opt.model import SmallCNN

SHAPE = (1, 1, 28, 28)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pictures(count: int = 2, *shape: int) -> list[Any]:
    return [(torch.randn(16, *(shape or (1, 28, 28))), torch.zeros(16)) for _ in range(count)]


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime", "openvino"])
def test_float32_agrees_with_the_original(runtime: str) -> None:
    done = compress.convert(Residual(), (1, 3, 12, 12), "fp32", runtime, verify_on=pictures(2, 3, 12, 12))
    assert done.effective_precision == "fp32"
    assert done.agreement.max_difference <= 1e-4
    assert (done.agreement.top1, done.agreement.samples, done.agreement.batches) == (1.0, 2 * 16, 2)
    assert {layer.path for layer in done.layers} >= {"stem", "conv", "head"}


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_every_layer_of_a_small_cnn_runs_in_int8(runtime: str, tmp_path: Path) -> None:
    done = compress.convert(SmallCNN(), SHAPE, "int8", runtime, calibration=pictures(), output=tmp_path)
    # two convolutions and a linear layer, by hand
    assert [(layer.path, layer.precision) for layer in done.layers] == [
        ("conv1", "int8"),
        ("conv2", "int8"),
        ("classifier", "int8"),
    ]
    assert done.effective_precision == "int8" and not done.kept_layers
    assert [path.name for path in tmp_path.iterdir()] == ["SmallCNN.int8.onnx"]
    assert done.size_bytes == Path(done.path).stat().st_size
    # weights of one byte instead of four: 16*9 + 32*16*9 + 1568*10, and some graph around them
    assert 16 * 9 + 32 * 16 * 9 + 1568 * 10 < done.size_bytes < done.original_bytes / 2
    # at least: the input is quantised, the output dequantised
    assert sum(kernel.only_converts for kernel in done.kernels) >= 2


def test_weights_have_eight_bits_per_channel_unless_the_cpu_would_saturate(tmp_path: Path) -> None:
    import onnx

    model = SmallCNN()
    for reduce_range, limit in ((True, 64), (False, 127)):
        folder = tmp_path / str(limit)
        done = compress.convert(model, SHAPE, "int8", calibration=pictures(1), reduce_range=reduce_range, output=folder)
        tensors = {item.name: onnx.numpy_helper.to_array(item) for item in onnx.load(done.path).graph.initializer}
        weight = next(array for name, array in tensors.items() if name.endswith("conv2.weight_quantized"))
        scale = next(array for name, array in tensors.items() if name.endswith("conv2.weight_scale"))
        assert weight.dtype == np.int8 and np.abs(weight.astype(int)).max() in (limit - 1, limit)
        assert scale.shape == (32,)
        # each channel's largest weight is at the end of its range
        largest = model.conv2.weight.detach().abs().amax((1, 2, 3)).numpy()
        assert np.allclose(scale * np.abs(weight.astype(int)).max((1, 2, 3)), largest, rtol=0.02)


def test_spared_layers_stay_in_float() -> None:
    done = compress.convert(Residual(), (1, 3, 12, 12), "int8", calibration=pictures(2, 3, 12, 12), keep_float=["conv"])
    assert done.effective_precision == "int8+fp32"
    # What is spared reads its input unrounded, so the layer before it runs in float, too.
    assert [(layer.path, layer.precision) for layer in done.kept_layers] == [("stem", "fp32"), ("conv", "fp32")]
    assert done.kept_layers[0].reason.startswith("a layer in float reads its output unrounded")
    assert done.kept_layers[1].reason == "kept in float, as asked"


def test_a_spared_layer_reads_what_the_activation_before_it_left() -> None:
    # Weights are 1 and one bias is -1: relu(x - 1) for x in 0, 1, 2, 3. Without the relu 0 would give -1.
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    for number, bias in ((0, 0.0), (1, -1.0), (3, 0.0)):
        nn.init.ones_(net[number].weight)
        nn.init.constant_(net[number].bias, bias)
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    done = compress.convert(net, x, "int8", calibration=[x], keep_float=["3"])
    with compress.open_runner(done) as runner:
        [found] = runner(x)
    assert torch.allclose(found, torch.tensor([[0.0], [0.0], [1.0], [2.0]]), atol=0.05)


class Resizing(nn.Module):
    """A skip connection beside a resize: ONNX Runtime cannot infer all of its symbolic shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.last = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = nn.functional.interpolate(nn.functional.max_pool2d(y, 2), scale_factor=2, mode="bilinear")
        return self.last(torch.cat([y, z], 1))


def test_a_conversion_leaves_nothing_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    x = torch.rand(4, 3, 16, 16)
    compress.convert(Resizing().eval(), x, "int8", "onnxruntime", calibration=[(x,)], output=tmp_path / "out",
                     max_difference=True)  # fmt: skip
    assert not list(here.iterdir())


def test_an_lstm_stays_in_float_and_says_why() -> None:
    batches = [torch.randn(8, 5, 8)]
    done = compress.convert(Recurrent(), (1, 5, 8), "int8", calibration=batches, scheme="static")
    assert [(layer.path, layer.precision) for layer in done.layers] == [("rnn", "fp32"), ("head", "int8")]
    assert done.kept_layers[0].reason == "static quantization has no rule for LSTM"
    with pytest.raises(ConversionFailed, match="did not take: all 1 layers run in fp32: .* no rule for LSTM"):
        compress.convert(nn.LSTM(8, 16, batch_first=True), (1, 5, 8), "int8", calibration=batches, scheme="static")


def test_a_transformer_is_quantised_product_by_product() -> None:
    batches = [torch.randint(0, 20, (8, 6)) for _ in range(2)]
    done = compress.convert(
        Tokens(), [torch.zeros(1, 6, dtype=torch.long)], "int8", calibration=batches, scheme="static"
    )
    # in and out projection, two products of attention, two of the feed-forward block, one head
    assert len(done.layers) == 2 + 2 + 2 + 1
    assert {layer.precision for layer in done.layers} == {"int8"}
    paths = {layer.path for layer in done.layers}
    assert paths == {"block.self_attn", "block.self_attn.out_proj", "block.linear1", "block.linear2", "head"}
    norms = {kernel.path for kernel in done.kernels if "LayerNorm" in kernel.op}
    assert norms == {"block.norm1", "block.norm2"}
    assert done.outputs == ("output_0", "output_1")


def test_fp16_that_onnxruntime_computes_in_fp32_raises() -> None:
    # On x86 ONNX Runtime has no fp16 kernels, also where the CPU has the instructions.
    if is_fast("fp16") and platform.machine() == "aarch64":
        assert compress.convert(SmallCNN(), SHAPE, "fp16").effective_precision == "fp16"
        return
    with pytest.raises(ConversionFailed, match="fp16 on onnxruntime did not take: all 3 layers run in fp32"):
        compress.convert(SmallCNN(), SHAPE, "fp16")


def test_fp16_may_be_stored_for_another_machine() -> None:
    done = compress.convert(SmallCNN(), SHAPE, "fp16", require_precision=False)
    assert done.precision == "fp16" and done.size_bytes < 0.6 * done.original_bytes
    assert done.effective_precision != "fp16" or is_fast("fp16")
    assert done.agreement.max_difference < 0.01


def test_bf16_has_no_kernels_in_onnxruntime() -> None:
    with pytest.raises(ConversionFailed, match="bfloat16"):
        compress.convert(SmallCNN(), SHAPE, "bf16", "onnxruntime")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_openvino_is_believed_only_by_its_compiled_model(precision: str) -> None:
    if is_fast(precision):
        done = compress.convert(SmallCNN(), SHAPE, precision, "openvino")
        assert done.effective_precision == precision
        assert {layer.precision for layer in done.layers} == {precision}
    else:
        with pytest.raises(ConversionFailed, match=f"{precision} on openvino did not take: all 3 layers run in"):
            compress.convert(SmallCNN(), SHAPE, precision, "openvino")


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_torch_runs_in_the_type_of_the_weights(precision: str, dtype: torch.dtype, tmp_path: Path) -> None:
    done = compress.convert(SmallCNN(), SHAPE, precision, "torch", output=tmp_path)
    assert {layer.precision for layer in done.layers} == {precision}
    state = torch.load(done.path, weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {dtype}
    assert done.original_bytes == 2 * sum(tensor.nbytes for tensor in state.values())
    assert any("slower than fp32" in remark for remark in done.remarks) == (is_fast(precision) is False)


def test_int8_in_torch_is_refused_with_the_way_round() -> None:
    with pytest.raises(InvalidInput, match="int8 is not supported on torch: .*use runtime='onnxruntime'"):
        compress.convert(SmallCNN(), SHAPE, "int8", "torch")


def test_values_beyond_half_precision_raise() -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, 1000.0)
    with pytest.raises(ConversionFailed, match="NaN or infinity"):
        compress.convert(model, [torch.full((1, 2), 1000.0)], "fp16", "torch")


def test_batches_of_different_sizes_calibrate() -> None:
    batches = [torch.randn(16, 1, 28, 28), torch.randn(16, 1, 28, 28), torch.randn(5, 1, 28, 28)]
    done = compress.convert(SmallCNN(), SHAPE, "int8", calibration=batches)
    assert done.effective_precision == "int8"
    assert done.agreement.samples == 16 + 16 + 5
    assert not any("left out" in remark for remark in done.remarks)


def test_several_inputs_of_different_kinds() -> None:
    inputs = [torch.randn(1, 3, 4), torch.zeros(1, 5, dtype=torch.long)]
    batches = [(torch.randn(2, 3, 4), torch.randint(0, 9, (2, 5)), "label")]
    for runtime in ("onnxruntime", "openvino"):
        done = compress.convert(Pair(), inputs, "fp32", runtime, verify_on=batches)
        assert done.inputs == ("x", "ids")
        assert done.agreement.max_difference <= 1e-4
        assert done.agreement.samples == 2  # exported with one sample, run with two


def test_one_export_serves_several_conversions(tmp_path: Path) -> None:
    model = SmallCNN()
    exported = compress.export_onnx(model, SHAPE, tmp_path / "small.onnx")
    before = Path(exported.path).read_bytes()
    quantized = compress.convert(model, SHAPE, "int8", calibration=pictures(1), exported=exported, output=tmp_path)
    plain = compress.convert(model, SHAPE, "fp32", "openvino", exported=exported)
    assert quantized.effective_precision, plain.effective_precision == ("int8", "fp32")
    assert Path(exported.path).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["SmallCNN.int8.onnx", "small.onnx"]


def test_what_a_cpu_does_fast_is_read_from_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_on(name: str, flags: str) -> None:
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc/cpuinfo").write_text(f"processor: 0\n{flags}\n")
        monkeypatch.setattr(platform, "machine", lambda: name)
        monkeypatch.setattr(machine, "cpu_flags", cpu_flags.__wrapped__)

    precisions = ("fp32", "fp16", "bf16", "int8")
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    run_on("x86_64", "flags\t\t: fpu avx2 avx512f avx512_vnni\nflags\t\t: other")
    assert [is_fast(name) for name in precisions] == [True, False, False, True]
    assert (needs_reduced_range(), vector_bytes()) == (False, 64)
    run_on("aarch64", "Features\t: fp asimd asimdhp asimddp")
    assert [is_fast(name) for name in precisions] == [True, True, False, True]
    assert (needs_reduced_range(), vector_bytes()) == (False, 16)
    run_on("x86_64", "flags\t\t: avx2")
    assert (needs_reduced_range(), vector_bytes()) == (True, 32)
    run_on("x86_64", "flags\t\t: avx2 avx_vnni")
    assert not needs_reduced_range()
    run_on("AMD64", "")
    assert is_fast("int8") is None and needs_reduced_range()
    run_on("aarch64", "")
    assert not needs_reduced_range()
