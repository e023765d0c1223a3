"""Records of what was measured here: latency, memory and energy, each with its provenance."""

from __future__ import annotations

from typing import Literal

from edge_opt.records.fields import Record, Shown, field, record

EnergySource = Literal["rapl", "nvml", "jetson", "proxy", "model"]
Verdict = Literal["equal", "faster", "slower"]


@record
class Interval(Record):
    """A 95 % bootstrap interval."""

    low: float = field("Its lower end, in the unit of the figure.")
    high: float = field("Its upper end.")


@record
class Latency(Shown):
    """Seconds per forward."""

    samples_s: tuple[float, ...] = field("Seconds on the wall clock, in the order they were taken.")
    cpu_samples_s: tuple[float, ...] = field("Seconds of CPU time of the same samples, all threads together.")
    minimum_s: float = field("The shortest sample.")
    median_s: float = field("The middle sample: the figure to quote.")
    mean_s: float = field("The mean of the samples.")
    std_s: float = field("Their standard deviation.")
    p90_s: float = field("Nine samples in ten are not longer.")
    p95_s: float = field("95 in 100 samples are not longer.")
    p99_s: float = field("99 in 100 samples are not longer.")
    median_interval_s: Interval = field("95 % interval of the median.")
    cpu_minimum_s: float = field("The shortest sample in CPU time.")
    cpu_median_s: float = field("The middle sample in CPU time.")
    batch_size: int = field("Samples in one forward.")
    is_noisy: bool = field("Whether the samples scatter much, or the median is not known as well as was asked.")
    is_contended: bool = field("Whether other programs used the CPU meanwhile.")
    remarks: tuple[str, ...] = field("What a reader should know before trusting the figures.")

    @property
    def throughput(self) -> float:
        """Samples per second at the median."""
        return self.batch_size / self.median_s


@record
class Comparison(Shown):
    """One latency against a baseline."""

    verdict: Verdict = field('"equal" means that no difference could be shown, because the interval holds 1.')
    ratio: float = field("New over old: 0.9 takes 10 % less time.")
    ratio_interval: Interval = field("95 % interval of the ratio, differences between sessions included.")
    clock: Literal["wall", "cpu"] = field('"cpu" where other programs disturbed the wall clock.')


@record
class LayerLatency(Record):
    """Time that one module call spends itself, children apart."""

    module: int = field("Place of the module call in the trace.")
    path: str = field("Path of the module.")
    kind: str = field('Class of the module, such as "Conv2d".')
    seconds: float = field("Its part of one forward.")
    interval_s: Interval = field("Its 95 % interval.")
    share: float = field("Its part as a share of the whole forward.")
    macs_per_s: float | None = field("MACs per second; None where one of its operators has no cost rule.")
    bytes_per_s: float | None = field("Bytes moved per second; None where one of its operators has no cost rule.")


@record
class LayerLatencies(Shown):
    """Layers and what lies between them; together they are `whole_s` exactly."""

    layers: tuple[LayerLatency, ...] = field("The calls that run operators or have no children.")
    between_layers_s: float = field("Seconds spent in containers, in calling modules and outside of layers.")
    whole_s: float = field("Seconds of the whole forward: the median of `Measurement.latency`.")
    overhead_s: float = field("Seconds that recording added, subtracted; negative where noise is larger.")
    recorded_s: float | None = field("Sum of the parts before scaling to the whole; None in older files.", default=None)


@record
class ModuleMemory(Record):
    """Device memory around one module call."""

    module: int = field("Place of the module call in the trace.")
    path: str = field("Path of the module.")
    before_bytes: int = field("Bytes in use before it.")
    allocated_bytes: int = field("Bytes that it took and kept; below zero where it gave back more.")
    peak_bytes: int = field("Most bytes in use during it.")


@record
class MeasuredMemory(Shown):
    """The allocator's peak during a forward, weights and inputs apart, and where it is."""

    peak_bytes: int = field("The peak in bytes.")
    activation_bytes: int = field("The part of the peak that is tensors.")
    scratch_bytes: int = field("The part of the peak that operators held only while they ran.")
    tensor_peak_bytes: int = field("The peak of tensors alone, without any scratch.")
    peak_op: str = field("The operator at the peak.")
    peak_module: str = field("Path of the module at the peak.")
    param_bytes: int = field("Bytes of the weights, which are not in the peak.")
    modules: tuple[ModuleMemory, ...] = field("Memory around each module call.")
    source: str = field("Who counted: events or statistics of the allocator.")


