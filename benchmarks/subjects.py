"""The models of the benchmarks: a builder, and the keyword arguments of a call, per name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

# The tests' helper declares what a CPU build of torchvision lacks.
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from zoo import torchvision_models

Call = dict[str, Any]


def image(device: str = "cpu") -> Call:
    return {"x": torch.zeros(1, 3, 224, 224, device=device)}


def tokens(device: str = "cpu") -> Call:
    return {"input_ids": torch.zeros(1, 128, dtype=torch.int64, device=device)}


def masked_tokens(device: str = "cpu") -> Call:
    """Tokens with a ready-made mask: to make one the model looks at values, which FlopCounterMode on meta cannot."""
    mask = torch.ones(1, 1, 128, 128, dtype=torch.bool, device=device).tril()
    return {"input_ids": torch.zeros(1, 128, dtype=torch.int64, device=device), "attention_mask": mask}


def sequence(device: str = "cpu") -> Call:
    return {"input": torch.zeros(50, 1, 256, device=device)}


def vision(name: str) -> Callable[[], nn.Module]:
    return lambda: torchvision_models().get_model(name, weights=None).eval()


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()).eval()


def llama_7b() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(use_cache=False)).eval()


def lstm() -> nn.Module:
    return nn.LSTM(256, 512, num_layers=2).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Call]]] = {
    "resnet50": (vision("resnet50"), image),
    "vit_b_16": (vision("vit_b_16"), image),
    "mobilenet_v3_small": (vision("mobilenet_v3_small"), image),
    "swin_t": (vision("swin_t"), image),
    "bert-base": (bert, tokens),
    "llama-7b (meta)": (llama_7b, masked_tokens),
    "lstm": (lstm, sequence),
}
