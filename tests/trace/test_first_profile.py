"""The first profile of a process, when nothing is remembered yet, says the same as the second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# Nothing is remembered in a process forked from one that has imported everything, and profiled nothing.
SCRIPT = """
import os, sys
import torch
from torch import nn
from torch.nn import functional as F
import edge_opt as eo

class Block(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.qkv, self.mix = nn.Linear(8, 24), mix

    def forward(self, x):
        return self.mix(*self.qkv(x).chunk(3, -1))

profile, mixes = eo.profile, [
    lambda q, k, v: q * k,
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    lambda q, k, v: torch.cdist(q, k) @ v,
]
for number, mix in enumerate(mixes):
    if not os.fork():
        net = nn.Sequential(Block(mix), Block(mix), Block(mix))
        peaks = [profile(net, (1, 4, 8)).peak_activation_bytes for _ in range(2)]
        print(number, peaks[0] == peaks[1], flush=True)
        os._exit(0)
    os.wait()
"""


def test_views_of_a_projection_do_not_outlive_their_block() -> None:
    shown = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout
    assert shown.splitlines() == ["0 True", "1 True", "2 True"]


TABLE = """
import hashlib, json, random, sys
import torch
import edge_opt as eo
from small_models import MODELS
from zoo import torchvision_models

vision = torchvision_models()
seed, large = int(sys.argv[1]), sys.argv[2:]
names = [*MODELS, *large]
random.Random(seed).shuffle(names)
rows = {}
# Twice in the first process, the second time in the opposite order, and once in the second process.
for name in names + (names[::-1] if seed == 1 else []):
    torch.manual_seed(0)
    if name in MODELS:
        model, inputs = MODELS[name]()
    else:
        with torch.device("meta"):
            model = vision.get_model(name, weights=None)
        inputs = ((1, 3, 224, 224),)
    profile = eo.profile(model, list(inputs))
    text = repr((profile.totals, profile.peak, profile.layers, profile.unpriced)).encode()
    is_outside = "outside" in str(profile.unpriced)
    rows.setdefault(name, set()).add(hashlib.sha256(text).hexdigest() + " outside" * is_outside)
print(json.dumps({name: sorted(digests) for name, digests in rows.items()}, sort_keys=True))
"""
LARGE = "densenet121 efficientnet_b0 googlenet mobilenet_v3_small shufflenet_v2_x0_5 swin_t".split()


def test_profiles_of_a_hundred_models_do_not_depend_on_the_process_or_the_order() -> None:
    support = str(Path(__file__).parents[1] / "support")
    outputs = [
        subprocess.run(
            [sys.executable, "-c", TABLE, seed, *LARGE], check=True, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([support, *sys.path]), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    first, second = map(json.loads, outputs)
    assert first == second
    assert len(first) >= 100 and all(len(digests) == 1 for digests in first.values())
    assert "outside" not in outputs[0]
