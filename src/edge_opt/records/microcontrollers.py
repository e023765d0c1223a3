"""RAM and flash of a model on a microcontroller, with what each consists of."""

from __future__ import annotations

from edge_opt import units
from edge_opt.records.fields import Record, Shown, field, record


def short_name(name: str) -> str:
    """Return the end of a tensor's name; converters join the names of all that was fused.

    >>> short_name("net/conv/Relu;net/conv/BiasAdd;net/conv/Conv2D")
    'net/conv/Relu'
    """
    first = name.split(";")[0]
    return first if len(first) <= 40 else f"…{first[-39:]}"


@record
class MemoryPart(Record):
    """One part of an amount of memory."""

    name: str = field("What it is.")
    nbytes: int = field("Its bytes.")


@record
class MemoryVerdict(Record):
    """Whether one kind of memory of a board is enough."""

    memory: str = field('"RAM" or "Flash".')
    needed_bytes: int = field("What the model and the runtime need, without the margin.")
    margin_bytes: int = field("What is kept free for what is not counted.")
    available_bytes: int = field("What the board has.")
    bank_bytes: int = field("The largest piece of it without a gap; the arena must fit one piece.")
    not_counted: str = field("What the margin is for.")
    largest_piece_bytes: int = field("The largest piece that is needed without a gap.")

    @property
    def left_bytes(self) -> int:
        """What is left beside the margin; negative where the memory is not enough."""
        whole = self.available_bytes - self.needed_bytes - self.margin_bytes
        return min(whole, self.bank_bytes - self.largest_piece_bytes)

    @property
    def fits(self) -> bool:
        return self.left_bytes >= 0

    @property
    def text(self) -> str:
        """What is needed and left, in a few words."""
        left = f"{units.size(abs(self.left_bytes))} {'left' if self.fits else 'missing'}"
        if self.left_bytes < self.available_bytes - self.needed_bytes - self.margin_bytes:
            left += f" in its largest bank of {units.size(self.bank_bytes)}"
        return (
            f"{units.size(self.needed_bytes)} of {units.size(self.available_bytes)}, {left} with a margin of "
            f"{units.size(self.margin_bytes)} for {self.not_counted}"
        )


@record
class BatteryLife(Shown):
    """How long a battery lasts if a model runs at regular times and the device sleeps in between."""

    target: str = field("Name of the device.")
    capacity_j: float = field("Energy of the full battery, in joules.")
    every_s: float = field("Seconds from one run to the next.")
    run_j: float = field("Joules of one run.")
    run_s: float = field("Seconds of one run.")
    idle_w: float = field("Watts between two runs.")
    life_s: float = field("Seconds until the battery is empty.")
    notes: tuple[str, ...] = field("Where power and time are from, and what is not in it.")

    @property
    def average_w(self) -> float:
        """Watts on average."""
        return self.capacity_j / self.life_s

    @property
    def text(self) -> str:
        """The result in a few words."""
        power = f"{self.average_w * 1e6:.3g} µW on average"
        return f"{self.life_s / 86400:.3g} days on {self.target}, one run every {self.every_s:g} s, {power}"

    def _brief(self) -> str:
        return self.text


@record
class McuMemory(Shown):
    """What TensorFlow Lite Micro needs for a model on one core: RAM in its arena, and flash."""

    model: str = field("Name of the model.")
    core: str = field('The core, such as "cortex-m4", or the board.')
    kernels: str = field('"reference" (TFLM\'s own) or "cmsis-nn".')
    arena_bytes: int = field("The smallest arena that works, aligned to 16 bytes.")
    head_bytes: int = field("Activations and scratch, planned at the start of the arena.")
    flash_bytes: int = field("Model file and code: what must be in flash.")
    flash_parts: tuple[MemoryPart, ...] = field("Weights, overhead of the file, core of TFLM, shared code, operators.")
    tail_bytes: int = field("Persistent data, stacked at the end of the arena.", default=0)
    tail_parts: tuple[MemoryPart, ...] = field("The tail by category, alignment included.", default=())
    planning_bytes: int = field("What TFLM needs while it plans; it may exceed head and tail.", default=0)
    scratch_bytes: int = field("Scratch that kernels request, added up; it does not all live at once.", default=0)
    peak_tensors: tuple[MemoryPart, ...] = field("Buffers that live at the peak, the largest first.", default=())
    peak_operator: str = field("The operator at the peak.", default="")
    operators: tuple[str, ...] = field("Operators to register in a `MicroMutableOpResolver`.", default=())
    verdicts: tuple[MemoryVerdict, ...] = field("Whether the board's RAM and flash suffice; of a core: none.",
                                                default=())  # fmt: skip
    notes: tuple[str, ...] = field("Assumptions, and what is not in the figures.", default=())
    precision: str = field("Type that most of the work is computed in.", default="int8")
    advice: tuple[str, ...] = field("What would lower the arena, with the head that it would leave.", default=())

    @property
    def arena_used_bytes(self) -> int:
        """Head and tail, as `arena_used_bytes()` of the interpreter returns it."""
        return self.head_bytes + self.tail_bytes

    @property
    def fits(self) -> bool | None:
        """Whether RAM and flash of the board suffice; None where no board was named."""
        return all(verdict.fits for verdict in self.verdicts) if self.verdicts else None

    @property
    def peak_text(self) -> str:
        """What lives at the peak of the head, in a few words."""
        tensors = ", ".join(f"{short_name(part.name)} {units.size(part.nbytes)}" for part in self.peak_tensors[:3])
        more = len(self.peak_tensors) - 3
        return f"{tensors}{f' and {more} more' if more > 0 else ''}"

    def parts_text(self, memory: str) -> str:
        """Return what the RAM or the flash consists of, in a few words.

        Args:
            memory: "RAM" or "Flash".
        """
        if memory == "RAM":
            return f"activations and scratch {units.size(self.head_bytes)}, persistent {units.size(self.tail_bytes)}"
        weights = self.flash_parts[0].nbytes
        return f"weights {units.size(weights)}, rest of the file and code {units.size(self.flash_bytes - weights)}"

    def _brief(self) -> str:
        fits = {None: "", True: "; it fits", False: "; it does not fit"}[self.fits]
        return (
            f"{self.model} on {self.core} with {self.kernels} kernels: arena {units.size(self.arena_bytes)}, "
            f"flash {units.size(self.flash_bytes)}{fits}"
        )
