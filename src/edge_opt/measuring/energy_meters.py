"""Meters by name, and those that read sensors: RAPL, NVML, Jetson."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from edge_opt.errors import MeterFailed, RuleError
from edge_opt.records.measurements import Energy, EnergySource, Latency
from edge_opt.records.profiles import ModelProfile


@contextmanager
def in_thread(tick: Callable[[], None], period_s: float) -> Iterator[None]:
    """Call `tick` every `period_s` from a thread of its own until the block ends."""
    is_over = threading.Event()

    def loop() -> None:
        while not is_over.wait(period_s):
            tick()

    thread = threading.Thread(target=loop, name="edge_opt-power-sampler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class Bench:
    """The machine's files, NVML and time, and what the caller knows: watts and a profile.

    `gpu` is an index in NVML's order or a UUID; `nvml` is the module `pynvml`, imported when it is None.
    """

    root: Path = Path("/")
    gpu: int | str = 0
    nvml: Any = None
    power_watts: float | None = None
    profile: ModelProfile | None = None
    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    background: Callable[[Callable[[], None], float], AbstractContextManager[None]] = in_thread
    read: Callable[[Path], str] = Path.read_text

    def number(self, path: Path) -> int:
        """The whole number in a sensor's file."""
        try:
            return int(self.read(path))
        except (OSError, ValueError) as error:
            raise MeterFailed(f"{path} cannot be read ({error})") from error

    def text(self, path: Path) -> str | None:
        """The stripped text of a sensor's file, None where there is none."""
        try:
            return self.read(path).strip()
        except OSError:
            return None


@dataclass(frozen=True, slots=True)
class Workload:
    """One forward as a call that returns when it is done, how long one takes, and how carefully to meter it."""

    run: Callable[[], object]
    latency: Latency
    min_time_s: float
    target_precision: float
    subtract_idle: bool


Measure = Callable[[Workload], Energy]
Factory = Callable[[Bench], Measure]


@dataclass(frozen=True, slots=True)
class Meter:
    """One way to know the energy of a forward; `refusal` says why it cannot be used here, None when it can.

    `sees` are the types of device whose energy it counts, empty for all; `is_automatic` meters are tried unasked.
    """

    name: EnergySource
    sees: tuple[str, ...]
    is_automatic: bool
    refusal: str | None
    measure: Measure


@dataclass(frozen=True, slots=True)
class _Entry:
    factory: Factory
    sees: tuple[str, ...]
    is_automatic: bool


_ENTRIES: dict[EnergySource, _Entry] = {}


def meter(name: EnergySource, *, sees: tuple[str, ...] = (), is_automatic: bool = True) -> Callable[[Factory], Factory]:
    """Register a meter: a function that finds its sensor on the bench, or raises `MeterFailed` with the reason."""

    def register(factory: Factory) -> Factory:
        if name in _ENTRIES:
            first, second = (f"{known.__module__}.{known.__qualname__}" for known in (_ENTRIES[name].factory, factory))
            raise RuleError(f"the meter {name!r} is registered twice: by {first} and by {second}")
        _ENTRIES[name] = _Entry(factory, sees, is_automatic)
        return factory

    return register


def names() -> list[EnergySource]:
    """The registered meters in the order in which they are tried."""
    ranks = {name: rank for rank, name in enumerate(get_args(EnergySource))}
    return sorted(_ENTRIES, key=lambda name: ranks.get(name, len(ranks)))


def build(name: EnergySource, bench: Bench) -> Meter:
    """The meter of this name on this bench, usable or with its refusal."""
    entry = _ENTRIES[name]
    try:
        return Meter(name, entry.sees, entry.is_automatic, None, entry.factory(bench))
    except MeterFailed as failure:
        reason = str(failure)

    def refuse(_: Workload) -> Energy:
        raise MeterFailed(f"the meter {name!r} cannot be used: {reason}")

    return Meter(name, entry.sees, entry.is_automatic, reason, refuse)


def meters(root: Path = Path("/")) -> tuple[Meter, ...]:
    """Every meter there is, usable on this machine or with the reason why not.

    >>> [meter.name for meter in meters()]
    ['rapl', 'nvml', 'jetson', 'proxy', 'model']
    """
    bench = Bench(root=root)
    return tuple(build(name, bench) for name in names())


# A sensor that has not moved after this many windows is stuck.
PATIENCE = 5
BLOCKS = 10


