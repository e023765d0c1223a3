"""Time and energy on a target: from its calibration, else costs fitted to times there, else its roofline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from edge_opt import units
from edge_opt.boards.class_costs import ModelWork
from edge_opt.boards.fused_layers import ITEMSIZE, MemoryPass, by_module, fused_passes, model_work, passes
from edge_opt.boards.platforms import estimate_fitted
from edge_opt.boards.roofline import HALF_PRECISIONS, LOWER_BOUNDS, NO_OVERHEAD, EngineLimits, check_asked, limit
from edge_opt.boards.st_edge_ai import live_work
from edge_opt.boards.targets import ResolvedTarget, Target, platforms_of, resolve_target
from edge_opt.calibration.predict import predict
from edge_opt.errors import InvalidInput, UnreadableModel
from edge_opt.measuring.energy import BYTE_PJ, OPERATION_PJ, operation_pj, table_note
from edge_opt.model_files.tflm_graph import read_tflm
from edge_opt.records.devices import Bound, DeviceSpec, Engine, Figure, Power, Precision
from edge_opt.records.measurements import Energy
from edge_opt.records.predictions import LayerPrediction, Prediction
from edge_opt.records.profiles import ModelProfile

# Share of an engine's peak that dense products reach: HPL over the peak in fp64, which is half of that in fp32, is 0.39
# to 0.64 on the five devices of the catalog that have both figures and at least 1 GiB; the median is 0.5.
DENSE = 0.5
# Depthwise convolutions run at a seventh of that. ST's three figures for MobileNetV1 on the STM32H747 differ in how
# much of the work is depthwise: two of them give both rates, and these meet the third within 5 %.
DEPTHWISE = DENSE / 7
# Other convolutions in groups run as those do that have no kernel of their own: the fits to ncnn's table have these at
# a median of 0.32 of the dense rate.
GROUPED = 0.32 * DENSE
# A peak counts fused multiply-adds, two operations at a time; element-wise work has one.
ELEMENTWISE = DENSE / 2
# Share of the data sheet's bandwidth that a copy reaches: 0.57 to 0.71 on the three devices that run models on the CPU
# and have both figures. A measured bandwidth is what a copy reached already.
PAPER_BANDWIDTH = 0.6
# Overhead of one layer if a device has no figure for it: on a CPU the time in which one core computes this many
# operations, on a GPU seconds. Both are medians of the fits to ncnn's table.
CALL_OPERATIONS = 5e5
LAUNCH_S = 24e-6
# The interval is from the estimate divided by this to the estimate times this: 90 % of 347 published times on the four
# CPU boards with figures lie in it, with one thread or all (benchmarks/boards.py). For other engines too few are known
# to say less.
INTERVAL_FACTOR = 3.5
# A layer's own efficiency strays from its class by another factor of two, which averages out over the whole.
LAYER_INTERVAL_FACTOR = 2 * INTERVAL_FACTOR
# tests/boards/test_estimate.py derives all of these from the catalog's files.

# Dispatch in a framework and launches on a GPU take microseconds to some tens of them. Where a device has no figure for
# it, none is put in; an operator that takes less than this itself then leaves the upper end of the interval open.
BRIEF_S = 50e-6


def predictions(
    profile: ModelProfile,
    targets: Sequence[ResolvedTarget],
    precision: Precision,
    threads: int | None = None,
    file: Path | None = None,
) -> tuple[Prediction, ...]:
    """Return what the model would take on each target, with its energy: the one answer to "how long there".

    Args:
        profile: The model and its inputs.
        targets: As `resolve_targets` returned them for this precision and threads.
        precision: Type of the numbers there.
        threads: Of a CPU whose roofline answers; default: all of its cores.
        file: The model's file, if it was read from one; ST's tool drops channels whose weights are all zero.
    """
    items, work = passes(profile, precision), None
    if any(target.platform is not None and target.calibration is None for target in targets):
        check_asked(profile, precision, None)
        work = model_work(profile)
    return tuple(
        _predicted(profile, target, precision, None, threads, items, _kept_work(work, target, file))
        for target in targets
    )


def _kept_work(work: ModelWork | None, target: ResolvedTarget, file: Path | None) -> ModelWork | None:
    """Return the layers as the target's runtime keeps them."""
    platform = target.platform
    is_st = platform is not None and (platform.runtime, platform.engine) == ("st-edge-ai", "cpu")
    if work is None or file is None or file.suffix.lower() != ".tflite" or not is_st:
        return work
    try:
        return live_work(work, read_tflm(file))
    except UnreadableModel:  # what TFLM cannot read may still be a model; it is timed as it is
        return work


