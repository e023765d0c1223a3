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
        # Beside a CUDA build of torch, torchvision registers its own.
        if torch.version.cuda is None and not hasattr(torch.ops.torchvision, name):
            library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
            _kept_alive.append(library)
    return import_module("torchvision.models")
