"""Files that other exporters made: scikit-learn's. tf2onnx needs TensorFlow, and ORT's quantiser has its own tests."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_opt as eo
from edge_opt.model_files.onnx_model import load_onnx

skl2onnx = pytest.importorskip("skl2onnx", reason="requirements/dev.lock has it")
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
