"""Energy of a forward: measured by the best meter there is, else an estimate under its name.

Three meters read sensors: RAPL, NVML and Jetson. The proxy multiplies given watts by the latency; the model adds up
joules per operation and byte. Each says why it cannot be used here.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from edge_opt._support.checks import is_number
from edge_opt.errors import InvalidInput, MeterFailed
from edge_opt.records.measurements import Energy, EnergySource, Latency, Refusal
from edge_opt.records.profiles import ModelProfile

# pJ of (an addition, a multiplication): M. Horowitz, "Computing's energy problem", ISSCC 2014, figure 1.1.9, 45 nm.
OPERATION_PJ = {
    "float32": (0.9, 3.7),
    "float16": (0.4, 1.1),
    "int32": (0.1, 3.1),
    "int8": (0.03, 0.2),
    "uint8": (0.03, 0.2),
    "qint8": (0.03, 0.2),
    "quint8": (0.03, 0.2),
}
# The same figure: 10 pJ for 64 bits from a cache of 8 kB, 1.3 nJ from DRAM (640 pJ for 32 bits in Han et al., EIE).
CACHE_PJ_PER_BYTE = 10 / 8
DRAM_PJ_PER_BYTE = 640 / 4
# The share that rasp's energy add-on takes: one access in five misses the cache.
DRAM_SHARE = 0.2
BYTE_PJ = (1 - DRAM_SHARE) * CACHE_PJ_PER_BYTE + DRAM_SHARE * DRAM_PJ_PER_BYTE

# Neither one missed update nor one step of a sensor is more than this share of the window it is read over.
_PRECISION = 0.02
# A sensor that has not moved after this many windows is stuck.
_PATIENCE = 5
_BLOCKS = 10


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


# Where the system shows its sensors. Tests replace it by a recording.
_ROOT = Path("/")


def _number(path: Path) -> int:
    """Return the whole number in a sensor's file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError) as error:
        raise MeterFailed(f"{path} cannot be read ({error})") from error


def _text(path: Path) -> str | None:
    """Return the stripped text of a sensor's file; None where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


class MeteredWork(NamedTuple):
    """One forward as a call that returns when it is done, how long one takes, and for how long to meter it."""

    run: Callable[[], object]
    latency: Latency
    min_time_s: float
    subtract_idle: bool


class EnergyMeter(ABC):
    """One way to know the energy of a forward.

    Attributes:
        name: The source that its figures name.
        device_types: The types of device whose energy it counts; empty for all.
        is_automatic: Whether it is tried where no meter is asked for by name.
    """

    name: ClassVar[EnergySource]
    device_types: ClassVar[tuple[str, ...]] = ()
    is_automatic: ClassVar[bool] = True

    @abstractmethod
    def available(self) -> None:
        """Raise `MeterFailed` with the reason where the meter cannot be used."""

    @abstractmethod
    def joules(self, work: MeteredWork) -> Energy:
        """Return the energy of one forward."""

    @property
    def refusal(self) -> str | None:
        """Why the meter cannot be used here; None where it can."""
        try:
            self.available()
        except MeterFailed as failure:
            return str(failure)
        return None


class SensorMeter(EnergyMeter):
    """A meter that reads a sensor while the forward is repeated.

    Attributes:
        update_s: Seconds between two changes of the sensor.
        step_j: The smallest step of the sensor in joules.
    """

    update_s: float
    step_j: float = 0.0

    @property
    @abstractmethod
    def counts(self) -> str:
        """What the sensor counts, for the note."""

    @abstractmethod
    def opened(self) -> AbstractContextManager[Callable[[], float]]:
        """Open the sensor and yield a call that returns the joules so far, from any origin."""

    def joules(self, work: MeteredWork) -> Energy:
        """Return joules per forward over a window long enough for the sensor."""
        window_s = max(work.min_time_s, self.update_s / _PRECISION)
        least_j = self.step_j / _PRECISION
        block = math.ceil(window_s / _BLOCKS / max(work.latency.median_s, 1e-9))
        now = time.perf_counter
        with self.opened() as joules:
            idle_watts = None
            if work.subtract_idle:
                start_j, start_s = joules(), now()
                time.sleep(window_s)
                idle_watts = (joules() - start_j) / (now() - start_s)
            forwards, start_j, start_s = 0, joules(), now()
            used_j = elapsed_s = 0.0
            while elapsed_s < window_s or used_j < least_j or not used_j:
                if elapsed_s > _PATIENCE * window_s:
                    raise MeterFailed(
                        f"{self.counts} moved by {used_j:.3g} J in {elapsed_s:.1f} s of work; it is stuck"
                    )
                for _ in range(block):
                    work.run()
                forwards += block
                used_j, elapsed_s = joules() - start_j, now() - start_s
        if idle_watts is not None and used_j <= idle_watts * elapsed_s:
            raise MeterFailed(
                f"{self.counts} took {used_j / elapsed_s:.3g} W under work and {idle_watts:.3g} W before it; "
                "the machine was not idle: end other work, or leave idle power in"
            )
        extent = "all that ran beside the model included"
        if idle_watts is not None:
            used_j -= idle_watts * elapsed_s
            extent = f"{idle_watts:.3g} W idle subtracted"
        note = f"measured: {self.counts}, {forwards} forwards in {elapsed_s:.2f} s, {extent}"
        return Energy(used_j / forwards, self.name, note, idle_watts)

    @contextmanager
    def integrated(self, watts: Callable[[], float], period_s: float) -> Iterator[Callable[[], float]]:
        """Sample power in the background, and yield the call that returns the joules so far."""
        integral = PowerIntegral(watts)
        with in_thread(integral.sample, period_s):
            yield integral.joules


class PowerIntegral:
    """Joules from samples of power, by trapezoids; safe to sample from two threads."""

    def __init__(self, watts: Callable[[], float]) -> None:
        self._watts = watts
        self._lock = threading.Lock()
        self._failure: MeterFailed | None = None
        self._last_s, self._last_watts, self._joules = time.perf_counter(), watts(), 0.0

    def sample(self) -> None:
        """Take one sample; a failure in the thread is raised by `joules`, in the caller's."""
        with self._lock:
            if self._failure is None:
                try:
                    watts = self._watts()
                except MeterFailed as failure:
                    self._failure = failure
                    return
                moment_s = time.perf_counter()
                self._joules += (watts + self._last_watts) / 2 * (moment_s - self._last_s)
                self._last_s, self._last_watts = moment_s, watts

    def joules(self) -> float:
        """Return the joules up to now."""
        self.sample()
        if self._failure is not None:
            raise self._failure
        return self._joules


