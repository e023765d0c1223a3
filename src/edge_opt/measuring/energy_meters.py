"""Meters that read sensors: RAPL, NVML and Jetson. Each says why it cannot be used here."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from edge_opt.errors import MeterFailed
from edge_opt.records.measurements import Energy, EnergySource, Latency

# A sensor that has not moved after this many windows is stuck.
PATIENCE = 5
BLOCKS = 10


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
class SensorAccess:
    """The machine's files, NVML and time. Tests replay recordings through it.

    `nvml` is the module `pynvml`, imported when it is None.
    """

    root: Path = Path("/")
    nvml: Any = None
    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    background: Callable[[Callable[[], None], float], AbstractContextManager[None]] = in_thread
    read: Callable[[Path], str] = Path.read_text

    def number(self, path: Path) -> int:
        """Return the whole number in a sensor's file."""
        try:
            return int(self.read(path))
        except (OSError, ValueError) as error:
            raise MeterFailed(f"{path} cannot be read ({error})") from error

    def text(self, path: Path) -> str | None:
        """Return the stripped text of a sensor's file; None where there is none."""
        try:
            return self.read(path).strip()
        except OSError:
            return None


class MeteredWork(NamedTuple):
    """One forward as a call that returns when it is done, how long one takes, and how carefully to meter it."""

    run: Callable[[], object]
    latency: Latency
    min_time_s: float
    target_precision: float
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

    def __init__(self, access: SensorAccess) -> None:
        self.access = access

    @property
    @abstractmethod
    def counts(self) -> str:
        """What the sensor counts, for the note."""

    @abstractmethod
    def opened(self) -> AbstractContextManager[Callable[[], float]]:
        """Open the sensor and yield a call that returns the joules so far, from any origin."""

    def joules(self, work: MeteredWork) -> Energy:
        """Return joules per forward over a window long enough for the sensor.

        Neither one missed update nor one step is more than `target_precision` of the window.
        """
        window_s = max(work.min_time_s, self.update_s / work.target_precision)
        least_j = self.step_j / work.target_precision
        block = math.ceil(window_s / BLOCKS / max(work.latency.median_s, 1e-9))
        now = self.access.now
        with self.opened() as joules:
            idle_watts = self._idle_watts(joules, window_s) if work.subtract_idle else None
            forwards, start_j, start_s = 0, joules(), now()
            used_j = elapsed_s = 0.0
            while elapsed_s < window_s or used_j < least_j or not used_j:
                if elapsed_s > PATIENCE * window_s:
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
        net_j = used_j - (idle_watts or 0.0) * elapsed_s
        extent = (
            "all that ran beside the model included" if idle_watts is None else f"{idle_watts:.3g} W idle subtracted"
        )
        note = f"measured: {self.counts}, {forwards} forwards in {elapsed_s:.2f} s, {extent}"
        return Energy(net_j / forwards, self.name, note, idle_watts)

    def _idle_watts(self, joules: Callable[[], float], window_s: float) -> float:
        start_j, start_s = joules(), self.access.now()
        self.access.sleep(window_s)
        return (joules() - start_j) / (self.access.now() - start_s)

    @contextmanager
    def integrated(self, watts: Callable[[], float], period_s: float) -> Iterator[Callable[[], float]]:
        """Sample power in the background, and yield the call that returns the joules so far."""
        integral = PowerIntegral(watts, self.access.now)
        with self.access.background(integral.sample, period_s):
            yield integral.joules


class PowerIntegral:
    """Joules from samples of power, by trapezoids; safe to sample from two threads."""

    def __init__(self, watts: Callable[[], float], now: Callable[[], float]) -> None:
        self._watts = watts
        self._now = now
        self._lock = threading.Lock()
        self._failure: MeterFailed | None = None
        self._last_s, self._last_watts, self._joules = now(), watts(), 0.0

    def sample(self) -> None:
        """Take one sample; a failure in the thread is raised by `joules`, in the caller's."""
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
        powercap = self.access.root / "sys/class/powercap"
        zones: dict[Path, str] = {}
        for zone in sorted(powercap.glob("intel-rapl:*")):
            name = self.access.text(zone / "name") or ""
            if not name.startswith(("package", "dram")):
                continue
            try:
                self.access.number(zone / "energy_uj")
                self.access.number(zone / "max_energy_range_uj")
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
        number = self.access.number
        ranges_uj = {zone: number(zone / "max_energy_range_uj") for zone in self.zones}
        last_uj = {zone: number(zone / "energy_uj") for zone in self.zones}
        total_uj = 0

        def joules() -> float:
            nonlocal total_uj
            for zone, range_uj in ranges_uj.items():
                now_uj = number(zone / "energy_uj")
                total_uj += _step_uj(zone, last_uj[zone], now_uj, range_uj)
                last_uj[zone] = now_uj
            return total_uj / 1e6

        yield joules


