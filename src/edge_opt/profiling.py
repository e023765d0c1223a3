"""profile(): the whole chain from a model to a ModelProfile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn

from edge_opt._support.checks import check_one_of
from edge_opt.cost.rules import clear_prices, price
from edge_opt.cost.totals import layer_costs, peak_activations, total_costs, unpriced_operators
from edge_opt.errors import InvalidInput
from edge_opt.loading import Loaded, ModelLike, resolve_call
from edge_opt.records.devices import Precision
from edge_opt.records.predictions import Prediction
from edge_opt.records.profiles import ModelProfile
from edge_opt.trace import clear_memo, trace, trace_in_separate_process

if TYPE_CHECKING:
    from edge_opt.boards.targets import ResolvedTarget, Target


def profile(
    model: ModelLike | ModelProfile,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    mode: Literal["eval", "train"] = "eval",
    convention: str = "edge_opt",
    name: str | None = None,
    measure: bool | Mapping[str, Any] = False,
    target: Target | Sequence[Target] | None = None,
    precision: Precision | None = None,
    runtime: str | None = None,
    threads: int | None = None,
    trust: bool = False,
    isolate: bool = False,
) -> ModelProfile:
    """Return what a model costs on these inputs: per operator, per layer and as a whole, without running it.

    Args:
        model: A module (it is not modified), an exported program, a reference such as "torchvision:resnet50",
            "timm:NAME", "hf:ORG/NAME" or "net.py:Net", or the path of an .onnx, .tflite, .pt2 or saved .json file.
        inputs: A shape, a tensor, a list with one entry per argument, or a mapping of arguments by name. A file and
            an exported program have their own.
        kwargs: More arguments by name; a tensor is a tensor, an `InputSpec` or a (shape, dtype) pair.
        mode: "eval" for inference, or "train" for the forward of training.
        convention: "edge_opt", or fvcore, thop, ptflops, torchinfo, torch or rasp: MACs and FLOPs are what that
            tool would print.
        name: Name of the model in tables; default: its class.
        measure: Also run the model: True, or the options of `edge_opt.measure`. The result is in `measurement`.
        target: A device of the catalog, its file or `DeviceSpec`, a platform or its file, "host", a calibration or
            its file, or a list of these. The predicted times are in `predictions`.
        precision: Type of the numbers on the target; default: int8 for a file that computes in int8, else fp32.
        runtime: Runtime on the target, such as "ncnn"; default: the one with the most accurate data.
        threads: Threads of the runtime on the target; default: those of its best-known platform. For threads to
            measure with here, see `measure`.
        trust: Whether a .pt2 file may be opened, which can execute code from it.
        isolate: Whether to trace in a separate process, so that a crash of forward raises `TraceFailed` instead of
            ending this process. For tensors on the CPU or on meta.

    >>> from torch import nn
    >>> profile(nn.Linear(16, 8), (4, 16)).totals.macs == 4 * 16 * 8
    True
    """
    check_one_of("mode", mode, ("eval", "train"))
    if convention != "edge_opt":
        from edge_opt.cost.conventions import find_convention

        find_convention(convention, "edge_opt")  # an unknown name is refused before any work is done
    saved = saved_profile(model)
    source = _source(model if saved is None else saved, target)
    own: Precision = getattr(source, "computes_in", "fp32")
    precision = precision or own
    targets = _targets(target, precision, runtime, threads, source)
    if saved is None:
        module, inputs, kwargs, own_name = resolve_call(model, inputs, kwargs, trust)
        profiled = _static_profile(module, inputs, kwargs, mode, name or own_name, isolate)
    elif inputs is not None or kwargs or mode != "eval" or measure is not False:
        raise InvalidInput("a saved profile is not profiled again; drop inputs, kwargs, mode and measure")
    else:
        profiled = saved if name is None else replace(saved, name=name)
    if targets:
        predicted = _predictions(profiled, targets, precision, threads, runtime, module if saved is None else None)
        profiled = replace(profiled, predictions=predicted)
    if measure is not False:
        from edge_opt.measuring.session import measure as measured_now

        options = {} if measure is True else dict(measure)
        measurement = measured_now(module, inputs, kwargs=kwargs, mode=mode, profile=profiled, **options)
        profiled = replace(profiled, measurement=measurement)
    if convention == profiled.convention:
        return profiled
    from edge_opt.cost.conventions import under_convention

    return under_convention(profiled, convention)


def _predictions(
    profiled: ModelProfile,
    targets: Sequence[ResolvedTarget],
    precision: Precision,
    threads: int | None,
    runtime: str | None,
    module: Any,
) -> tuple[Prediction, ...]:
    """Return what the model takes on each target; `module` is None for a saved profile."""
    from edge_opt.boards.estimate import predictions
    from edge_opt.model_files.file_model import FileModel

    file = module.file if isinstance(module, FileModel) else None
    predicted = predictions(profiled, targets, precision, threads, file)
    if module is None or not any(target.spec.microcontroller for target in targets):
        return predicted
    from edge_opt.boards.mcu_memory import with_mcu_memory

    return with_mcu_memory(predicted, targets, profiled, module, runtime)


def _source(model: object, target: Target | Sequence[Target] | None) -> object:
    """Return what the precision and runtime on a target follow from: a profile, or a file's module; None: nothing."""
    if target is None:
        return None
    if isinstance(model, (str, PathLike)) and fspath(model).lower().endswith((".tflite", ".onnx")):
        from edge_opt.loading import load_model

        model = load_model(model)
    return model.model if isinstance(model, Loaded) else model


