"""The first profile of a process, when nothing is remembered yet, says the same as the second."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
import edge_opt as eo

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return {expression}

peaks = [eo.profile(nn.Sequential(Block(), Block(), Block()), (1, 4, 8)).peak_activation_bytes for _ in range(2)]
assert peaks[0] == peaks[1], peaks
"""


@pytest.mark.parametrize("expression", ["q * k", "F.scaled_dot_product_attention(q, k, v)", "torch.cdist(q, k) @ v"])
def test_views_of_a_projection_do_not_outlive_their_block(expression: str) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT.format(expression=expression)], check=True)
