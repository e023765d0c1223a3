"""training_step(): what one step of training costs, from a model and its inputs; and what would make it smaller."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate as accumulate_sums
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from edge_opt._support.checks import check_positive, check_whole
from edge_opt._support.progress import report_progress
from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.loading import ModelLike, resolve_call
from edge_opt.records.training_steps import CheckpointChoice, Remedy, TrainingStep
from edge_opt.trace.inputs import CallArguments, InputSpec, call_arguments, map_arguments, with_shapes
from edge_opt.trace.tracer import unwrap_compiled
from edge_opt.training_steps.step_costs import StepCosts, StepMemory, step_times
from edge_opt.training_steps.step_trace import StepPlan, TracedStep, trace_step

if TYPE_CHECKING:
    from edge_opt.boards.targets import Target

_AUTOCAST_REMARK = (
    "autocast is followed for linear layers, matrix products, convolutions and attention; others keep their type"
)
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_SAVING = 0.01
_BLOCK = 256  # elements that share one scale in bitsandbytes' block-wise optimizers
_LEAST_ELEMENTS = 4096  # smaller parameters keep states of 32 bits there


def training_step(
    model: ModelLike,
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
    """Return the cost of a training step without running it: FLOPs, bytes, and memory by kind.

    Forward, loss, backward and optimizer run as one trace on tensors without data, in training mode; of a model that
    is in training mode, modules in eval mode (frozen norms) stay so. The step is
    `loss = loss_of(model(inputs)); loss.backward(); optimizer.step()`, after `optimizer.zero_grad()`: outputs are
    dropped once the loss is there, the loss is held. The model, its gradients and the random state are unchanged.

    Args:
        model: As in `profile`; parameters that do not require a gradient are frozen, as with LoRA.
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
        name: Name of the model in tables; default: its class.
        remedies: Whether to try ways to reduce the memory; each takes one more trace.

    >>> step = training_step(nn.Linear(8, 4), (2, 8), optimizer="sgd")
    >>> step.forward_flops, step.backward_flops  # 2 x 2·8·4; the gradient of the input is not needed
    (128, 128)
    >>> step.peak_by_kind["gradients"], step.peak_by_kind["optimizer_state"]
    (144, 0)
    """
    model, arguments = checked_model(model, inputs, kwargs)
    plan = plan_of(
        model, loss=loss, optimizer=optimizer, frozen=frozen, checkpoint=checkpoint, autocast=autocast,
        accumulate=accumulate, set_to_none=set_to_none,
    )  # fmt: skip
    trace = trace_step(model, arguments, plan)
    _check_recomputed(plan.checkpoint, trace)
    step = _report(trace, model, plan, name or type(model).__name__)
    if autocast is not None:
        step = replace(step, remarks=(*step.remarks, _AUTOCAST_REMARK))
    if remedies:
        step = replace(step, remedies=_what_would_help(step, model, arguments, plan))
    if target is not None:
        step = replace(step, times=step_times(step, model, arguments, target))
    return step


def checked_model(model: ModelLike, inputs: Any, kwargs: Mapping[str, Any] | None) -> tuple[nn.Module, CallArguments]:
    """Return the module that is traced, and the arguments of its call."""
    model, inputs, kwargs, _ = resolve_call(model, inputs, kwargs)
    model = unwrap_compiled(model)
    arguments = call_arguments(model, inputs, kwargs)
    return with_shapes(model, arguments), arguments


def plan_of(
    model: nn.Module, *, loss: Any = None, optimizer: Any = "adamw", frozen: str | Sequence[str] = (),
    checkpoint: str | Sequence[str] = (), autocast: str | None = None, accumulate: int = 1, set_to_none: bool = True,
) -> StepPlan:  # fmt: skip
    """Return what a step is made of; see `training_step` for each."""
    check_whole("accumulate", accumulate)
    if autocast is not None and autocast not in _AUTOCAST:
        raise InvalidInput(f"autocast must be one of {', '.join(_AUTOCAST)}; got {autocast!r}")
    if loss is not None and not callable(loss):
        raise InvalidInput(f"loss must be a function of the model's output that returns one number; got {loss!r}")
    groups = _groups_of(optimizer)
    own = {id(parameter) for parameter in model.parameters()}
    if groups and own.isdisjoint(known for ids, _ in groups for known in ids):
        raise InvalidInput("the optimizer has no parameter of this model; make it of model.parameters()")
    return StepPlan(
        loss,
        *_find_optimizer(optimizer),
        _trained(model, _listed("frozen", frozen)),
        _checkpoints(model, _listed("checkpoint", checkpoint)),
        None if autocast is None else _AUTOCAST[autocast],
        accumulate=accumulate,
        set_to_none=set_to_none,
        groups=groups,
    )


def _report(trace: TracedStep, model: nn.Module, plan: StepPlan, name: str) -> TrainingStep:
    costs, memory = StepCosts(trace, plan.accumulate), StepMemory(trace, plan)
    work = costs.by_phase
    remarks = trace.notes
    if not work["update"].flops:
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
        plan.optimizer_name,
        plan.accumulate,
        forward=work["forward"],
        backward=work["input_gradient"] + work["weight_gradient"],
        recomputation=work["recomputation"],
        update=work["update"],
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


def _listed(name: str, paths: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(paths, str):
        return tuple(part.strip() for part in paths.split(",") if part.strip())
    listed = tuple(paths) if isinstance(paths, Iterable) else (paths,)
    if not all(isinstance(path, str) for path in listed):
        raise InvalidInput(f"{name} must be paths of modules, such as ['layer1']; got {paths!r}")
    return listed


def _trained(model: nn.Module, frozen: tuple[str, ...]) -> dict[int, bool]:
    """Return whether each parameter gets a gradient, by its id."""
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


class EightBit(torch.optim.Optimizer):
    """States of 8 bits with a scale in float32 per 256 elements, as bitsandbytes keeps them; its update is fused.

    Nothing is updated: it has the memory of the real one, on parameters without data.
    """

    def __init__(self, params: Any, moments: int) -> None:
        super().__init__(params, {})
        self.moments = moments

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = self._state(parameter)

    def _state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for moment in range(self.moments):
            if parameter.numel() < _LEAST_ELEMENTS:
                state[f"state{moment + 1}"] = torch.zeros_like(parameter, dtype=torch.float32)
                continue
            state[f"state{moment + 1}"] = torch.zeros_like(parameter, dtype=torch.uint8)
            blocks = -(-parameter.numel() // _BLOCK)
            state[f"absmax{moment + 1}"] = parameter.new_zeros((blocks,), dtype=torch.float32)
        return state


_BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adamw-8bit": partial(EightBit, moments=2),
    "momentum-8bit": partial(EightBit, moments=1),
}


# What people write, without its punctuation, and what it is called here.
_ALSO_CALLED = {"sgdmomentum": "momentum", "momentumsgd": "momentum", "sgdm": "momentum", "nesterov": "momentum"} | {
    f"{prefix}adam{w}8bit": "adamw-8bit" for prefix in ("", "paged") for w in ("", "w")
}


def _optimizer_key(name: str) -> str:
    """Return the key of an optimizer's name: `torch.optim.SGD`, `AdamW8bit` and `sgd_momentum` are known.

    >>> _optimizer_key("torch.optim.SGD"), _optimizer_key("PagedAdamW8bit")
    ('sgd', 'adamw-8bit')
    """
    key = name.rpartition(".")[2].lower().replace("_", "-")
    return key if key in _BY_NAME else _ALSO_CALLED.get(key.replace("-", "").replace(" ", ""), key)


def _find_optimizer(wanted: Any) -> tuple[str, Callable[..., Any]]:
    """Return its name, and how to make it for a list of parameters.

    `wanted` is a name, a class of optimizers, an optimizer (its settings are taken) or a function of parameters.
    """
    if isinstance(wanted, str):
        key = _optimizer_key(wanted)
        if key not in _BY_NAME:
            close = difflib.get_close_matches(key, _BY_NAME, n=2, cutoff=0.4)
            closest = f"; closest: {', '.join(close)}" if close else ""
            raise InvalidInput(f"no optimizer named {wanted!r}{closest}. Known: {', '.join(_BY_NAME)}")
        return key, _BY_NAME[key]
    if isinstance(wanted, torch.optim.Optimizer):
        accepted = type(wanted).__init__.__code__.co_varnames
        settings = {name: value for name, value in _unfused(wanted.defaults).items() if name in accepted}
        return type(wanted).__name__, partial(type(wanted), **settings)
    if isinstance(wanted, type) and issubclass(wanted, torch.optim.Optimizer):
        return wanted.__name__, wanted
    if callable(wanted):
        made_by = wanted.func if isinstance(wanted, partial) else wanted
        return getattr(made_by, "__name__", type(made_by).__name__), wanted
    raise InvalidInput(
        f"optimizer must be a name ({', '.join(_BY_NAME)}), a torch optimizer or a function; got {wanted!r}"
    )


def _groups_of(wanted: Any) -> tuple[tuple[tuple[int, ...], dict[str, Any]], ...]:
    """Return the groups of a given optimizer, ids and settings of each; none where it is yet to be made."""
    if not isinstance(wanted, torch.optim.Optimizer):
        return ()
    return tuple(
        (tuple(map(id, group["params"])), {name: value for name, value in _unfused(group).items() if name != "params"})
        for group in wanted.param_groups
    )


def _unfused(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the fused kernel, which torch refuses to run on parameters without data.

    The loop in its place has the same state, and the temporaries of one parameter on top.
    """
    return {name: None if name == "fused" else value for name, value in settings.items()}


