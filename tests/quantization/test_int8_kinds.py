"""int8 for every kind of model: dynamic, weights alone, other ranges, mixed precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from convertible import Recurrent, Tokens
from edge_opt import compress
from edge_opt.errors import ConversionFailed, InvalidInput
from edge_opt.quantization.fake_quantization import keep_float_until_it_agrees, ranked_layers
from edge_opt.quantization.onnx_files import FloatFile, module_path
from edge_opt.records.conversions import KeptFloatTrial


def test_an_lstm_runs_in_int8_without_calibration() -> None:
    done = compress.convert(Recurrent(), (1, 5, 8), "int8")
    assert [(layer.path, layer.precision) for layer in done.layers] == [("rnn", "int8"), ("head", "int8")]
    assert done.effective_precision == "int8"


def test_a_transformer_s_weights_run_in_int8_and_products_of_activations_do_not() -> None:
    done = compress.convert(Tokens(), [torch.zeros(1, 6, dtype=torch.long)], "int8")
    # in and out projection, two layers of the feed-forward block, the head; attention multiplies activations twice
    assert [layer.precision for layer in done.layers].count("int8") == 2 + 2 + 1
    assert [layer.path for layer in done.kept_layers] == ["block.self_attn"] * 2
    assert {layer.reason.partition(",")[0] for layer in done.kept_layers} == {"a product of two activations"}


class Stacked(nn.Module):
    """A product with a stack of constant matrices, as DeBERTa has for positions, before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.last = nn.Parameter(torch.randn(4, 16, 16) / 4), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x @ self.stack)


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_products_with_a_stack_of_matrices_stay_in_float(scheme: str) -> None:
    """ONNX Runtime refused them when they ran, by "b zero point is not valid"."""
    batches = [torch.randn(16, 4, 3, 16) for _ in range(2)]
    done = compress.convert(Stacked(), (1, 4, 3, 16), "int8", calibration=batches, scheme=scheme)
    assert [(layer.path, layer.precision) for layer in done.layers] == [("", "fp32"), ("last", "int8")]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 512), nn.Linear(512, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


@pytest.mark.parametrize(("precision", "group", "bits"), [("int8", 32, 8), ("int4", 32, 4), ("int4", 128, 4)])
def test_weights_alone_take_their_bits_and_a_scale_for_each_group(precision: str, group: int, bits: int) -> None:
    done = compress.convert(Wide(), (1, 256), precision, scheme="weights", group_size=group)
    weights = 256 * 512 + 512 * 16
    # bits of each weight, four bytes of scale for each group, four bytes of each bias
    expected = weights * bits // 8 + weights // group * 4 + (512 + 16) * 4
    assert done.effective_precision == precision
    assert expected <= done.size_bytes < expected + 4000


def test_int4_is_of_weights_only() -> None:
    with pytest.raises(InvalidInput, match="int4 is of weights only"):
        compress.convert(Wide(), (1, 256), "int4", scheme="static")
    with pytest.raises(InvalidInput, match="unknown scheme 'best'"):
        compress.convert(Wide(), (1, 256), "int8", scheme="best")
    with pytest.raises(InvalidInput, match="group_size is 7"):
        compress.convert(Wide(), (1, 256), "int4", group_size=7)


def needing(count: int) -> Callable[[tuple[str, ...]], tuple[KeptFloatTrial, str | None]]:
    """Return attempts that agree where so many layers stay in float."""

    def attempt(layers: tuple[str, ...]) -> tuple[KeptFloatTrial, str | None]:
        is_enough = len(layers) >= count
        return KeptFloatTrial(layers, 0.05 if is_enough else 0.2, None, None), None if is_enough else "too far"

    return attempt


def test_as_few_layers_as_suffice_stay_in_float() -> None:
    ranked = [f"layer{number}" for number in range(20)]
    # five layers suffice: tried are 0, 1, 2, 4, 8, and between 4 and 8 the middle ones 6 and 5
    spared, curve = keep_float_until_it_agrees(ranked, needing(5), 0.1)
    assert spared == tuple(ranked[:5])
    assert [len(point.spared) for point in curve] == [0, 1, 2, 4, 5, 6, 8]
    # eighteen of twenty: 16 is the last power of two, and 19 leaves one in int8
    assert keep_float_until_it_agrees(ranked, needing(18), 0.1)[0] == tuple(ranked[:18])
    with pytest.raises(ConversionFailed, match="while any layer is in int8"):
        keep_float_until_it_agrees(ranked, needing(20), 0.1)


class Masked(nn.Module):
    """Attention over tokens, of which a mask hides some by a number that is added to their scores."""

    def __init__(self, hidden: float) -> None:
        super().__init__()
        self.hidden = hidden
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 3)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        added = torch.where(mask[:, None, :] > 0, 0.0, self.hidden)
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 4 + added
        return self.head((scores.softmax(-1) @ self.value(x))[:, 0])


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min, -1e4])
@pytest.mark.parametrize("is_calibrated", [True, False])
def test_a_mask_hides_in_static_int8_what_it_hides_in_float(hidden: float, is_calibrated: bool) -> None:
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 20, (32, 8)), torch.ones(32, 8, dtype=torch.int64)
    mask[:, 5:] = 0
    seen = mask if is_calibrated else torch.ones_like(mask)
    model = Masked(hidden).eval()
    done = compress.convert(
        model, [ids, seen], "int8", calibration=[(ids, seen)], scheme="static", verify_on=[(ids, mask)]
    )
    assert done.agreement.relative_difference < 0.1
    assert [layer.path for layer in done.layers if layer.precision == "int8"].count("") == 2  # both products
    other = ids.clone()
    other[:, 5:] = torch.randint(0, 20, (32, 3))
    with compress.open_runner(done) as runner:
        assert torch.equal(runner(ids, mask)[0], runner(other, mask)[0])


