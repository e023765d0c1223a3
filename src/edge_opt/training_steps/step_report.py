"""training_step(): what one step of training costs, from a model and its inputs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from edge_opt._support.checks import check_whole
from edge_opt.errors import InvalidInput
from edge_opt.records.costs import OpCost
from edge_opt.records.training_steps import TrainingStep
from edge_opt.trace import unwrap_exported
from edge_opt.trace.inputs import CallArguments, call_arguments
from edge_opt.trace.tracer import one_at_a_time, unwrap_compiled
from edge_opt.training_steps.optimizers import find_optimizer, groups_of
from edge_opt.training_steps.step_costs import StepCosts, StepMemory, step_times
from edge_opt.training_steps.step_trace import StepPlan, TracedStep, trace_step

if TYPE_CHECKING:
    from edge_opt.boards.targets import Target

_AUTOCAST_REMARK = (
    "autocast is followed for linear layers, matrix products, convolutions and attention; others keep their type"
)
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def training_step(
    model: nn.Module,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Any = "adamw",
    frozen: str | Sequence[str] = (),
    checkpoint: str | Sequence[str] = (),
    autocast: str | None = None,
    accumulate: int = 1,
    set_to_none: bool = True,
    target: Target | Sequence[Target] | None = None,
    name: str | None = None,
    remedies: bool = False,
) -> TrainingStep:
    """What a training step costs, without running it: FLOPs, bytes, and the memory of the whole step by kind.

    Forward, loss, backward and optimizer run as one trace on tensors without data, in training mode; of a model that
    is in training mode, modules in eval mode (frozen norms) stay so. The step is
    `loss = loss_of(model(inputs)); loss.backward(); optimizer.step()`, after `optimizer.zero_grad()`: outputs are
    dropped once the loss is there, the loss is held. The model, its gradients and the random numbers are as found.

    Args:
        model: The model; parameters that do not require a gradient are frozen, as with LoRA.
        inputs: As in `profile`: a shape, a tensor, a list with one entry per argument, or a mapping by name.
        kwargs: Arguments of the model by name, such as labels.
        loss: A function of the output that returns one number. Without it, the output's own `loss` where it has one,
            else the sum of the output.
        optimizer: "sgd", "momentum", "adam", "adamw", "adafactor", "adagrad", "rmsprop", "adamw-8bit" or
            "momentum-8bit"; an optimizer of torch, its class, or a function of the parameters.
        frozen: Paths of modules or parameters that get no gradient, beside those frozen already.
        checkpoint: Paths of modules whose activations are dropped and computed again, tried without changing them.
        autocast: "bf16" or "fp16": products run in it, weights stay as they are.
        accumulate: Batches whose gradients are added up before the optimizer runs.
        set_to_none: Whether gradients are dropped between steps, as `zero_grad()` does, or set to zero.
        target: A device, platform or calibration, or several: how long a step takes there.
        name: Name of the model in tables; its class unless given.
        remedies: Whether to try what would make the step smaller; each try is a trace of its own.

    >>> step = training_step(nn.Linear(8, 4), (2, 8), optimizer="sgd")
    >>> step.forward_flops, step.backward_flops  # 2 x 2·8·4; the gradient of the input is not needed
    (128, 128)
    >>> step.peak_by_kind["gradients"], step.peak_by_kind["optimizer_state"]
    (144, 0)
    """
    model, arguments = checked_model(model, inputs, kwargs)
    called_optimizer = find_optimizer(optimizer)[0]
    plan = plan_of(
        model, loss=loss, optimizer=optimizer, frozen=frozen, checkpoint=checkpoint, autocast=autocast,
        accumulate=accumulate, set_to_none=set_to_none,
    )  # fmt: skip
    shown = name or type(model).__name__
    trace = _traced(model, arguments, plan)
    _check_recomputed(plan.checkpoint, trace)
    step = _report(trace, shown, called_optimizer, accumulate, set_to_none, model)
    if autocast is not None:
        step = replace(step, remarks=(*step.remarks, _AUTOCAST_REMARK))
    if remedies:
        from edge_opt.training_steps.remedies import what_would_help

        step = replace(step, remedies=what_would_help(step, model, arguments, plan, accumulate))
    if target is not None:
        step = replace(step, times=step_times(step, model, arguments, target))
    return step


def checked_model(model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None) -> tuple[nn.Module, CallArguments]:
    """The module that is traced, and the arguments of its call."""
    model, inputs, kwargs = unwrap_exported(model, inputs, kwargs)
    model = unwrap_compiled(model)
    return model, call_arguments(model, inputs, kwargs)


def plan_of(
    model: nn.Module, *, loss: Any = None, optimizer: Any = "adamw", frozen: str | Sequence[str] = (),
    checkpoint: str | Sequence[str] = (), autocast: str | None = None, accumulate: int = 1, set_to_none: bool = True,
) -> StepPlan:  # fmt: skip
    """What a step is made of; see `training_step` for each."""
    check_whole("accumulate", accumulate)
    if loss is not None and not callable(loss):
        raise InvalidInput(f"loss must be a function of the model's output that returns one number; got {loss!r}")
    groups = groups_of(optimizer)
    own = {id(parameter) for parameter in model.parameters()}
    if groups and own.isdisjoint(known for ids, _ in groups for known in ids):
        raise InvalidInput("the optimizer has no parameter of this model; make it of model.parameters()")
    return StepPlan(
        loss,
        find_optimizer(optimizer)[1],
        _trained(model, _listed("frozen", frozen)),
        _checkpoints(model, _listed("checkpoint", checkpoint)),
        _precision(autocast),
        has_second_batch=accumulate > 1 or not set_to_none,
        adds_up=accumulate > 1,
        set_to_none=set_to_none,
        groups=groups,
    )


def _traced(model: nn.Module, arguments: CallArguments, plan: StepPlan) -> TracedStep:
    with one_at_a_time():
        return trace_step(model, arguments, plan)


def _report(
    trace: TracedStep, name: str, optimizer: str, accumulate: int, set_to_none: bool, model: nn.Module
) -> TrainingStep:
    costs, memory = StepCosts(trace, accumulate), StepMemory(trace, accumulate, set_to_none)
    work = costs.by_phase
    remarks = trace.notes
    if not work.get("update", OpCost()).flops:
        remarks += ("the optimizer is one kernel, whose arithmetic is not counted",)
    stepwise = [f"{path} ({type(module).__name__})" for path, module in model.named_modules() if _is_stepwise(module)]
    if stepwise:
        remarks += (
            f"{', '.join(stepwise)}: traced step by step, while the CPU multiplies the inputs of all steps at once; "
            "the peak is up to a quarter off, with a projection more",
        )
    if costs.unpriced:
        names = ", ".join(list(costs.unpriced)[:3])
        remarks += (f"{len(costs.unpriced)} operators have no cost rule ({names}): FLOPs and bytes are lower bounds",)
    return TrainingStep(
        name,
        optimizer,
        accumulate,
        forward=work["forward"],
        backward=work["input_gradient"] + work["weight_gradient"],
        recomputation=work.get("recomputation", OpCost()),
        update=work.get("update", OpCost()),
        params=sum(parameter.numel() for parameter in model.parameters()),
        trained_params=sum(trace.trained.values()),
        peak=memory.peak(),
        first_peak=memory.first_peak(),
        layers=costs.layers(),
        curve=memory.curve(),
        unpriced=tuple(costs.unpriced),
        used_real_tensors=trace.used_real_tensors,
        remarks=remarks,
    )


def _is_stepwise(module: nn.Module) -> bool:
    """Return whether a recurrent layer is traced otherwise than the CPU runs it (`cpu_kernels`)."""
    if not isinstance(module, nn.RNNBase):
        return False
    has_kernel = isinstance(module, nn.LSTM) and not module.proj_size
    return not has_kernel or any(parameter.dtype is torch.float64 for parameter in module.parameters())


def peak_of(model: nn.Module, arguments: CallArguments, plan: StepPlan, accumulate: int = 1) -> tuple[int, int]:
    """Peak of a step in the long run, and its FLOPs."""
    memory, flops = memory_and_flops(model, arguments, plan, accumulate)
    return memory.peak().memory.total, flops


def memory_and_flops(
    model: nn.Module, arguments: CallArguments, plan: StepPlan, accumulate: int
) -> tuple[StepMemory, int]:
    """Memory along a step, and its FLOPs."""
    trace = _traced(model, arguments, plan)
    work = StepCosts(trace, accumulate).by_phase
    macs = sum(work[part].macs for part in ("forward", "input_gradient", "weight_gradient", "recomputation"))
    return StepMemory(trace, accumulate, plan.set_to_none), 2 * macs


def _listed(name: str, paths: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(paths, str):
        return tuple(part.strip() for part in paths.split(",") if part.strip())
    listed = tuple(paths) if isinstance(paths, Iterable) else (paths,)
    if not all(isinstance(path, str) for path in listed):
        raise InvalidInput(f"{name} must be paths of modules, such as ['layer1']; got {paths!r}")
    return listed


def _trained(model: nn.Module, frozen: tuple[str, ...]) -> dict[int, bool]:
    """Whether each parameter gets a gradient, by its id."""
    named = dict(model.named_parameters(remove_duplicate=False))
    modules = [path for path, _ in model.named_modules() if path] if frozen else []
    for path in frozen:
        if path not in named and path not in modules:
            raise InvalidInput(
                f"frozen names {path!r}, and the model has no such module or parameter{_close(path, modules)}"
            )
    trains: dict[int, bool] = {}
    for name, parameter in named.items():
        is_frozen = any(name == path or name.startswith(f"{path}.") for path in frozen)
        trains[id(parameter)] = parameter.requires_grad and not is_frozen and trains.get(id(parameter), True)
    if not trains:
        raise InvalidInput("the model has no parameters, so there is nothing to train")
    if not any(trains.values()):
        raise InvalidInput("no parameter of the model is trained: all are frozen; set requires_grad_(True) on some")
    return trains


def _checkpoints(model: nn.Module, paths: tuple[str, ...]) -> tuple[str, ...]:
    modules = dict(model.named_modules()) if paths else {}
    for path in paths:
        if path not in modules:
            raise InvalidInput(
                f"checkpoint names {path!r}, and the model has no such module{_close(path, list(modules))}"
            )
        if type(modules[path]).forward is nn.Module.forward:  # as of a ModuleList; a subclass may have one
            raise InvalidInput(
                f"checkpoint names {path!r}, a {type(modules[path]).__name__}, which is never called and cannot be "
                f"recomputed; name its modules, such as {path}.0"
            )
    return paths


def _check_recomputed(paths: tuple[str, ...], trace: TracedStep) -> None:
    called_paths = {call.path for call in trace.modules} if paths else set()
    never = [path for path in paths if path not in called_paths]
    if never:
        raise InvalidInput(
            f"checkpoint names {', '.join(map(repr, never))}, which the forward never calls: nothing of it can be "
            "recomputed; where a parent uses its parameters itself, name the parent"
        )


def _close(path: str, known: list[str]) -> str:
    close = difflib.get_close_matches(path, known, n=2, cutoff=0.3)
    return f"; closest: {', '.join(close)}" if close else ""


def _precision(autocast: str | None) -> torch.dtype | None:
    if autocast is None:
        return None
    if autocast not in _AUTOCAST:
        raise InvalidInput(f"autocast must be one of {', '.join(_AUTOCAST)}; got {autocast!r}")
    return _AUTOCAST[autocast]