def predicted_seconds(profile: ModelProfile, target: ResolvedTarget, threads: int | None = None) -> float:
    """Return the seconds on a target that pruning is to meet, as `eo.profile(target=)` predicts them."""
    precision: Precision = "fp32" if target.platform is None else target.platform.precision  # type: ignore[assignment]
    [prediction] = predictions(profile, [target], precision, threads)
    if prediction.seconds is None:
        why = prediction.remarks[0] if prediction.remarks else "nothing is known of it"
        raise InvalidInput(f"latency on {prediction.target} cannot be predicted: {why}; pass latency_of= instead")
    return prediction.seconds


def estimate(
    profile: ModelProfile,
    device: Target,
    precision: Precision = "fp32",
    *,
    engine: Engine | None = None,
    runtime: str | None = None,
    threads: int | None = None,
) -> Prediction:
    """Estimate what a model and each of its layers would take on a target, with intervals, as `profile(target=)` does.

    A calibrated machine answers by its calibration. If times of whole models on the device are published, costs
    fitted to them are used (`basis` is "fitted"), and a remark names the platform. Otherwise a roofline is used:
    every operator takes the longer of moving its bytes and computing, at the share of the device's figures that its
    class usually reaches. It is meant for a runtime with tuned kernels; a framework that runs operator by operator
    may take several times as long. Where a figure is missing the time is None, and a remark names the figure.

    Args:
        profile: The model and its inputs.
        device: A device of the catalog, its file or `DeviceSpec`, a platform or its file, or a calibrated machine:
            "host", a calibration or its file.
        precision: Type of the numbers there.
        engine: Who computes; the device's own choice unless given.
        runtime: Runtime there, such as "ncnn". Times with it must be known. Default: the most accurate
            platform.
        threads: Threads of the runtime; default: those of the most accurate platform. A roofline's peaks are scaled by
            threads over cores, its bandwidth is not.

    >>> import edge_opt as eo
    >>> from edge_opt.model import SmallCNN
    >>> there = estimate(eo.profile(SmallCNN(), (1, 1, 28, 28)), "raspberry-pi-4", runtime="ncnn", threads=1)
    >>> there.basis, there.low < there.seconds < there.high, there.energies[0].source
    ('fitted', True, 'proxy')
    """
    check_asked(profile, precision, engine)
    target = resolve_target(device, precision, engine=engine, runtime=runtime, threads=threads, model=profile)
    work = model_work(profile) if target.platform is not None and target.calibration is None else None
    return _predicted(profile, target, precision, engine, threads, passes(profile, precision), work)


def _predicted(
    profile: ModelProfile,
    target: ResolvedTarget,
    precision: Precision,
    engine: Engine | None,
    threads: int | None,
    items: Sequence[MemoryPass],
    work: ModelWork | None,
) -> Prediction:
    """Return what the model takes on one target; `items` and `work` are its layers, read once for all targets."""
    if target.calibration is not None:
        kernels = target.kernels
        asked = (None, None) if kernels is None else (kernels.runtime, kernels.threads)
        predicted = predict(profile, target.calibration, precision, *asked)
        return _with_energies(predicted, items, None, bool(profile.unpriced))
    check_asked(profile, precision, engine)
    predicted = _from_platform(profile, target, work) or _from_roofline(
        profile, target.spec, precision, engine, threads, items
    )
    return _with_energies(predicted, items, target.spec, bool(profile.unpriced))