def _what_would_help(
    step: TrainingStep, model: nn.Module, arguments: CallArguments, plan: StepPlan
) -> tuple[Remedy, ...]:
    """Return every remedy that saves at least one per cent, largest first; what the model refuses is left out."""
    remedies: list[Remedy] = []
    for change, changed_plan, changed_arguments in _changes(model, arguments, plan):
        report_progress(f"trying what would help: {change}")
        try:
            memory, flops = _memory_and_flops(model, changed_arguments, changed_plan)
        except EdgeOptError:
            continue
        peak_bytes = memory.peak().memory.total
        if peak_bytes <= (1 - _LEAST_SAVING) * step.peak_bytes:
            remedies.append(Remedy(change, peak_bytes, flops))
    return tuple(sorted(remedies, key=lambda remedy: remedy.peak_bytes))


def _changes(
    model: nn.Module, arguments: CallArguments, plan: StepPlan
) -> Iterator[tuple[str, StepPlan, CallArguments]]:
    """Yield what may make a step smaller: its name, and the step with it."""
    blocks = repeated_blocks(model)
    if blocks and not plan.checkpoint:
        listed = ", ".join(repr(path) for path in blocks[:2]) + (", …" if len(blocks) > 2 else "")
        yield f"checkpoint=[{listed}] ({len(blocks)} blocks)", replace(plan, checkpoint=blocks), arguments
    for name in ("sgd", "adafactor", "adamw-8bit"):
        yield f'optimizer="{name}"', replace(plan, optimizer=_BY_NAME[name]), arguments
    if plan.autocast is None:
        yield 'autocast="bf16"', replace(plan, autocast=torch.bfloat16), arguments
    half = _halved(arguments)
    if half is not None:
        yield "half the batch", plan, half
        yield "half the batch, accumulate twice as often", replace(plan, accumulate=2 * plan.accumulate), half
    owning = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    if len(owning) > 1:
        # The last child that has parameters is what people train when they take the rest as it is.
        last = owning[-1]
        trains = {id(p): name.startswith(f"{last}.") and plan.trains[id(p)] for name, p in model.named_parameters()}
        if any(trains.values()):
            yield f"frozen: all but {last!r}", replace(plan, trains=trains), arguments


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of a model's blocks: children of lists and sequences that have children themselves."""
    blocks = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for name, child in module.named_children()
        if any(True for _ in child.children())
    ]
    # A block inside a block is recomputed with it.
    return tuple(path for path in blocks if not any(path.startswith(f"{other}.") for other in blocks))


