"""Accuracy at the same MACs after the same fine-tuning: our rankings against torch-pruning's, on Fashion-MNIST.

    python benchmarks/pruning_accuracy.py [--nets 3] [--seeds 3] [--all] [--only PART ...]

Three nets, three seeds, two shares of the MACs. Every method starts from the same trained net, loses channels until the
same MACs are left, and is trained on the same batches. Before training it is scored, too.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from timing import save
from torch import nn
from torch.nn import functional as F

from edge_opt.compress import accuracy, finetune, prune
from edge_opt.data import load_splits
from edge_opt.profiling import profile

SHAPE = (1, 1, 28, 28)
SHARES = (0.5, 0.25)
TRAIN, VALIDATION, BATCH, CALIBRATION = 3200, 2500, 64, 8
EPOCHS, TUNING_EPOCHS, RATE, TUNING_RATE = 4, 1, 3e-3, 1e-3


class Bottleneck(nn.Module):
    """An inverted residual of MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return x + out if self.is_residual else out


class Basic(nn.Module):
    """A basic block of ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        is_same = stride == 1 and inputs == outputs
        self.short: nn.Module = (
            nn.Identity()
            if is_same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.short(x))


def _stem(width: int) -> list[nn.Module]:
    return [nn.Conv2d(1, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]


def _head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]


def resnet() -> nn.Module:
    blocks = [Basic(16, 16, 1), Basic(16, 32, 2), Basic(32, 32, 1), Basic(32, 64, 2), Basic(64, 64, 1)]
    return nn.Sequential(*_stem(16), *blocks, *_head(64))


def mobilenet() -> nn.Module:
    widths = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 48, 2), (48, 48, 1)]
    return nn.Sequential(*_stem(16), *(Bottleneck(*width) for width in widths), *_head(48))


def plain() -> nn.Module:
    """VGG-like: nothing is added, so every layer's channels are its own."""
    layers: list[nn.Module] = _stem(32)
    for inputs, outputs, stride in ((32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 96, 2), (96, 96, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, *_head(96))


NETS: dict[str, Callable[[], nn.Module]] = {"mobilenet-like": mobilenet, "resnet-like": resnet, "vgg-like": plain}
Method = Callable[[nn.Module, float, list[Any]], nn.Module]


def ours(**options: Any) -> Method:
    def run(model: nn.Module, share: float, calibration: list[Any]) -> nn.Module:
        return prune(model, SHAPE, macs_target=share, round_to=1, loader=calibration, **options).model

    return run


def theirs(kind: str, is_global: bool = False) -> Method:
    """torch-pruning with one of its importances; its ratio is searched until the MACs are those asked for."""

    def cut(model: nn.Module, ratio: float, calibration: list[Any]) -> nn.Module:
        import torch_pruning

        net = copy.deepcopy(model).eval()
        importance = getattr(torch_pruning.importance, kind)()
        pruner = torch_pruning.pruner.MetaPruner(
            net,
            torch.zeros(SHAPE),
            importance=importance,
            pruning_ratio=ratio,
            global_pruning=is_global,
            ignored_layers=[net[-1]],
        )
        if kind == "GroupTaylorImportance":
            for inputs, labels in calibration:
                F.cross_entropy(net(inputs), labels).backward()
        pruner.step()
        return net

    def run(model: nn.Module, share: float, calibration: list[Any]) -> nn.Module:
        whole = profile(model, SHAPE).totals.macs
        low, high = 0.0, 0.98
        best: tuple[float, nn.Module] | None = None
        for _ in range(9):
            net = cut(model, (low + high) / 2, calibration)
            left = profile(net, SHAPE).totals.macs / whole
            if best is None or abs(left - share) < abs(best[0] - share):
                best = left, net
            low, high = ((low + high) / 2, high) if left > share else (low, (low + high) / 2)
        assert best is not None
        return best[1]

    return run


METHODS: dict[str, Method] = {
    "ours group (default)": ours(),
    "ours reconstruction": ours(importance="reconstruction"),
    "torch-pruning magnitude": theirs("GroupMagnitudeImportance"),
    "torch-pruning magnitude, global": theirs("GroupMagnitudeImportance", is_global=True),
    "torch-pruning bn scale": theirs("BNScaleImportance"),
}
# Beside the comparison: what single steps are worth. Run with --all.
VARIANTS: dict[str, Method] = {
    "ours group, not fitted": ours(importance="group", reconstruct=False),
    "ours reconstruction, not fitted": ours(importance="reconstruction", reconstruct=False),
    "ours taylor": ours(importance="taylor"),
    "ours random": ours(importance="random"),
    "ours group, cut only": ours(importance="group", reestimate=False, reconstruct=False),
    "torch-pruning taylor": theirs("GroupTaylorImportance"),
}


def trained(build: Callable[[], nn.Module], train: Iterable[Any], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return finetune(build(), train, epochs=EPOCHS, learning_rate=RATE, seed=seed, progress=False).model.eval()


def rows_of(name: str, seed: int, methods: dict[str, Method]) -> list[dict[str, Any]]:
    """Every method at every share, from one trained net."""
    splits = load_splits(
        "fashion-mnist", batch_size=BATCH, seed=seed, train_subset=TRAIN, val_subset=VALIDATION,
        calibration_batches=CALIBRATION,
    )  # fmt: skip
    train, validation, calibration = list(splits.train), list(splits.validation), list(splits.calibration)
    model = trained(NETS[name], train, seed)
    macs, base = profile(model, SHAPE).totals.macs, accuracy(model, validation)
    rows = []
    for share in SHARES:
        for method, run in methods.items():
            start = time.process_time()
            pruned = run(model, share, calibration)
            spent = time.process_time() - start
            before = accuracy(pruned, validation)
            tuned = finetune(
                pruned, train, epochs=TUNING_EPOCHS, learning_rate=TUNING_RATE, seed=seed, progress=False
            ).model
            left = profile(pruned, SHAPE).totals.macs / macs
            after = accuracy(tuned, validation)
            rows.append({"net": name, "seed": seed, "share": share, "method": method, "macs_left": left,
                         "baseline": base, "untuned": before, "accuracy": after, "prune_cpu_s": spent})  # fmt: skip
            print(
                f"{name} seed {seed} {share:.0%} {method:32} MACs {left:.3f} {before:.4f} -> {after:.4f} "
                f"({base:.4f}, {spent:.1f} s)",
                flush=True,
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Mean over the seeds, with the mean deviation from it, by net, share and method."""
    cases = list(dict.fromkeys((row["net"], row["share"]) for row in rows))
    lines = ["| | " + " | ".join(f"{net}, {share:.0%} of the MACs" for net, share in cases) + " |"]
    lines.append("|---" * (len(cases) + 1) + "|")
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for net, share in cases:
            mine = [row for row in rows if (row["net"], row["share"], row["method"]) == (net, share, method)]
            scores = [row["accuracy"] for row in mine]
            if not scores:
                continue
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            untuned = statistics.mean(row["untuned"] for row in mine)
            cells.append(f"{statistics.mean(scores):.4f} ± {spread:.4f} ({untuned:.2f})")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", type=int, default=len(NETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="also what single steps are worth")
    parser.add_argument("--only", nargs="*", default=[])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    known = METHODS | VARIANTS if chosen.all or chosen.only else METHODS
    methods = {name: run for name, run in known.items() if not chosen.only or any(p in name for p in chosen.only)}
    rows = [
        row
        for seed in range(chosen.seeds)
        for name in list(NETS)[: chosen.nets]
        for row in rows_of(name, seed, methods)
    ]
    print(table(rows))
    if not chosen.only:
        print(f"saved {save('pruning_accuracy', rows, shares=SHARES, train=TRAIN, epochs=TUNING_EPOCHS).name}")


if __name__ == "__main__":
    main()