def _step_uj(zone: Path, before_uj: int, now_uj: int, range_uj: int) -> int:
    """Return how far the counter went, across its wrap-around."""
    if now_uj >= before_uj:
        return now_uj - before_uj
    step_uj = now_uj - before_uj + range_uj
    # A counter that was reset also goes back; but then the step would be most of its range, which is hours of work.
    if not 0 <= step_uj <= range_uj / 2:
        raise MeterFailed(
            f"{zone / 'energy_uj'} went back from {before_uj} to {now_uj} µJ, which is no wrap-around at {range_uj} µJ"
        )
    return step_uj


# Seconds between two samples of a GPU's power, and of a Jetson's: there a reading crosses a slow I2C bus, and six rails
# of two take about 10 ms.
NVML_PERIOD_S = 0.02
JETSON_PERIOD_S = 0.05


class NvmlMeter(SensorMeter):
    """The whole board of one GPU. The counter came with Volta; GPUs before it tell their power at the moment.

    Args:
        access: The machine.
        gpu: An index in NVML's order or a UUID.
    """

    name = "nvml"
    device_types = ("cuda",)
    # Readings change every 20 to 100 ms, by GPU (Yang, Adamek, Armour, "Part-time power measurements", 2023).
    update_s = 0.1

    def __init__(self, access: SensorAccess, gpu: int | str = 0) -> None:
        super().__init__(access)
        self.gpu = gpu

    @cached_property
    def library(self) -> Any:
        if self.access.nvml is not None:
            return self.access.nvml
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
        return f"NVML power of {self.board}, sampled every {NVML_PERIOD_S} s"

    @contextmanager
    def opened(self) -> Iterator[Callable[[], float]]:
        with self._session() as handle:
            if self.has_counter:
                yield partial(self._reading, self.library.nvmlDeviceGetTotalEnergyConsumption, handle)
                return
            with self.integrated(
                partial(self._reading, self.library.nvmlDeviceGetPowerUsage, handle), NVML_PERIOD_S
            ) as joules:
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
            query(handle)
        except self.library.NVMLError:
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
MODULE_RAILS = (
    ("VDD_IN",),
    ("POM_5V_IN",),
    ("5V_IN",),
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),
)

Watts = Callable[[], float]


class JetsonMeter(SensorMeter):
    """The whole module, GPU, processor and memory, without the carrier board."""

    name = "jetson"
    update_s = JETSON_PERIOD_S

    @cached_property
    def rails(self) -> dict[str, Watts]:
        """The rails that add up to the module, each with a call that returns its watts."""
        root = self.access.root
        rails = {**self._hwmon_rails(), **self._iio_rails()}
        if not rails:
            raise MeterFailed(
                f"no INA3221 monitor in {root / 'sys/class/hwmon'} or {root / 'sys/bus/i2c/drivers/ina3221x'}; "
                "Jetson boards have one, except the 2 GB Nano"
            )
        chosen = next((names for names in MODULE_RAILS if set(names) <= set(rails)), None)
        if chosen is None:
            raise MeterFailed(f"which of the rails {', '.join(sorted(rails))} add up to this board is not known")
        return {name: rails[name] for name in chosen}

    def available(self) -> None:
        self._watts()

    @property
    def counts(self) -> str:
        return f"INA3221 power of {' + '.join(self.rails)}, sampled every {JETSON_PERIOD_S} s"

    def opened(self) -> AbstractContextManager[Callable[[], float]]:
        return self.integrated(self._watts, JETSON_PERIOD_S)

    def _watts(self) -> float:
        return sum(rail() for rail in self.rails.values())

    def _hwmon_rails(self) -> Mapping[str, Watts]:
        """Return rails of the mainline driver (JetPack 5 and later); by hwmon's convention in mV, mA and µW."""
        rails: dict[str, Watts] = {}
        for chip in sorted((self.access.root / "sys/class/hwmon").glob("hwmon*")):
            if self.access.text(chip / "name") != "ina3221":
                continue
            for channel in (1, 2, 3):
                label = self.access.text(chip / f"in{channel}_label")
                if not label:
                    continue
                power = chip / f"power{channel}_input"
                pair = (chip / f"in{channel}_input", chip / f"curr{channel}_input")
                has_power = self.access.text(power) is not None
                rails[label] = partial(self._product, (power,) if has_power else pair, 1e-6)
        return rails

    def _iio_rails(self) -> Mapping[str, Watts]:
        """Return rails of NVIDIA's own driver (JetPack 4), in mW."""
        rails: dict[str, Watts] = {}
        for chip in sorted((self.access.root / "sys/bus/i2c/drivers/ina3221x").glob("*/iio:device*")):
            for channel in (0, 1, 2):
                label = self.access.text(chip / f"rail_name_{channel}")
                if label:
                    rails[label] = partial(self._product, (chip / f"in_power{channel}_input",), 1e-3)
        return rails

    def _product(self, paths: tuple[Path, ...], scale: float) -> float:
        return scale * math.prod(self.access.number(path) for path in paths)
