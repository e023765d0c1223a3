"""edge-opt explain and reconcile: why two models differ in time, here or on a target, and two tools in their counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Option

from edge_opt.cli import arguments as shared
from edge_opt.cli.arguments import argument, is_candidate, is_profile, loaded_call, option, random_batches, read_profile
from edge_opt.cli.shell import print_record, print_status, refuse_unused
from edge_opt.errors import InvalidInput

if TYPE_CHECKING:
    from edge_opt.explanation.explain_models import ModelToRun
    from edge_opt.records.compression import Explanation
    from edge_opt.records.devices import Precision
    from edge_opt.records.sweeps import Candidate

_VARIANT = re.compile(r"(?P<model>.+)@(?P<precision>fp32|fp16|bf16|int8|int4)(?::(?P<runtime>[\w-]+))?")
# Least seconds that each model is measured.
_MIN_TIME_S = 0.5


def explain(
    models: list[str] = argument(
        "A B",
        "Models, conversions of them (net.py:Net@int8, net.py:Net@fp32:openvino), .onnx, .tflite or .pte files, rows "
        "of a sweep (RUN#CANDIDATE), or saved profiles (.json).",
    ),
    inputs: shared.Inputs = None,
    batch: shared.Batch = None,
    target: shared.Target = None,
    threads: int | None = option(None, "N", "Threads here (default: 1), or of the runtime on the target."),
) -> None:
    """Show why B is faster than A or is not: both run here, interleaved, and the kernels responsible are named.

    With --target nothing runs: times there are predicted, and what would help most is named with its gain.

    \b
    edge-opt explain net.py:Net@fp32 net.py:Net@int8 -i 1x3x32x32
    edge-opt explain net.py:Net net.py:Net@int8 -i 1x3x32x32 --target raspberry-pi-4
    edge-opt explain 'runs/mnist#prune 0 fp32 onnxruntime' runs/mnist#best
    """
    if len(models) != 2:
        raise InvalidInput(f"{len(models)} models given; name two: edge-opt explain A B")
    are_saved = all(map(is_profile, models))
    refuse_unused("on saved profiles, which are not run", "inputs", "batch", when=are_saved)
    refuse_unused("on saved profiles, which are not run", "threads", when=are_saved and target is None)
    if target is not None:
        result = explained_on_target(models, inputs, batch, target, threads)
    else:
        result = explained(models, inputs, batch, _MIN_TIME_S, 1 if threads is None else threads)
    print_record(result, "explanation")


def explained(
    models: Sequence[str], inputs: list[str] | None, batch: int | None, min_time: float, threads: int
) -> Explanation:
    """Return why the second model is faster than the first, or is not."""
    import edge_opt as eo
    from edge_opt.explanation.explain_models import explain_models

    if any(map(is_profile, models)):
        if not all(map(is_profile, models)):
            raise InvalidInput("a saved profile is explained with another saved profile; give two .json files")
        return eo.explain(*(read_profile(model, False) for model in models))
    with ExitStack() as stack:
        before, after = (_side(model, inputs, batch, stack) for model in models)
        return explain_models(before, after, min_time_s=min_time, threads=threads)


def explained_on_target(
    models: Sequence[str], inputs: list[str] | None, batch: int | None, target: str, threads: int | None
) -> Explanation:
    """Return why the second model is faster on a target than the first, or is not."""
    import edge_opt as eo
    from edge_opt.explanation.explain import ModelVariant

    sides = []
    for reference in models:
        model, precision, runtime = _parts(reference)
        if is_candidate(reference):
            folder, candidate = _row(reference)
            side = ModelVariant(eo.load(folder / "profile.json"), precision=candidate.precision)
        else:
            side = ModelVariant(read_profile(model, False, inputs, batch), precision=precision)
        sides.append(side.on_target(target, runtime, threads))
    return eo.explain(*sides)


def _parts(reference: str) -> tuple[str, Precision | None, str | None]:
    """Return the model of a reference, and the precision and the runtime of its conversion, if it names one."""
    variant = _VARIANT.fullmatch(reference)
    return (reference, None, None) if variant is None else cast("Any", variant.group("model", "precision", "runtime"))


def _side(reference: str, inputs: list[str] | None, batch: int | None, stack: ExitStack) -> ModelToRun:
    """Return the model that a reference names, with the values that it is called with."""
    from edge_opt.explanation.explain_models import ModelToRun

    model, precision, runtime = _parts(reference)
    if is_candidate(reference):
        model, runtime = _row_file(reference)
    elif precision is not None:
        noise = "; calibrated on noise: its time is real, its accuracy is not" if precision == "int8" else ""
        print_status(f"converting {model} to {precision}{noise}")
    path = Path(model) if Path(model).is_file() else None
    call = stack.enter_context(loaded_call(model, inputs, batch))
    [tensors] = random_batches(call.inputs or [], call.kwargs, 1)
    return ModelToRun(call.model, call.inputs, tensors, call.kwargs, path, precision, runtime)


def _row(reference: str) -> tuple[Path, Candidate]:
    """Return the folder of a row of a sweep, and its candidate."""
    from edge_opt.model_comparison import find_trial
    from edge_opt.report.sweep_files import load_sweep
    from edge_opt.search.sweep import candidate_folder

    run, _, name = reference.rpartition("#")
    candidate = find_trial(load_sweep(run), name).candidate
    root = Path(run)
    return candidate_folder(root if root.is_dir() else root.parent, candidate), candidate


def _row_file(reference: str) -> tuple[str, str]:
    """Return the file of a row of a sweep, and its runtime."""
    from edge_opt.runtimes.registry import find_runtime

    folder, candidate = _row(reference)
    runtime = find_runtime(candidate.runtime)
    files = [] if runtime.runs_modules else sorted(folder.glob(f"*.{runtime.suffix}"))
    if not files:
        why = "torch keeps no file of it" if runtime.runs_modules else f"{folder} has no .{runtime.suffix} file"
        raise InvalidInput(f"the row {candidate.label!r} cannot be run again: {why}; name a row of another runtime")
    return str(files[0]), runtime.name


def reconcile(
    model: shared.ModelArgument,
    tool: Annotated[str, Option("--with", metavar="TOOL", help="fvcore, thop, ptflops, torchinfo, torch or rasp.")],
    inputs: shared.Inputs = None,
    batch: shared.Batch = None,
) -> None:
    """Show by which causes another tool's count differs from ours; the tool itself is not needed.

    \b
    edge-opt reconcile torchvision:resnet50 -i 1x3x224x224 --with thop
    edge-opt reconcile net.py:Net -i 1x3x32x32 --with torchinfo --json
    """
    import edge_opt as eo

    refuse_unused("on a saved profile", "inputs", "batch", when=is_profile(model))
    print_record(eo.reconcile(read_profile(model, False, inputs, batch), tool), "reconciliation")
