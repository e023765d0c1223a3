"""Accuracy, microseconds at batch 1 and kilobytes of small trained nets, in every runtime, precision and scheme.

    python benchmarks/runtimes.py [NET ...] [--without PART ...]

Nets are trained briefly on Fashion-MNIST; the weights are kept for the next run. One thread; everything of a net is
interleaved in one process with a pinned allocator, and the least CPU time of the blocks counts. Accuracy is of 5000
images that no training and no calibration saw, and its change is paired, with Newcombe's interval; that of our int8 in
ONNX Runtime also against NNCF's. Beside ours stand what others make with the same calibration batches: ONNX Runtime's
own quantisers with their defaults, LiteRT's tools for a batch of one, and NNCF's, where it is installed (`pip install
--no-deps nncf`, in an environment of its own). What a runtime refuses is a row with its reason. Prints Markdown and
writes results/runtimes.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compress_speed import images
from pruning_accuracy import mobilenet, plain, resnet
from timing import save
from torch import nn

from edge_opt import compress
from edge_opt.errors import EdgeOptError, message_of
from edge_opt.tasks.paired_scores import paired_shares

OURS = [
    ("fp32", "torch", "auto"), ("fp32", "torch-compile", "auto"), ("fp32", "onnxruntime", "auto"),
    ("int8", "onnxruntime", "static"), ("int8", "onnxruntime", "dynamic"), ("int8", "onnxruntime", "weights"),
    ("int4", "onnxruntime", "auto"), ("fp32", "openvino", "auto"), ("int8", "openvino", "static"),
    ("fp32", "litert", "auto"), ("int8", "litert", "static"), ("int8", "litert", "dynamic"),
    ("fp32", "executorch", "auto"), ("int8", "executorch", "static"), ("int8", "executorch", "dynamic"),
]  # fmt: skip
BASE = "fp32 torch"
TRAINED_ON, SCORED_ON, EPOCHS, RATE = 20_000, 5_000, 3, 2e-3
KEPT = Path(tempfile.gettempdir()) / "edge-opt-runtimes"


class Rows(nn.Module):
    """An image as a sequence of its rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(1)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.embed = Rows(), nn.Linear(28, 64)
        self.place = nn.Parameter(torch.randn(28, 64) * 0.1)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0), 2)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.embed(self.rows(x)) + self.place).mean(1))
        return out


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rows, self.head = Rows(), nn.Linear(128, 10)
        self.rnn: Any = kind(28, 128, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rnn(self.rows(x))[0][:, -1])
        return out


NETS: dict[str, Callable[[], nn.Module]] = {
    "ResNet": resnet,
    "MobileNetV2-like": mobilenet,
    "VGG-like": plain,
    "transformer": Transformer,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
}


@dataclass(frozen=True, slots=True)
class Data:
    """Images and answers to train on and to score on, and batches to calibrate with."""

    train: tuple[torch.Tensor, torch.Tensor]
    score: tuple[torch.Tensor, torch.Tensor]
    calibration: list[torch.Tensor]


def data() -> Data:
    x, y = images("train")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    first, second, third = order[:TRAINED_ON], order[TRAINED_ON : TRAINED_ON + 256], order[-SCORED_ON:]
    return Data((x[first], y[first]), (x[third], y[third]), list(x[second].split(32)))


