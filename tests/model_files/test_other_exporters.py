"""Files that other programs made: converters, quantisers, optimisers and writers of ONNX. tf2onnx needs TensorFlow."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from torch import nn

import edge_opt as eo
from edge_opt.model_files.file_model import load_onnx
from needed import needed

skl2onnx = needed("skl2onnx")
ROWS, FEATURES, CLASSES, HIDDEN, PARTS = 4, 8, 3, 16, 5


def fitted(name: str) -> Any:
    from sklearn import cluster, decomposition, ensemble, linear_model, naive_bayes, neural_network, pipeline, svm

    dice = np.random.default_rng(0)
    x, y = dice.normal(size=(60, FEATURES)).astype(np.float32), np.arange(60) % CLASSES
    model = {
        "logistic": linear_model.LogisticRegression(),
        "linear": linear_model.LinearRegression(),
        "perceptron": neural_network.MLPClassifier((HIDDEN,), max_iter=5),
        "components": pipeline.make_pipeline(decomposition.PCA(PARTS), linear_model.LogisticRegression()),
        "means": cluster.KMeans(CLASSES, n_init=1),
        "bayes": naive_bayes.GaussianNB(),
        "forest": ensemble.RandomForestClassifier(3),
        "boosted": ensemble.GradientBoostingRegressor(n_estimators=3),
        "vectors": svm.SVC(),
    }[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return skl2onnx.to_onnx(model.fit(x, y), x[:1], target_opset=17)


def profiled(name: str, folder: Path) -> eo.ModelProfile:
    path = folder / "m.onnx"
    path.write_bytes(fitted(name).SerializeToString())
    return eo.profile(load_onnx(path), (ROWS, FEATURES))


@pytest.mark.parametrize(("name", "macs"), [
    ("logistic", ROWS * FEATURES * CLASSES),
    ("linear", ROWS * FEATURES),
    ("perceptron", ROWS * (FEATURES * HIDDEN + HIDDEN * CLASSES)),
    ("components", ROWS * (FEATURES * PARTS + PARTS * CLASSES)),
    ("means", ROWS * FEATURES * CLASSES),
    ("bayes", 0),  # squares and sums, element by element
])  # fmt: skip
def test_products_of_scikit_learn_are_counted(name: str, macs: int, tmp_path: Path) -> None:
    found = profiled(name, tmp_path)
    assert found.totals.macs == macs
    assert found.totals.flops > 2 * macs
    assert not found.unpriced


@pytest.mark.parametrize("name", ["forest", "boosted", "vectors"])
def test_what_depends_on_values_is_listed(name: str, tmp_path: Path) -> None:
    found = profiled(name, tmp_path)
    assert len(found.unpriced) == 1
    assert found.totals.is_lower_bound


IMAGES, CHANNELS, SIDE, WIDTH = 2, 3, 8, 16
# A convolution of 3x3 that keeps the size, then a layer on the mean of each channel.
NET_MACS = IMAGES * (SIDE * SIDE * WIDTH * CHANNELS * 9 + WIDTH * CLASSES)
NET_PARAMS = (WIDTH * CHANNELS * 9 + WIDTH) + (CLASSES * WIDTH + CLASSES)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As torch's older exporter writes it, by way of TorchScript."""
    path = tmp_path_factory.mktemp("scripted") / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Net().eval(), (torch.randn(IMAGES, CHANNELS, SIDE, SIDE),), str(path), dynamo=False, opset_version=17
        )
    return path


class Reader(CalibrationDataReader):
    def __init__(self, name: str) -> None:
        self.batches = iter([{name: np.ones((IMAGES, CHANNELS, SIDE, SIDE), np.float32)}])

    def get_next(self) -> Any:
        return next(self.batches, None)


def as_it_is(path: Path, made: Path) -> None:
    onnx.save(onnx.load(path), made)


def in_another_version(path: Path, made: Path) -> None:
    from onnx import version_converter

    onnx.save(version_converter.convert_version(onnx.load(path), 21), made)


def dynamic(path: Path, made: Path) -> None:
    quantize_dynamic(str(path), str(made))


def between_steps(path: Path, made: Path) -> None:
    reader = Reader(onnx.load(path).graph.input[0].name)
    quantize_static(str(path), str(made), reader, quant_format=QuantFormat.QDQ)


def of_bytes(path: Path, made: Path) -> None:
    reader = Reader(onnx.load(path).graph.input[0].name)
    quantize_static(str(path), str(made), reader, quant_format=QuantFormat.QOperator)


def in_halves(path: Path, made: Path) -> None:
    common = needed("onnxconverter_common")
    onnx.save(common.float16.convert_float_to_float16(onnx.load(path), keep_io_types=True), made)


def slimmed(path: Path, made: Path) -> None:
    onnx.save(needed("onnxslim").slim(str(path)), made)


@pytest.mark.parametrize(("change", "width"), [
    (as_it_is, 4), (in_another_version, 4), (slimmed, 4), (dynamic, 1), (between_steps, 1), (of_bytes, 1),
    (in_halves, 2),
])  # fmt: skip
def test_what_others_make_of_a_file_counts_the_same(
    change: Callable[[Path, Path], None], width: int, scripted: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made.onnx"
    change(scripted, made)
    found = eo.profile(load_onnx(made), (IMAGES, CHANNELS, SIDE, SIDE))
    assert (found.totals.macs, found.totals.params) == (NET_MACS, NET_PARAMS)
    assert not found.unpriced
    # Weights have the width of their type, and a quantiser leaves biases at four bytes.
    biases = WIDTH + CLASSES
    assert found.totals.param_bytes == width * (NET_PARAMS - biases) + (2 if width == 2 else 4) * biases


def test_a_transformer_that_onnxruntime_fused(tmp_path: Path) -> None:
    from onnxruntime.transformers import optimizer

    block = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
    path = tmp_path / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(block.eval(), (torch.randn(1, ROWS, HIDDEN),), str(path), dynamo=False, opset_version=14)
    fused = optimizer.optimize_model(str(path), "bert", num_heads=2, hidden_size=HIDDEN, opt_level=0)
    fused.save_model_to_file(str(path))
    assert "BiasGelu" in {one.op_type for one in fused.model.graph.node}
    found = eo.profile(load_onnx(path), (1, ROWS, HIDDEN))
    assert found.totals.macs == 2 * ROWS * HIDDEN * 2 * HIDDEN
    assert not found.unpriced


def test_weights_in_nodes_are_parameters(tmp_path: Path) -> None:
    """spox writes each array as a node of type Constant."""
    spox = needed("spox")
    import spox.opset.ai.onnx.v17 as op

    x = spox.argument(spox.Tensor(np.float32, ("N", FEATURES)))
    product = op.matmul(x, op.const(np.ones((FEATURES, CLASSES), np.float32)))
    y = op.add(product, op.const(np.ones(CLASSES, np.float32)))
    onnx.save(spox.build({"x": x}, {"y": y}), tmp_path / "m.onnx")
    found = eo.profile(load_onnx(tmp_path / "m.onnx"), (ROWS, FEATURES))
    assert (found.totals.macs, found.totals.params) == (ROWS * FEATURES * CLASSES, FEATURES * CLASSES + CLASSES)
