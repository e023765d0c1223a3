"""A text classifier with dict batches, as in Hugging Face: is a sentence about weather, food or travel? Macro F1.

Run it: python examples/text_classifier.py
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import nn

import edge_opt as eo

TEXTS = """
the rain falls, a storm is near, snow covers hills, wind moves clouds, the sun shines, fog hides roads
the soup is hot, bread with butter, she cooks rice, a bowl of noodles, fresh fruit salad, he bakes a cake
the train leaves, a ticket to rome, we board ships, the hotel is full, pack a suitcase, a long flight
"""
# One line per class: weather, food, travel.
SENTENCES = [(text, label) for label, line in enumerate(TEXTS.strip().splitlines()) for text in line.split(", ")]
WORDS = sorted({word for text, _ in SENTENCES for word in text.split()})
LENGTH = 6


def collate(samples: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
    """Sentences and labels to `input_ids`, `attention_mask` and `labels`; 0 is padding."""
    ids = torch.zeros(len(samples), LENGTH, dtype=torch.int64)
    for row, (text, _) in zip(ids, samples, strict=True):
        tokens = [WORDS.index(word) + 1 for word in text.split()][:LENGTH]
        row[: len(tokens)] = torch.tensor(tokens)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([label for _, label in samples]),
    }


def variations(seed: int, count: int) -> list[tuple[str, int]]:
    """Sentences with their words in another order."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for place in torch.randint(len(SENTENCES), (count,), generator=draw).tolist():
        words = SENTENCES[place][0].split()
        mixed = [words[index] for index in torch.randperm(len(words), generator=draw).tolist()]
        found.append((" ".join(mixed), SENTENCES[place][1]))
    return found


def samples() -> dict[str, Any]:
    """Lists of samples: `collate` makes their batches."""
    return {"train": variations(0, 192), "validation": variations(1, 96)}


class Classifier(nn.Module):
    """Word vectors, their mean over the words there are, two layers; it answers a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS) + 1, 32)
        self.hidden = nn.Linear(32, 64)
        self.head = nn.Linear(64, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        there = attention_mask[..., None].float()
        mean = (self.embedding(input_ids) * there).sum(1) / there.sum(1).clamp(min=1)
        return {"logits": self.head(self.hidden(mean).relu())}


def trained() -> nn.Module:
    torch.manual_seed(0)
    batches = [collate(samples()["train"][start : start + 32]) for start in range(0, 192, 32)]
    return eo.compress.finetune(Classifier(), batches, epochs=10, learning_rate=1e-2, metric="f1", progress=False).model


def main(folder: str) -> None:
    result = eo.sweep(
        f"{__file__}:trained",
        f"{__file__}:samples",
        output=folder,
        metric="f1",
        collate=f"{__file__}:collate",
        budgets=["f1_drop <= 0.05"],
        pruning_levels=[0.0, 0.5],
        precisions=["int8"],
        runtimes=["onnxruntime"],
        fine_tune_epochs=2,
        learning_rate=1e-2,
        min_time_s=0.05,
    )
    print(result.recommendation)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
