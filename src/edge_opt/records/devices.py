"""Devices and their figures, each with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge_opt.records.shown import Record, Shown

FigureKind = Literal["vendor", "measured", "secondary", "derived"]
Engine = Literal["cpu", "gpu", "npu", "all"]
# int4 is of weights alone: they are widened to 16 bits where they are used.
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
Bound = Literal["memory", "compute", "overhead", "unknown"]


@dataclass(frozen=True, slots=True)
class Figure(Record):
    """One number about a device, who says so, and how they know.

    Attributes:
        value: The number; the field that holds it names the unit.
        source: Where it was published or how it was found.
        kind: Who says so: "vendor", "measured", "secondary" (somebody who quotes it) or "derived" from other figures.
        low: The lowest of the sources; None where they agree.
        high: The highest of the sources; None where they agree.
    """

    value: float
    source: str
    kind: FigureKind
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Bandwidth(Record):
    """Bytes per second by one method.

    Attributes:
        method: How it is known: "datasheet", "quoted", or a measurement such as "memcpy".
        engine: Who moved the bytes; None for a figure on paper.
        figure: Bytes per second.
    """

    method: str
    engine: Engine | None
    figure: Figure


@dataclass(frozen=True, slots=True)
class Peak(Record):
    """Operations per second of one engine at one precision.

    Attributes:
        engine: Who computes; "all" is every engine of a module at once.
        precision: Type of the numbers, such as "fp16".
        figure: Operations per second, two per MAC.
    """

    engine: Engine
    precision: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Power(Record):
    """Watts of the whole device in one state.

    Attributes:
        state: What the device does, such as "idle" or "load".
        figure: Watts.
    """

    state: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class KnownLatency(Record):
    """How long a named model takes on the device, as somebody published it.

    Attributes:
        model: The model that was timed.
        figure: Seconds.
    """

    model: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class DeviceSpec(Shown):
    """A device: what is known about it, datasheet and measurement apart. None and an absent entry mean: not known.

    Attributes:
        name: The name to ask for it by, such as "raspberry-pi-4".
        title: The name for people.
        engine: Who runs a model unless another is asked for.
        aliases: Other names to ask for it by.
        cores: Number of cores.
        fast_cores: How many of them are fast ones; None where all are alike.
        fast_share: Share of the CPU's peak that the fast cores have; None where all are alike.
        clock_hz: Cycles per second.
        ram_bytes: Bytes of memory; every size that the device is sold with, smallest first.
        flash_bytes: Bytes of flash memory.
        bandwidths: Bytes per second, by each method that is known.
        bandwidth_unknown: Why there is no bandwidth; None where there is one.
        peaks: Operations per second, by engine and precision.
        powers: Watts, by state.
        overhead_s: Seconds that each operator takes beside its work.
        latencies: Models that somebody has timed on it.
        note: What else a reader should know.
        origin: The file that describes it, or "calibration".
    """

    name: str
    title: str
    engine: Engine
    aliases: tuple[str, ...]
    cores: Figure | None
    clock_hz: Figure | None
    ram_bytes: tuple[Figure, ...]
    flash_bytes: Figure | None
    bandwidths: tuple[Bandwidth, ...]
    bandwidth_unknown: str | None
    peaks: tuple[Peak, ...]
    powers: tuple[Power, ...]
    overhead_s: Figure | None
    latencies: tuple[KnownLatency, ...]
    note: str
    origin: str
    fast_cores: Figure | None = None
    fast_share: Figure | None = None

    def peak(self, engine: str, precision: str) -> Figure | None:
        """Operations per second of one engine at one precision; None where nobody has said.

        Args:
            engine: Who computes: "cpu", "gpu", "npu" or "all".
            precision: Type of the numbers, such as "fp16".
        """
        return next(
            (peak.figure for peak in self.peaks if (peak.engine, peak.precision) == (engine, precision)),
            None,
        )

    def bandwidth(self, method: str, engine: str | None = None) -> Figure | None:
        """Bytes per second by one method; None where nobody has said.

        Args:
            method: "datasheet" or "quoted"; with an engine, a measurement such as "memcpy".
            engine: Who moved the bytes; None for a figure on paper.
        """
        return next(
            (item.figure for item in self.bandwidths if (item.method, item.engine) == (method, engine)),
            None,
        )


@dataclass(frozen=True, slots=True)
class UsedBandwidth(Record):
    """The bandwidth that a roofline stands on.

    Attributes:
        bytes_per_s: Bytes read plus bytes written per second.
        method: How the figure is known, such as "datasheet" or "memcpy".
        figure: The figure it was made from.
        reading: What was made of the figure, in words.
    """

    bytes_per_s: float
    method: str
    figure: Figure
    reading: str


@dataclass(frozen=True, slots=True)
class RooflinePoint(Record):
    """One layer under the roof, or the whole model.

    Attributes:
        module: Place of the module call in the trace; None for the whole model.
        path: Path of the module; "" for the whole model.
        kind: Class of the module; the model's name for the whole.
        includes: Paths of the layers that are fused into it.
        passes: How often data goes through memory: one pass per operator, fused ones together.
        macs: Multiplications with an addition.
        flops: Arithmetic operations, two per MAC.
        bytes_read: Bytes read at this precision.
        bytes_written: Bytes written at this precision.
        attainable_flops_per_s: FLOPs per second at most, for work of this intensity; None where a figure is not known.
        memory_s: Seconds to move the bytes; None where the bandwidth is not known.
        compute_s: Seconds to compute; None where the peak is not known.
        overhead_s: Seconds of overhead of all passes; None where it is not known, and then not in `seconds`.
        seconds: Sum over passes of the longer of moving and computing, plus overhead; None where a figure is not known.
        bound: What most of the time goes to.
        is_lower_bound: Whether an operator of it has no price.
    """

    module: int | None
    path: str
    kind: str
    includes: tuple[str, ...]
    passes: int
    macs: int
    flops: int
    bytes_read: int
    bytes_written: int
    attainable_flops_per_s: float | None
    memory_s: float | None
    compute_s: float | None
    overhead_s: float | None
    seconds: float | None
    bound: Bound
    is_lower_bound: bool

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte moved; None where nothing is moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else None

    @property
    def bandwidth_utilization(self) -> float | None:
        """Share of the time in which memory is busy."""
        return self.memory_s / self.seconds if self.memory_s is not None and self.seconds else None

    @property
    def compute_utilization(self) -> float | None:
        """Share of the time in which the arithmetic is busy."""
        return self.compute_s / self.seconds if self.compute_s is not None and self.seconds else None


@dataclass(frozen=True, slots=True)
class Roofline(Shown):
    """A model under the roof of one engine of a device, at one precision, unfused and fused.

    Fused means that a batch norm with running statistics and an activation behind a convolution or a product happen in
    the same pass: what would lie between them is neither written nor read.

    Attributes:
        device: Name of the device.
        engine: Who computes.
        precision: Type of the numbers.
        bandwidth: The bandwidth that was used; None where none is known.
        peak_flops_per_s: Operations per second at this precision; None where it is not known.
        overhead_per_pass_s: Seconds that each pass takes beside its work; None where it is not known.
        knee_flops_per_byte: FLOPs per byte from which on compute is the limit; None where a figure is not known.
        layers: One point per layer that does work of its own.
        total: The whole model.
        fused_layers: The layers after fusing.
        fused_total: The whole model after fusing.
        remarks: Figures that are missing, and what follows from that.
    """

    device: str
    engine: Engine
    precision: Precision
    bandwidth: UsedBandwidth | None
    peak_flops_per_s: Figure | None
    overhead_per_pass_s: Figure | None
    knee_flops_per_byte: float | None
    layers: tuple[RooflinePoint, ...]
    total: RooflinePoint
    fused_layers: tuple[RooflinePoint, ...]
    fused_total: RooflinePoint
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Utilization(Shown):
    """How well a layer, or the whole model, uses the device, in numbers and in words.

    Attributes:
        module: Place of the module call in the trace; None for the whole model.
        path: Path of the module; "" for the whole model.
        seconds: The time in which it is used.
        is_measured: Whether that time was measured; else it is the roofline's.
        bandwidth: Share of the bandwidth that is used; above 1 where data came from a cache.
        compute: Share of the peak that is used; None where the peak is not known.
        reading: What the share of the bandwidth says, in words.
        advice: What to try.
    """

    module: int | None
    path: str
    seconds: float
    is_measured: bool
    bandwidth: float | None
    compute: float | None
    reading: str
    advice: tuple[str, ...]


# Said wherever a verdict on RAM is given. What rules know of an operator's own tensors is part of its live bytes.
SCRATCH_IS_APART = "memory is that of tensors: what kernels allocate inside (scratch) comes on top"


@dataclass(frozen=True, slots=True)
class BatchFit(Shown):
    """The largest batch that fits, and what it needs. Where nothing fits, the bytes are those of one sample.

    Attributes:
        batch: The largest batch; 0 where even a single sample does not fit.
        limit_bytes: Bytes that there are.
        limit_source: Where the limit comes from, in words.
        weight_bytes: Bytes of the weights.
        buffer_bytes: Bytes of the buffers.
        input_bytes: Bytes of the inputs.
        activation_bytes: Peak of live activations in bytes.
        shortfall_bytes: Bytes that are missing for one sample more; None where the search ended at `most`.
        most: The largest batch that was to be tried.
        allocator: Whose blocks and segments were counted, such as "cuda"; None: the tensors alone.
        reserved_bytes: Bytes that the allocator takes from the device; None without one.
    """

    batch: int
    limit_bytes: int
    limit_source: str
    weight_bytes: int
    buffer_bytes: int
    input_bytes: int
    activation_bytes: int
    shortfall_bytes: int | None
    most: int
    allocator: str | None = None
    reserved_bytes: int | None = None

    @property
    def fits(self) -> bool:
        return self.batch > 0

    @property
    def remark(self) -> str:
        """What the bytes leave out, in a sentence."""
        return SCRATCH_IS_APART

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.buffer_bytes + self.input_bytes + self.activation_bytes