class Uneven(nn.Module):
    """A layer whose input has one value a thousand times the others: 256 steps leave nothing of those."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fine(x)
        stretched = torch.cat([hidden[:, :1] * 0 + 1000.0, hidden[:, 1:]], 1)
        return self.coarse(stretched) - 1000.0 * self.coarse.weight[:, 0]


def test_the_layer_that_hurts_is_found_and_spared() -> None:
    torch.manual_seed(0)
    model, batch = Uneven().eval(), torch.randn(16, 8)
    assert ranked_layers(model, lambda: [model(batch)])[0] == "coarse"
    done = compress.convert(model, (1, 8), "int8", calibration=[batch], keep_float="auto")
    assert [layer.path for layer in done.kept_layers] == ["coarse"]
    assert [point.spared for point in done.curve] == [(), ("coarse",)]
    assert done.curve[0].difference > 0.1 > done.curve[1].difference


def test_shapes_that_are_inferred_otherwise_do_not_stop_dynamic_int8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(source: Path, prepared: Path) -> FloatFile:
        # as symbolic inference leaves some files: a tensor with another rank than it has
        model = onnx.load(str(source))
        wrong = onnx.helper.make_tensor_value_info(model.graph.node[0].output[0], onnx.TensorProto.FLOAT, [1, 2, 3])
        model.graph.value_info.extend([wrong])
        prepared.write_bytes(model.SerializeToString())
        return FloatFile(prepared, model, {node.name: module_path(node) for node in model.graph.node}, is_big=False)

    monkeypatch.setattr("edge_opt.runtimes.export.prepare", prepare)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    assert compress.convert(model, (2, 16), "int8", scheme="dynamic", output=tmp_path).effective_precision == "int8"


def test_layers_are_chosen_on_the_kind_of_file_that_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    from edge_opt.runtimes import export

    def refuse(*_: object) -> None:
        raise AssertionError("a dynamic file was tried")

    monkeypatch.setattr(export, "quantize_dynamic", refuse)
    torch.manual_seed(0)
    model, batch = Uneven().eval(), torch.randn(16, 8)
    done = compress.convert(model, (1, 8), "int8", scheme="weights", keep_float="auto", verify_on=[batch])
    assert done.curve and done.effective_precision.startswith("int8")


def test_ranges_take_no_infinities() -> None:
    from edge_opt.quantization.onnx_files import _min_max

    values = [("x", np.array([-np.inf, -2.0, 3.0])), ("x", np.array([np.nan, 1.0])), ("y", np.array([-np.inf]))]
    assert _min_max(values, {}) == {"x": (-2.0, 3.0), "y": (0.0, 0.0)}
