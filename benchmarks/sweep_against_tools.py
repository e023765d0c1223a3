"""What a default sweep ships, against what other tools make of the same network: accuracy, time and CPU seconds.

    python benchmarks/sweep_against_tools.py [NET ...] [--tools PART ...] [--seed 0]

Networks are those of `sweep_networks.py`, on Fashion-MNIST; `densenet` and `kws` were kept back while the search was
developed. Each
tool runs in a process of its own, with its defaults and one thread, and writes a file; its CPU seconds are those of the
whole process tree. Then all files are timed in one process, interleaved, batch 1, one thread, least CPU time, and
scored on the 10 000 test images, which no tool saw. A tool that is missing or fails is a row with its reason.

Tools, beside edge-opt[all]: pip install --no-deps nncf olive-ai torchmetrics lightning-utilities, in a folder of their
own that PYTHONPATH names (`--target`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sweep_networks import NETS, RATE, SHAPE, loaders, trained
from timing import save

from edge_opt import compress
from edge_opt.errors import first_line
from edge_opt.measuring.latency import TimedCall, interleaved

HERE = Path(__file__).parent
LIMIT_S = 3600
# What installs a package that a tool is missing.
INSTALL = {"litert_torch": "litert-torch", "ai_edge_quantizer": "ai-edge-quantizer", "torch_pruning": "torch-pruning",
           "olive": "olive-ai"}  # fmt: skip
Call = Callable[[np.ndarray], np.ndarray]


def calibration() -> list[np.ndarray]:
    return [inputs.numpy() for inputs, _ in loaders()["calibration"]]


def onnx_file(model: torch.nn.Module, path: Path) -> Path:
    torch.onnx.export(
        model, (torch.zeros(SHAPE),), str(path), dynamo=True, input_names=["input"], verbose=False,
        dynamic_shapes=({0: torch.export.Dim.AUTO},),
    )  # fmt: skip
    return path


def onnxruntime_fp32(net: str, folder: Path) -> Path:
    return onnx_file(trained(net), folder / "model.onnx")


def onnxruntime_int8(net: str, folder: Path) -> Path:
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(quantization.CalibrationDataReader):
        batches = iter([{"input": batch} for batch in calibration()])

        def get_next(self) -> Any:
            return next(self.batches, None)

    source, prepared, path = onnx_file(trained(net), folder / "fp32.onnx"), folder / "ready.onnx", folder / "model.onnx"
    quant_pre_process(str(source), str(prepared))
    quantization.quantize_static(str(prepared), str(path), Reader())
    return path


def litert_fp32(net: str, folder: Path) -> Path:
    import litert_torch

    litert_torch.convert(trained(net), (torch.zeros(SHAPE),)).export(str(folder / "model.tflite"))
    return folder / "model.tflite"


def litert_int8(net: str, folder: Path) -> Path:
    from ai_edge_quantizer import quantizer, recipe

    source = litert_fp32(net, folder).rename(folder / "fp32.tflite")
    made = quantizer.Quantizer(str(source))
    made.load_quantization_recipe(recipe.static_wi8_ai8())
    feeds = [{"args_0": sample[None]} for batch in calibration() for sample in batch]
    made.quantize(made.calibrate({"serving_default": feeds})).export_model(str(folder / "model.tflite"))
    return folder / "model.tflite"


def nncf_int8(net: str, folder: Path) -> Path:
    import nncf
    import openvino

    model = openvino.convert_model(onnx_file(trained(net), folder / "fp32.onnx"))
    made = nncf.quantize(model, nncf.Dataset(calibration()))
    openvino.save_model(made, folder / "model.xml", compress_to_fp16=False)
    return folder / "model.xml"


def olive_int8(net: str, folder: Path) -> Path:
    from olive.data.registry import Registry
    from olive.workflows import run

    class Data(torch.utils.data.Dataset[Any]):
        batches = calibration()

        def __len__(self) -> int:
            return len(self.batches)

        def __getitem__(self, index: int) -> Any:
            return {"input": self.batches[index]}, 0

    Registry.register_dataset("fashion")(lambda **_: Data())
    source = onnx_file(trained(net), folder / "fp32.onnx")
    run({
        "input_model": {"type": "OnnxModel", "model_path": str(source)},
        "data_configs": [{"name": "data", "load_dataset_config": {"type": "fashion"},
                          "dataloader_config": {"batch_size": None}}],
        "passes": {"int8": {"type": "OnnxStaticQuantization", "data_config": "data"}},
        "output_dir": str(folder / "olive"), "cache_dir": str(folder / "cache"),
    })  # fmt: skip
    return next((folder / "olive").rglob("*.onnx"))


def torch_pruning(net: str, folder: Path, epochs: int = 2, ratio: float = 0.5, round_to: int | None = None) -> Path:
    """torch-pruning by its magnitude importance, in ONNX Runtime."""
    import torch_pruning as library

    model = trained(net)
    pruner = library.pruner.MagnitudePruner(
        model, torch.zeros(SHAPE), library.importance.MagnitudeImportance(), pruning_ratio=ratio,
        ignored_layers=[model[-1]], round_to=round_to,
    )  # fmt: skip
    pruner.step()
    return onnx_file(fine_tuned(model, epochs), folder / "model.onnx")


def fine_tuned(model: torch.nn.Module, epochs: int) -> torch.nn.Module:
    """Train as users of torch-pruning do: it brings no training of its own."""
    train = loaders()["train"]
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train))
    model.train()
    for _ in range(epochs):
        for inputs, labels in train:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def torch_pruning_like_ours(net: str, folder: Path) -> Path:
    """The ratio and the epochs of the variant that the sweep ships, which ran before."""
    spec = json.loads((folder.parent / "edge-opt sweep" / "sweep" / "best" / "spec.json").read_text())
    ratio, remarks = spec["candidate"]["pruning"], " ".join(spec["metrics"]["remarks"])
    epochs = int(remarks.partition("trained for ")[2].partition(" ")[0] or 0)
    if not ratio:
        raise ValueError("the sweep ships an unpruned network")
    return torch_pruning(net, folder, epochs, ratio, 8)


def edge_opt_sweep(net: str, folder: Path) -> Path:
    here = f"{HERE / 'sweep_networks.py'}"
    command = [sys.executable, "-m", "edge_opt.cli", "sweep", f"{here}:trained(net={net!r})", "--data",
               f"{here}:loaders", "-o", str(folder / "sweep")]  # fmt: skip
    subprocess.run(command, check=True)
    return next(path for path in (folder / "sweep" / "best").iterdir() if path.suffix in (".onnx", ".tflite", ".pte"))


TOOLS: dict[str, Callable[[str, Path], Path]] = {
    "edge-opt sweep": edge_opt_sweep,
    "ONNX Runtime fp32": onnxruntime_fp32,
    "ONNX Runtime static int8": onnxruntime_int8,
    "LiteRT fp32": litert_fp32,
    "LiteRT static int8": litert_int8,
    "NNCF int8 in OpenVINO": nncf_int8,
    "Olive static int8": olive_int8,
    "torch-pruning 50 %, 2 epochs": torch_pruning,
    "torch-pruning, our ratio and epochs": torch_pruning_like_ours,
}


def opened(path: Path) -> Call:
    """Open a file in its runtime, with one thread: a function of a batch."""
    if path.suffix == ".xml":
        import openvino

        compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1})
        request = compiled.create_infer_request()
        return lambda batch: np.array(next(iter(request.infer([batch]).values())))
    runner = compress.open_runner(path, threads=1)
    return lambda batch: runner(torch.from_numpy(batch))[0].numpy()


def timed_call(path: Path, sample: np.ndarray) -> TimedCall:
    if path.suffix == ".xml":
        call = opened(path)
        return TimedCall(lambda: call(sample))
    return TimedCall(compress.open_runner(path, threads=1).bind(torch.from_numpy(sample)))


def made_by(tool: str, net: str, folder: Path) -> dict[str, Any]:
    """Run a tool in a process of its own; return its file or its reason, and the CPU seconds of its process tree."""
    folder.mkdir(parents=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-W", "ignore", __file__, net, "--make", tool, "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=LIMIT_S, check=False).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    outcome = folder / "outcome.json"
    facts = json.loads(outcome.read_text()) if outcome.is_file() else {"reason": f"ended with exit code {code}"}
    print(f"{net}, {tool}: {seconds:.1f} CPU s", file=sys.stderr, flush=True)
    return {"net": net, "tool": tool, "cpu_s": round(seconds, 1), **facts}


def make(tool: str, net: str, folder: Path) -> None:
    """Run one tool here; write its file's path, or why there is none."""
    torch.set_num_threads(1)
    try:
        facts = {"path": str(TOOLS[tool](net, folder))}
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        facts = {"reason": f"{package} is not installed: pip install --no-deps {INSTALL.get(package, package)}"}
    except Exception as error:  # whatever a tool raises is its row
        facts = {"reason": f"{type(error).__name__}: {first_line(error)}"}
    (folder / "outcome.json").write_text(json.dumps(facts))


