"""Records of a calibration, and of predictions for a target."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from edge_opt import units
from edge_opt.records.costs import OpSignature, Shape
from edge_opt.records.devices import BatchFit, Bound, Engine, Precision
from edge_opt.records.fields import Record, Shown, field, record
from edge_opt.records.measurements import Energy, Environment, ModuleMemory
from edge_opt.records.microcontrollers import McuMemory

if TYPE_CHECKING:
    import pandas as pd


# Convolutions by their kernel, or a plain matrix product.
PeakClass = Literal["gemm", "conv3x3", "conv1x1", "depthwise", "strided"]


@record
class OperatorSample(Record):
    """One operator as it was timed."""

    signature: OpSignature = field("The operator on its shapes.")
    distances: tuple[int, ...] = field("Bytes touched since each tensor in `signature.inputs` was last used.")
    seconds: float = field("How long one call took.")
    origin: str | None = field("Reference model in which it was timed; None: timed alone.", default=None)


@record
class ReferenceRun(Record):
    """A whole forward of a reference model beside the sum of its operators: what lies between operators."""

    name: str = field("Name of the run.")
    family: str = field("Kind of the model.")
    batch: int = field("Samples in one forward.")
    operators: int = field("Operators in one forward.")
    modules: int = field("Module calls in one forward.")
    operators_s: float = field("Seconds of all operators together.")
    seconds: float = field("Seconds of the whole forward.")
    step_s: float | None = field("Seconds of forward and backward in training; None: not timed.", default=None)
    backward_work: float | None = field("Work of the backward over the forward's, by MACs or bytes.", default=None)


@record
class MeasuredPeak(Record):
    """Operations per second of one class of work at one precision, as its best kernel here reaches."""

    work: PeakClass = field('The class of work, such as "gemm" or "depthwise".')
    precision: Precision = field("Type of the numbers.")
    ops_per_s: float = field("Operations per second, two per MAC.")


@record
class MeasuredBandwidth(Record):
    """The bandwidth that a copy in memory reaches."""

    working_set_bytes: int = field("Bytes of source and target together; a small set stays in a cache.")
    bytes_per_s: float = field("Bytes read plus bytes written per second.")


@record
class FreshOutput(Record):
    """Time to write a new tensor, beside writing one that was written before."""

    nbytes: int = field("Size of the tensor in bytes.")
    fresh_s: float = field("Seconds to write a new one, whose memory the system must map first.")
    reused_s: float = field("Seconds to write one that was written before.")


@record
class GroupDeviation(Record):
    """How far predictions of one group of operators are off."""

    group: str = field('The group, such as "conv" or "matmul".')
    deviation: float = field("Standard deviation of the logarithm of predicted over measured time.")


@record
class CheckedNet(Record):
    """A whole net that no sample is of: what it took, and what was predicted for it."""

    name: str = field("Name of the net with its batch.")
    seconds: float = field("Least seconds of a forward, over the slowness of the machine beside it.")
    predicted_s: float = field("Predicted seconds, before the common factor.")


@record
class SelfCheck(Record):
    """Whole nets that were held out, timed beside their predictions: one factor common to all, and what is left."""

    created: str = field("When the nets were timed, as an ISO date and time.")
    factor: float = field("Measured over predicted time of the nets; predictions are multiplied by it.")
    low: float = field("Lower end of the 90 % interval of the factor.")
    high: float = field("Upper end of that interval.")
    expected_error: float = field("Median error on a net that was held out, once the factor is taken out.")
    deviation: float = field("Standard deviation of the logarithm of those errors.")
    reference_s: float = field("Seconds of the reference kernel: the speed of the machine then.")
    nets: tuple[CheckedNet, ...] = field("The nets.")
    note: str = field('Why it was repeated, and what that changed; "" for the one of the calibration.', default="")

    @property
    def factor_deviation(self) -> float:
        """Standard deviation of the factor's logarithm."""
        return math.log(self.high / self.low) / 2 / 1.645


@record
class KernelGroupSample(Record):
    """A group of operators as a runtime ran it: one with weights or products, its head, and what follows it."""

    group: str = field('Kind of the head, such as "conv"; "" without one.')
    op: str = field("Operator of the head.")
    numbers: tuple[float, ...] = field("What a regression sees of the head.")
    estimate_s: float = field("First estimate of the head's seconds.")
    tail: tuple[str, ...] = field("Operators that follow it.")
    tail_bytes: tuple[int, ...] = field("Bytes that each of these reads and writes.")
    head_s: float = field("Seconds of the kernels with weights or products.")
    tail_s: float = field("Seconds of the other kernels.")
    kernels: tuple[str, ...] = field("What the runtime ran, in its own words.")
    converting: int = field("Kernels of these that only convert or reorder.")
    origin: str = field("Net that it is of.")


