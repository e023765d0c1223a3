"""Resolve what a user names as a target: a device's figures, and its platform or calibration."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from edge_opt._support.checks import check_whole
from edge_opt.boards.catalog import (
    SUFFIXES,
    is_platform_table,
    is_shipped,
    normalized,
    read_table,
    spec_from,
    unknown_device,
)
from edge_opt.boards.catalog import device as find_device
from edge_opt.boards.ethos_u import VELA, npu_of
from edge_opt.boards.platform_file import (
    Platform,
    checked_platform,
    fitted_platforms,
    known_chips,
    timed_devices,
    untimed_platform,
)
from edge_opt.calibration.calibration_file import calibrated_runtime, calibration_from, load_calibration
from edge_opt.errors import InvalidInput, UnknownDevice
from edge_opt.records.devices import Bandwidth, DeviceSpec, Figure, Peak
from edge_opt.records.predictions import Calibration, RuntimeCalibration

HOST = "host"
_DEVICE_NAME = re.compile(r"[a-z0-9.-]+")


@dataclass(frozen=True, eq=False)
class ResolvedTarget:
    """A target with what answers for it: its calibration, else its fitted platform, else the roofline of its figures.

    `name` is that of the target in results: the platform's where a platform was named, else the device's or machine's.
    `kernels` are of another runtime than eager torch on a calibrated machine.
    """

    name: str
    spec: DeviceSpec
    platform: Platform | None = None
    calibration: Calibration | None = None
    kernels: RuntimeCalibration | None = None


TFLITE_RUNTIMES = ("xnnpack", "tflite", "tflm", "tflm-reference", "tinyengine")
# Runtimes that do not take a file, by the kind of the module that reads it.
_REFUSED_FORMATS = {
    "OnnxModel": TFLITE_RUNTIMES,
    "TfliteModel": ("ncnn", "ncnn-vulkan", "onnx", "qnn", "torch", "torch-compile"),
}

Target = str | os.PathLike[str] | DeviceSpec | Calibration | Platform | ResolvedTarget


def resolve_targets(
    targets: Target | Sequence[Target],
    precision: str = "fp32",
    *,
    runtime: str | None = None,
    threads: int | None = None,
    model: object = None,
) -> tuple[ResolvedTarget, ...]:
    """Resolve one target or several, each as `resolve_target` does; one that is named twice is refused."""
    named: Sequence[Any] = targets if isinstance(targets, (list, tuple)) else [targets]
    if not named:
        raise InvalidInput("no target is given; name a device, such as raspberry-pi-4, or 'host'")
    resolved = tuple(
        resolve_target(target, precision, runtime=runtime, threads=threads, model=model) for target in named
    )
    names = [target.name for target in resolved]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInput(f"the target {twice} is given twice; keep one of them")
    return resolved


def resolve_target(
    target: Target,
    precision: str = "fp32",
    *,
    engine: str | None = None,
    runtime: str | None = None,
    threads: int | None = None,
    model: object = None,
) -> ResolvedTarget:
    """Resolve a target, and refuse what cannot be asked of it before any work is done for it.

    A calibration is of one machine with torch and its threads. A platform is one engine, runtime, precision and number
    of threads. A device has the best-known platform that fits what is asked; a runtime must be among them.

    Args:
        target: "host", a calibration or its file, a platform, its name or file, a device, its name, alias or file.
        precision: Type of the numbers.
        engine: Who computes; the device's own choice unless given, or any where a runtime or threads are asked for.
        runtime: Such as "ncnn"; default: the one with the most accurate data.
        threads: Any number unless given.
        model: What is asked about. Of a file, runtimes that take its format answer first.

    >>> resolve_target("raspberry-pi-4").platform.name
    'raspberry-pi-4/cpu-4/ncnn/fp32'
    >>> resolve_target("orange-pi-zero-2", threads=1).name
    'orange-pi-zero-2'
    """
    if isinstance(target, ResolvedTarget):
        return target
    if threads is not None:
        check_whole("threads", threads)
    named = named_target(target)
    if isinstance(named, Calibration):
        kernels = calibrated_runtime(named, precision, runtime, threads)
        name = named.name if kernels is None else f"{named.name}/{kernels.name}"
        return ResolvedTarget(name, calibrated_device(named), calibration=named, kernels=kernels)
    if isinstance(named, Platform):
        _check_platform(named, precision, engine, runtime, threads)
        return ResolvedTarget(named.name, _device_of(named), named)
    known = platforms_of(named)
    wanted_engine = engine or (named.engine if runtime is None and threads is None else None)
    refusing = _REFUSED_FORMATS.get(_kind(model), ()) if runtime is None else ()
    fitting = ([it for it in known if it.runtime not in refusing], known) if refusing else (known,)
    options: dict[str, Any] = {"runtime": runtime, "threads": threads, "preferred_engine": named.engine}
    answers = (select_platform(some, precision, engine=wanted_engine, **options) for some in fitting)
    platform = next((answer for answer in answers if answer is not None), None)
    if platform is None and runtime is not None and not (runtime == VELA and npu_of(named)):
        raise InvalidInput(_no_such_runtime(named, known, precision, engine, runtime, threads))
    return ResolvedTarget(named.name, named, platform)


def _kind(model: object) -> str:
    """Return the class of a model, or of the one that a profile is of."""
    trace = getattr(model, "trace", None)
    return trace.modules[0].kind if trace is not None and not callable(trace) else type(model).__name__


def named_target(target: Target) -> DeviceSpec | Platform | Calibration:
    """Return what a target names: a calibrated machine, a platform, else a device.

    A device that is not in the catalog but has published times is a device without figures. A file is parsed
    once; its contents say what it is.
    """
    if isinstance(target, ResolvedTarget):
        return target.calibration or target.platform or target.spec
    if isinstance(target, (Calibration, Platform)):
        return target
    if target == HOST:
        # It imports torch, which names of devices do without.
        from edge_opt.calibration.self_check import carried

        return carried(load_calibration())
    if isinstance(target, (str, os.PathLike)) and Path(target).suffix.lower() in SUFFIXES:
        return _from_file(Path(target))
    try:
        return find_device(target)
    except UnknownDevice:
        if not isinstance(target, str):
            raise
        name = normalized(target)
        known = shipped_platforms(name)
        if not known:
            raise unknown_device(target, timed_devices()) from None
    return known[0] if known[0].name == name else _without_figures(known[0])


def _from_file(path: Path) -> DeviceSpec | Platform | Calibration:
    table = read_table(path)
    if path.suffix.lower() == ".json" and "schema" in table:
        return calibration_from(table, path)
    return checked_platform(table, path) if is_platform_table(table) else spec_from(table, str(path))


def find_spec(target: Target) -> DeviceSpec:
    """Return the figures of a target; those of a machine that was calibrated are the measured ones."""
    named = named_target(target)
    if isinstance(named, Calibration):
        return calibrated_device(named)
    return named if isinstance(named, DeviceSpec) else _device_of(named)


def shipped_platforms(name: str) -> tuple[Platform, ...]:
    """Return the shipped platforms of a device, the most accurate first; empty if no times are published.

    Args:
        name: The device's name, or a platform's full name: then it is the only one.
    """
    device = name.partition("/")[0]
    # A file is named after its platform, and glob has a meaning for some characters of a wrong name.
    known = fitted_platforms(device) if _DEVICE_NAME.fullmatch(device) else ()
    return tuple(platform for platform in known if platform.name == name) if "/" in name else best_known(known)


def platforms_of(spec: DeviceSpec) -> tuple[Platform, ...]:
    """Return the platforms that answer for a device as the catalog has it, or that is known by its times alone.

    Args:
        spec: The device. One that a user changed or wrote has none: its figures are not those that were timed.
    """
    known = shipped_platforms(spec.name)
    if not known:
        known = _same_core(spec)
    elif not is_shipped(spec) and spec != _without_figures(known[0]):
        return ()
    return (*known, *_other_engines(spec, known))


# Boards with published times that answer for a microcontroller of the same core: with ST's engine, and with another.
_SIBLINGS = {
    "cortex-m0plus": ("", "nucleo-g0b1re"),
    "cortex-m4f": ("nucleo-l4r5zi", "nucleo-l4r5zi"),
    "cortex-m7": ("stm32h747", "nucleo-h7a3zi"),
    "cortex-m33": ("nucleo-u575zi-q", "nucleo-u575zi-q"),
}
# Between boards of one core, nine in ten lie within a factor of 1.86 when their clocks are taken into account.
SAME_CORE_SD = 0.377


def _same_core(spec: DeviceSpec, *, with_st: bool = False) -> tuple[Platform, ...]:
    """Return platforms of a microcontroller without a published time: those of a board with its core, by the clocks.

    Args:
        spec: The microcontroller.
        with_st: Whether the times of ST's engine are meant on boards of other vendors as well.
    """
    controller = spec.microcontroller
    if controller is None or spec.clock_hz is None or controller.core not in _SIBLINGS:
        return ()
    ghz, is_st = spec.clock_hz.value / 1e9, with_st or spec.title.startswith("STMicroelectronics")
    st, other = _SIBLINGS[controller.core]
    if with_st and not st:
        return ()
    name = f"{st}/cpu-1/st-edge-ai/int8" if st and is_st else f"{other}/cpu-1/bosch-hal/int8"
    base = next(iter(shipped_platforms(name)), None)
    if base is None or base.ghz is None:
        return ()
    note = f"the costs of {base.name} ({base.core}), at {1000 * ghz:g} instead of {1000 * base.ghz:g} MHz"
    alike = untimed_platform(base, spec.name, spec.title, SAME_CORE_SD, (note,), base.ghz / ghz)
    return (replace(alike, ghz=ghz, source=f"{base.source}; clock: {spec.clock_hz.source}"),)


# Time of other engines over that of ST's, on an STM32H743 (mit-han-lab/tinyengine README, 2023): geometric mean, the
# standard deviation of its logarithm, and how many nets both ran.
_ENGINES = {
    "tflm": ("TensorFlow Lite Micro with CMSIS-NN", 1.673, 0.091, 10),
    "tflm-reference": ("TensorFlow Lite Micro with its reference kernels", 17.98, 0.098, 10),
    "tinyengine": ("TinyEngine", 0.817, 0.099, 11),
}
# Cores other than the one that the engines were compared on; what that adds was not measured and is a guess.
_OTHER_CORE_SD = 0.3


def _other_engines(spec: DeviceSpec, known: Sequence[Platform]) -> tuple[Platform, ...]:
    """Return platforms of other engines on a Cortex-M: the times of ST's engine times a measured ratio."""
    controller = spec.microcontroller
    if controller is None or controller.core not in _SIBLINGS:
        return ()
    is_st_engine = [platform for platform in known if platform.runtime == "st-edge-ai"]
    base = next(iter(is_st_engine or _same_core(spec, with_st=True)), None)
    if base is None:
        return ()
    platforms = []
    for runtime, (title, ratio, nets_sd, nets) in _ENGINES.items():
        sd = math.hypot(nets_sd, 0.0 if controller.core == "cortex-m7" else _OTHER_CORE_SD)
        note = f"{title}: {ratio:.3g} times the time of ST's engine, by {nets} nets on an STM32H743"
        other = untimed_platform(base, spec.name, spec.title, sd, (note, *base.notes), ratio)
        name = other.name.replace(f"/{base.runtime}/", f"/{runtime}/")
        source = f"{base.source}; mit-han-lab/tinyengine README"
        platforms.append(replace(other, name=name, runtime=runtime, source=source))
    return tuple(platforms)