@dataclass(frozen=True, slots=True)
class Sensor:
    """A sensor of energy: what it counts, how often and in which steps it moves.

    `opened()` is a context that yields a call: joules so far, from any origin.
    """

    name: EnergySource
    counts: str
    update_s: float
    step_j: float
    opened: Callable[[], AbstractContextManager[Callable[[], float]]]


def sensed(sensor: Sensor, bench: Bench, work: Workload) -> Energy:
    """Joules per forward by this sensor.

    The window is so long that neither one missed update nor one step is more than `target_precision` of it.
    """
    window_s = max(work.min_time_s, sensor.update_s / work.target_precision)
    least_j = sensor.step_j / work.target_precision
    block = math.ceil(window_s / BLOCKS / max(work.latency.median_s, 1e-9))
    with sensor.opened() as joules:
        idle_watts = _idle_watts(joules, bench, window_s) if work.subtract_idle else None
        forwards, start_j, start_s = 0, joules(), bench.now()
        used_j = elapsed_s = 0.0
        while elapsed_s < window_s or used_j < least_j or not used_j:
            if elapsed_s > PATIENCE * window_s:
                raise MeterFailed(f"{sensor.counts} moved by {used_j:.3g} J in {elapsed_s:.1f} s of work; it is stuck")
            for _ in range(block):
                work.run()
            forwards += block
            used_j, elapsed_s = joules() - start_j, bench.now() - start_s
    if idle_watts is not None and used_j <= idle_watts * elapsed_s:
        raise MeterFailed(
            f"{sensor.counts} took {used_j / elapsed_s:.3g} W under work and {idle_watts:.3g} W before it; "
            "the machine was not idle: end other work, or leave idle power in"
        )
    net_j = used_j - (idle_watts or 0.0) * elapsed_s
    extent = "all that ran beside the model included" if idle_watts is None else f"{idle_watts:.3g} W idle subtracted"
    note = f"measured: {sensor.counts}, {forwards} forwards in {elapsed_s:.2f} s, {extent}"
    return Energy(net_j / forwards, sensor.name, note, idle_watts)


def _idle_watts(joules: Callable[[], float], bench: Bench, window_s: float) -> float:
    start_j, start_s = joules(), bench.now()
    bench.sleep(window_s)
    return (joules() - start_j) / (bench.now() - start_s)


class PowerIntegral:
    """Joules from samples of power, by trapezoids; safe to sample from two threads."""

    def __init__(self, watts: Callable[[], float], now: Callable[[], float]) -> None:
        self._watts = watts
        self._now = now
        self._lock = threading.Lock()
        self._failure: MeterFailed | None = None
        self._last_s, self._last_watts, self._joules = now(), watts(), 0.0

    def sample(self) -> None:
        """Take one sample; a failure is kept for `joules`, which somebody listens to."""
        with self._lock:
            if self._failure is None:
                try:
                    watts = self._watts()
                except MeterFailed as failure:
                    self._failure = failure
                    return
                moment_s = self._now()
                self._joules += (watts + self._last_watts) / 2 * (moment_s - self._last_s)
                self._last_s, self._last_watts = moment_s, watts

    def joules(self) -> float:
        """Joules up to now."""
        self.sample()
        if self._failure is not None:
            raise self._failure
        return self._joules


@contextmanager
def integrated(watts: Callable[[], float], bench: Bench, period_s: float) -> Iterator[Callable[[], float]]:
    """Sample power in the background; yields the call that tells the joules so far."""
    integral = PowerIntegral(watts, bench.now)
    with bench.background(integral.sample, period_s):
        yield integral.joules


# Intel SDM vol. 3B, 15.10: counters move about every millisecond, in steps of 61 µJ unless the unit register differs.
RAPL_UPDATE_S = 1e-3
RAPL_STEP_J = 61e-6


@meter("rapl", sees=("cpu",))
def rapl(bench: Bench) -> Measure:
    """Packages and their memory. Memory is a sub-zone by name only: its joules are not in the package's.

    Cores and graphics are in the package, and `psys` holds everything once more; none of them is added.
    """
    zones = _zones(bench)
    names = " + ".join(sorted(zones.values()))
    sensor = Sensor("rapl", f"RAPL counters {names}", RAPL_UPDATE_S, RAPL_STEP_J, partial(_opened, bench, tuple(zones)))
    return partial(sensed, sensor, bench)