@record
class RuntimeCalibration(Record):
    """A runtime on a machine in one precision, with one number of threads."""

    runtime: str = field('Name of the runtime, such as "onnxruntime".')
    precision: Precision = field("Type of the numbers that files were converted to.")
    threads: int = field("Threads of the runtime.")
    version: str = field("Version of the runtime.")
    created: str = field("When it was measured, as an ISO date and time.")
    cpu_seconds: float = field("Seconds of CPU time that measuring took.")
    samples: tuple[KernelGroupSample, ...] = field("Groups of operators as they were timed.")
    check: SelfCheck = field("Whole nets that were held out.")
    remarks: tuple[str, ...] = field("What a reader should know.", default=())

    @property
    def name(self) -> str:
        """Runtime, precision and threads: `onnxruntime/int8, threads: 1`."""
        return f"{self.runtime}/{self.precision}, threads: {self.threads}"


@record
class TimedOperators(Record):
    """Operators of one model, timed to narrow the interval of its prediction."""

    name: str = field("Name of the model.")
    created: str = field("When they were timed, as an ISO date and time.")
    deviation: float = field("Error of their sum: standard deviation of the logarithm.")
    operator_deviation: float = field("The same for one operator.")
    samples: tuple[OperatorSample, ...] = field("The operators in seconds inside a model.")
    before: tuple[float, float] = field("90 % interval of the model's seconds without them.", default=(0.0, 0.0))
    after: tuple[float, float] = field("The same with them.", default=(0.0, 0.0))


@record
class AssumedKernels(Record):
    """What a runtime is assumed to make of groups of operators that look alike."""

    operators: str = field("The operators, joined by +.")
    kernels: tuple[str, ...] = field("The kernels, in the runtime's words; empty: no such group was sampled.")
    converting: int = field("Kernels of these that only convert or reorder.")
    count: int = field("How often the model has such a group.")
    seconds: float = field("Seconds of all of these together.")


@record
class Calibration(Shown):
    """A machine as it was measured; everything a prediction there rests on."""

    name: str = field("Name of the machine.")
    created: str = field("When it was measured, as an ISO date and time.")
    machine: Environment = field("The machine, with the number of threads that was used.")
    versions: tuple[tuple[str, str], ...] = field("Packages with their versions.")
    cpu_seconds: float = field("Seconds of CPU time that measuring took.")
    bandwidths: tuple[MeasuredBandwidth, ...] = field("What a copy reaches, by working set.")
    peaks: tuple[MeasuredPeak, ...] = field("What arithmetic reaches, by class of work and precision.")
    overhead_per_operator_s: float = field("Seconds that a forward takes for each operator, beside its work.")
    overhead_per_module_s: float = field("Seconds that a forward takes for each module call.")
    fresh_outputs: tuple[FreshOutput, ...] = field("What it costs to write new memory, by size.")
    references: tuple[ReferenceRun, ...] = field("Whole forwards of the reference models.")
    samples: tuple[OperatorSample, ...] = field("Operators as they were timed.")
    whole_deviation: float = field("Error on held-out models: standard deviation of the logarithm.")
    deviations: tuple[GroupDeviation, ...] = field("The same for operators, by group.")
    remarks: tuple[str, ...] = field("What disturbed it; empty where nothing did.", default=())
    check: SelfCheck | None = field("Whole nets timed at the end; None: an older file.", default=None)
    runtimes: tuple[RuntimeCalibration, ...] = field("Other runtimes on the same machine.", default=())
    timed: tuple[TimedOperators, ...] = field("Operators of models that were asked about.", default=())

    @property
    def factor(self) -> float:
        """The factor common to all predictions that the self-check saw; 1 where there was none."""
        return 1.0 if self.check is None else self.check.factor

    @property
    def deviation(self) -> float:
        """Standard deviation of the logarithm of the error on whole nets, of the self-check where there was one."""
        return self.whole_deviation if self.check is None else self.check.deviation

    def peak(self, work: str, precision: str) -> float | None:
        """Return the operations per second of one class of work; None where torch has no kernel for it.

        Args:
            work: The class of work, such as "gemm" or "depthwise".
            precision: Type of the numbers, such as "fp32".
        """
        rates = (item.ops_per_s for item in self.peaks if (item.work, item.precision) == (work, precision))
        return next(rates, None)

    @property
    def memory_bytes_per_s(self) -> float:
        """Bandwidth of the largest working set: that of memory itself."""
        return max(self.bandwidths, key=lambda item: item.working_set_bytes).bytes_per_s


Basis = Literal["calibrated", "timed", "fitted", "roofline", "vendor"]