def _from_platform(profile: ModelProfile, target: ResolvedTarget, work: ModelWork | None) -> Prediction | None:
    """Return what the target's platform says; None where it has none, or the model has no layer that it knows."""
    if target.platform is None or work is None:
        return None
    is_named = target.name == target.platform.name
    if not work.works and not is_named:
        return None
    predicted = estimate_fitted(profile, work, target.platform, target.name)
    return replace(predicted, remarks=(*predicted.remarks, LOWER_BOUNDS)) if profile.unpriced else predicted


def _from_roofline(
    profile: ModelProfile,
    whole: DeviceSpec,
    precision: Precision,
    engine: Engine | None,
    threads: int | None,
    items: Sequence[MemoryPass],
) -> Prediction:
    spec, remark = _with_threads(whole, engine or whole.engine, threads)
    roof = EngineLimits(spec, engine or spec.engine, precision, may_widen=True)
    overheads = _Overheads(profile, whole, roof)
    layers = tuple(_layer(profile, number, own, roof, overheads) for number, own in sorted(by_module(items).items()))
    bound, seconds = _timed(items, roof, overheads)
    if seconds is not None:  # the layers' own sum, to the last bit
        seconds = math.fsum(layer.seconds for layer in layers if layer.seconds is not None)
    is_open = overheads.may_rule(seconds, len(items)) or roof.peak is None
    return Prediction(
        target=spec.name,
        basis="roofline",
        precision=precision,
        seconds=seconds,
        low=None if seconds is None else seconds / (INTERVAL_FACTOR * _gain(roof)),
        high=None if seconds is None or is_open or profile.unpriced else seconds * INTERVAL_FACTOR,
        bound=bound,
        layers=layers,
        outside=tuple(dict.fromkeys(item.op for item in profile.unpriced)),
        energies=(),
        remarks=(*_remarks(profile, spec, roof, seconds, overheads, is_open), *remark),
    )


def _with_threads(spec: DeviceSpec, engine: str, threads: int | None) -> tuple[DeviceSpec, tuple[str, ...]]:
    """Return the device with the peaks of this many of its cores and the bandwidth of all, and remarks on it."""
    if threads is None:
        return spec, ()
    if engine != "cpu":
        return spec, (f"threads are of a CPU, and this is its {engine}: they are left out",)
    if spec.cores is None:
        return spec, (f"the cores of {spec.name} are not known, so the figures are for all of them",)
    cores = int(spec.cores.value)
    if threads > cores:
        raise InvalidInput(f"threads is {threads}, and {spec.name} has {cores} core(s); ask for at most {cores}")
    share, which = share_of_peak(spec, threads, cores), f"{threads} of {cores} cores"
    peaks = tuple(
        replace(peak, figure=Figure(peak.figure.value * share, f"{which} of: {peak.figure.source}", "derived"))
        if peak.engine == "cpu"
        else peak
        for peak in spec.peaks
    )
    alike = "the fast ones first" if spec.fast_cores else "taken to be alike"
    return replace(spec, peaks=peaks), (f"peaks of {which}, {alike}; one bandwidth",)


def share_of_peak(spec: DeviceSpec, threads: int, cores: int) -> float:
    """Return the share of a CPU's peak that this many threads have; fast cores are used first."""
    if spec.fast_cores is None or spec.fast_share is None:
        return threads / cores
    fast, share = int(spec.fast_cores.value), spec.fast_share.value
    if threads <= fast:
        return share * threads / fast
    return share + (1 - share) * (threads - fast) / (cores - fast)


def _gain(roof: EngineLimits) -> float:
    """Return how much faster than the wider peak an engine may be at a precision whose own peak is not published."""
    if roof.peak is None or roof.precision == "int4":  # weights of four bits are widened in any case
        return 1.0
    return ITEMSIZE[roof.computes_in] / ITEMSIZE[roof.precision]