def _zones(bench: Bench) -> dict[Path, str]:
    """The zones that add up to the processor and its memory, with their names."""
    powercap = bench.root / "sys/class/powercap"
    found: dict[Path, str] = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        name = bench.text(zone / "name") or ""
        if not name.startswith(("package", "dram")):
            continue
        try:
            bench.number(zone / "energy_uj")
            bench.number(zone / "max_energy_range_uj")
        except MeterFailed as failure:
            if isinstance(failure.__cause__, PermissionError):
                raise MeterFailed(
                    f"{zone} is readable by root alone; until the next boot, "
                    f"`sudo chmod a+r {powercap}/intel-rapl:*/*energy*_uj` opens it"
                ) from failure
            continue
        found[zone] = name
    if not any(name.startswith("package") for name in found.values()):
        raise MeterFailed(
            f"no package counter in {powercap}; virtual machines and processors other than x86 have none, "
            "elsewhere `sudo modprobe intel_rapl_msr` may bring it"
        )
    return found


@contextmanager
def _opened(bench: Bench, zones: tuple[Path, ...]) -> Iterator[Callable[[], float]]:
    ranges_uj = {zone: bench.number(zone / "max_energy_range_uj") for zone in zones}
    last_uj = {zone: bench.number(zone / "energy_uj") for zone in zones}
    total_uj = 0

    def joules() -> float:
        nonlocal total_uj
        for zone in zones:
            now_uj = bench.number(zone / "energy_uj")
            total_uj += _step_uj(zone, last_uj[zone], now_uj, ranges_uj[zone])
            last_uj[zone] = now_uj
        return total_uj / 1e6

    yield joules


def _step_uj(zone: Path, before_uj: int, now_uj: int, range_uj: int) -> int:
    """How far the counter went, across its wrap-around."""
    if now_uj >= before_uj:
        return now_uj - before_uj
    step_uj = now_uj - before_uj + range_uj
    # A counter that was reset also goes back; but then the step would be most of its range, which is hours of work.
    if not 0 <= step_uj <= range_uj / 2:
        raise MeterFailed(
            f"{zone / 'energy_uj'} went back from {before_uj} to {now_uj} µJ, which is no wrap-around at {range_uj} µJ"
        )
    return step_uj


# Readings change every 20 to 100 ms, by GPU (Yang, Adamek, Armour, "Part-time power measurements", 2023).
NVML_UPDATE_S = 0.1
NVML_PERIOD_S = 0.02
NVML_STEP_J = 1e-3


@meter("nvml", sees=("cuda",))
def nvml(bench: Bench) -> Measure:
    """The whole board of one GPU. The counter came with Volta; GPUs before it tell their power at the moment."""
    library = _library() if bench.nvml is None else bench.nvml
    with _session(library):
        handle = _handle(library, bench.gpu)
        name = library.nvmlDeviceGetName(handle)
        name = name.decode() if isinstance(name, bytes) else name
        has_counter = _is_supported(library, library.nvmlDeviceGetTotalEnergyConsumption, handle)
        if not has_counter and not _is_supported(library, library.nvmlDeviceGetPowerUsage, handle):
            raise MeterFailed(f"{name} tells NVML neither its energy nor its power")
    counts = (
        f"NVML energy counter of {name}" if has_counter else f"NVML power of {name}, sampled every {NVML_PERIOD_S} s"
    )
    opened = partial(_counted if has_counter else _sampled, bench, library)
    return partial(sensed, Sensor("nvml", counts, NVML_UPDATE_S, NVML_STEP_J if has_counter else 0.0, opened), bench)


def gpu_of(device: str) -> int | str:
    """The GPU that torch calls `device`, by UUID: NVML knows nothing of CUDA_VISIBLE_DEVICES and of torch's order."""
    import torch

    kind, _, index = device.partition(":")
    if kind != "cuda" or not torch.cuda.is_available():
        return int(index or 0) if kind == "cuda" else 0
    return f"GPU-{torch.cuda.get_device_properties(int(index) if index else torch.cuda.current_device()).uuid}"


def _library() -> Any:
    try:
        return import_module("pynvml")
    except ImportError as error:
        raise MeterFailed("pynvml is not installed; `pip install nvidia-ml-py` brings it") from error


@contextmanager
def _session(library: Any) -> Iterator[None]:
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise MeterFailed(f"NVML does not start ({error}); is there an NVIDIA GPU with its driver loaded?") from error
    try:
        yield
    finally:
        library.nvmlShutdown()


def _handle(library: Any, gpu: int | str) -> Any:
    try:
        by = library.nvmlDeviceGetHandleByIndex if isinstance(gpu, int) else library.nvmlDeviceGetHandleByUUID
        return by(gpu)
    except library.NVMLError as error:
        raise MeterFailed(f"NVML has no GPU {gpu!r} ({error})") from error


