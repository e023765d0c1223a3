"""Microseconds at batch 1 of a small ResNet, transformer and LSTM in every runtime and precision that is installed.

One thread, interleaved, medians of one run; `python benchmarks/runtimes.py` prints a Markdown table. What a runtime
refuses is a row with its reason.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch
from torch import nn

from edge_opt import compress
from edge_opt.errors import EdgeOptError, message_of
from edge_opt.records import Converted

PAIRS = [
    ("fp32", "torch", "auto"), ("fp32", "torch-compile", "auto"), ("fp32", "onnxruntime", "auto"),
    ("int8", "onnxruntime", "static"), ("int8", "onnxruntime", "dynamic"), ("int8", "onnxruntime", "weights"),
    ("int4", "onnxruntime", "auto"), ("fp32", "openvino", "auto"), ("int8", "openvino", "static"),
    ("fp32", "litert", "auto"), ("int8", "litert", "static"), ("int8", "litert", "dynamic"),
    ("fp32", "executorch", "auto"), ("int8", "executorch", "static"), ("int8", "executorch", "dynamic"),
]  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norms[1](self.second(torch.relu(self.norms[0](self.first(x))))) + x)


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1, stride=2)
        self.blocks = nn.Sequential(*(Block(32) for _ in range(3)))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))


class SmallTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(28, 64)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0), 2)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x)).mean(1))


class SmallLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(28, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


SUBJECTS = {
    "ResNet": (SmallResNet, (1, 28, 28)),
    "transformer": (SmallTransformer, (28, 28)),
    "LSTM": (SmallLSTM, (28, 28)),
}


def main(names: list[str]) -> None:
    torch.manual_seed(0)
    print("| model | runtime | asked | runs in | µs | KB | differs by |\n|---|---|---|---|---|---|---|")
    for name in names or list(SUBJECTS):
        factory, shape = SUBJECTS[name]
        model, batches = factory().eval(), [torch.randn(32, *shape) for _ in range(2)]
        done: dict[str, Converted] = {}
        for precision, runtime, scheme in PAIRS:
            what = f"{name} | {runtime} | {precision}{'' if scheme == 'auto' else ' ' + scheme}"
            try:
                done[what] = compress.convert(
                    model, (1, *shape), precision, runtime, scheme=scheme, calibration=batches, verify_on=batches
                )
            except EdgeOptError as error:
                print(f"| {what} | – | – | – | {message_of(error)[:110].replace('|', '/')} |", flush=True)
        with ExitStack() as stack:
            runners = {what: stack.enter_context(compress.open_runner(found)) for what, found in done.items()}
            times = compress.measure_runners(runners, torch.randn(1, *shape), min_time_s=0.3)
        for what, found in done.items():
            worst = max(entry.difference or 0.0 for entry in found.agreement.by_batch)
            micros, size = times[what].median_s * 1e6, found.size_bytes / 1000
            print(f"| {what} | {found.effective_precision} | {micros:.0f} | {size:.0f} | {worst:.1%} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
