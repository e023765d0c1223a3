"""Records of what was measured here: latency, memory and energy, each with its provenance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EnergySource = Literal["rapl", "nvml", "jetson", "proxy", "model"]
Verdict = Literal["equal", "faster", "slower"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % bootstrap interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds per forward. Samples are kept in the order they were taken, wall and CPU time side by side."""

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
class Comparison:
    """One latency against a baseline. `ratio` is new over old: 0.9 takes 10 % less time.

    The interval allows for what samples cannot show, such as a machine that differs from session to session; where it
    holds 1, no difference was shown and the verdict is `equal`. `clock` says which samples were compared: CPU time
    where the wall clock was disturbed by other programs.
    """

    verdict: Verdict
    ratio: float
    ratio_interval: Interval
    clock: Literal["wall", "cpu"]


@dataclass(frozen=True, slots=True)
class LayerLatency:
    """Time that one module call spends itself, children apart; `module` is its index in the trace."""

    module: int
    path: str
    kind: str
    seconds: float
    interval_s: Interval
    share: float
    macs_per_s: float | None
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class LayerLatencies:
    """Layers and what lies between them; together they are `whole_s` exactly.

    `overhead_s` is what recording added to a forward, measured against the same forward without it, and taken out; it
    may be below zero where noise is larger. `recorded_s` is what the parts came to where nothing held them up, before
    they were scaled to the whole.
    """

    layers: tuple[LayerLatency, ...]
    between_layers_s: float
    whole_s: float
    overhead_s: float
    recorded_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """Device memory around one module call: in use before it, allocated by it, most in use during it."""

    module: int
    path: str
    before_bytes: int
    allocated_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """The allocator's peak during a forward, weights and inputs apart, and at which operator it stands.

    `scratch_bytes` is what operators held only while they ran, at the peak; `activation_bytes` is the rest of the peak.
    `tensor_peak_bytes` is the peak of tensors alone, without any scratch.
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
class Energy:
    """Joules per forward, and where the figure comes from; a proxy or a model is never a measurement."""

    joules: float
    source: EnergySource
    note: str
    idle_watts: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An energy meter that cannot be used here, and why."""

    meter: str
    reason: str


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine and the process a measurement was made in."""

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
class Measurement:
    """Everything measured in one go; what was not asked for is None."""

    latency: Latency
    layers: LayerLatencies | None
    memory: MeasuredMemory | None
    energy: Energy | None
    energy_refusals: tuple[Refusal, ...]
    environment: Environment


@dataclass(frozen=True, slots=True)
class Facility:
    """A device or an energy meter; `refusal` says why it cannot be used here, None that it can."""

    name: str
    refusal: str | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a measurement on this machine would rest on.

    `noise` is the latency of a fixed matrix product, and `repetition` the same product, measured in turn with it,
    against it: how far apart two measurements of one thing come out.
    """

    environment: Environment
    interop_threads: int
    cpu_capability: str
    versions: tuple[tuple[str, str | None], ...]
    devices: tuple[Facility, ...]
    meters: tuple[Facility, ...]
    noise: Latency
    repetition: Comparison
