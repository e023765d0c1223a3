"""Records of a training step: forward, backward, optimizer, and memory."""

from __future__ import annotations

from dataclasses import fields

from edge_opt.records.costs import OpCost
from edge_opt.records.fields import Record, Saved, Shown, field, record


@record
class MemoryByKind(Record):
    """Bytes alive at one moment of a step, by what they hold."""

    weights: int = field("Parameters of the model, frozen ones too.", default=0)
    buffers: int = field("Buffers of the model, such as running means.", default=0)
    inputs: int = field("The batch.", default=0)
    gradients: int = field("Gradients of parameters.", default=0)
    optimizer_state: int = field("What the optimizer keeps from step to step.", default=0)
    activations: int = field("Tensors of the forward that backward needs.", default=0)
    temporaries: int = field("Other tensors of the step, and memory inside operators.", default=0)

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Return bytes by name of the kind."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@record
class MemoryPoint(Record):
    """One moment of a step."""

    op_index: int = field("Number of the operator in the step.")
    phase: str = field('"forward", "loss", "backward", "recomputation" or "optimizer".')
    layer: str = field('Path of the module that the operator belongs to; "" for the model itself and outside of it.')
    memory: MemoryByKind = field("Bytes alive then.")


@record
class TrainingLayer(Record):
    """The cost of one module in a step, without its children; all its calls together."""

    path: str = field('Path of the module; "" for the model itself.')
    kind: str = field('Class of the module; "loss" for what is computed outside of the model.')
    trained_params: int = field("Parameters of its own that get a gradient.")
    forward: OpCost = field("Work of the forward.")
    input_gradient: OpCost = field("Work of the gradient that goes on to earlier layers.")
    weight_gradient: OpCost = field("Work of the gradient of its parameters.")
    recomputation: OpCost = field("Work of the forward that a checkpoint does again.")
    kept_bytes: int = field("Activations that are kept for the backward because this module needs them.")
    gradient_bytes: int = field("Bytes of its parameters' gradients.")
    state_bytes: int = field("Bytes of its parameters' optimizer state.")

    @property
    def backward(self) -> OpCost:
        """Work of both gradients."""
        return self.input_gradient + self.weight_gradient

    @property
    def flops(self) -> int:
        """Two per MAC, of everything."""
        return 2 * (self.forward.macs + self.backward.macs + self.recomputation.macs)


@record
class Remedy(Record):
    """One way to make a step smaller, with what it would come to."""

    change: str = field("What to do, as one would write it.")
    peak_bytes: int = field("Peak of the step with it.")
    flops: int | None = field("FLOPs of forward, backward and recomputation with it; None where nothing was counted.")


@record
class CheckpointChoice(Shown):
    """Layers to checkpoint so that a step fits a budget."""

    paths: tuple[str, ...] = field("Paths of the modules, in the order in which they were chosen.")
    peak_bytes: int = field("Peak of the step with them.")
    before_bytes: int = field("Peak without any.")
    flops: int = field("FLOPs of the step with them, recomputation included.")
    flops_before: int = field("FLOPs without any.")
    budget_bytes: int = field("The budget.")

    @property
    def fits(self) -> bool:
        """Whether the budget is kept."""
        return self.peak_bytes <= self.budget_bytes


@record
class StepTime(Record):
    """How long a step takes on a target."""

    target: str = field("Its name.")
    seconds: float | None = field("The step; None where it is not known.")
    low: float | None = field("Lower end of the interval.")
    high: float | None = field("Upper end; None where it is open.")
    forward_seconds: float | None = field("Part of the forward.")
    backward_seconds: float | None = field("Part of the backward, recomputation included.")
    optimizer_seconds: float | None = field("Part of the optimizer.")
    basis: str = field("What it rests on.")
    remarks: tuple[str, ...] = field("What a reader should know.", default=())


@record
class TrainingCost(Record):
    """The two values of a training step that budgets and sweeps use."""

    optimizer: str = field("The optimizer by name.")
    flops: int = field("FLOPs of forward, backward and recomputation of one step; two per MAC.")
    peak_bytes: int = field("Bytes at the fullest moment of a step in the long run, weights and batch included.")
    is_lower_bound: bool = field("Whether operators without a cost rule are missing.", default=False)


@record
class TrainingStep(Saved):
    """The cost of one training step, from its trace."""

    name: str = field("Name of the model.")
    optimizer: str = field("The optimizer by name.")
    accumulate: int = field("Batches whose gradients are added up before the optimizer runs.")
    forward: OpCost = field("Work of the forward of one step, loss included.")
    backward: OpCost = field("Work of the backward, without recomputation.")
    recomputation: OpCost = field("Work of the forward that checkpoints do again.")
    update: OpCost = field("Work of the optimizer.")
    params: int = field("Parameters of the model.")
    trained_params: int = field("Parameters that get a gradient.")
    peak: MemoryPoint = field("Peak of a step after the first: the optimizer state exists already.")
    first_peak: MemoryPoint = field("The fullest moment of the first step, in which the state is born.")
    layers: tuple[TrainingLayer, ...] = field("One row per module that did something.")
    curve: tuple[MemoryPoint, ...] = field("Memory along a step after the first; thinned, peaks kept.")
    remedies: tuple[Remedy, ...] = field("What would make it smaller, where that was asked for.", default=())
    times: tuple[StepTime, ...] = field("How long it takes on the targets that were named.", default=())
    unpriced: tuple[str, ...] = field("Operators without a cost rule: figures are lower bounds.", default=())
    used_real_tensors: bool = field("Whether the step ran on a real copy: the model reads values.", default=False)
    remarks: tuple[str, ...] = field("What a reader should know.", default=())

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