class _Overheads:
    """The overhead of calls: the device's own figure, else the usual one of its class."""

    def __init__(self, profile: ModelProfile, spec: DeviceSpec, roof: EngineLimits) -> None:
        self.own_s = roof.overhead_s
        self.usual_s = None if self.own_s is not None else _usual_overhead(spec, roof.engine)
        # A runtime with tuned kernels calls what is fused once.
        self.calls: dict[int, int] = {}
        for item in fused_passes(profile, roof.precision) if self.usual_s is not None else ():
            # On a GPU every step of a recurrent layer is a launch of its own; a CPU loops inside one call.
            count = item.steps if roof.engine == "gpu" else 1
            self.calls[item.module] = self.calls.get(item.module, 0) + count

    def seconds(self, items: Sequence[MemoryPass]) -> float | None:
        """Return the seconds of these passes; None where they are not known."""
        if self.own_s is not None:
            return self.own_s * len(items)
        if self.usual_s is None:
            return None
        return self.usual_s * sum(self.calls.get(module, 0) for module in {item.module for item in items})

    def may_rule(self, seconds: float | None, operators: int) -> bool:
        """Return whether an overhead that is not known may be most of the time."""
        is_unknown = self.own_s is None and self.usual_s is None
        return is_unknown and seconds is not None and seconds < BRIEF_S * operators


def _usual_overhead(spec: DeviceSpec, engine: str) -> float | None:
    """Return the seconds of one call on a device that has no figure for it; None where nothing usual is known."""
    if engine == "gpu":
        return LAUNCH_S
    peak = spec.peak("cpu", "fp32")
    if engine != "cpu" or peak is None or spec.cores is None:
        return None
    cores = int(spec.cores.value)
    return CALL_OPERATIONS / (peak.value * share_of_peak(spec, 1, cores))


def _layer(
    profile: ModelProfile, number: int, items: Sequence[MemoryPass], roof: EngineLimits, overheads: _Overheads
) -> LayerPrediction:
    module = profile.trace.modules[number]
    bound, seconds = _timed(items, roof, overheads)
    is_outside = any(item.is_unpriced for item in items)
    is_open = is_outside or roof.peak is None or overheads.may_rule(seconds, len(items))
    return LayerPrediction(
        module=number,
        path=module.path,
        kind=module.kind,
        seconds=seconds,
        low=None if seconds is None else seconds / (LAYER_INTERVAL_FACTOR * _gain(roof)),
        high=None if seconds is None or is_open else seconds * LAYER_INTERVAL_FACTOR,
        bound=bound,
        is_outside=is_outside,
    )


def _timed(items: Sequence[MemoryPass], roof: EngineLimits, overheads: _Overheads) -> tuple[Bound, float | None]:
    """Return what most of the time goes to, and the time of passes at their classes' efficiencies; none for no passes.

    Where no peak is known it is what memory takes alone, and unknown in fp16 and bf16.
    """
    if not items:
        return "unknown", 0.0
    grouped = {"depthwise": DEPTHWISE, "grouped": GROUPED}

    def compute_s(item: MemoryPass) -> float | None:
        efficiency = grouped.get(item.grouping, DENSE if item.macs else ELEMENTWISE)
        is_memory_alone = roof.peak is None and roof.precision not in HALF_PRECISIONS
        return 0.0 if is_memory_alone else roof.compute_s(item, efficiency)

    priced = [item for item in items if not item.is_unpriced]
    reached = PAPER_BANDWIDTH if roof.bandwidth and roof.bandwidth.method in ("datasheet", "quoted") else 1.0
    return limit(
        [roof.memory_s(item, reached) for item in priced],
        [compute_s(item) for item in priced],
        overheads.seconds(items),
    )