def trained(name: str, found: Data) -> nn.Module:
    """The net, trained once and kept."""
    torch.manual_seed(0)
    model, path = NETS[name](), KEPT / f"{name}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    x, y = found.train
    batches = list(zip(x.split(64), y.split(64), strict=True))
    model = compress.finetune(model, batches, epochs=EPOCHS, learning_rate=RATE, progress=False).model.eval()
    KEPT.mkdir(exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


@dataclass(frozen=True, slots=True)
class Made:
    """A file or module that runs, with its size and what its layers run in."""

    runner: compress.Runner
    size_bytes: int
    runs_in: str


# A float .onnx file, where to write, the data, and the model.
Peer = Callable[[Path, Path, Data, nn.Module], Made]


def ours(model: nn.Module, found: Data, precision: str, runtime: str, scheme: str) -> Made:
    options: dict[str, Any] = {"scheme": scheme, "calibration": found.calibration} if precision != "fp32" else {}
    done = compress.convert(model, (1, 1, 28, 28), precision, runtime, **options)
    return Made(compress.open_runner(done, threads=1), done.size_bytes, done.effective_precision)


def _theirs(path: Path, runtime: str = "onnxruntime") -> Made:
    return Made(compress.open_runner(path, runtime, threads=1), path.stat().st_size, "not asked")


def onnxruntime_dynamic(source: Path, target: Path, found: Data, model: nn.Module) -> Made:
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = target.with_name(f"prepared-{target.name}")
    quant_pre_process(str(source), str(prepared))
    quantize_dynamic(prepared, target)
    return _theirs(target)


def onnxruntime_static(source: Path, target: Path, found: Data, model: nn.Module) -> Made:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter([{_input(source): batch.numpy()} for batch in found.calibration])

        def get_next(self) -> Any:
            return next(self.left, None)

    quantize_static(source, target, Reader())
    return _theirs(target)


def litert(recipe: str) -> Peer:
    """LiteRT's converter and quantiser as their pages call them: one sample, a recipe by name, "" for float."""

    def make(source: Path, target: Path, found: Data, model: nn.Module) -> Made:
        import litert_torch
        from ai_edge_quantizer import quantizer
        from ai_edge_quantizer import recipe as recipes

        plain, made = target.with_suffix(".float.tflite"), target.with_suffix(".tflite")
        litert_torch.convert(model, (found.score[0][:1],)).export(str(plain))
        if not recipe:
            return _theirs(plain, "litert")
        tool = quantizer.Quantizer(str(plain))
        tool.load_quantization_recipe(getattr(recipes, recipe)())
        samples = [{"args_0": one.numpy()} for batch in found.calibration for one in batch.split(1)]
        ranges = tool.calibrate({"serving_default": samples}) if recipe.startswith("static") else None
        tool.quantize(ranges).export_model(str(made), overwrite=True)
        return _theirs(made, "litert")

    return make


def nncf_static(source: Path, target: Path, found: Data, model: nn.Module) -> Made:
    import onnx

    try:
        import nncf
    except ImportError as error:
        raise ImportError("not installed: pip install --no-deps nncf, in an environment of its own") from error

    name = _input(source)
    batches = nncf.Dataset([batch.numpy() for batch in found.calibration], lambda batch: {name: batch})
    kind = nncf.ModelType.TRANSFORMER if "transformer" in target.stem else None
    onnx.save(nncf.quantize(onnx.load(str(source)), batches, model_type=kind, subset_size=8), str(target))
    return _theirs(target)


NNCF = "NNCF's static int8, in onnxruntime"
PEERS: dict[str, Peer] = {
    "ONNX Runtime's own dynamic int8": onnxruntime_dynamic,
    "ONNX Runtime's own static int8": onnxruntime_static,
    NNCF: nncf_static,
    "LiteRT's own fp32": litert(""),
    "LiteRT's own static int8": litert("static_wi8_ai8"),
    "LiteRT's own dynamic int8": litert("dynamic_wi8_afp32"),
}


def _input(path: Path) -> str:
    import onnx

    return str(onnx.load(str(path), load_external_data=False).graph.input[0].name)


def rows_of(name: str, found: Data, without: Sequence[str]) -> list[dict[str, Any]]:
    """Build, score and time (interleaved) all variants of one model, except those named by a part of their row."""
    model = trained(name, found)
    rows: list[dict[str, Any]] = []
    made: dict[str, Made] = {}

    def attempt(what: str, make: Callable[[], Made]) -> None:
        if any(part in what for part in without):
            return
        try:
            made[what] = make()
            made[what].runner(found.score[0][:1])
        except (EdgeOptError, ImportError) as error:
            made.pop(what, None)
            rows.append({"net": name, "what": what, "refused": message_of(error)})
        except Exception as error:  # a peer's own
            made.pop(what, None)
            rows.append({"net": name, "what": what, "refused": f"{type(error).__name__}: {message_of(error)}"})

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for precision, runtime, scheme in OURS:
            what = f"{precision} {runtime}{'' if scheme == 'auto' else ' ' + scheme}"
            attempt(what, lambda a=precision, b=runtime, c=scheme: ours(model, found, a, b, c))  # type: ignore[misc]
        source = Path(compress.export_onnx(model, (1, 1, 28, 28), folder / "float.onnx").path)
        for number, (what, make) in enumerate(PEERS.items()):
            attempt(what, lambda f=make, n=number: f(source, folder / f"{name}-{n}.onnx", found, model))  # type: ignore[misc]
        for each in made.values():
            stack.enter_context(each.runner)
        times = compress.measure_runners({w: m.runner for w, m in made.items()}, found.score[0][:1], min_time_s=0.5)
        right = {what: is_right(each.runner, found) for what, each in made.items()}
    for what, each in made.items():
        change = paired_shares(right[what], right[BASE])
        against: dict[str, Any] = {}
        if NNCF in right and what.startswith("int8 onnxruntime"):
            ahead = paired_shares(right[what], right[NNCF])
            against["ahead_of_nncf"] = [100 * value for value in (ahead.value, ahead.low, ahead.high)]
        rows.append(
            {
                "net": name, "what": what, "runs_in": each.runs_in, "us": min(times[what].cpu_samples_s) * 1e6,
                "kb": each.size_bytes / 1000, "accuracy": float(right[what].mean()), "points": change.value * 100,
                "points_low": change.low * 100, "points_high": change.high * 100, **against,
            }
        )  # fmt: skip
    order = [f"{p} {r}{'' if s == 'auto' else ' ' + s}" for p, r, s in OURS] + list(PEERS)
    return sorted(rows, key=lambda row: order.index(row["what"]))


def is_right(runner: compress.Runner, found: Data) -> np.ndarray:
    """Which images are answered rightly; in single samples where a file takes no more."""
    x, y = found.score
    try:
        scores = torch.cat([runner(part)[0] for part in x.split(100)])
    except EdgeOptError:
        scores = torch.cat([runner(part)[0] for part in x.split(1)])
    return np.asarray(scores.argmax(1) == y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*")
    parser.add_argument("--without", nargs="*", default=[], help="rows to leave out, by a part of their name")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found, rows = data(), []
    print("| net | made by | runs in | µs | KB | accuracy | change, points (95 %) |\n|---|---|---|---|---|---|---|")
    for name in asked.nets or list(NETS):
        for row in rows_of(name, found, asked.without):
            rows.append(row)
            start = f"| {name} | {row['what']} |"
            if "refused" in row:
                print(f"{start} – | | | | {row['refused'][:110].replace('|', '/')} |", flush=True)
                continue
            change = f"{row['points']:+.2f} ({row['points_low']:+.2f} to {row['points_high']:+.2f})"
            if "ahead_of_nncf" in row:
                change += "; of NNCF's {:+.2f} ({:+.2f} to {:+.2f})".format(*row["ahead_of_nncf"])
            print(
                f"{start} {row['runs_in']} | {row['us']:.0f} | {row['kb']:.0f} | {row['accuracy']:.4f} | {change} |",
                flush=True,
            )
    if not asked.nets and not asked.without:
        print(f"saved {save('runtimes', rows, trained_on=TRAINED_ON, epochs=EPOCHS, scored_on=SCORED_ON).name}")


if __name__ == "__main__":
    main()
