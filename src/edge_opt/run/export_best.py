"""Export the model to ship: the file that was measured, a program that runs it, and a model card."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_opt import __version__, units
from edge_opt._support.files import write_whole
from edge_opt.boards.targets import find_spec
from edge_opt.data import Splits
from edge_opt.errors import first_line
from edge_opt.measuring.machine import read_environment
from edge_opt.quantization.onnx_files import with_data
from edge_opt.records.sweeps import SweepResult, TargetFigures, Trial, TrialMetrics
from edge_opt.report.sheets import sheet_markdown
from edge_opt.report.sweep_files import conclusion, per_call, speedup_data, target_text
from edge_opt.run.handover import (
    class_names,
    input_specification,
    preprocessing,
    reproducing_command,
    sample_counts,
    save_tokenizer,
    without_folders,
)
from edge_opt.run.job import INPUTS, PRUNED, PipelineJob, built_file
from edge_opt.run.model_and_data import load_inputs, weights_of
from edge_opt.run.run_summary import plain_metrics
from edge_opt.runtimes.registry import find_runtime
from edge_opt.runtimes.tflm_firmware import write_firmware
from edge_opt.search.store import Store
from edge_opt.search.sweep import candidate_folder
from edge_opt.tasks.batches import LossChoice

CARD = "MODEL_CARD.md"
PROGRAM = "run_best.py"
_SAMPLES = 32

_HEAD = '''\
"""Run the model beside this file. Needs numpy and {package}: pip install numpy {package}

python run_best.py             runs the samples in samples.npz
python run_best.py photo.jpg   runs an image (needs pillow), a .csv file with one sample per row, or a .npy file
"""

import json
import sys
from pathlib import Path

import numpy as np
{imports}

FOLDER = Path(__file__).parent
SPEC = json.loads((FOLDER / "spec.json").read_text()) if (FOLDER / "spec.json").exists() else {{}}
samples = np.load(FOLDER / "samples.npz")


def read_image(path, shape):
    """Return an image as the model was trained on it; without known preprocessing, pixels are between 0 and 1."""
    from PIL import Image

    steps = SPEC.get("preprocessing") or {{}}
    channels, height, width = shape
    image = Image.open(path).convert("L" if channels == 1 else "RGB")
    if "center_crop" in steps:
        short = steps.get("resize", [min(height, width)])[0]
        factor = short / min(image.size)
        image = image.resize([round(side * factor) for side in image.size])
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    else:
        image = image.resize((width, height))
    pixels = np.asarray(image, dtype="float32").reshape(height, width, channels) / 255
    if not steps:
        print("preprocessing unknown: pixels are scaled to 0..1", file=sys.stderr)
    mean, std = (np.asarray(steps.get(name, [default]), "float32") for name, default in (("mean", 0), ("std", 1)))
    return ((pixels - mean) / std).transpose(2, 0, 1)


def read_input(path):
    """Return a batch of one sample or more from a file."""
    example = samples["input_0"]
    if path.suffix == ".npy":
        values = np.load(path)
    elif path.suffix == ".csv":
        values = np.loadtxt(path, delimiter=",", ndmin=2)
    else:
        values = read_image(path, example.shape[1:])
    return values.astype(example.dtype).reshape(-1, *example.shape[1:])


labels = None
if sys.argv[1:2] in (["-h"], ["--help"]):
    sys.exit(__doc__)
if len(sys.argv) > 1:
    try:
        inputs = [read_input(Path(sys.argv[1]))]
    except (ImportError, OSError, ValueError) as error:
        expected = "x".join(map(str, samples["input_0"].shape[1:]))
        sys.exit(f"cannot read {{sys.argv[1]}} as samples of {{expected}}: {{error}}\\n\\n{{__doc__}}")
else:
    count = sum(name.startswith("input_") for name in samples.files)
    inputs, labels = [samples[f"input_{{index}}"] for index in range(count)], samples["labels"]
'''
_TAIL = """
known = samples["labels"]
classes = SPEC.get("classes") or [str(number) for number in range(scores.shape[-1] if scores.ndim else 0)]
if scores.ndim == 2 and scores.shape[1] > 1 and known.ndim == 1 and known.dtype.kind in "iu":
    answers = scores.argmax(axis=1)
    print("answers: ", *(classes[answer] for answer in answers))
    if labels is not None:
        print("labels:  ", *(classes[label] for label in labels))
        print(f"{(answers == labels).sum()} of {len(answers)} right")
else:
    print(f"outputs of shape {scores.shape}; the first:", scores[0])
    if labels is not None:
        print("its label:", labels[0])