def _remarks(
    profile: ModelProfile,
    spec: DeviceSpec,
    roof: EngineLimits,
    seconds: float | None,
    overheads: _Overheads,
    is_open: bool,
) -> Iterator[str]:
    if roof.bandwidth is None:
        why = spec.bandwidth_unknown or f"there is no figure for its {roof.engine}, and none in a data sheet"
        timed = next((platform for platform in platforms_of(spec) if platform.precision != roof.precision), None)
        remedy = "type in a few that you measured: `edge-opt board my-board --time NET=MS`"
        if timed is not None:
            remedy = f"times with {timed.runtime} are known in {timed.precision}: --precision {timed.precision}"
        yield f"the bandwidth of {spec.name} is unknown ({why}), so there is no time; {remedy}"
    elif roof.peak is None and roof.precision in HALF_PRECISIONS:
        known = ", ".join(peak.precision for peak in spec.peaks if peak.engine == roof.engine) or "none"
        yield (
            f"the peak of {spec.name} in {roof.precision} ({roof.engine}) is unknown, so there is no time; "
            f"known peaks: {known}"
        )
    elif roof.peak is None:
        yield (
            f"the peak of {spec.name} in {roof.precision} ({roof.engine}) is unknown: this is what memory takes alone, "
            "and there is no upper end"
        )
    if seconds is not None and roof.bandwidth is not None:
        yield (
            "uncalibrated: a roofline with usual efficiencies, for a runtime with tuned kernels; of 347 published "
            f"times on four CPU boards 90 % lie within a factor of {INTERVAL_FACTOR:g}. Winograd's convolutions and "
            "arithmetic in a narrower type beat it"
        )
        yield f"on its {roof.engine}; bandwidth: {roof.bandwidth.reading}"
        if _gain(roof) > 1:
            yield (
                f"no peak in {roof.precision} is known, so it computes in {roof.computes_in}; it may be up to "
                f"{_gain(roof):g} times as fast"
            )
        if overheads.usual_s is not None:
            yield (
                f"{units.duration(overheads.usual_s)} per layer beside its work, which is usual for such a "
                f"{roof.engine}; no figure of its own is known"
            )
        elif is_open and overheads.own_s is None:
            yield (
                f"{NO_OVERHEAD}; operators take less than "
                f"{units.duration(BRIEF_S)} each, so it may be most of the time, and there is no upper end"
            )
        elif overheads.own_s is None:
            yield NO_OVERHEAD
    if profile.unpriced:
        yield LOWER_BOUNDS


# Under a model's load a device draws its power under load; a power mode and a TDP are limits, idle is no load at all.
_WORKING_STATES = ("load", "highest_mode", "tdp")
_TABLE_DTYPE: dict[Precision, str] = {
    "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8", "int4": "float16",
    "w8a16": "int16",
}  # fmt: skip


def _with_energies(
    prediction: Prediction, items: Sequence[MemoryPass], spec: DeviceSpec | None, is_lower_bound: bool
) -> Prediction:
    """Return the prediction with the device's RAM, and its energy by every way there is; power times time comes first.

    Layers get their part of the first one, so that they add up to it. Where nothing is known a remark says so.

    Args:
        prediction: Times of the model and its layers.
        items: Passes of the model at the prediction's precision.
        spec: The device; None for a calibrated machine, whose power is not known.
        is_lower_bound: Whether some operators have no cost rule.
    """
    power = None if spec is None else working_power(spec) or _controller_power(spec)
    proxy = None
    if power is not None and prediction.seconds is not None:
        watts, figure = power.figure.value, power.figure
        drawn = f"{watts:g} W ({power.state}; {figure.kind}: {figure.source})"
        note = f"proxy, not measured: {drawn} × predicted {units.duration(prediction.seconds)}"
        proxy = Energy(watts * prediction.seconds, "proxy", note)
    # The table is of a datacenter's chips: 9 to 357 times too low for microcontrollers.
    is_controller = spec is not None and spec.microcontroller is not None
    table = None if is_controller else _from_table(items, prediction.precision, is_lower_bound)
    remarks: tuple[str, ...] = ()
    if spec is not None and proxy is None:
        missing = "the power at work" if power is None else "the time"
        remarks += (f"{missing} is unknown, so there is no energy from power and time",)
    if table is None and not is_controller:
        remarks += (f"the table of energies per operation has no figure for {prediction.precision}",)
    layers = prediction.layers
    if proxy is not None:
        layers = tuple(
            replace(layer, energy_j=None if layer.seconds is None else watts * layer.seconds) for layer in layers
        )
    elif table is not None:
        own = by_module(items)
        layers = tuple(
            replace(layer, energy_j=_table_joules(own.get(layer.module, ()), prediction.precision)) for layer in layers
        )
    return replace(
        prediction,
        layers=layers,
        energies=tuple(energy for energy in (proxy, table) if energy is not None),
        remarks=prediction.remarks + remarks,
        # A board of the user's own is like another in its times, not in its RAM.
        ram_bytes=tuple(int(s.value) for s in spec.ram_bytes) if spec and spec.name == prediction.target else (),
    )


