"""sweep(): variants of a trained model, built, measured and judged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from edge_opt.data.own import splits_of
from edge_opt.errors import InvalidInput
from edge_opt.measure.environment import usable_cores
from edge_opt.pipeline.artifacts import write_sweep
from edge_opt.pipeline.core import Search, sweep_space
from edge_opt.pipeline.job import Bench, PipelineJob, Reference
from edge_opt.pipeline.scores import accuracy_of
from edge_opt.pipeline.settings import digest
from edge_opt.pipeline.subject import Subject, absolute, weights_of
from edge_opt.pipeline.variants import Tuning
from edge_opt.profiling import profile
from edge_opt.records import Importance, Precision, SweepResult
from edge_opt.search.events import Listener
from edge_opt.search.space import SamplerName, Space
from edge_opt.units import MIB


def sweep(
    model: nn.Module | str,
    loaders: Any,
    *,
    folder: str | Path,
    example_inputs: Sequence[int] | None = None,
    pruning: Sequence[float] = (0.0, 0.25, 0.5),
    precisions: Sequence[Precision] = ("fp32", "int8"),
    runtimes: Sequence[str] = ("torch", "onnxruntime"),
    constraints: Sequence[str] = (),
    layer_pruning: Mapping[str, Sequence[float]] | None = None,
    importance: Importance = "l1",
    round_to: int = 8,
    fine_tune_epochs: int = 1,
    learning_rate: float = 1e-3,
    distillation: bool = False,
    calibration_batches: int = 8,
    threads: int | None = 1,
    build_threads: int | None = 1,
    min_time_s: float = 0.4,
    power_watts: float = 2.0,
    sampler: SamplerName = "grid",
    trials: int | None = None,
    seed: int = 0,
    use_ci: bool = False,
    memory_limit_mb: float | None = None,
    time_limit_s: float | None = None,
    workers: int = 0,
    scheduler: str | None = None,
    fresh: bool = False,
    on_event: Listener = lambda _: None,
) -> SweepResult:
    """Every variant of a trained model, measured and judged by constraints; tables and plots go to `folder`.

    `loaders` is a mapping with `train` and `validation`, and if you like `calibration` and `test`, of loaders of
    (inputs, labels); or a reference to a function that returns one, `file.py:loaders`. `example_inputs` is the shape of
    one batch to time; the first validation batch unless given. Candidates are built in processes of their own: the
    model and the loaders must be picklable, with classes that can be imported; else name them, `file.py:factory`.
    Run again with the same folder, it goes on.
    """
    root = Path(folder)
    data = (
        {"dataset": absolute(loaders), "seed": seed, "calibration_batches": calibration_batches}
        if isinstance(loaders, str)
        else splits_of(loaders, "loaders", calibration_batches)
    )
    batch_size = None if example_inputs is None else int(example_inputs[0])
    subject = Subject(absolute(model) if isinstance(model, str) else _sendable(model), data, batch_size=batch_size)
    splits, original = subject.splits(), subject.build()
    example = subject.example(splits)
    if example_inputs is not None and tuple(example[0].shape) != tuple(example_inputs):
        raise InvalidInput(
            f"example_inputs is {tuple(example_inputs)}, and samples of the data make it {tuple(example[0].shape)}"
        )
    profiled, weights = profile(original, example), weights_of(original)
    tuned = Tuning(importance, round_to, fine_tune_epochs, learning_rate, distillation, "cpu", seed)
    bench = Bench(threads, min_time_s, power_watts)
    settings = {
        "model": model if isinstance(model, str) else profiled.name,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "data_sha256": dict(splits.fingerprints()),
        "tuning": asdict(tuned),
        "bench": asdict(bench),
        "batch_size": len(example[0]),
        "calibration_batches": calibration_batches,
    }
    job = PipelineJob(
        # A factory may draw its weights anew each time: all processes get those of the first.
        replace(subject, weights=weights) if isinstance(model, str) else subject,
        Reference(accuracy_of(original, splits.validation), profiled.totals.macs, profiled.totals.params),
        (root / "pruned" / digest(settings)).resolve(),
        tuned,
        bench,
        calibration_batches,
        build_threads=build_threads or usable_cores(),
    )
    result = sweep_space(
        job,
        Space(list(pruning), list(precisions), sorted(runtimes, key=lambda name: name != "torch"), layer_pruning or {}),
        splits,
        folder=root,
        constraints=constraints,
        settings=settings,
        search=Search(
            sampler=sampler,
            trials=trials,
            seed=seed,
            use_ci=use_ci,
            memory_limit_bytes=None if memory_limit_mb is None else int(memory_limit_mb * MIB),
            time_limit_s=time_limit_s,
            workers=workers,
            scheduler=scheduler,
            fresh=fresh,
        ),
        name=profiled.name,
        on_event=on_event,
    )
    write_sweep(result, root)
    return result


def _sendable(model: nn.Module) -> nn.Module:
    """Refuse a model that other processes cannot rebuild."""
    for path, module in model.named_modules():
        kind = type(module)
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            where = f"module {path!r}" if path else "the model"
            raise InvalidInput(
                f"{where} is a {kind.__qualname__}, which other processes cannot import; put the class into a file "
                "and pass 'file.py:factory'"
            )
    return model