@record
class LayerPrediction(Record):
    """The predicted time of one module call, without its children."""

    module: int = field("Place of the module call in the trace.")
    path: str = field("Path of the module.")
    kind: str = field('Class of the module, such as "Conv2d".')
    seconds: float | None = field("Its part of one forward; None where a figure is not known.")
    low: float | None = field("Lower end of the 90 % interval; None: not known.")
    high: float | None = field("Upper end of that interval; None where it is not known.")
    bound: Bound = field("What most of the time goes to.")
    is_outside: bool = field("Whether an operator is outside the calibration or has no cost rule.", default=False)
    energy_j: float | None = field("Its part of the prediction's first energy; None: not known.", default=None)
    engine: Engine | None = field("Who computes it; None: not known.", default=None)


# How a remark begins that says how often whole models do not run on an NPU, as when TFLite's delegate cannot start.
NPU_UNUSED = "the NPU was not used at all for"


@record
class Departure(Record):
    """An operator that leaves the accelerator in some layers, why, and what would stay."""

    operator: str = field('What leaves, such as "LayerNorm".')
    engine: Engine = field("Who computes it instead.")
    modules: tuple[int, ...] = field("Places in the trace of the module calls that it leaves in.")
    seconds: tuple[float, ...] = field("What each of them takes for it: hand-over and arithmetic.")
    reason: str = field("Why it leaves.")
    rewrite: str = field("What would stay on the accelerator.")


@record
class Prediction(Shown):
    """The predicted time of a model on a target; its layers add up to `seconds`."""

    target: str = field("Name of the target.")
    basis: Basis = field('"calibrated" or "timed" operators, costs "fitted" to whole models, "roofline", or "vendor".')
    precision: Precision = field("Type of the numbers.")
    seconds: float | None = field("Seconds per forward; None where a figure is not known.")
    low: float | None = field("Lower end of the 90 % interval; None: not known.")
    high: float | None = field("Upper end of the 90 % interval; None: not known.")
    bound: Bound = field("What most of the time goes to.")
    layers: tuple[LayerPrediction, ...] = field("What each layer would take.")
    outside: tuple[str, ...] = field("Operators unlike anything that was sampled, or without a cost rule.")
    energies: tuple[Energy, ...] = field("Joules per forward with their source; the layers add up to the first.")
    remarks: tuple[str, ...] = field("What a reader should know before trusting the figure.")
    ram_bytes: tuple[int, ...] = field("RAM sizes that are sold, smallest first; empty: not known.", default=())
    mcu: McuMemory | None = field("RAM and flash on a microcontroller; None: another device, or not known.",
                                  default=None)  # fmt: skip
    computes_in: str | None = field("Type of the arithmetic where it is another one; None: `precision`.", default=None)
    engine: Engine | None = field("Who computes what does not leave it; None: not known.", default=None)
    departures: tuple[Departure, ...] = field("What leaves an NPU; empty: nothing that is known.", default=())
    kernels: tuple[AssumedKernels, ...] = field("What a calibrated runtime is assumed to fuse.", default=())

    @property
    def precision_label(self) -> str:
        """The precision, with the type that is computed in where it is another one."""
        return f"{self.precision}, computed in {self.computes_in}" if self.computes_in else self.precision

    @property
    def cpu_layers(self) -> int | None:
        """Layers of which a part runs on the CPU instead of the NPU; None where no time of an NPU is predicted."""
        if self.engine != "npu" or self.seconds is None:
            return None
        return len({module for item in self.departures if item.engine == "cpu" for module in item.modules})

    def _brief(self) -> str:
        time = "no time known" if self.seconds is None else units.duration(self.seconds)
        is_known = self.low is not None and self.high is not None
        ends = f" ({units.duration(self.low or 0)} to {units.duration(self.high or 0)})" if is_known else ""
        return f"{time}{ends} on {self.target} in {self.precision_label}, {self.basis}, {len(self.layers)} layers"


# How peak memory is determined; a measured one is in its own record.
MemoryKind = Literal["static eager", "static planner"]


RatioBasis = Literal["one platform", "two precisions", "independent"]


@record
class LatencyRatio(Shown):
    """The latency of one variant over that of another on one target, with a 90 % interval."""

    target: str = field("Name of the target.")
    before_s: float = field("Seconds of the variant that the other is compared with.")
    after_s: float = field("Seconds of the other variant.")
    low: float = field("Lower end of the 90 % interval of the ratio.")
    high: float = field("Upper end of that interval.")
    basis: RatioBasis = field('Shared errors: of "one platform", of "two precisions" of it, or none ("independent").')

    @property
    def ratio(self) -> float:
        """The latency after over the latency before; below 1 is faster."""
        return self.after_s / self.before_s

    @property
    def is_decided(self) -> bool:
        """Whether the whole interval is on one side of 1."""
        return self.low > 1 or self.high < 1

    def _brief(self) -> str:
        return f"{self.ratio:.2f} × the time on {self.target} (90 % interval {self.low:.2f} to {self.high:.2f})"


