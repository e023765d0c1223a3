"""Devices and their figures, each with its source."""

from __future__ import annotations

from typing import Literal

from edge_opt.records.fields import Record, Shown, field, record

FigureKind = Literal["vendor", "measured", "secondary", "derived"]
Engine = Literal["cpu", "gpu", "npu", "all"]
# int4 is of weights alone: they are widened to 16 bits where they are used. w8a16 has weights of 8 and activations of
# 16 bits, as NPUs take them.
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4", "w8a16"]
Bound = Literal["memory", "compute", "overhead", "unknown"]


@record
class Figure(Record):
    """One number about a device, who says so, and how they know."""

    value: float = field("The number; the field that holds it names the unit.")
    source: str = field("Where it was published or how it was found.")
    kind: FigureKind = field('"vendor", "measured", "secondary" (quoted by others) or "derived" from other figures.')
    low: float | None = field("The lowest of the sources; None where they agree.", default=None)
    high: float | None = field("The highest of the sources; None where they agree.", default=None)


@record
class Bandwidth(Record):
    """Bytes per second by one method."""

    method: str = field('How it is known: "datasheet", "quoted", or a measurement such as "memcpy".')
    engine: Engine | None = field("Engine that moved the bytes; None for a data-sheet figure.")
    figure: Figure = field("Bytes per second.")


@record
class Peak(Record):
    """Operations per second of one engine at one precision."""

    engine: Engine = field('Who computes; "all" is every engine of a module at once.')
    precision: str = field('Type of the numbers, such as "fp16".')
    figure: Figure = field("Operations per second, two per MAC.")


@record
class Power(Record):
    """Watts of the whole device in one state."""

    state: str = field('What the device does, such as "idle" or "load".')
    figure: Figure = field("Watts.")


@record
class KnownLatency(Record):
    """How long a named model takes on the device, as somebody published it."""

    model: str = field("The model that was timed.")
    figure: Figure = field("Seconds.")
    runtime: str | None = field("Runtime that ran it; None: not published.", default=None)
    version: str | None = field("Version of the runtime; None: not published.", default=None)
    day: str | None = field("Day of the publication; None: not known.", default=None)
    clock_hz: float | None = field("Clock of the cores; None: not published.", default=None)
    threads: int | None = field("Threads of the runtime; None: not published.", default=None)
    precision: str | None = field("Type of the numbers; None: not published.", default=None)


@record
class RamBank(Record):
    """A piece of a microcontroller's RAM without a gap."""

    name: str = field('Its name in the data sheet, such as "AXI SRAM".')
    figure: Figure = field("Its bytes.")


@record
class Microcontroller(Record):
    """What a model on a microcontroller depends on beside the sizes of RAM and flash."""

    core: str = field('The core that runs a model, such as "cortex-m7" or "xtensa-lx7".')
    source: str = field("Where the core and its extensions are published.")
    extension: str = field('What it adds for such work, such as "DSP" or "Helium (MVE)"; empty: nothing.', default="")
    executes_in_place: bool = field("Whether code and weights are used in flash; else they are copied to RAM.",
                                    default=True)  # fmt: skip
    ram_banks: tuple[RamBank, ...] = field("Pieces of the RAM; empty: one piece.", default=())
    external_ram_bytes: Figure | None = field("RAM beside the chip, on the board; None: none.", default=None)


@record
class DeviceSpec(Shown):
    """A device: what is known about it, datasheet and measurement apart. None and an absent entry mean: not known."""

    name: str = field('The name to ask for it by, such as "raspberry-pi-4".')
    title: str = field("The name for people.")
    engine: Engine = field("Who runs a model unless another is asked for.")
    aliases: tuple[str, ...] = field("Other names to ask for it by.")
    cores: Figure | None = field("Number of cores.")
    clock_hz: Figure | None = field("Cycles per second.")
    ram_bytes: tuple[Figure, ...] = field("Bytes of memory; every size that the device is sold with, smallest first.")
    flash_bytes: Figure | None = field("Bytes of flash memory.")
    bandwidths: tuple[Bandwidth, ...] = field("Bytes per second, by each method that is known.")
    bandwidth_unknown: str | None = field("Why there is no bandwidth; None where there is one.")
    peaks: tuple[Peak, ...] = field("Operations per second, by engine and precision.")
    powers: tuple[Power, ...] = field("Watts, by state.")
    overhead_s: Figure | None = field("Seconds that each operator takes beside its work.")
    latencies: tuple[KnownLatency, ...] = field("Models that somebody has timed on it.")
    note: str = field("What else a reader should know.")
    origin: str = field('The file that describes it, or "calibration".')
    fast_cores: Figure | None = field("How many of them are fast ones; None where all are alike.", default=None)
    fast_share: Figure | None = field("Share of the CPU's peak in the fast cores; None: all alike.", default=None)
    microcontroller: Microcontroller | None = field("Core and memories; None: not a microcontroller.", default=None)

    def peak(self, engine: str, precision: str) -> Figure | None:
        """Return the operations per second of one engine at one precision; None if not published.

        Args:
            engine: Who computes: "cpu", "gpu", "npu" or "all".
            precision: Type of the numbers, such as "fp16".
        """
        known = (peak.figure for peak in self.peaks if (peak.engine, peak.precision) == (engine, precision))
        return next(known, None)

    def bandwidth(self, method: str, engine: str | None = None) -> Figure | None:
        """Return bytes per second by one method; None if not published.

        Args:
            method: "datasheet" or "quoted"; with an engine, a measurement such as "memcpy".
            engine: Engine that moved the bytes; None for a data-sheet figure.
        """
        known = (item.figure for item in self.bandwidths if (item.method, item.engine) == (method, engine))
        return next(known, None)