class RaplMeter(SensorMeter):
    """Packages and their memory. Memory is a sub-zone by name only: its joules are not in the package's.

    Cores and graphics are in the package, and `psys` holds everything once more; none of them is added.
    """

    name = "rapl"
    device_types = ("cpu",)
    # Intel SDM vol. 3B, 15.10: counters move about every millisecond, in steps of 61 µJ unless a register says else.
    update_s = 1e-3
    step_j = 61e-6

    @cached_property
    def zones(self) -> dict[Path, str]:
        """The zones that add up to the processor and its memory, with their names."""
        powercap = _ROOT / "sys/class/powercap"
        zones: dict[Path, str] = {}
        for zone in sorted(powercap.glob("intel-rapl:*")):
            name = _text(zone / "name") or ""
            if not name.startswith(("package", "dram")):
                continue
            try:
                _number(zone / "energy_uj")
                _number(zone / "max_energy_range_uj")
            except MeterFailed as failure:
                if isinstance(failure.__cause__, PermissionError):
                    raise MeterFailed(
                        f"{zone} is readable by root alone; until the next boot, "
                        f"`sudo chmod a+r {powercap}/intel-rapl:*/*energy*_uj` opens it"
                    ) from failure
                continue
            zones[zone] = name
        if not any(name.startswith("package") for name in zones.values()):
            raise MeterFailed(
                f"no package counter in {powercap}; virtual machines and processors other than x86 have none, "
                "elsewhere `sudo modprobe intel_rapl_msr` may bring it"
            )
        return zones

    def available(self) -> None:
        _ = self.zones

    @property
    def counts(self) -> str:
        return f"RAPL counters {' + '.join(sorted(self.zones.values()))}"

    @contextmanager
    def opened(self) -> Iterator[Callable[[], float]]:
        ranges_uj = {zone: _number(zone / "max_energy_range_uj") for zone in self.zones}
        last_uj = {zone: _number(zone / "energy_uj") for zone in self.zones}
        total_uj = 0

        def joules() -> float:
            nonlocal total_uj
            for zone, range_uj in ranges_uj.items():
                before_uj, now_uj = last_uj[zone], _number(zone / "energy_uj")
                last_uj[zone], step_uj = now_uj, (now_uj - before_uj) % range_uj
                # A counter that was reset goes back as one that wrapped around does; but then the step would be most
                # of its range, which is hours of work.
                if now_uj < before_uj and step_uj > range_uj / 2:
                    moved = f"went back from {before_uj} to {now_uj} µJ, which is not a wrap-around at {range_uj} µJ"
                    raise MeterFailed(f"{zone / 'energy_uj'} {moved}")
                total_uj += step_uj
            return total_uj / 1e6

        yield joules


