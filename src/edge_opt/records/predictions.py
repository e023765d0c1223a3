"""A machine sampled into a file, and what is said of a model on a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edge_opt import units
from edge_opt.records.costs import OpSignature, Shape
from edge_opt.records.devices import BatchFit, Bound, Precision
from edge_opt.records.measurements import Energy, Environment, ModuleMemory
from edge_opt.records.shown import Record, Shown

if TYPE_CHECKING:
    import pandas as pd


# Of a convolution by its kernel, or a plain matrix product.
PeakClass = Literal["gemm", "conv3x3", "conv1x1", "depthwise", "strided"]


@dataclass(frozen=True, slots=True)
class OperatorSample(Record):
    """One operator as it was timed.

    Attributes:
        signature: The operator on its shapes.
        distances: Bytes touched since each tensor in `signature.inputs` was last used: it may still be in a cache.
        seconds: How long one call took.
        origin: The reference model in which it was timed; None where it was timed alone.
    """

    signature: OpSignature
    distances: tuple[int, ...]
    seconds: float
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class ReferenceRun(Record):
    """A whole forward of a reference model beside the sum of its operators: what lies between operators.

    Attributes:
        name: Name of the run.
        family: Kind of the model.
        batch: Samples in one forward.
        operators: Operators in one forward.
        modules: Module calls in one forward.
        operators_s: Seconds of all operators together.
        seconds: Seconds of the whole forward.
        step_s: Seconds of a forward and its backward while training; None where that was not timed.
    """

    name: str
    family: str
    batch: int
    operators: int
    modules: int
    operators_s: float
    seconds: float
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class MeasuredPeak(Record):
    """Operations per second of one class of work at one precision, as its best kernel here reaches.

    Attributes:
        work: The class of work, such as "gemm" or "depthwise".
        precision: Type of the numbers.
        ops_per_s: Operations per second, two per MAC.
    """

    work: PeakClass
    precision: Precision
    ops_per_s: float


@dataclass(frozen=True, slots=True)
class MeasuredBandwidth(Record):
    """What a copy in memory reaches.

    Attributes:
        working_set_bytes: Bytes of source and target together; a small set stays in a cache.
        bytes_per_s: Bytes read plus bytes written per second.
    """

    working_set_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class FreshOutput(Record):
    """Time to write a new tensor, beside writing one that was written before.

    Attributes:
        nbytes: Size of the tensor in bytes.
        fresh_s: Seconds to write a new one, whose memory the system must map first.
        reused_s: Seconds to write one that was written before.
    """

    nbytes: int
    fresh_s: float
    reused_s: float


@dataclass(frozen=True, slots=True)
class GroupDeviation(Record):
    """How far predictions of one group of operators are off.

    Attributes:
        group: The group, such as "conv" or "matmul".
        deviation: Standard deviation of the logarithm of predicted over measured time.
    """

    group: str
    deviation: float


@dataclass(frozen=True, slots=True)
class Calibration(Shown):
    """A machine as it was measured; everything a prediction there rests on.

    Attributes:
        name: Name of the machine.
        created: When it was measured, as an ISO date and time.
        machine: The machine, with the number of threads that was used.
        versions: Packages with their versions.
        cpu_seconds: Seconds of CPU time that measuring took.
        bandwidths: What a copy reaches, by working set.
        peaks: What arithmetic reaches, by class of work and precision.
        overhead_per_operator_s: Seconds that a forward takes for each operator, beside its work.
        overhead_per_module_s: Seconds that a forward takes for each module call.
        fresh_outputs: What it costs to write new memory, by size.
        references: Whole forwards of the reference models.
        samples: Operators as they were timed.
        whole_deviation: Error of predicted whole models that were held out: standard deviation of the logarithm.
        deviations: The same for operators, by group.
        remarks: What disturbed it; empty where nothing did.
    """

    name: str
    created: str
    machine: Environment
    versions: tuple[tuple[str, str], ...]
    cpu_seconds: float
    bandwidths: tuple[MeasuredBandwidth, ...]
    peaks: tuple[MeasuredPeak, ...]
    overhead_per_operator_s: float
    overhead_per_module_s: float
    fresh_outputs: tuple[FreshOutput, ...]
    references: tuple[ReferenceRun, ...]
    samples: tuple[OperatorSample, ...]
    whole_deviation: float
    deviations: tuple[GroupDeviation, ...]
    remarks: tuple[str, ...] = ()

    def peak(self, work: str, precision: str) -> float | None:
        """Operations per second of one class of work; None where torch has no kernel for it.

        Args:
            work: The class of work, such as "gemm" or "depthwise".
            precision: Type of the numbers, such as "fp32".
        """
        found = (item.ops_per_s for item in self.peaks if (item.work, item.precision) == (work, precision))
        return next(found, None)

    @property
    def memory_bytes_per_s(self) -> float:
        """Bandwidth of the largest working set: that of memory itself."""
        return max(self.bandwidths, key=lambda item: item.working_set_bytes).bytes_per_s


Basis = Literal["calibrated", "timed", "fitted", "roofline"]


@dataclass(frozen=True, slots=True)
class LayerPrediction(Record):
    """What one module call would take, children apart.

    Attributes:
        module: Place of the module call in the trace.
        path: Path of the module.
        kind: Class of the module, such as "Conv2d".
        seconds: Its part of one forward; None where a figure is not known.
        low: Lower end of the interval that holds the truth nine times in ten; None where it is not known.
        high: Upper end of that interval; None where it is not known.
        bound: What most of the time goes to.
        is_outside: Whether an operator of it lies outside what was calibrated, or has no price.
        energy_j: Its part of the prediction's first energy: power times time, else joules per operation and byte; or
            None.
    """

    module: int
    path: str
    kind: str
    seconds: float | None
    low: float | None
    high: float | None
    bound: Bound
    is_outside: bool = False
    energy_j: float | None = None


@dataclass(frozen=True, slots=True)
class Prediction(Shown):
    """What the whole model would take on a target; its layers add up to `seconds`.

    Attributes:
        target: Name of the target.
        basis: Operators sampled there ("calibrated") or timed there once ("timed"), costs fitted to times of whole
            models there ("fitted"), or a rough estimate ("roofline").
        precision: Type of the numbers.
        seconds: Seconds per forward; None where a figure is not known.
        low: Lower end of the interval that holds the truth nine times in ten; None where it is not known.
        high: Upper end of that interval; None where it is not known, as with operators that have no price.
        bound: What most of the time goes to.
        layers: What each layer would take.
        outside: Operators unlike anything that was sampled, or without a price.
        energies: Joules per forward, each with its source; those of the layers add up to the first.
        remarks: What a reader should know before trusting the figure.
        ram_bytes: Bytes of every size that the device is sold with, smallest first; empty where none is known.
    """

    target: str
    basis: Basis
    precision: Precision
    seconds: float | None
    low: float | None
    high: float | None
    bound: Bound
    layers: tuple[LayerPrediction, ...]
    outside: tuple[str, ...]
    energies: tuple[Energy, ...]
    remarks: tuple[str, ...]
    ram_bytes: tuple[int, ...] = ()

    def _brief(self) -> str:
        time = "no time known" if self.seconds is None else units.duration(self.seconds)
        ends = (
            ""
            if self.low is None or self.high is None
            else (f" ({units.duration(self.low)} to {units.duration(self.high)})")
        )
        return f"{time}{ends} on {self.target} in {self.precision}, {self.basis}, {len(self.layers)} layers"


# Who says what peak memory is; a measured one stands in its own record.
MemoryKind = Literal["static eager", "static planner"]


@dataclass(frozen=True, slots=True)
class MemoryNeed(Shown):
    """Peak memory of one forward. What kernels allocate inside (scratch) is not in it.

    Attributes:
        weight_bytes: Bytes of the weights.
        buffer_bytes: Bytes of the buffers.
        input_bytes: Bytes of the inputs.
        activation_bytes: Most bytes of activations alive at once.
        kind: Whose lifetimes count: those of an eager run, or those of a runtime that plans.
    """

    weight_bytes: int
    buffer_bytes: int
    input_bytes: int
    activation_bytes: int
    kind: MemoryKind = "static eager"

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.buffer_bytes + self.input_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class DeviceMemoryPoint(Record):
    """Bytes on the device while one operator runs, weights and inputs included: its highest point.

    Attributes:
        op: Place of the operator in the trace.
        module: Place of the module call in the trace that it belongs to.
        requested_bytes: Bytes that tensors ask for.
        allocated_bytes: Bytes of the blocks they got.
        reserved_bytes: Bytes of the segments taken from the driver.
    """

    op: int
    module: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemory(Shown):
    """What a device's caching allocator would hold during one forward, by simulation; in bytes.

    Attributes:
        device: Whose allocator it is, such as "cuda".
        source: Where the figures are from: a simulation.
        resident_bytes: Blocks of weights, buffers and inputs, there before the forward begins. The three peaks below
            include them.
        requested_bytes: Most that tensors ask for at once.
        allocated_bytes: Most in blocks at once, as `torch.cuda.max_memory_allocated` tells.
        reserved_bytes: Most taken from the driver, as `torch.cuda.max_memory_reserved` tells; the device must have it.
        peak_op: Place in the trace of the operator during which most is allocated; None where there is no operator.
        peak_module: Path of the module that it belongs to; empty for the model itself, or without an operator.
        modules: What each module call finds, adds and reaches, without `resident_bytes`.
        tape: The highest point of each operator, in order.
        notes: What is not in it, and what may differ on the device.
    """

    device: str
    source: str
    resident_bytes: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_op: int | None
    peak_module: str
    modules: tuple[ModuleMemory, ...]
    tape: tuple[DeviceMemoryPoint, ...]
    notes: tuple[str, ...]

    @property
    def activation_bytes(self) -> int:
        """The peak without what was there before."""
        return self.allocated_bytes - self.resident_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the reserved bytes that no tensor asked for, at the peaks: rounding, remainders and gaps."""
        return 1.0 - self.requested_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