def _static_profile(
    model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None, mode: Literal["eval", "train"], name: str | None,
    isolate: bool,
) -> ModelProfile:  # fmt: skip
    record = trace_in_separate_process if isolate else trace
    recorded = record(model, inputs, kwargs, training=mode == "train")
    prices = tuple(price(signature) for signature in recorded.signatures)
    layers = layer_costs(recorded, prices)
    return ModelProfile(
        name=name or recorded.modules[0].kind,
        mode=mode,
        convention="edge_opt",
        trace=recorded,
        prices=prices,
        layers=layers,
        totals=total_costs(recorded, layers),
        peak=peak_activations(recorded),
        unpriced=unpriced_operators(recorded, prices),
    )


def saved_profile(model: object) -> ModelProfile | None:
    """Return the profile that is given instead of a model, itself or as the path of a .json file; else None."""
    if isinstance(model, ModelProfile):
        return model
    if not isinstance(model, (str, PathLike)) or not fspath(model).lower().endswith(".json"):
        return None
    from edge_opt.report.save import load

    return load(model)


def profile_or_saved(
    model: ModelLike | ModelProfile,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    measure: bool | Mapping[str, Any] = False,
    **options: Any,
) -> ModelProfile:
    """Return the profile of a model on its inputs; a saved one has inputs of its own and is not measured again."""
    saved = saved_profile(model)
    if saved is not None:
        return profile(saved, **options)
    return profile(model, inputs, kwargs=kwargs, measure=measure, **options)


def _targets(
    target: Target | Sequence[Target] | None,
    precision: str,
    runtime: str | None = None,
    threads: int | None = None,
    model: object = None,
) -> tuple[ResolvedTarget, ...]:
    """Resolve the targets before any work is done."""
    check_one_of("precision", precision, get_args(Precision))
    asked = next((name for name, value in (("runtime", runtime), ("threads", threads)) if value is not None), None)
    if asked and target is None:
        raise InvalidInput(f"{asked}= requires target=, such as target='raspberry-pi-4'; add it, or drop {asked}=")
    if target is not None:
        from edge_opt.boards.targets import resolve_targets

        return resolve_targets(target, precision, runtime=runtime, threads=threads, model=model)
    if precision != "fp32":
        raise InvalidInput(f"precision={precision!r} requires target=, such as target='raspberry-pi-4'")
    return ()


def clear_caches() -> None:
    """Forget cached operators and costs; the next profile starts cold."""
    clear_memo()
    clear_prices()
