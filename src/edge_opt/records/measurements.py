"""Records of what was measured here: latency, memory and energy, each with its provenance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge_opt.records.shown import Record, Shown

EnergySource = Literal["rapl", "nvml", "jetson", "proxy", "model"]
Verdict = Literal["equal", "faster", "slower"]


@dataclass(frozen=True, slots=True)
class Interval(Record):
    """A 95 % bootstrap interval.

    Attributes:
        low: Its lower end, in the unit of the figure.
        high: Its upper end.
    """

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Latency(Shown):
    """Seconds per forward.

    Attributes:
        samples_s: Seconds on the wall clock, in the order they were taken.
        cpu_samples_s: Seconds of CPU time of the same samples, all threads together.
        minimum_s: The shortest sample.
        median_s: The middle sample: the figure to quote.
        mean_s: The mean of the samples.
        std_s: Their standard deviation.
        p90_s: Nine samples in ten are not longer.
        p95_s: 95 in 100 samples are not longer.
        p99_s: 99 in 100 samples are not longer.
        median_interval_s: How well the median is known.
        cpu_minimum_s: The shortest sample in CPU time.
        cpu_median_s: The middle sample in CPU time.
        batch_size: Samples in one forward.
        is_noisy: Whether the samples scatter much, or the median is not known as well as was asked.
        is_contended: Whether other programs used the CPU meanwhile.
        remarks: What a reader should know before trusting the figures.
    """

    samples_s: tuple[float, ...]
    cpu_samples_s: tuple[float, ...]
    minimum_s: float
    median_s: float
    mean_s: float
    std_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    median_interval_s: Interval
    cpu_minimum_s: float
    cpu_median_s: float
    batch_size: int
    is_noisy: bool
    is_contended: bool
    remarks: tuple[str, ...]

    @property
    def throughput(self) -> float:
        """Samples per second at the median."""
        return self.batch_size / self.median_s


@dataclass(frozen=True, slots=True)
class Comparison(Shown):
    """One latency against a baseline.

    Attributes:
        verdict: "equal" means that no difference could be shown, because the interval holds 1.
        ratio: New over old: 0.9 takes 10 % less time.
        ratio_interval: Where the ratio lies. It allows for what samples cannot show: machines differ from session to
            session.
        clock: Which samples were compared; CPU time where other programs disturbed the wall clock.
    """

    verdict: Verdict
    ratio: float
    ratio_interval: Interval
    clock: Literal["wall", "cpu"]


@dataclass(frozen=True, slots=True)
class LayerLatency(Record):
    """Time that one module call spends itself, children apart.

    Attributes:
        module: Place of the module call in the trace.
        path: Path of the module.
        kind: Class of the module, such as "Conv2d".
        seconds: Its part of one forward.
        interval_s: How well that is known.
        share: Its part as a share of the whole forward.
        macs_per_s: MACs per second; None where an operator of it has no price.
        bytes_per_s: Bytes moved per second; None where an operator of it has no price.
    """

    module: int
    path: str
    kind: str
    seconds: float
    interval_s: Interval
    share: float
    macs_per_s: float | None
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class LayerLatencies(Shown):
    """Layers and what lies between them; together they are `whole_s` exactly.

    Attributes:
        layers: The calls that run operators or have no children.
        between_layers_s: Seconds spent in containers, in calling modules and outside of layers.
        whole_s: Seconds of the whole forward: the median of `Measurement.latency`.
        overhead_s: Seconds that recording added to a forward, taken out again. Below zero where the noise is larger.
        recorded_s: Sum of the parts where nothing held them up, before they were scaled to the whole; None in older
            files.
    """

    layers: tuple[LayerLatency, ...]
    between_layers_s: float
    whole_s: float
    overhead_s: float
    recorded_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModuleMemory(Record):
    """Device memory around one module call.

    Attributes:
        module: Place of the module call in the trace.
        path: Path of the module.
        before_bytes: Bytes in use before it.
        allocated_bytes: Bytes that it took and kept; below zero where it gave back more.
        peak_bytes: Most bytes in use during it.
    """

    module: int
    path: str
    before_bytes: int
    allocated_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class MeasuredMemory(Shown):
    """The allocator's peak during a forward, weights and inputs apart, and where it is.

    Attributes:
        peak_bytes: The peak in bytes.
        activation_bytes: The part of the peak that is tensors.
        scratch_bytes: The part of the peak that operators held only while they ran.
        tensor_peak_bytes: The peak of tensors alone, without any scratch.
        peak_op: The operator at the peak.
        peak_module: Path of the module at the peak.
        param_bytes: Bytes of the weights, which are not in the peak.
        modules: Memory around each module call.
        source: Who counted: events or statistics of the allocator.
    """

    peak_bytes: int
    activation_bytes: int
    scratch_bytes: int
    tensor_peak_bytes: int
    peak_op: str
    peak_module: str
    param_bytes: int
    modules: tuple[ModuleMemory, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Energy(Shown):
    """Joules per forward, and where the figure comes from; a proxy or a model is never a measurement.

    Attributes:
        joules: Joules per forward.
        source: The meter, or "proxy" (watts times time), or "model" (joules per operation and byte).
        note: What the figure includes, in words.
        idle_watts: Watts at rest that were subtracted; None where nothing was.
    """

    joules: float
    source: EnergySource
    note: str
    idle_watts: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal(Record):
    """An energy meter that cannot be used here.

    Attributes:
        meter: Name of the meter.
        reason: Why it cannot be used.
    """

    meter: str
    reason: str


@dataclass(frozen=True, slots=True)
class Environment(Shown):
    """The machine and the process a measurement was made in.

    Attributes:
        cpu: Name of the processor.
        cores: Cores that the process may use.
        threads: Threads that torch uses, or the runtime that was timed.
        governor: How Linux chooses the clock rate, such as "performance"; None where it does not say.
        load_1min: Mean number of busy processes in the last minute; None where it is not known.
        memory_bytes: Bytes of RAM.
        system: Operating system, its version and the architecture.
        python: Version of Python.
        torch: Version of torch; "" where it was not used.
        device: Where the model ran, such as "cpu".
    """

    cpu: str
    cores: int
    threads: int
    governor: str | None
    load_1min: float | None
    memory_bytes: int
    system: str
    python: str
    torch: str
    device: str


@dataclass(frozen=True, slots=True)
class LayerStep(Record):
    """What one module took in a forward and backward, without its children; all its calls together.

    Attributes:
        path: Path of the module; "" for the model itself.
        kind: Class of the module.
        forward_s: Seconds of its forward.
        backward_s: Seconds of its gradients.
    """

    path: str
    kind: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class MeasuredStep(Record):
    """A real forward and backward, the loss being the sum of the output; without an optimizer.

    Attributes:
        whole_s: Seconds of both, the median of runs without time stamps.
        forward_s: Part of the forward, the loss included.
        backward_s: Part of the backward.
        between_s: Seconds that belong to no module: the loss, and autograd before its first node.
        layers: Modules in the order of their paths; with `between_s` they add up to `whole_s`.
        recorded: Steps with time stamps, whose medians divide the whole.
    """

    whole_s: float
    forward_s: float
    backward_s: float
    between_s: float
    layers: tuple[LayerStep, ...]
    recorded: int


@dataclass(frozen=True, slots=True)
class Measurement(Shown):
    """Everything measured at one time; what was not asked for is None.

    Attributes:
        latency: Seconds per forward.
        layers: Each layer's part of the latency.
        memory: The peak of memory in one forward.
        energy: Joules per forward; None also where no meter could be used.
        energy_refusals: Meters that could not be used, and why.
        environment: The machine and the process.
        training: Forward and backward by layer, in mode "train" on the CPU; None where nothing has a gradient.
        fresh_latency_s: Median seconds of a forward that must map its memory first; `latency` is of kept memory. None
            where the C library cannot be told, off the CPU, and where the number of repeats was given.
    """

    latency: Latency
    layers: LayerLatencies | None
    memory: MeasuredMemory | None
    energy: Energy | None
    energy_refusals: tuple[Refusal, ...]
    environment: Environment
    training: MeasuredStep | None = None
    fresh_latency_s: float | None = None

    @property
    def is_slower_fresh(self) -> bool:
        """Whether a forward that must map its memory first takes clearly longer than one with kept memory."""
        return self.fresh_latency_s is not None and self.fresh_latency_s > _CLEARLY * self.latency.p95_s


# A handful of single calls is known to about this factor.
_CLEARLY = 1.1


@dataclass(frozen=True, slots=True)
class Facility(Record):
    """A device or an energy meter, and whether it can be used here.

    Attributes:
        name: Its name.
        refusal: Why it cannot be used; None where it can.
    """

    name: str
    refusal: str | None


@dataclass(frozen=True, slots=True)
class Diagnosis(Shown):
    """What a measurement on this machine would rest on.

    Attributes:
        environment: The machine and the process.
        interop_threads: Threads that torch uses to run operators side by side.
        cpu_capability: The vector instructions that torch uses, such as "AVX2".
        versions: Packages with their versions; None where one is not installed.
        devices: Kinds of devices, and whether there is one.
        meters: Energy meters, and whether they can be used.
        noise: Latency of a fixed matrix product.
        repetition: The same product measured again, in turn with it: how far apart two measurements of one thing are.
    """

    environment: Environment
    interop_threads: int
    cpu_capability: str
    versions: tuple[tuple[str, str | None], ...]
    devices: tuple[Facility, ...]
    meters: tuple[Facility, ...]
    noise: Latency
    repetition: Comparison
