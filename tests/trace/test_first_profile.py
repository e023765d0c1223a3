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
from zoo import torchvision_models

models = torchvision_models()
seed, names = int(sys.argv[1]), sorted(sys.argv[2:])
random.Random(seed).shuffle(names)
rows = {}
# Twice in the first process, the second time in the opposite order, and once in the second process.
for name in names + (names[::-1] if seed == 1 else []):
    with torch.device("meta"):
        model = models.get_model(name, weights=None)
    size = 299 if name == "inception_v3" else 224
    profile = eo.profile(model, (1, 3, size, size))
    text = repr((profile.totals, profile.peak, profile.layers)).encode()
    rows.setdefault(name, set()).add(hashlib.sha256(text).hexdigest())
print(json.dumps({name: sorted(digests) for name, digests in rows.items()}, sort_keys=True))
"""
NAMES = (
    "alexnet densenet121 efficientnet_b0 googlenet inception_v3 maxvit_t mnasnet0_5 mobilenet_v3_small "
    "resnet18 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t vgg11 vit_b_16"
).split()


def test_profiles_do_not_depend_on_the_process_or_the_order() -> None:
    support = str(Path(__file__).parents[1] / "support")
    outputs = [
        subprocess.run(
            [sys.executable, "-c", TABLE, seed, *NAMES], check=True, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": support, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    first, second = map(json.loads, outputs)
    assert first == second
    assert sorted(first) == sorted(NAMES) and all(len(digests) == 1 for digests in first.values())