# Seconds between two samples of a GPU's power, and of a Jetson's: there a reading crosses a slow I2C bus, and six rails
# of two take about 10 ms.
_NVML_PERIOD_S = 0.02
_JETSON_PERIOD_S = 0.05


class NvmlMeter(SensorMeter):
    """The whole board of one GPU. The counter came with Volta; GPUs before it tell their power at the moment.

    Args:
        gpu: An index in NVML's order or a UUID.
    """

    name = "nvml"
    device_types = ("cuda",)
    # Readings change every 20 to 100 ms, by GPU (Yang, Adamek, Armour, "Part-time power measurements", 2023).
    update_s = 0.1

    def __init__(self, gpu: int | str) -> None:
        self.gpu = gpu

    @cached_property
    def library(self) -> Any:
        try:
            return import_module("pynvml")
        except ImportError as error:
            raise MeterFailed("pynvml is not installed; `pip install nvidia-ml-py` brings it") from error

    def available(self) -> None:
        with self._session() as handle:
            name = self.library.nvmlDeviceGetName(handle)
            self.board = name.decode() if isinstance(name, bytes) else name
            self.has_counter = self._is_supported(self.library.nvmlDeviceGetTotalEnergyConsumption, handle)
            if not self.has_counter and not self._is_supported(self.library.nvmlDeviceGetPowerUsage, handle):
                raise MeterFailed(f"{self.board} tells NVML neither its energy nor its power")
        self.step_j = 1e-3 if self.has_counter else 0.0

    @property
    def counts(self) -> str:
        if self.has_counter:
            return f"NVML energy counter of {self.board}"
        return f"NVML power of {self.board}, sampled every {_NVML_PERIOD_S} s"

    @contextmanager
    def opened(self) -> Iterator[Callable[[], float]]:
        with self._session() as handle:
            if self.has_counter:
                yield partial(self._reading, self.library.nvmlDeviceGetTotalEnergyConsumption, handle)
                return
            watts = partial(self._reading, self.library.nvmlDeviceGetPowerUsage, handle)
            with self.integrated(watts, _NVML_PERIOD_S) as joules:
                yield joules

    @contextmanager
    def _session(self) -> Iterator[Any]:
        """Start NVML, yield the handle of the GPU, and stop it again."""
        library = self.library
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            raise MeterFailed(
                f"NVML does not start ({error}); is there an NVIDIA GPU with its driver loaded?"
            ) from error
        try:
            is_index = isinstance(self.gpu, int)
            find = library.nvmlDeviceGetHandleByIndex if is_index else library.nvmlDeviceGetHandleByUUID
            try:
                handle = find(self.gpu)
            except library.NVMLError as error:
                raise MeterFailed(f"NVML has no GPU {self.gpu!r} ({error})") from error
            yield handle
        finally:
            library.nvmlShutdown()

    def _is_supported(self, query: Callable[[Any], int], handle: Any) -> bool:
        try:
            self._reading(query, handle)
        except MeterFailed:
            return False
        return True

    def _reading(self, query: Callable[[Any], int], handle: Any) -> float:
        """Return a reading in thousandths as whole units: mJ as J, mW as W."""
        try:
            return query(handle) / 1000
        except self.library.NVMLError as error:
            raise MeterFailed(f"the GPU stopped answering NVML ({error})") from error


def gpu_of(device: str) -> int | str:
    """Return the GPU that torch calls `device`, by UUID.

    NVML knows nothing of CUDA_VISIBLE_DEVICES and of torch's order.
    """
    import torch

    kind, _, index = device.partition(":")
    if kind != "cuda" or not torch.cuda.is_available():
        return int(index or 0) if kind == "cuda" else 0
    return f"GPU-{torch.cuda.get_device_properties(int(index) if index else torch.cuda.current_device()).uuid}"