@record
class Energy(Shown):
    """Joules per forward, and where the figure comes from; a proxy or a model is never a measurement."""

    joules: float = field("Joules per forward.")
    source: EnergySource = field('The meter, "proxy" (watts times time) or "model" (joules per operation and byte).')
    note: str = field("What the figure includes, in words.")
    idle_watts: float | None = field("Watts at rest that were subtracted; None where nothing was.", default=None)


@record
class Refusal(Record):
    """An energy meter that cannot be used here."""

    meter: str = field("Name of the meter.")
    reason: str = field("Why it cannot be used.")


@record
class Environment(Shown):
    """The machine and the process a measurement was made in."""

    cpu: str = field("Name of the processor.")
    cores: int = field("Cores that the process may use.")
    threads: int = field("Threads that torch uses, or the runtime that was timed.")
    governor: str | None = field('How Linux chooses the clock rate, such as "performance"; None where it does not say.')
    load_1min: float | None = field("Mean number of busy processes in the last minute; None where it is not known.")
    memory_bytes: int = field("Bytes of RAM.")
    system: str = field("Operating system, its version and the architecture.")
    python: str = field("Version of Python.")
    torch: str = field('Version of torch; "" where it was not used.')
    device: str = field('Where the model ran, such as "cpu".')


@record
class LayerStep(Record):
    """The measured time of one module, forward and backward, without its children; all its calls together."""

    path: str = field('Path of the module; "" for the model itself.')
    kind: str = field("Class of the module.")
    forward_s: float = field("Seconds of its forward.")
    backward_s: float = field("Seconds of its gradients.")


@record
class MeasuredStep(Record):
    """A real forward and backward, the loss being the sum of the output; without an optimizer."""

    whole_s: float = field("Seconds of both, the median of runs without time stamps.")
    forward_s: float = field("Part of the forward, the loss included.")
    backward_s: float = field("Part of the backward.")
    between_s: float = field("Seconds that belong to no module: the loss, and autograd before its first node.")
    layers: tuple[LayerStep, ...] = field("Modules ordered by path; with `between_s` they add up to `whole_s`.")
    recorded: int = field("Steps with time stamps, whose medians divide the whole.")


@record
class Measurement(Shown):
    """Everything measured at one time; what was not asked for is None."""

    latency: Latency = field("Seconds per forward.")
    layers: LayerLatencies | None = field("Each layer's part of the latency.")
    memory: MeasuredMemory | None = field("The peak of memory in one forward.")
    energy: Energy | None = field("Joules per forward; None also where no meter could be used.")
    energy_refusals: tuple[Refusal, ...] = field("Meters that could not be used, and why.")
    environment: Environment = field("The machine and the process.")
    training: MeasuredStep | None = field("Forward and backward by layer; None: no gradient.", default=None)
    fresh_latency_s: float | None = field("Median seconds if memory must be mapped first; None: unknown.", default=None)

    @property
    def is_slower_fresh(self) -> bool:
        """Whether a forward that must map its memory first takes clearly longer than one with kept memory."""
        return self.fresh_latency_s is not None and self.fresh_latency_s > _CLEARLY * self.latency.p95_s


# A handful of single calls is known to about this factor.
_CLEARLY = 1.1


@record
class Facility(Record):
    """A device or an energy meter, and whether it can be used here."""

    name: str = field("Its name.")
    refusal: str | None = field("Why it cannot be used; None where it can.")


@record
class Diagnosis(Shown):
    """Facts about this machine that affect measurements."""

    environment: Environment = field("The machine and the process.")
    interop_threads: int = field("Threads that torch uses to run operators side by side.")
    cpu_capability: str = field('The vector instructions that torch uses, such as "AVX2".')
    versions: tuple[tuple[str, str | None], ...] = field("Packages with their versions; None: not installed.")
    devices: tuple[Facility, ...] = field("Kinds of devices, and whether there is one.")
    meters: tuple[Facility, ...] = field("Energy meters, and whether they can be used.")
    noise: Latency = field("Latency of a fixed matrix product.")
    repetition: Comparison = field("The same product measured again, interleaved: the noise of one measurement.")
