"""Write the layers of nets that boards are timed with, so that naming them needs no torchvision.

    python scripts/write_bundled_nets.py

Every net is torchvision's, for one image of 224 x 224.
"""

from __future__ import annotations

import json

from fit_platforms import declare_operators

import edge_opt
from edge_opt.boards.fused_layers import model_work
from edge_opt.boards.platforms import NETS

NAMES = (
    "alexnet", "efficientnet_b0", "googlenet", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large",
    "mobilenet_v3_small", "regnet_y_400mf", "resnet18", "resnet50", "shufflenet_v2_x1_0", "squeezenet1_1", "vgg16",
)  # fmt: skip


def main() -> None:
    """Trace every net and write all of them to one file."""
    declare_operators()
    from torchvision import models

    found = {}
    for name in NAMES:
        options = {"init_weights": False} if name in ("googlenet", "vgg16") else {}
        options |= {"aux_logits": False} if name == "googlenet" else {}
        traced = model_work(edge_opt.profile(getattr(models, name)(weights=None, **options).eval(), (1, 3, 224, 224)))
        if traced.outside:
            raise SystemExit(f"{name} has operators that no class describes: {traced.outside}")
        found[name] = traced.works
    lines = ",\n".join(f'"{name}": {json.dumps(works, separators=(",", ":"))}' for name, works in found.items())
    NETS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"{len(found)} nets in {NETS}")


if __name__ == "__main__":
    main()