# Rails that together feed the module, the widest view first. Sources: NVIDIA's Jetson Linux developer guide, "power
# monitor" tables per board; for AGX Xavier, which has no input rail, its product design guide, 5.6.2.
# VDDQ_VDD2_1V8AO of AGX Orin is fed by VIN_SYS_5V0 and is not added.
_MODULE_RAILS = (
    ("VDD_IN",),
    ("POM_5V_IN",),
    ("5V_IN",),
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),
)


class JetsonMeter(SensorMeter):
    """The whole module, GPU, processor and memory, without the carrier board."""

    name = "jetson"
    update_s = _JETSON_PERIOD_S

    @cached_property
    def rails(self) -> dict[str, Callable[[], float]]:
        """The rails that add up to the module, each with a call that returns its watts."""
        hwmon = _ROOT / "sys/class/hwmon"
        iio = _ROOT / "sys/bus/i2c/drivers/ina3221x"
        rails: dict[str, Callable[[], float]] = {}
        # The mainline driver (JetPack 5 and later), by hwmon's convention in mV, mA and µW.
        chips = [chip for chip in sorted(hwmon.glob("hwmon*")) if _text(chip / "name") == "ina3221"]
        for chip, channel in product(chips, (1, 2, 3)):
            power = chip / f"power{channel}_input"
            pair = (chip / f"in{channel}_input", chip / f"curr{channel}_input")
            if label := _text(chip / f"in{channel}_label"):
                rails[label] = partial(self._product, pair if _text(power) is None else (power,), 1e-6)
        # NVIDIA's own driver (JetPack 4), in mW.
        for chip, channel in product(sorted(iio.glob("*/iio:device*")), (0, 1, 2)):
            if label := _text(chip / f"rail_name_{channel}"):
                rails[label] = partial(self._product, (chip / f"in_power{channel}_input",), 1e-3)
        if not rails:
            raise MeterFailed(f"no INA3221 monitor in {hwmon} or {iio}; Jetson boards have one, except the 2 GB Nano")
        chosen = next((names for names in _MODULE_RAILS if set(names) <= set(rails)), None)
        if chosen is None:
            raise MeterFailed(f"which of the rails {', '.join(sorted(rails))} add up to this board is not known")
        return {name: rails[name] for name in chosen}

    def available(self) -> None:
        self._watts()

    @property
    def counts(self) -> str:
        return f"INA3221 power of {' + '.join(self.rails)}, sampled every {_JETSON_PERIOD_S} s"

    def opened(self) -> AbstractContextManager[Callable[[], float]]:
        return self.integrated(self._watts, _JETSON_PERIOD_S)

    def _watts(self) -> float:
        return sum(rail() for rail in self.rails.values())

    def _product(self, paths: tuple[Path, ...], scale: float) -> float:
        return scale * math.prod(_number(path) for path in paths)


class ProxyMeter(EnergyMeter):
    """The caller's watts times the median latency."""

    name = "proxy"

    def __init__(self, power_watts: float | None) -> None:
        self.power_watts = power_watts

    def available(self) -> None:
        if self.power_watts is None:
            raise MeterFailed("no power is given; pass power_watts=, the draw of the device under load")

    def joules(self, work: MeteredWork) -> Energy:
        assert self.power_watts is not None
        median_s = work.latency.median_s
        idle = "; idle power is not known and not subtracted" if work.subtract_idle else ""
        note = f"proxy, not measured: {self.power_watts:g} W given × median latency of {median_s:.4g} s{idle}"
        return Energy(self.power_watts * median_s, "proxy", note)


class ModelMeter(EnergyMeter):
    """Joules per operation and byte, from a profile: for comparing variants of a model, not for sizing a battery."""

    name = "model"
    is_automatic = False

    def __init__(self, profile: ModelProfile | None) -> None:
        self.profile = profile

    def available(self) -> None:
        if self.profile is None:
            raise MeterFailed("no profile is given; pass profile=, the result of edge_opt.profile")
        modeled(self.profile)

    def joules(self, work: MeteredWork) -> Energy:
        assert self.profile is not None
        return modeled(self.profile)


def operation_pj(dtype: str, macs: int, others: int) -> float:
    """Return picojoules: a MAC is a multiplication and an addition, other arithmetic multiplications."""
    add_pj, multiply_pj = OPERATION_PJ[dtype]
    return macs * (add_pj + multiply_pj) + others * multiply_pj


def table_note(dtype: str) -> str:
    """Return where energies by the table come from, with its figures of one type."""
    add_pj, multiply_pj = OPERATION_PJ[dtype]
    return (
        f"model, not measured: operations by Horowitz, ISSCC 2014 (45 nm; {dtype} add {add_pj:g} pJ, multiply "
        f"{multiply_pj:g} pJ), bytes {BYTE_PJ:g} pJ (four in five from cache, one from DRAM)"
    )


