"""Records of devices: figures with their sources, rooflines, utilisation and batches that fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FigureKind = Literal["vendor", "measured", "secondary", "derived"]
Engine = Literal["cpu", "gpu", "npu", "all"]
Precision = Literal["fp32", "fp16", "bf16", "int8"]
Bound = Literal["memory", "compute", "overhead", "unknown"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number about a device, who says so, and how they know; `low` and `high` where sources disagree."""

    value: float
    source: str
    kind: FigureKind
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second by one method. `engine` is who moved them; None for a figure on paper."""

    method: str
    engine: Engine | None
    figure: Figure


@dataclass(frozen=True, slots=True)
class Peak:
    """Operations per second, two per MAC, of one engine at one precision; "all" is every engine of a module at once."""

    engine: Engine
    precision: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Power:
    """Watts of the whole device in one state, such as "idle" or "load"."""

    state: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class KnownLatency:
    """Seconds that a named model takes on the device, as somebody published it."""

    model: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device: what is known about it, datasheet and measurement apart. None and an absent entry mean: not known.

    `engine` is the one that runs a model unless another is asked for. A device sold with several sizes of RAM has
    them all in `ram_bytes`, smallest first.
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

    def peak(self, engine: str, precision: str) -> Figure | None:
        """Operations per second of one engine at one precision; None where nobody has said."""
        return next(
            (peak.figure for peak in self.peaks if (peak.engine, peak.precision) == (engine, precision)),
            None,
        )

    def bandwidth(self, method: str, engine: str | None = None) -> Figure | None:
        """Bytes per second by one method: "datasheet", "quoted", or with an engine "memcpy" and the like."""
        return next(
            (item.figure for item in self.bandwidths if (item.method, item.engine) == (method, engine)),
            None,
        )


@dataclass(frozen=True, slots=True)
class UsedBandwidth:
    """The bandwidth that a roofline stands on: which figure, and what was made of it."""

    bytes_per_s: float
    method: str
    figure: Figure
    reading: str


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """One layer under the roof, or the whole model (`module` is None).

    `seconds` is the sum over passes of the longer of moving and computing, plus overhead; None where a figure that
    it needs is not known, and then `memory_s` and `compute_s` hold what is. `includes` names layers fused into it.
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
class Roofline:
    """A model under the roof of one engine of a device, at one precision, unfused and fused.

    Fused means that a batch norm with running statistics and an activation behind a convolution or a product happen
    in the same pass: what would lie between them is neither written nor read.
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
class Utilization:
    """What a layer, or the whole (`module` is None), makes of the device in `seconds`, in numbers and in words."""

    module: int | None
    path: str
    seconds: float
    is_measured: bool
    bandwidth: float | None
    compute: float | None
    reading: str
    advice: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BatchFit:
    """The largest batch that fits, and what it needs; `batch` is 0 where even a single sample does not fit.

    The bytes are those of `batch`, or of one sample where nothing fits: weights, buffers, inputs and the peak of live
    activations in an eager run. `shortfall_bytes` is missing for one sample more; None when the search ended at
    `most`, the largest batch it was to try.
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

    @property
    def fits(self) -> bool:
        return self.batch > 0

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.buffer_bytes + self.input_bytes + self.activation_bytes