def _halved(arguments: CallArguments) -> CallArguments | None:
    def half(value: Any) -> Any:
        dtype = value.dtype if isinstance(value, InputSpec) else str(value.dtype).removeprefix("torch.")
        return InputSpec((value.shape[0] // 2, *value.shape[1:]), dtype)

    try:
        return map_arguments(arguments, half)
    except (EdgeOptError, IndexError):  # a batch of one, or an input without a batch
        return None


def fewest_checkpoints(
    model: nn.Module, inputs: Any = None, *, budget_mb: float, kwargs: Mapping[str, Any] | None = None, **options: Any
) -> CheckpointChoice:
    """Find few blocks of a model to checkpoint so that a training step fits a budget, and what that costs.

    In each round the blocks that hold most at the peak are added, as few as could be enough; then the whole step is
    traced again. If no other block holds anything at the peak, the result does not fit.

    Args:
        model: The model.
        inputs: As in `training_step`.
        budget_mb: Most MiB of the peak, weights and batch included.
        kwargs: Arguments of the model by name.
        options: `loss`, `optimizer`, `frozen`, `autocast`, `accumulate` and `set_to_none`, as in `training_step`.

    >>> block = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    >>> net = nn.Sequential(*(block() for _ in range(4)))
    >>> choice = fewest_checkpoints(net, (256, 64), budget_mb=0.9, optimizer="sgd")
    >>> choice.fits, choice.paths, choice.flops - choice.flops_before  # one linear layer again: 2 x 256·64·64
    (True, ('0',), 2097152)
    """
    check_positive("budget_mb", budget_mb)
    budget_bytes = int(budget_mb * 2**20)
    model, arguments = checked_model(model, inputs, kwargs)
    plan = plan_of(model, **options)
    blocks = repeated_blocks(model)
    chosen: tuple[str, ...] = ()
    memory, flops_before = _memory_and_flops(model, arguments, plan)
    peak_bytes = before_bytes = memory.peak().memory.total
    flops = flops_before
    while peak_bytes > budget_bytes:
        held = memory.held_at_peak([path for path in blocks if path not in chosen])
        largest = sorted((path for path in held if held[path]), key=lambda path: -held[path])
        if not largest:
            break
        sums = accumulate_sums(held[path] for path in largest)
        enough = next((n for n, total in enumerate(sums, 1) if total >= peak_bytes - budget_bytes), len(largest))
        chosen = (*chosen, *largest[:enough])
        report_progress(f"checkpoints: {len(chosen)} chosen")
        memory, flops = _memory_and_flops(model, arguments, replace(plan, checkpoint=chosen))
        peak_bytes = memory.peak().memory.total
    return CheckpointChoice(chosen, peak_bytes, before_bytes, flops, flops_before, budget_bytes)


def _memory_and_flops(model: nn.Module, arguments: CallArguments, plan: StepPlan) -> tuple[StepMemory, int]:
    """Return the memory along a step, and its FLOPs."""
    trace = trace_step(model, arguments, plan)
    work = StepCosts(trace, plan.accumulate).by_phase
    macs = sum(work[part].macs for part in ("forward", "input_gradient", "weight_gradient", "recomputation"))
    return StepMemory(trace, plan), 2 * macs
