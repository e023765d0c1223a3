"""Rooflines: what bounds a model on a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast, get_args

from edge_opt.boards.catalog import ENGINES
from edge_opt.boards.fused_layers import MemoryPass, by_module, fused_passes, passes
from edge_opt.boards.targets import Target, find_spec
from edge_opt.errors import InvalidInput
from edge_opt.records.devices import (
    Bound,
    DeviceSpec,
    Engine,
    Figure,
    Precision,
    Roofline,
    RooflinePoint,
    UsedBandwidth,
)
from edge_opt.records.profiles import ModelProfile

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# The first available measurement of an engine counts. A copy reads and writes each byte that it counts once.
_MEASURED = (
    ("traffic", 1, "bytes read plus bytes written, measured on the {engine}"),
    ("stream_copy", 1, "STREAM copy, bytes read plus bytes written, measured on the {engine}"),
    ("memcpy", 2, "twice memcpy on the {engine}: a copy reads and writes every byte"),
    ("read", 1, "reads alone, measured on the {engine}"),
)
_PAPER = (("datasheet", "the memory's peak by the data sheet"), ("quoted", "a quoted figure; nothing better is known"))


def roofline(
    profile: ModelProfile,
    device: Target,
    precision: Precision = "fp32",
    *,
    engine: Engine | None = None,
) -> Roofline:
    """Return what limits a model and each of its layers on a device: memory, compute or overhead, and the time at best.

    Without a bandwidth, or a peak at that precision, the bound and the time are unknown; no other figure is put in
    their place.

    Args:
        profile: The model and its inputs.
        device: A device of the catalog, its file or `DeviceSpec`, or a calibrated machine such as "host".
        precision: Type of the numbers, by which bytes and the peak are chosen.
        engine: Who computes; the device's own choice unless given.

    >>> import edge_opt as eo
    >>> from edge_opt.model import SmallCNN
    >>> roof = roofline(eo.profile(SmallCNN(), (1, 1, 28, 28)), "raspberry-pi-4")
    >>> [(layer.path, layer.bound) for layer in roof.layers if layer.macs]
    [('conv1', 'memory'), ('conv2', 'compute'), ('classifier', 'memory')]
    """
    check_asked(profile, precision, engine)
    spec = find_spec(device)
    roof = EngineLimits(spec, engine or spec.engine, precision)
    layers, total = _points(profile, passes(profile, precision), roof)
    fused_layers, fused_total = _points(profile, fused_passes(profile, precision), roof)
    return Roofline(
        device=spec.name,
        engine=roof.engine,
        precision=precision,
        bandwidth=roof.bandwidth,
        peak_flops_per_s=roof.peak,
        overhead_per_pass_s=spec.overhead_s,
        knee_flops_per_byte=roof.knee,
        layers=layers,
        total=total,
        fused_layers=fused_layers,
        fused_total=fused_total,
        remarks=tuple(figure_remarks(profile, spec, roof)),
    )


def check_asked(profile: ModelProfile, precision: str, engine: str | None) -> None:
    """Refuse a precision or an engine that there is not, and a profile that counts as another tool does."""
    if precision not in PRECISIONS:
        raise InvalidInput(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if engine is not None and engine not in ENGINES:
        raise InvalidInput(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}")
    if profile.convention != "edge_opt":
        raise InvalidInput(
            f"the profile counts as {profile.convention} does, and a roofline needs our own counts; "
            "profile again without convention="
        )


def used_bandwidth(spec: DeviceSpec, engine: str) -> UsedBandwidth | None:
    """Return the bandwidth of an engine: measured on it, else of the data sheet; None where neither is known.

    >>> from edge_opt.boards.catalog import device
    >>> used_bandwidth(device("raspberry-pi-5"), "cpu").reading
    'twice memcpy on the cpu: a copy reads and writes every byte'
    """
    for method, factor, reading in _MEASURED:
        figure = spec.bandwidth(method, engine)
        if figure is not None:
            return UsedBandwidth(factor * figure.value, method, figure, reading.format(engine=engine))
    for method, reading in _PAPER:
        figure = spec.bandwidth(method)
        if figure is not None:
            return UsedBandwidth(figure.value, method, figure, reading)
    return None


HALF_PRECISIONS = ("fp16", "bf16")
_WIDER: dict[Precision, tuple[Precision, ...]] = {
    "fp32": ("fp32",), "fp16": ("fp16",), "bf16": ("bf16",), "int8": ("int8", "fp16", "fp32"),
    "int4": ("int4", "fp16", "fp32"), "w8a16": ("w8a16", "fp16", "fp32"),
}  # fmt: skip


class EngineLimits:
    """The figures of one engine at one precision, and how long a pass takes under them.

    With `may_widen`, int8 and int4 without a published peak compute at the next wider one's, `computes_in`: numbers
    can always be widened, so that is the least the engine reaches. fp16 and bf16 are not widened: an engine without
    such arithmetic has no time in them.
    """

    def __init__(self, spec: DeviceSpec, engine: Engine, precision: Precision, may_widen: bool = False) -> None:
        self.engine = engine
        self.precision = precision
        self.bandwidth = used_bandwidth(spec, engine)
        # Four-bit weights are widened before they are multiplied.
        widened = _WIDER[precision] if may_widen or precision == "int4" else (precision,)
        known = (name for name in widened if spec.peak(engine, name) is not None)
        self.computes_in: Precision = next(known, precision)
        self.peak: Figure | None = spec.peak(engine, self.computes_in)
        self.int8_peak = spec.peak(engine, "int8") or (self.peak if may_widen else None)
        self.overhead_s = None if spec.overhead_s is None else spec.overhead_s.value

    @property
    def knee(self) -> float | None:
        """FLOPs per byte from which on compute is the limit, or None."""
        if self.peak is None or self.bandwidth is None:
            return None
        return self.peak.value / self.bandwidth.bytes_per_s

    def attainable(self, flops: int, nbytes: int) -> float | None:
        """Return the most FLOPs per second for work of this intensity."""
        if self.peak is None or self.bandwidth is None:
            return None
        return min(self.peak.value, flops / nbytes * self.bandwidth.bytes_per_s) if nbytes else self.peak.value

    def memory_s(self, item: MemoryPass, share: float = 1.0) -> float | None:
        """Return the seconds to move a pass's bytes at a share of the bandwidth; None where it is not known."""
        moved = item.bytes_read + item.bytes_written
        if not moved:
            return 0.0
        return None if self.bandwidth is None else moved / self.bandwidth.bytes_per_s / share

    def compute_s(self, item: MemoryPass, share: float = 1.0) -> float | None:
        """Return the seconds of a pass's arithmetic at a share of the peak; None where it is not known."""
        if not item.flops or item.arithmetic == "none":
            return 0.0
        peak: Figure | None = self.peak if item.arithmetic == "asked" else self.int8_peak
        return None if peak is None else item.flops / peak.value / share


