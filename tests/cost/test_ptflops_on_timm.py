"""convention="ptflops" against the package, on models that neither was written for."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import edge_opt as eo
from edge_opt.cost.conventions import count
from zoo import torchvision_models

torchvision_models()
ptflops = pytest.importorskip("ptflops")

MODELS = (
    "regnety_002", "efficientnet_b0", "mobilenetv3_small_100", "mobilevit_xxs", "swin_tiny_patch4_window7_224",
    "vit_tiny_patch16_224", "convnext_atto", "ghostnet_100", "levit_128s", "xcit_nano_12_p16_224", "cait_xxs24_224",
    "coat_lite_tiny", "edgenext_xx_small", "crossvit_tiny_240", "maxvit_tiny_rw_224", "nest_tiny", "skresnet18",
    "visformer_tiny", "volo_d1_224", "efficientformer_l1",
)  # fmt: skip


def by_the_package(model: nn.Module, size: tuple[int, ...]) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        macs, _ = ptflops.get_model_complexity_info(
            model, size, as_strings=False, print_per_layer_stat=False, verbose=False, backend="pytorch"
        )
    return int(macs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_timm_model_counts_as_in_the_package(name: str) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, pretrained=False).eval()
    size = model.default_cfg["input_size"]
    assert count(eo.profile(model, (1, *size)), "ptflops").total == by_the_package(model, size)


class LayerNorm(nn.LayerNorm):
    """A subclass with the same name, as timm has one."""


class Odd(nn.Module):
    """What a tool that goes by classes and function names sees differently."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNorm(8)
        self.plain = nn.LayerNorm(8)
        shared = nn.Linear(8, 8)
        self.outer = nn.Sequential(shared, nn.ReLU())
        self.other = nn.Sequential(shared)
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.other(self.outer(self.plain(self.norm(x)))))
        return F.softmax(torch.matmul(x, self.weight), dim=-1) + x


def test_classes_by_object_and_functions_by_name() -> None:
    rows, width = 4, 8
    elements = rows * width
    linear = rows * width * width + elements
    expected = (
        elements  # torch's own LayerNorm, and not its subclass
        + 2 * 2 * linear  # called twice, and met in both parents
        + 2 * elements  # nn.ReLU as a module and as the function it calls
        + elements  # F.relu
        + rows * width * width  # torch.matmul
        + elements  # F.softmax; `+` is not seen
    )
    assert (
        count(eo.profile(Odd(), (1, rows, width)), "ptflops").total == expected == by_the_package(Odd(), (rows, width))
    )


def test_a_saved_profile_counts_the_same(tmp_path: Any) -> None:
    profile = eo.profile(Odd(), (1, 4, 8))
    profile.save(tmp_path / "odd.json")
    assert count(eo.load(tmp_path / "odd.json"), "ptflops").total == count(profile, "ptflops").total
