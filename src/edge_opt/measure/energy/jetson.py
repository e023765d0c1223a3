"""Jetson: the INA3221 power monitors of NVIDIA's boards, read from sysfs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from edge_opt.errors import MeterFailed
from edge_opt.measure.energy.bench import Bench
from edge_opt.measure.energy.registry import Measure, meter
from edge_opt.measure.energy.sensing import Sensor, integrated, sensed

# A reading crosses a slow I2C bus; six rails of two take about 10 ms.
PERIOD_S = 0.05

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
    counts = f"INA3221 power of {' + '.join(chosen)}, sampled every {PERIOD_S} s"
    sensor = Sensor("jetson", counts, PERIOD_S, 0.0, partial(integrated, watts, bench, PERIOD_S))
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