@dataclass(frozen=True, slots=True)
class TargetFit(Record):
    """One target: what was predicted there, and whether the model fits.

    Attributes:
        prediction: Time and energy on the target.
        fits: Whether the smallest RAM holds the model; None where no size is known.
        needed_bytes: Bytes that the model needs at once.
        ram_bytes: Bytes of every size that the device is sold with, smallest first; empty where none is known.
        batch: The largest batch that fits the smallest RAM; None where that cannot be told, and a remark says why.
        remarks: What could not be told, and why.
    """

    prediction: Prediction
    fits: bool | None
    needed_bytes: int
    ram_bytes: tuple[int, ...]
    batch: BatchFit | None
    remarks: tuple[str, ...]

    @property
    def fitting_ram_bytes(self) -> tuple[int, ...]:
        """The sizes of RAM that hold the model."""
        return tuple(size for size in self.ram_bytes if self.needed_bytes <= size)


@dataclass(frozen=True, slots=True)
class TargetComparison(Shown):
    """A model on several targets, in the order they were asked for.

    Attributes:
        model: Name of the model.
        inputs: Shapes of its inputs.
        precision: Type of the numbers.
        memory: What it needs at once, on every target.
        targets: What was found for each target.
    """

    model: str
    inputs: tuple[Shape, ...]
    precision: Precision
    memory: MemoryNeed
    targets: tuple[TargetFit, ...]

    def _brief(self) -> str:
        names = ", ".join(fit.prediction.target for fit in self.targets)
        return f"{self.model} in {self.precision}, {units.size(self.memory.total_bytes)}, on {names}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know about the figures; a sentence that holds for several targets stands once, with their names."""
        said: dict[str, list[str]] = {}
        for fit in self.targets:
            found = fit.prediction
            energies = [f"energy: {energy.note}" for energy in found.energies[:1]]
            for remark in (*energies, *found.remarks, *fit.remarks):
                said.setdefault(remark, []).append(found.target)
        return tuple(f"{', '.join(names)}: {remark}" for remark, names in said.items())

    def to_dataframe(self) -> pd.DataFrame:
        """One row per target; exact numbers, None where a figure is not known."""
        from edge_opt.report.target_tables import dataframe

        return dataframe(self)