def _is_supported(library: Any, query: Callable[[Any], int], handle: Any) -> bool:
    try:
        query(handle)
    except library.NVMLError:
        return False
    return True


def _reading(library: Any, query: Callable[[Any], int], handle: Any) -> float:
    """A reading in thousandths, as whole units: mJ as J, mW as W."""
    try:
        return query(handle) / 1000
    except library.NVMLError as error:
        raise MeterFailed(f"the GPU stopped answering NVML ({error})") from error


@contextmanager
def _counted(bench: Bench, library: Any) -> Iterator[Callable[[], float]]:
    with _session(library):
        yield partial(_reading, library, library.nvmlDeviceGetTotalEnergyConsumption, _handle(library, bench.gpu))


@contextmanager
def _sampled(bench: Bench, library: Any) -> Iterator[Callable[[], float]]:
    with _session(library):
        watts = partial(_reading, library, library.nvmlDeviceGetPowerUsage, _handle(library, bench.gpu))
        with integrated(watts, bench, NVML_PERIOD_S) as joules:
            yield joules


# A reading crosses a slow I2C bus; six rails of two take about 10 ms.
JETSON_PERIOD_S = 0.05

# Rails that together feed the module, the widest view first. Sources: NVIDIA's Jetson Linux developer guide, "power
# monitor" tables per board; for AGX Xavier, which has no input rail, its product design guide, 5.6.2.
# VDDQ_VDD2_1V8AO of AGX Orin is fed by VIN_SYS_5V0 and is not added.
MODULE_RAILS = (
    ("VDD_IN",),
    ("POM_5V_IN",),
    ("5V_IN",),
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),
)

Watts = Callable[[], float]


@meter("jetson")
def jetson(bench: Bench) -> Measure:
    """The whole module, GPU, processor and memory, without the carrier board."""
    rails = {**_hwmon_rails(bench), **_iio_rails(bench)}
    if not rails:
        raise MeterFailed(
            f"no INA3221 monitor in {bench.root / 'sys/class/hwmon'} or {bench.root / 'sys/bus/i2c/drivers/ina3221x'}; "
            "Jetson boards have one, except the 2 GB Nano"
        )
    chosen = next((names for names in MODULE_RAILS if set(names) <= set(rails)), None)
    if chosen is None:
        raise MeterFailed(f"which of the rails {', '.join(sorted(rails))} add up to this board is not known")
    parts = [rails[name] for name in chosen]

    def watts() -> float:
        return sum(part() for part in parts)

    watts()
    counts = f"INA3221 power of {' + '.join(chosen)}, sampled every {JETSON_PERIOD_S} s"
    sensor = Sensor("jetson", counts, JETSON_PERIOD_S, 0.0, partial(integrated, watts, bench, JETSON_PERIOD_S))
    return partial(sensed, sensor, bench)


def _hwmon_rails(bench: Bench) -> Mapping[str, Watts]:
    """Rails of the mainline driver (JetPack 5 and later); by hwmon's convention in mV, mA and µW."""
    rails: dict[str, Watts] = {}
    for chip in sorted((bench.root / "sys/class/hwmon").glob("hwmon*")):
        if bench.text(chip / "name") != "ina3221":
            continue
        for channel in (1, 2, 3):
            label = bench.text(chip / f"in{channel}_label")
            if not label:
                continue
            power = chip / f"power{channel}_input"
            if bench.text(power) is not None:
                rails[label] = partial(_product, bench, (power,), 1e-6)
            else:
                pair = (chip / f"in{channel}_input", chip / f"curr{channel}_input")
                rails[label] = partial(_product, bench, pair, 1e-6)
    return rails


def _iio_rails(bench: Bench) -> Mapping[str, Watts]:
    """Rails of NVIDIA's own driver (JetPack 4), in mW."""
    rails: dict[str, Watts] = {}
    for chip in sorted((bench.root / "sys/bus/i2c/drivers/ina3221x").glob("*/iio:device*")):
        for channel in (0, 1, 2):
            label = bench.text(chip / f"rail_name_{channel}")
            if label:
                rails[label] = partial(_product, bench, (chip / f"in_power{channel}_input",), 1e-3)
    return rails


def _product(bench: Bench, paths: tuple[Path, ...], scale: float) -> float:
    product = scale
    for path in paths:
        product *= bench.number(path)
    return product