def working_power(spec: DeviceSpec) -> Power | None:
    """Return the watts of the device at work: under load, else in its highest mode, else its TDP; None: not known.

    >>> from edge_opt.boards.catalog import device
    >>> [(power.state, power.figure.value) for power in (working_power(device("jetson-nano")),)]
    [('highest_mode', 10.0)]
    """
    by_state = {power.state: power for power in spec.powers}
    return next((by_state[state] for state in _WORKING_STATES if state in by_state), None)


# Watts per hertz of a microcontroller at work, by its core: geometric means of boards in mlcommons/tiny_results (v1.2:
# 0.35 mW per MHz for a Cortex-M4, 0.45 for an M7, 0.144 for an M33; v1.0: 0.136 for an M33). Other cores take the mean
# of the four. Each board from the others: 6, 6, 21 and 27 % off. Two submitters differ by up to 1.9 on one board.
CONTROLLER_W_PER_HZ = {"cortex-m33": 0.14e-9, "cortex-m4f": 0.39e-9, "cortex-m7": 0.39e-9}
OTHER_CONTROLLER_W_PER_HZ = 0.235e-9


def _controller_power(spec: DeviceSpec) -> Power | None:
    """Return the usual power of a microcontroller at work, by its core and clock; None for other devices."""
    if spec.microcontroller is None or spec.clock_hz is None:
        return None
    per_hz = CONTROLLER_W_PER_HZ.get(spec.microcontroller.core, OTHER_CONTROLLER_W_PER_HZ)
    source = f"usual for a {spec.microcontroller.core}, {per_hz * 1e9:.3g} mW per MHz; off by up to a factor of 2"
    if spec.microcontroller.core not in CONTROLLER_W_PER_HZ:
        source = f"usual for microcontrollers, {per_hz * 1e9:.3g} mW per MHz; off by up to a factor of 3"
    return Power("load", Figure(per_hz * spec.clock_hz.value, source, "derived"))


def _from_table(items: Iterable[MemoryPass], precision: Precision, is_lower_bound: bool = False) -> Energy | None:
    """Return the energy of these passes by the table of `measuring.energy`; None where it lacks the precision."""
    joules = _table_joules(items, precision)
    if joules is None:
        return None
    note = f"{table_note(_TABLE_DTYPE[precision])}; for comparing variants, not for sizing a battery"
    return Energy(joules, "model", note + ("; a lower bound, for some operators are unpriced" * is_lower_bound))


def _table_joules(items: Iterable[MemoryPass], precision: Precision) -> float | None:
    """Return joules: a MAC is a multiplication and an addition, other arithmetic multiplications, bytes all the same.

    None where the table has no figure for the precision and something is computed in it.
    """
    picojoules = 0.0
    for item in items:
        picojoules += BYTE_PJ * (item.bytes_read + item.bytes_written)
        if item.arithmetic == "none" or not item.flops:
            continue
        dtype = "int8" if item.arithmetic == "int8" else _TABLE_DTYPE[precision]
        if dtype not in OPERATION_PJ:
            return None
        picojoules += operation_pj(dtype, item.macs, item.flops - 2 * item.macs)
    return picojoules * 1e-12