def select_platform(
    known: Sequence[Platform],
    precision: str,
    *,
    engine: str | None = None,
    runtime: str | None = None,
    threads: int | None = None,
    preferred_engine: str | None = None,
) -> Platform | None:
    """Return the best of a device's platforms that is what is asked for; None where there is none.

    An engine, runtime or number of threads that is not given may be any; platforms of `preferred_engine` come first.
    """
    fitting = [
        platform
        for platform in known
        if platform.precision == precision
        and engine in (None, platform.engine)
        and runtime in (None, platform.runtime)
        and threads in (None, platform.threads)
    ]
    preferred = [platform for platform in fitting if platform.engine == preferred_engine]
    return next(iter(best_known(preferred or fitting)), None)


def best_known(platforms: Sequence[Platform]) -> tuple[Platform, ...]:
    """Return platforms in the order in which they answer for a device: the CPU before other engines, fp32 first.

    Then the runtime whose held-out error is the lowest with any number of threads. Of that runtime all the big cores
    come first, as people run it, then most threads, then little cores. Errors do not choose the threads: one thread is
    always predicted best, and a user who names a board means all of it.
    """

    def knowledge(platform: Platform) -> float:
        errors = (
            other.error
            for other in platforms
            if (other.engine, other.precision, other.runtime) == (platform.engine, platform.precision, platform.runtime)
        )
        return min((error for error in errors if error is not None), default=math.inf)

    def rank(platform: Platform) -> tuple[object, ...]:
        threads = platform.threads or 0
        # One thread on a big core is not all of them.
        cores = 2 if platform.cores == "little" else 0 if platform.cores == "big" and threads > 1 else 1
        is_other = platform.precision != "fp32"
        return (
            platform.engine != "cpu", is_other, platform.precision, knowledge(platform), cores, -threads, platform.name
        )  # fmt: skip

    return tuple(sorted(platforms, key=rank))