def modeled(profile: ModelProfile) -> Energy:
    """Return the energy of one forward by the table of this module.

    A MAC is a multiplication and an addition in the type of the operator's result; other arithmetic is priced as
    multiplications; bytes come from the cache four times in five.
    """
    macs, others, moved_bytes = Counter[str](), Counter[str](), 0
    for operator in profile.operators:
        dtype = operator.outputs[0].dtype if operator.outputs else ""
        macs[dtype] += operator.cost.macs
        others[dtype] += operator.cost.other_ops
        moved_bytes += operator.cost.bytes_moved
    missing = sorted(dtype for dtype, count in macs.items() if count and dtype not in OPERATION_PJ)
    if missing:
        raise MeterFailed(f"the table has no energy for MACs in {', '.join(missing)}; it has {', '.join(OPERATION_PJ)}")
    operations_pj = sum(operation_pj(dtype, macs[dtype], others[dtype]) for dtype in macs if dtype in OPERATION_PJ)
    unpriced = {dtype: count for dtype, count in others.items() if count and dtype not in OPERATION_PJ}
    note = table_note("float32")
    if unpriced:
        note += f"; without {sum(unpriced.values())} operations in {', '.join(sorted(unpriced))}, which have no figure"
    if profile.totals.is_lower_bound:
        note += "; a lower bound, for some operators are unpriced"
    return Energy((operations_pj + moved_bytes * BYTE_PJ) * 1e-12, "model", note)


def meters(
    gpu: int | str = 0,
    power_watts: float | None = None,
    profile: ModelProfile | None = None,
) -> tuple[EnergyMeter, ...]:
    """Return every meter, in the order in which they are tried.

    >>> [meter.name for meter in meters()]
    ['rapl', 'nvml', 'jetson', 'proxy', 'model']
    """
    return RaplMeter(), NvmlMeter(gpu), JetsonMeter(), ProxyMeter(power_watts), ModelMeter(profile)


def measure_energy(
    run: Callable[[], object],
    latency: Latency,
    *,
    energy: str | None = "auto",
    device: str = "cpu",
    power_watts: float | None = None,
    profile: ModelProfile | None = None,
    subtract_idle: bool = False,
    min_time_s: float = 1.0,
) -> tuple[Energy | None, tuple[Refusal, ...]]:
    """Return joules per forward with their source, and each meter that could not be used with its reason.

    `run` does one forward and returns when it is done. "auto" takes the first meter that counts the device and works
    to the end, then the proxy if `power_watts` is given, then none; a meter that is asked for by name works or raises
    `MeterFailed`. "model" needs `profile` and is never taken unasked.
    """
    known = meters(gpu_of(device), power_watts, profile)
    names = [meter.name for meter in known]
    if energy not in (None, "auto", *names):
        raise InvalidInput(f"energy is {energy!r}; it must be 'auto', None or one of {', '.join(names)}")
    for name, value in (("power_watts", power_watts), ("min_time_s", min_time_s)):
        if value is not None and not (is_number(value) and value > 0):
            raise InvalidInput(f"{name} is {value!r}; it must be a number above 0")
    if energy is None:
        return None, ()
    work = MeteredWork(run, latency, min_time_s, subtract_idle)
    if energy != "auto":
        chosen = next(meter for meter in known if meter.name == energy)
        if reason := chosen.refusal:
            raise MeterFailed(f"the meter {energy!r} cannot be used: {reason}")
        figure, other_device = chosen.joules(work), _other_device(chosen, device)
        return (replace(figure, note=f"{figure.note}; {other_device}") if other_device else figure), ()
    refusals: list[Refusal] = []
    for meter in known:
        if not meter.is_automatic:
            continue
        reason = meter.refusal or _other_device(meter, device)
        if reason is None:
            try:
                return meter.joules(work), tuple(refusals)
            except MeterFailed as failure:
                reason = str(failure)
        refusals.append(Refusal(meter.name, reason))
    return None, tuple(refusals)


def _other_device(meter: EnergyMeter, device: str) -> str | None:
    """Return why a meter does not count the device that the model runs on; None where it does."""
    types = meter.device_types
    if not types or device.partition(":")[0] in types:
        return None
    return f"it counts the energy of {' and '.join(types)} alone, and the model runs on {device}"
