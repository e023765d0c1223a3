"""Profile a transformer: where its work is, and how that moves with the length of the text."""

from __future__ import annotations

import torch
from torch import nn

import edge_opt as eo


class Encoder(nn.Module):
    """Tokens in, one vector each out: four layers of width 256."""

    def __init__(self, words: int = 10_000, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.words(tokens))


def main() -> None:
    model = Encoder().eval()
    print(eo.profile(model, eo.InputSpec((1, 128), dtype="int64")))
    print("\ntokens     MACs  in attention  peak of activations")
    for length in (128, 512, 2048):
        profile = eo.profile(model, eo.InputSpec((1, length), dtype="int64"))
        attention = sum(op.cost.macs for op in profile.operators if op.kind == "attention")
        share, peak = attention / profile.totals.macs, profile.peak_activation_bytes / 2**20
        print(f"{length:6} {profile.totals.macs / 1e9:6.2f} G {share:13.1%} {peak:16.1f} MiB")


if __name__ == "__main__":
    main()