def calibrated_device(calibration: Calibration) -> DeviceSpec:
    """Return the calibrated machine with its measured bandwidth, its best peak at each precision, and its overhead.

    Args:
        calibration: The machine. The roofline uses the peak of its best class of work, and the bandwidth of memory.
    """
    machine = calibration.machine
    source = f"calibration of {calibration.created[:10]}, threads: {machine.threads}, torch {machine.torch}"

    def figure(value: float) -> Figure:
        return Figure(value, source, "measured")

    best: dict[str, float] = {}
    for peak in calibration.peaks:
        best[peak.precision] = max(best.get(peak.precision, 0.0), peak.ops_per_s)
    return DeviceSpec(
        name=normalized(calibration.name),
        title=f"{calibration.name} ({machine.cpu})",
        engine="cpu",
        aliases=(),
        cores=figure(machine.cores),
        clock_hz=None,
        ram_bytes=(figure(machine.memory_bytes),),
        flash_bytes=None,
        bandwidths=(Bandwidth("traffic", "cpu", figure(calibration.memory_bytes_per_s)),),
        bandwidth_unknown=None,
        peaks=tuple(Peak("cpu", precision, figure(value)) for precision, value in best.items()),
        powers=(),
        overhead_s=figure(calibration.overhead_per_operator_s),
        latencies=(),
        note="Figures as measured by a calibration, with that many threads.",
        origin="calibration",
    )


