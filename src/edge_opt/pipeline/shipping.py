"""The model to ship: its files, and a program of one page that runs them."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.compress import convert
from edge_opt.data import Splits
from edge_opt.files import write_whole
from edge_opt.pipeline.job import PRUNED, PipelineJob
from edge_opt.pipeline.subject import inputs_of, weights_of
from edge_opt.records import Trial

_SAMPLES = 32
_PROGRAM = '''\
"""Run the model beside this file. Needs numpy and onnxruntime: pip install numpy onnxruntime"""

from pathlib import Path

import numpy as np
import onnxruntime

FOLDER = Path(__file__).parent

session = onnxruntime.InferenceSession(str(FOLDER / "model.onnx"), providers=["CPUExecutionProvider"])
names = [entry.name for entry in session.get_inputs()]
samples = np.load(FOLDER / "samples.npz")
scores = session.run(None, {name: samples[f"input_{index}"] for index, name in enumerate(names)})[0]
answers = scores.argmax(axis=1)
print("answers: ", *answers)
print("labels:  ", *samples["labels"])
print(f"{(answers == samples['labels']).sum()} of {len(answers)} right")
'''


def ship(trial: Trial, job: PipelineJob, origin: Path, splits: Splits, folder: Path) -> list[Path]:
    """Put a candidate into a folder: ONNX, float32 weights, the recipe, samples, and a program that runs it.

    Everything is written aside and put in place as a whole.
    """
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        _fill(draft, trial, job, origin, splits)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sorted(folder.iterdir())


def _fill(draft: Path, trial: Trial, job: PipelineJob, origin: Path, splits: Splits) -> None:
    candidate = trial.candidate
    model = job.model(candidate, origin)
    # Eager torch leaves no ONNX file behind, so one is made of the same model in the same precision.
    precision = candidate.precision
    converted = convert(
        model,
        job.subject.example(splits),
        precision,
        "onnxruntime",
        calibration=splits.calibration if precision == "int8" else None,
        calibration_batches=job.calibration_batches,
        reduce_range=job.reduce_range,
        folder=draft / "onnx",
    )
    for file in (draft / "onnx").iterdir():
        # Weights beside the file keep the name that the file knows them by.
        file.rename(draft / ("model.onnx" if file == Path(converted.path) else file.name))
    (draft / "onnx").rmdir()
    write_whole(draft / "model.safetensors", weights_of(model))
    recipe = origin / PRUNED
    if recipe.is_dir():
        shutil.copytree(recipe, draft / PRUNED)
    write_whole(draft / "spec.json", json.dumps(_spec(trial, job, converted.effective_precision), indent=1))
    write_whole(draft / "samples.npz", _samples(splits))
    write_whole(draft / "run_best.py", _PROGRAM)


def _spec(trial: Trial, job: PipelineJob, effective: str) -> dict[str, Any]:
    source = job.subject.model
    return {
        "candidate": asdict(trial.candidate) | {"label": trial.candidate.label, "key": trial.candidate.key},
        "model": source if isinstance(source, str) else type(source).__name__,
        "onnx_precision": effective,
        "metrics": None if trial.metrics is None else asdict(trial.metrics),
        "files": {
            "model.onnx": "the model in its precision, for any ONNX runtime",
            "model.safetensors": "the pruned weights in float32",
            "pruned/": "recipe and weights for edge_opt.compress.load_pruned; absent where nothing was pruned",
            "samples.npz": "inputs and labels to try it with",
        },
    }


def _samples(splits: Splits) -> bytes:
    """Samples that the model was neither trained nor chosen on, where there are such."""
    batch = next(iter(splits.test if splits.test is not None else splits.validation))
    inputs = inputs_of(batch)
    arrays: dict[str, Any] = {f"input_{index}": value[:_SAMPLES].numpy() for index, value in enumerate(inputs)}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, labels=np.asarray(batch[-1][:_SAMPLES]), **arrays)
    return buffer.getvalue()