def judge(rows: list[dict[str, Any]], seed: int) -> None:
    """Time all files interleaved, and score them on test images; a file that cannot be run gets the reason."""
    test = [(inputs.numpy(), labels.numpy()) for inputs, labels in loaders(seed)["test"]]
    calls: dict[str, TimedCall] = {}
    for row in (row for row in rows if "path" in row):
        try:
            call = opened(Path(row["path"]))
            right = [(call(batch).argmax(1) == labels).sum() for batch, labels in test]
            row["accuracy"] = float(sum(right)) / sum(len(labels) for _, labels in test)
            calls[row["tool"]] = timed_call(Path(row["path"]), test[0][0][:1])
        except Exception as error:
            row["reason"] = f"its file does not run: {first_line(error)}"
    latencies = interleaved(calls, batch_size=1, min_time_s=0.5, max_time_s=1.0)
    for row in rows:
        if row["tool"] in latencies:
            row["us"] = round(1e6 * min(latencies[row["tool"]].cpu_samples_s), 1)
        row.pop("path", None)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| network | tool | test accuracy | µs | CPU s |", "|---|---|---|---|---|"]
    for row in rows:
        figures = f"{row['accuracy']:.4f} | {row['us']:.1f}" if "us" in row else f"{row.get('reason', 'no file')} | "
        lines.append(f"| {row['net']} | {row['tool']} | {figures} | {row['cpu_s']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(NETS))
    parser.add_argument("--tools", nargs="*", default=[""], help="parts of their names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.make:
        make(chosen.make, chosen.nets[0], chosen.folder)
        return
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for net in chosen.nets:
        trained(net, chosen.seed)
        with tempfile.TemporaryDirectory() as folder:
            tools = [tool for tool in TOOLS if any(part in tool for part in chosen.tools)]
            own = [made_by(tool, net, Path(folder) / tool) for tool in tools]
            judge(own, chosen.seed)
        rows += own
        print(table(own), flush=True)
    save("sweep_against_tools", rows, data="Fashion-MNIST, 20 000 training and 10 000 test images", seed=chosen.seed)


if __name__ == "__main__":
    main()
