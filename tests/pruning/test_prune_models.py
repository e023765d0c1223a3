"""Pruning of well-known models at 50 %: they run, train, export and are rebuilt.

`benchmarks/shrink_zoo.py` asks many more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from edge_opt.compress import load_pruned, prune, save_pruned
from edge_opt.model import SmallCNN
from edge_opt.pruning.proof import TOLERANCE
from pruned_nets import UNet
from zoo import torchvision_models


def torchvision_factory(name: str, **options: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model: nn.Module = getattr(torchvision_models(), name)(**options)
        if name == "VisionTransformer":
            # Its head starts at zero, and then no output depends on anything.
            nn.init.normal_(model.heads.head.weight, std=0.02)
        return model

    return build


VIT = {"image_size": 64, "patch_size": 16, "num_layers": 4, "num_heads": 6, "hidden_dim": 192, "mlp_dim": 768}
FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "resnet18": torchvision_factory("resnet18"),
    "mobilenet_v3_small": torchvision_factory("mobilenet_v3_small"),
    "unet": lambda: UNet(32),
    # The class of vit_b_16, with a third of its layers and a quarter of its width.
    "vision_transformer": torchvision_factory("VisionTransformer", **VIT),
    "small_cnn": lambda: SmallCNN(16, 32),
}
SLOW = {name for name in FACTORIES if name not in ("unet", "small_cnn")}
CASES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FACTORIES]


def shape_of(name: str) -> tuple[int, ...]:
    return (2, 1, 28, 28) if name == "small_cnn" else (2, 3, 64, 64)


@pytest.mark.parametrize("name", CASES)
def test_half_of_every_layer(name: str, tmp_path: Path) -> None:
    import onnxruntime

    torch.manual_seed(0)
    factory, shape = FACTORIES[name], shape_of(name)
    original = factory()
    pruned = prune(original, shape, 0.5)
    # Half of the inputs and half of the outputs of most layers; rounding and output layers keep more.
    assert 0.24 < pruned.achieved.macs_ratio < 0.4
    assert pruned.check.silenced_error < TOLERANCE
    assert pruned.check.gradients == len(list(original.parameters()))
    explained = {fall.path for fall in pruned.shortfalls}
    assert all(layer.achieved >= 0.5 or layer.path in explained for layer in pruned.achieved.layers)
    x = torch.randn(shape)
    reloaded = load_pruned(save_pruned(pruned, tmp_path), factory).eval()
    model = pruned.model.eval()
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(reloaded(x), expected)
    path = tmp_path / "pruned.onnx"
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    model.train()
    model(x).square().mean().backward()


@pytest.mark.parametrize("name", CASES)
def test_half_of_the_macs(name: str) -> None:
    torch.manual_seed(0)
    pruned = prune(FACTORIES[name](), shape_of(name), macs_target=0.5)
    assert abs(pruned.achieved.macs_ratio - 0.5) <= 0.05 or pruned.shortfalls
