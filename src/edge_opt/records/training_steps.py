"""What a training step costs: forward, backward, optimizer, and the memory of all of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from edge_opt.records.costs import OpCost
from edge_opt.records.shown import Record, Shown


@dataclass(frozen=True, slots=True)
class MemoryByKind(Record):
    """Bytes alive at one moment of a step, by what they hold.

    Attributes:
        weights: Parameters of the model, frozen ones too.
        buffers: Buffers of the model, such as running means.
        inputs: The batch.
        gradients: Gradients of parameters.
        optimizer_state: What the optimizer keeps from step to step.
        activations: Tensors of the forward that backward needs.
        temporaries: Everything else: tensors that the step makes and drops, and what operators hold inside.
    """

    weights: int = 0
    buffers: int = 0
    inputs: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Bytes by name of the kind."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class MemoryPoint(Record):
    """One moment of a step.

    Attributes:
        op_index: Number of the operator in the step.
        phase: "forward", "loss", "backward", "recomputation" or "optimizer".
        layer: Path of the module that the operator belongs to; "" for the model itself and outside of it.
        memory: Bytes alive then.
    """

    op_index: int
    phase: str
    layer: str
    memory: MemoryByKind


@dataclass(frozen=True, slots=True)
class TrainingLayer(Record):
    """What one module takes in a step, without its children; all its calls together.

    Attributes:
        path: Path of the module; "" for the model itself.
        kind: Class of the module; "loss" for what is computed outside of the model.
        trained_params: Parameters of its own that get a gradient.
        forward: Work of the forward.
        input_gradient: Work of the gradient that goes on to earlier layers.
        weight_gradient: Work of the gradient of its parameters.
        recomputation: Work of the forward that a checkpoint does again.
        kept_bytes: Activations that are kept for the backward because this module needs them.
        gradient_bytes: Bytes of its parameters' gradients.
        state_bytes: Bytes of its parameters' optimizer state.
    """

    path: str
    kind: str
    trained_params: int
    forward: OpCost
    input_gradient: OpCost
    weight_gradient: OpCost
    recomputation: OpCost
    kept_bytes: int
    gradient_bytes: int
    state_bytes: int

    @property
    def backward(self) -> OpCost:
        """Work of both gradients."""
        return self.input_gradient + self.weight_gradient

    @property
    def flops(self) -> int:
        """Two per MAC, of everything."""
        return 2 * (self.forward.macs + self.backward.macs + self.recomputation.macs)


@dataclass(frozen=True, slots=True)
class Remedy(Record):
    """One way to make a step smaller, with what it would come to.

    Attributes:
        change: What to do, as one would write it.
        peak_bytes: Peak of the step with it.
        flops: FLOPs of forward, backward and recomputation with it; None where nothing was counted.
    """

    change: str
    peak_bytes: int
    flops: int | None


@dataclass(frozen=True, slots=True)
class CheckpointChoice(Shown):
    """Layers to checkpoint so that a step fits a budget.

    Attributes:
        paths: Paths of the modules, in the order in which they were chosen.
        peak_bytes: Peak of the step with them.
        before_bytes: Peak without any.
        flops: FLOPs of the step with them, recomputation included.
        flops_before: FLOPs without any.
        budget_bytes: The budget.
        is_smallest: Whether no smaller set of blocks can keep the budget: fewer of them do not hold enough at the peak.
    """

    paths: tuple[str, ...]
    peak_bytes: int
    before_bytes: int
    flops: int
    flops_before: int
    budget_bytes: int
    is_smallest: bool = False

    @property
    def fits(self) -> bool:
        """Whether the budget is kept."""
        return self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True, slots=True)
class StepTime(Record):
    """How long a step takes on a target.

    Attributes:
        target: Its name.
        seconds: The step; None where it is not known.
        low: Lower end of the interval.
        high: Upper end; None where it is open.
        forward_seconds: Part of the forward.
        backward_seconds: Part of the backward, recomputation included.
        optimizer_seconds: Part of the optimizer.
        basis: What it rests on.
        remarks: What a reader should know.
    """

    target: str
    seconds: float | None
    low: float | None
    high: float | None
    forward_seconds: float | None
    backward_seconds: float | None
    optimizer_seconds: float | None
    basis: str
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingCost(Record):
    """The two figures of a training step that budgets and sweeps speak of.

    Attributes:
        optimizer: The optimizer by name.
        flops: FLOPs of forward, backward and recomputation of one step; two per MAC.
        peak_bytes: Bytes at the fullest moment of a step in the long run, weights and batch included.
        is_lower_bound: Whether operators had no price, so that there are more FLOPs than these.
    """

    optimizer: str
    flops: int
    peak_bytes: int
    is_lower_bound: bool = False


@dataclass(frozen=True, slots=True)
class TrainingStep(Shown):
    """What one training step costs, before it is run.

    Attributes:
        name: Name of the model.
        optimizer: The optimizer by name.
        accumulate: Batches whose gradients are added up before the optimizer runs.
        forward: Work of the forward of one step, loss included.
        backward: Work of the backward, without recomputation.
        recomputation: Work of the forward that checkpoints do again.
        update: Work of the optimizer.
        torch_flops: Forward, backward and recomputation as torch's FlopCounterMode counts them on the meta device. It
            counts the weight gradient of a convolution in groups as if it had one group.
        params: Parameters of the model.
        trained_params: Parameters that get a gradient.
        peak: The fullest moment of a step in the long run, with the optimizer's state there from the start.
        first_peak: The fullest moment of the first step, in which the state is born.
        layers: One row per module that did something.
        curve: Memory along a step in the long run; long steps are thinned out, and highest points are kept.
        remedies: What would make it smaller, where that was asked for.
        times: How long it takes on the targets that were named.
        unpriced: Operators without a rule; the figures are lower bounds where there are any.
        used_real_tensors: Whether the step really ran on a copy, because the model looks at values.
        remarks: What a reader should know.
    """

    name: str
    optimizer: str
    accumulate: int
    forward: OpCost
    backward: OpCost
    recomputation: OpCost
    update: OpCost
    torch_flops: int
    params: int
    trained_params: int
    peak: MemoryPoint
    first_peak: MemoryPoint
    layers: tuple[TrainingLayer, ...]
    curve: tuple[MemoryPoint, ...]
    remedies: tuple[Remedy, ...] = ()
    times: tuple[StepTime, ...] = ()
    unpriced: tuple[str, ...] = ()
    used_real_tensors: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def forward_flops(self) -> int:
        """Two per MAC of the forward; element-wise work is in `forward.other_ops`."""
        return 2 * self.forward.macs

    @property
    def backward_flops(self) -> int:
        """Two per MAC of the backward, without recomputation."""
        return 2 * self.backward.macs

    @property
    def recomputation_flops(self) -> int:
        """Two per MAC of what checkpoints compute again."""
        return 2 * self.recomputation.macs

    @property
    def optimizer_flops(self) -> int:
        """Every arithmetic operation of the optimizer; it has no products."""
        return self.update.flops

    @property
    def flops(self) -> int:
        """Two per MAC of forward, backward and recomputation."""
        return self.forward_flops + self.backward_flops + self.recomputation_flops

    @property
    def peak_bytes(self) -> int:
        """Bytes at the fullest moment of a step, weights and batch included."""
        return self.peak.memory.total

    @property
    def first_peak_bytes(self) -> int:
        """Bytes at the fullest moment of the first step, weights and batch included."""
        return self.first_peak.memory.total

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """Bytes at the peak by what they hold; they add up to `peak_bytes`."""
        return self.peak.memory.by_kind()

    @property
    def cost(self) -> TrainingCost:
        """FLOPs and peak alone, as budgets and sweeps hold them."""
        return TrainingCost(self.optimizer, self.flops, self.peak_bytes, bool(self.unpriced))

    def save(self, path: Any) -> Any:
        """Write it as .json, .md, .txt or .html, by the ending; returns the path.

        Args:
            path: Where to.
        """
        from edge_opt.report.training_tables import save_training_step

        return save_training_step(self, path)
