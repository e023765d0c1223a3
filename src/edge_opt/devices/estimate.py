"""Estimates: what a model would take on a device of the catalogue that nobody has calibrated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from edge_opt import units
from edge_opt.devices.energies import with_energies
from edge_opt.devices.passes import Pass, passes
from edge_opt.devices.roofline import Roof, checked_roof, figure_remarks, limit
from edge_opt.devices.targets import Target
from edge_opt.records import Bound, DeviceSpec, Engine, LayerPrediction, ModelProfile, Precision, Prediction

# Share of an engine's peak that dense products reach: HPL over the peak in fp64, which is half of that in fp32, is 0.39
# to 0.64 on the five devices of the catalogue that have both figures and at least 1 GiB; in the middle 0.5.
DENSE = 0.5
# Convolutions in groups run at a seventh of that. ST's three figures for MobileNetV1 on the STM32H747 differ in how
# much of the work is depthwise: two of them give both rates, and these meet the third within 5 %.
GROUPED = DENSE / 7
# A peak counts fused multiply-adds, two operations at a time; element-wise work has one.
ELEMENTWISE = DENSE / 2
# Share of the memory's peak on paper that a copy reaches: 0.57 to 0.71 on the three devices that run models on the CPU
# and have both figures. A measured bandwidth is what a copy reached already.
PAPER_BANDWIDTH = 0.6
# A 90 % interval from the estimate divided by this to the estimate times this. All of the 21 published latencies on two
# boards lie within a factor of 1.9 of the estimate; GPUs, NPUs and other runtimes are less well known.
SPREAD = 2.5
# A layer's own efficiency strays from its class by another factor of two, which averages out over the whole.
LAYER_SPREAD = 2 * SPREAD
# tests/test_estimate.py derives all of these from the catalogue's files.

# Dispatch in a framework and launches on a GPU take microseconds to some tens of them. Where a device has no figure for
# it, none is put in; an operator that takes less than this itself then leaves the upper end of the interval open.
BRIEF_S = 50e-6


def estimate(
    profile: ModelProfile,
    device: Target,
    precision: Precision = "fp32",
    *,
    engine: Engine | None = None,
) -> Prediction:
    """What a model and each of its layers would take on a device that was never calibrated, with a wide interval.

    Every operator takes the longer of moving its bytes and computing, at the share of the device's figures that its
    class usually reaches, and the overhead per operator where the device has a figure for it. It is meant for a
    runtime with tuned kernels; a framework that runs operator by operator may take several times as long. Where a
    figure is missing the time is None, and a remark names the figure.

    >>> import edge_opt as eo
    >>> from edge_opt.model import SmallCNN
    >>> found = estimate(eo.profile(SmallCNN(), (1, 1, 28, 28)), "raspberry-pi-4")
    >>> found.basis, found.low < found.seconds, found.energies[0].source
    ('roofline', True, 'proxy')
    """
    spec, roof = checked_roof(profile, device, precision, engine)
    by_module: dict[int, list[Pass]] = {}
    for item in passes(profile, precision):
        by_module.setdefault(item.module, []).append(item)
    layers = tuple(_layer(profile, number, by_module[number], roof) for number in sorted(by_module))
    bound, seconds = _timed([item for items in by_module.values() for item in items], roof)
    if seconds is not None:  # the layers' own sum, to the last bit
        seconds = math.fsum(layer.seconds for layer in layers if layer.seconds is not None)
    is_brief = _is_brief(seconds, sum(map(len, by_module.values())), roof)
    prediction = Prediction(
        target=spec.name,
        basis="roofline",
        precision=precision,
        seconds=seconds,
        low=None if seconds is None else seconds / SPREAD,
        high=None if seconds is None or is_brief or profile.unpriced else seconds * SPREAD,
        bound=bound,
        layers=layers,
        outside=tuple(dict.fromkeys(item.op for item in profile.unpriced)),
        energies=(),
        remarks=tuple(_remarks(profile, spec, roof, seconds, is_brief)),
    )
    return with_energies(prediction, profile, spec)


def _layer(profile: ModelProfile, number: int, items: Sequence[Pass], roof: Roof) -> LayerPrediction:
    module = profile.trace.modules[number]
    bound, seconds = _timed(items, roof)
    is_outside = any(item.is_unpriced for item in items)
    is_open = is_outside or _is_brief(seconds, len(items), roof)
    return LayerPrediction(
        module=number,
        path=module.path,
        kind=module.kind,
        seconds=seconds,
        low=None if seconds is None else seconds / LAYER_SPREAD,
        high=None if seconds is None or is_open else seconds * LAYER_SPREAD,
        bound=bound,
        is_outside=is_outside,
    )


def _is_brief(seconds: float | None, operators: int, roof: Roof) -> bool:
    """Whether an overhead that is not known may be most of the time."""
    return roof.overhead_s is None and seconds is not None and seconds < BRIEF_S * operators


def _timed(items: Sequence[Pass], roof: Roof) -> tuple[Bound, float | None]:
    """What passes take at their classes' efficiencies, and what most of the time goes to; nothing to do takes none."""
    if not items:
        return "unknown", 0.0
    priced = [item for item in items if not item.is_unpriced]
    reached = PAPER_BANDWIDTH if roof.bandwidth and roof.bandwidth.method in ("datasheet", "quoted") else 1.0
    return limit(
        [_divided(roof.memory_s(item), reached) for item in priced],
        [_divided(roof.compute_s(item), _efficiency(item)) for item in priced],
        None if roof.overhead_s is None else roof.overhead_s * len(items),
    )


def _efficiency(item: Pass) -> float:
    if item.is_grouped:
        return GROUPED
    return DENSE if item.macs else ELEMENTWISE


def _divided(seconds: float | None, share: float) -> float | None:
    return None if seconds is None else seconds / share


def _remarks(
    profile: ModelProfile, spec: DeviceSpec, roof: Roof, seconds: float | None, is_brief: bool
) -> Iterator[str]:
    if seconds is not None and roof.bandwidth is not None:
        yield (
            "uncalibrated: a roofline with usual efficiencies, for a runtime with tuned kernels; nine times in ten "
            f"within a factor of {SPREAD:g}"
        )
        yield f"on its {roof.engine}; bandwidth: {roof.bandwidth.reading}"
        if is_brief:
            yield (
                f"operators take less than {units.duration(BRIEF_S)} each, and the overhead of one is not known: it "
                "may be most of the time, so there is no upper end"
            )
    yield from figure_remarks(profile, spec, roof)