@record
class MemoryNeed(Shown):
    """Peak memory of one forward. What kernels allocate inside (scratch) is not in it."""

    weight_bytes: int = field("Bytes of the weights.")
    buffer_bytes: int = field("Bytes of the buffers.")
    input_bytes: int = field("Bytes of the inputs.")
    activation_bytes: int = field("Most bytes of activations alive at once.")
    kind: MemoryKind = field("Lifetimes of an eager run, or of a runtime that plans memory.", default="static eager")
    outside: tuple[str, ...] = field("Work outside torch with its module; its memory is unknown.", default=())

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.buffer_bytes + self.input_bytes + self.activation_bytes


@record
class DeviceMemoryPoint(Record):
    """Bytes on the device while one operator runs, weights and inputs included: its highest point."""

    op: int = field("Place of the operator in the trace.")
    module: int = field("Place of the module call in the trace that it belongs to.")
    requested_bytes: int = field("Bytes that tensors ask for.")
    allocated_bytes: int = field("Bytes of the blocks they got.")
    reserved_bytes: int = field("Bytes of the segments taken from the driver.")


@record
class DeviceMemory(Shown):
    """The simulated bytes of a device's caching allocator during one forward pass."""

    device: str = field('Whose allocator it is, such as "cuda".')
    source: str = field("Where the figures are from: a simulation.")
    resident_bytes: int = field("Blocks of weights, buffers and inputs; the three peaks below include them.")
    requested_bytes: int = field("Most that tensors ask for at once.")
    allocated_bytes: int = field("Most in blocks at once, as `torch.cuda.max_memory_allocated` tells.")
    reserved_bytes: int = field("Most memory reserved, as `torch.cuda.max_memory_reserved` returns.")
    peak_op: int | None = field("Index of the operator at the peak; None without operators.")
    peak_module: str = field("Path of its module; empty for the model itself.")
    modules: tuple[ModuleMemory, ...] = field("Start, growth and peak of each module call, without `resident_bytes`.")
    tape: tuple[DeviceMemoryPoint, ...] = field("The highest point of each operator, in order.")
    notes: tuple[str, ...] = field("What is not in it, and what may differ on the device.")

    @property
    def activation_bytes(self) -> int:
        """The peak without what was there before."""
        return self.allocated_bytes - self.resident_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the reserved bytes that no tensor asked for, at the peaks: rounding, remainders and gaps."""
        return 1.0 - self.requested_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


@record
class TargetFit(Record):
    """One target: what was predicted there, and whether the model fits."""

    prediction: Prediction = field("Time and energy on the target.")
    fits: bool | None = field("Whether the smallest RAM holds the model; None where no size is known.")
    needed_bytes: int = field("Bytes that the model needs at once.")
    ram_bytes: tuple[int, ...] = field("RAM sizes that are sold, smallest first; empty: not known.")
    batch: BatchFit | None = field("Largest batch in the smallest RAM; None: see the remarks.")
    remarks: tuple[str, ...] = field("What could not be told, and why.")

    @property
    def fitting_ram_bytes(self) -> tuple[int, ...]:
        """The sizes of RAM that hold the model."""
        return tuple(size for size in self.ram_bytes if self.needed_bytes <= size)


@record
class TargetComparison(Shown):
    """A model on several targets, in the order they were asked for."""

    model: str = field("Name of the model.")
    inputs: tuple[Shape, ...] = field("Shapes of its inputs.")
    precision: Precision = field("Type of the numbers.")
    memory: MemoryNeed = field("What it needs at once, on every target.")
    targets: tuple[TargetFit, ...] = field("What was found for each target.")

    def _brief(self) -> str:
        names = ", ".join(fit.prediction.target for fit in self.targets)
        return f"{self.model} in {self.precision}, {units.size(self.memory.total_bytes)}, on {names}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the values; one that applies to several targets occurs once, with their names."""
        targets: dict[str, list[str]] = {}
        for fit in self.targets:
            energies = [f"energy: {energy.note}" for energy in fit.prediction.energies[:1]]
            for remark in (*energies, *fit.prediction.remarks, *fit.remarks):
                targets.setdefault(remark, []).append(fit.prediction.target)
        return tuple(f"{', '.join(names)}: {remark}" for remark, names in targets.items())

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per target; exact numbers, None where a figure is not known."""
        from edge_opt.report.target_tables import dataframe

        return dataframe(self)
