"""Models for the tests."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

_kept_alive: list[torch.library.Library] = []


def torchvision_models() -> ModuleType:
    """torchvision.models, also where torchvision's compiled operators do not fit this torch.

    Its import only needs the names of two operators; a library that is collected would take them away again.
    """
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept_alive.append(library)
    return import_module("torchvision.models")