def _points(
    profile: ModelProfile, items: Sequence[MemoryPass], roof: EngineLimits
) -> tuple[tuple[RooflinePoint, ...], RooflinePoint]:
    """Return one point per module call that does work of its own, in order of the trace, and one for the whole."""
    modules = profile.trace.modules
    layers = tuple(
        _point(roof, own, number, modules[number].path, modules[number].kind, profile)
        for number, own in sorted(by_module(items).items())
    )
    return layers, _point(roof, items, None, "", profile.name, profile)


def _point(
    roof: EngineLimits, items: Sequence[MemoryPass], module: int | None, path: str, kind: str, profile: ModelProfile
) -> RooflinePoint:
    priced = [item for item in items if not item.is_unpriced]
    memory = [roof.memory_s(item) for item in priced]
    compute = [roof.compute_s(item) for item in priced]
    overhead_s = None if roof.overhead_s is None else roof.overhead_s * len(items)
    flops, read = sum(item.flops for item in items), sum(item.bytes_read for item in items)
    written = sum(item.bytes_written for item in items)
    bound, seconds = limit(memory, compute, overhead_s)
    included = () if module is None else dict.fromkeys(number for item in items for number in item.includes)
    return RooflinePoint(
        module=module,
        path=path,
        kind=kind,
        includes=tuple(profile.trace.modules[number].path for number in included if number != module),
        passes=len(items),
        macs=sum(item.macs for item in items),
        flops=flops,
        bytes_read=read,
        bytes_written=written,
        attainable_flops_per_s=roof.attainable(flops, read + written),
        memory_s=_total(memory),
        compute_s=_total(compute),
        overhead_s=overhead_s,
        seconds=seconds,
        bound=bound,
        is_lower_bound=len(priced) < len(items),
    )


def limit(
    memory: Sequence[float | None], compute: Sequence[float | None], overhead_s: float | None
) -> tuple[Bound, float | None]:
    """Return what most of the time goes to, and the time: passes follow each other, and each takes its longer half."""
    spent: dict[Bound, float] = {"memory": 0.0, "compute": 0.0, "overhead": overhead_s or 0.0}
    if not memory:
        return "unknown", None
    for moving, computing in zip(memory, compute, strict=True):
        if moving is None or computing is None:
            return "unknown", None
        spent["compute" if computing >= moving else "memory"] += max(moving, computing)
    return max(spent, key=lambda bound: spent[bound]), sum(spent.values())


def _total(parts: Iterable[float | None]) -> float | None:
    known = list(parts)
    return None if not known or None in known else sum(cast("list[float]", known))


NO_OVERHEAD = "overhead per operator is not known and not included"
LOWER_BOUNDS = "some operators have no cost rule: the figures are lower bounds"


def figure_remarks(profile: ModelProfile, spec: DeviceSpec, roof: EngineLimits) -> Iterable[str]:
    """Say what is missing for a time, or is left out of it, figure by figure."""
    if roof.bandwidth is None:
        why = spec.bandwidth_unknown or f"there is no figure for its {roof.engine}, and none in a data sheet"
        yield f"the bandwidth of {spec.name} is unknown ({why}), so bounds and times are too"
    if roof.peak is None:
        known = ", ".join(f"{peak.precision} ({peak.engine})" for peak in spec.peaks) or "none"
        yield (
            f"the peak of {spec.name} in {roof.precision} ({roof.engine}) is unknown, so bounds and times are too; "
            f"known peaks: {known}"
        )
    if spec.overhead_s is None:
        yield NO_OVERHEAD
    if profile.unpriced:
        yield LOWER_BOUNDS