@record
class UsedBandwidth(Record):
    """The bandwidth that a roofline stands on."""

    bytes_per_s: float = field("Bytes read plus bytes written per second.")
    method: str = field('How the figure is known, such as "datasheet" or "memcpy".')
    figure: Figure = field("The figure it was made from.")
    reading: str = field("What was made of the figure, in words.")


@record
class RooflinePoint(Record):
    """One layer under the roof, or the whole model."""

    module: int | None = field("Place of the module call in the trace; None for the whole model.")
    path: str = field('Path of the module; "" for the whole model.')
    kind: str = field("Class of the module; the model's name for the whole.")
    includes: tuple[str, ...] = field("Paths of the layers that are fused into it.")
    passes: int = field("How often data goes through memory: one pass per operator, fused ones together.")
    macs: int = field("Multiplications with an addition.")
    flops: int = field("Arithmetic operations, two per MAC.")
    bytes_read: int = field("Bytes read at this precision.")
    bytes_written: int = field("Bytes written at this precision.")
    attainable_flops_per_s: float | None = field("Highest FLOPs per second at this intensity; None: not known.")
    memory_s: float | None = field("Seconds to move the bytes; None where the bandwidth is not known.")
    compute_s: float | None = field("Seconds to compute; None where the peak is not known.")
    overhead_s: float | None = field("Overhead of all passes in seconds; None: not known, not in `seconds`.")
    seconds: float | None = field("Sum over passes of max(moving, computing), plus overhead; None: not known.")
    bound: Bound = field("What most of the time goes to.")
    is_lower_bound: bool = field("Whether one of its operators has no cost rule.")

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


@record
class Roofline(Shown):
    """A model under the roof of one engine of a device, at one precision, unfused and fused.

    Fused means that a batch norm with running statistics and an activation behind a convolution or a product happen in
    the same pass: what would lie between them is neither written nor read.
    """

    device: str = field("Name of the device.")
    engine: Engine = field("Who computes.")
    precision: Precision = field("Type of the numbers.")
    bandwidth: UsedBandwidth | None = field("The bandwidth that was used; None where none is known.")
    peak_flops_per_s: Figure | None = field("Operations per second at this precision; None where it is not known.")
    overhead_per_pass_s: Figure | None = field("Overhead of each pass in seconds; None: not known.")
    knee_flops_per_byte: float | None = field("FLOPs per byte above which compute is the limit; None: not known.")
    layers: tuple[RooflinePoint, ...] = field("One point per layer that does work of its own.")
    total: RooflinePoint = field("The whole model.")
    fused_layers: tuple[RooflinePoint, ...] = field("The layers after fusing.")
    fused_total: RooflinePoint = field("The whole model after fusing.")
    remarks: tuple[str, ...] = field("Figures that are missing, and what follows from that.")


# Said wherever a verdict on RAM is given. What rules know of an operator's own tensors is part of its live bytes.
SCRATCH_IS_APART = "memory is that of tensors: what kernels allocate inside (scratch) comes on top"


@record
class BatchFit(Shown):
    """The largest batch that fits, and what it needs. Where nothing fits, the bytes are those of one sample."""

    batch: int = field("The largest batch; 0 where even a single sample does not fit.")
    limit_bytes: int = field("Bytes that there are.")
    limit_source: str = field("Where the limit comes from, in words.")
    weight_bytes: int = field("Bytes of the weights.")
    buffer_bytes: int = field("Bytes of the buffers.")
    input_bytes: int = field("Bytes of the inputs.")
    activation_bytes: int = field("Peak of live activations in bytes.")
    shortfall_bytes: int | None = field("Bytes missing for one more sample; None: ended at `most`.")
    most: int = field("The largest batch that was to be tried.")
    allocator: str | None = field('Allocator that was simulated, such as "cuda"; None: tensors only.', default=None)
    reserved_bytes: int | None = field("Bytes that the allocator reserves; None without one.", default=None)
    outside: tuple[str, ...] = field("Work outside torch with its module; its memory is unknown.", default=())

    @property
    def fits(self) -> bool:
        return self.batch > 0

    @property
    def remark(self) -> str:
        """A sentence about memory that is not included."""
        return "; ".join((SCRATCH_IS_APART, *(f"{work}: its memory is not known" for work in self.outside)))

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.buffer_bytes + self.input_bytes + self.activation_bytes