"""
_NO_PROGRAM = '''\
"""torch.export could not write this model: {reason}.

`model.pt` holds its weights as they were measured; load them into the model that you have, pruned by the recipe in
`pruned/` (edge_opt.compress.load_pruned) where there is one.
"""

raise SystemExit(__doc__)
'''


def program(runtime: str, precision: str) -> str:
    """Return a program that runs the shipped file with its runtime alone.

    >>> "import onnxruntime" in program("onnxruntime", "int8"), "bf16" in program("openvino", "bf16")
    (True, True)
    """
    part = find_runtime(runtime).program(precision)
    return _HEAD.format(package=part.package, imports=part.imports) + part.body + _TAIL


def export_best(
    result: SweepResult,
    job: PipelineJob,
    store: Store,
    splits: Splits,
    root: Path,
    command: Sequence[str] = (),
    loss: LossChoice | None = None,
) -> list[Path]:
    """Write the winner to `best/`: the measured file, its weights and recipe, samples, a program and a card.

    The folder is written under another name and renamed. Without a winner, `best/` of an earlier run is removed:
    nothing says that it satisfies the constraints of this one.
    """
    folder, draft = root / "best", root / ".best.draft"
    shutil.rmtree(draft, ignore_errors=True)
    if result.best is None:
        shutil.rmtree(folder, ignore_errors=True)
        return []
    candidate = result.trial(result.best).candidate
    built = store.build_of(candidate)
    assert built is not None
    draft.mkdir(parents=True)
    try:
        _fill(draft, result, job, candidate_folder(root, candidate), built.value, splits, command, loss)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sorted(folder.iterdir())


def _fill(
    draft: Path,
    result: SweepResult,
    job: PipelineJob,
    origin: Path,
    built: Mapping[str, Any],
    splits: Splits,
    command: Sequence[str],
    loss: LossChoice | None,
) -> None:
    trial = result.trial(str(result.best))
    candidate = trial.candidate
    measured = built_file(origin, built)
    text = program(candidate.runtime, candidate.precision)
    if find_runtime(candidate.runtime).runs_modules:
        shutil.copyfile(measured, draft / "model.pt")
        lost = _exported(draft / "model.pt2", job, trial, origin)
        text = text if lost is None else _NO_PROGRAM.format(reason=lost)
    else:
        for file in with_data(measured):
            # Weights beside the file keep the name that the file knows them by.
            name = f"model.{find_runtime(candidate.runtime).suffix}" if file == measured else file.name
            shutil.copyfile(file, draft / name)
    for spec in map(find_spec, job.config.targets):
        if spec.microcontroller is not None and (draft / "model.tflite").exists():
            write_firmware(draft / "model.tflite", draft / f"firmware-{spec.name}", core=spec.name, kernels="auto")
    write_whole(draft / "model.safetensors", weights_of(job.model(candidate, origin)))
    recipe = origin / PRUNED
    if recipe.is_dir():
        shutil.copytree(recipe, draft / PRUNED)
    part = splits.test if splits.test is not None else splits.validation
    inputs, labels = job.source.samples(part, job.model(candidate, origin), _SAMPLES)
    write_whole(draft / "samples.npz", _samples(inputs, labels))
    write_whole(draft / PROGRAM, text)
    save_tokenizer(splits, draft)
    is_fixed = find_runtime(candidate.runtime).may_fix_batch
    handed_over = {
        "input": input_specification(inputs, job.config.deploy_batch if is_fixed else "batch"),
        "preprocessing": preprocessing(splits),
        "classes": class_names(splits),
        "samples": sample_counts(splits),
        "command": reproducing_command(command),
        "loss": None if loss is None else str(loss),
    }
    write_whole(draft / "spec.json", json.dumps(_spec(trial, job, result, draft) | handed_over, indent=1))
    write_whole(draft / CARD, model_card(result, splits, job, handed_over))


def _exported(path: Path, job: PipelineJob, trial: Trial, origin: Path) -> str | None:
    """Write the model as a program that torch alone can run; return the reason where that cannot be done."""
    model, inputs = job.eager(trial.candidate, origin).model, load_inputs(origin / INPUTS)
    reason = "it has no module"
    if model is None:
        return reason
    batch = torch.export.Dim.AUTO
    for shapes in (tuple({0: batch} for _ in inputs), None):
        try:
            # An adapter takes its inputs as one row of positional arguments.
            exported = torch.export.export(model, tuple(inputs), dynamic_shapes=shapes and (shapes,))
            torch.export.save(exported, path)
            return None
        except Exception as error:  # whatever the exporter raises, weights and recipe ship all the same
            reason = first_line(error)
    return reason


_FILES = {
    **{f"model.{ending}": "the file that was measured" for ending in ("onnx", "tflite", "pte")},
    "model.pt": "the weights in their precision: the file that was measured",
    "model.pt2": "the same model as a program for torch alone",
    "model.safetensors": "the pruned weights in float32",
    "pruned": "recipe and weights for edge_opt.compress.load_pruned; absent where nothing was pruned or trained on",
    "samples.npz": "inputs and labels to try it with",
    "tokenizer": "the tokenizer of the dataset",
    "firmware": "a project for TensorFlow Lite Micro: C array, operators, size of the arena, example, expected outputs",
    PROGRAM: "runs the model on the samples or on a file, with its runtime alone",
}


def _spec(trial: Trial, job: PipelineJob, result: SweepResult, folder: Path) -> dict[str, Any]:
    source, names = job.source.model, sorted(path.name for path in folder.iterdir())
    effective = None if trial.metrics is None else trial.metrics.effective_precision
    return {
        "candidate": asdict(trial.candidate) | {"label": trial.candidate.label, "key": trial.candidate.key},
        "model": without_folders(source) if isinstance(source, str) else type(source).__name__,
        "runtime": trial.candidate.runtime,
        "precision": trial.candidate.precision,
        "effective_precision": effective,
        "onnx_precision": effective if "model.onnx" in names else None,
        "metrics": None if trial.metrics is None else plain_metrics(trial.metrics),
        "speedup": speedup_data(result.speedup),
        "files": {name: _FILES.get(name.partition("-")[0], "weights of the file beside it") for name in names},
    }


def _samples(inputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> bytes:
    """Return samples to try it with, as an .npz file."""
    names = ["labels", *(f"labels_{index}" for index in range(1, len(labels)))]
    arrays: dict[str, Any] = {f"input_{index}": value.numpy() for index, value in enumerate(inputs)}
    arrays |= dict(zip(names, (value.numpy() for value in labels), strict=False))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def model_card(result: SweepResult, splits: Splits, job: PipelineJob, handed_over: Mapping[str, Any]) -> str:
    """Return what the shipped model is, in Markdown: task, data, figures with their conditions, and the candidates."""
    trial = result.trial(str(result.best))
    metrics, machine = trial.metrics, read_environment()
    assert metrics is not None
    sizes = ", ".join(f"{part} {count}" for part, count in handed_over["samples"].items()) or "number not known:"
    test = "" if metrics.test_accuracy is None else f"; {metrics.test_accuracy:.4f} on the test part"
    threads = job.config.used_threads
    machine_text = f"{metrics.machine or machine.cpu}, {threads} thread{'s' * (threads > 1)}, {trial.candidate.runtime}"
    mark = "; **disturbed** by other programs or noise" if metrics.is_disturbed else ""
    lines = [
        f"# {without_folders(result.name)}: {trial.candidate.title}",
        "",
        f"Made by edge_opt {__version__}. `python {PROGRAM}` runs it on its samples, "
        f"`python {PROGRAM} FILE` on an image, a CSV or a .npy file.",
        "",
        "| | |",
        "|---|---|",
        f"| task | {_task(metrics)} |",
        f"| input | {_inputs_text(handed_over['input'])} |",
        f"| preprocessing | {_preprocessing_text(handed_over['preprocessing'])} |",
        f"| classes | {', '.join(handed_over['classes'] or ['names not provided by the dataset'])} |",
        f"| data | {without_folders(splits.name)} ({sizes} samples) |",
        f"| {metrics.metric} | {metrics.accuracy:.4f} on validation ({metrics.accuracy_low:.4f} to "
        f"{metrics.accuracy_high:.4f}, 95 %){test} |",
        f"| drop vs baseline | {_drop(metrics)} |",
        *([f"| loss of training | {handed_over['loss']} |"] if handed_over.get("loss") else []),
        *_on_target(metrics),
        *(
            []
            if metrics.latency_s is None
            else [f"| latency | {_latency(metrics)}, measured on {machine_text}{mark} |"]
        ),
        f"| file | {units.size(metrics.size_bytes)}, {metrics.effective_precision} on {trial.candidate.runtime} |",
        f"| memory, measured | {_memory(metrics)} |",
        f"| peak memory, estimated | {units.size(metrics.peak_memory_bytes)} for a batch of {metrics.batch_size}: "
        "weights, inputs and activations, from shapes |",
        f"| energy | {_energy(metrics)} |",
        f"| work | {units.count(metrics.macs)} MACs per batch of {metrics.batch_size}, "
        f"{units.count(metrics.params)} parameters |",
        "",
        "## Reproduce",
        "",
        f"    {handed_over['command'] or 'edge_opt.sweep, called from Python'}",
        "",
        "## Candidates",
        "",
        *sheet_markdown(conclusion(result)).splitlines()[2:],
    ]
    return "\n".join(lines) + "\n"


def _inputs_text(inputs: Sequence[Mapping[str, Any]]) -> str:
    texts = []
    for each in inputs:
        shape = units.TIMES.join(map(str, each["shape"]))
        low, high = each["range"] or (None, None)
        between = "" if low is None else f", {low:.4g} to {high:.4g} in the samples"
        texts.append(f"{shape} of {each['type']}{', ' + each['layout'] if each['layout'] else ''}{between}")
    return "; ".join(texts)


def _preprocessing_text(steps: Mapping[str, Any] | None) -> str:
    if steps is None:
        return "not provided by the dataset: inputs as in samples.npz"
    return "; ".join(f"{name} {', '.join(map(str, value))}" for name, value in steps.items())


def _latency(metrics: TrialMetrics) -> str:
    """Return the latency of the deployed batch on this machine, with its interval."""
    here = replace(metrics, target=None)
    low, high = here.ranked_low_s, here.ranked_high_s
    between = "" if low is None or high is None else f" ({units.duration(low)} to {units.duration(high)}, 95 %)"
    return f"{per_call(here)}{between}"


def _on_target(metrics: TrialMetrics) -> list[str]:
    """Return the lines of the target: latency, memory, energy, and how to run the file there."""
    figures = metrics.target
    if figures is None:
        return []
    ram = "not known" if figures.ram_bytes is None else f"{units.size(figures.ram_bytes)}, estimated from shapes"
    energy = "not known" if figures.energy_j is None else f"{units.energy(figures.energy_j)} per call, estimated"
    return [
        f"| latency on {figures.target} | {target_text(metrics)}; rests on {figures.platform} |",
        f"| RAM on {figures.target} | {ram}, without the runtime itself |",
        f"| energy on {figures.target} | {energy} |",
        f"| run it there | {how_to_run(figures)} |",
    ]


_THERE = {
    "ncnn": "convert `model.onnx` with pnnx; for int8 let ncnn2table and ncnn2int8 quantize it with `samples.npz`",
    "xnnpack": "give `model.tflite` to LiteRT; its XNNPACK delegate is on by default",
    "tflite": "give `model.tflite` to LiteRT",
    "tflm": "`firmware-*/` is a project for TensorFlow Lite Micro",
    "st-edge-ai": "`stedgeai generate --model model.onnx` writes the C code",
    "torch-compile": "load `model.pt2` with torch.export and call torch.compile",
}
_ANYWHERE = "load `model.onnx` with ONNX Runtime; on a Jetson, `trtexec --onnx=model.onnx` builds it for TensorRT"


def how_to_run(figures: TargetFigures) -> str:
    """Return how the exported file runs on the target, by the runtime that the latency rests on."""
    parts = figures.platform.split("/")
    return next((text for name, text in _THERE.items() if any(part.startswith(name) for part in parts)), _ANYWHERE)


def _task(metrics: TrialMetrics) -> str:
    if metrics.metric in ("accuracy", "top5", "f1"):
        return "classification: one score per class"
    return f"scored by {metrics.metric}; {metrics.metric_direction} is better"


def _drop(metrics: TrialMetrics) -> str:
    if metrics.accuracy_drop_low is None or metrics.accuracy_drop_high is None:
        return f"{metrics.accuracy_drop:+.4f} lost"
    ends = f"{metrics.accuracy_drop_low:+.4f} to {metrics.accuracy_drop_high:+.4f}"
    return f"{metrics.accuracy_drop:+.4f} lost ({ends}, 95 %, the same samples)"


def _memory(metrics: TrialMetrics) -> str:
    if metrics.measured_memory_bytes is None:
        return "not known here"
    growth = f"growth of the process over the idle runtime, batches of {metrics.batch_size}"
    return f"{units.size(metrics.measured_memory_bytes)}: {growth}"


def _energy(metrics: TrialMetrics) -> str:
    if metrics.energy_j is None:
        return "not known"
    mark = "; **disturbed**" if "latency_ms" in metrics.disturbed_times else ""
    return f"{units.energy(metrics.energy_j)} per batch of {metrics.batch_size} ({metrics.energy_source}){mark}"