def _device_of(platform: Platform) -> DeviceSpec:
    try:
        return find_device(platform.device)
    except UnknownDevice:
        return _without_figures(platform)


def _without_figures(platform: Platform) -> DeviceSpec:
    """Return a device with published times only, and what is known of its chip and RAM."""
    known = known_chips().get(platform.device, {})
    ram = known.get("ram")
    sizes = () if ram is None else (Figure(ram["gib"] * 2**30, ram["source"], "secondary"),)
    note = f"Chip: {known['chip']} ({known['source']})" if known else ""
    return DeviceSpec(
        name=platform.device, title=platform.title, engine=platform.engine, aliases=(), cores=None, clock_hz=None,
        ram_bytes=sizes, flash_bytes=None, bandwidths=(), peaks=(), powers=(), overhead_s=None, latencies=(),
        bandwidth_unknown="only times of whole models are known of it", note=note, origin=platform.source,
    )  # fmt: skip


def _check_platform(
    platform: Platform, precision: str, engine: str | None, runtime: str | None, threads: int | None
) -> None:
    for name, asked, known in (
        ("precision", precision, platform.precision),
        ("engine", engine, platform.engine),
        ("runtime", runtime, platform.runtime),
        ("threads", threads, platform.threads),
    ):
        if asked is not None and known is not None and asked != known:
            raise InvalidInput(
                f"{name} is {asked}, and the platform {platform.name} is for {known}; name another platform, or pass "
                f"{name}={known!r}"
            )


def _no_such_runtime(
    spec: DeviceSpec, known: Sequence[Platform], precision: str, engine: str | None, runtime: str, threads: int | None
) -> str:
    """Return what to say where no platform has the runtime that was asked for, with the one that differs least."""
    if not known:
        return (
            f"no times of {spec.name} are known with any runtime, and {runtime!r} is asked for; leave the runtime "
            "out for its roofline, or type in a few times with fit_platform"
        )
    near = get_close_matches(runtime, sorted({platform.runtime for platform in known}), n=1)

    def distance(platform: Platform) -> tuple[object, ...]:
        apart = abs(math.log((platform.threads or 1) / (threads or platform.threads or 1)))
        return platform.runtime not in (runtime, *near), platform.precision != precision, apart

    counted = None if threads is None else f"{threads} thread(s)"
    asked = filter(None, (f"the runtime {runtime!r}", precision, counted, engine))
    return (
        f"no times of {spec.name} are known with {', '.join(asked)}; closest: "
        f"{min(best_known(known), key=distance).name}; `edge-opt devices {spec.name}` lists all"
    )
