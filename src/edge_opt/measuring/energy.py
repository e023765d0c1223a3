"""Energy of a forward: measured by the best meter there is, else an estimate under its name.

The proxy multiplies given watts by the latency; the model adds up joules per operation and byte.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from edge_opt.errors import InvalidInput, MeterFailed
from edge_opt.measuring.energy_meters import (
    EnergyMeter,
    JetsonMeter,
    MeteredWork,
    NvmlMeter,
    RaplMeter,
    SensorAccess,
    gpu_of,
)
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
    operations_pj = sum(count * sum(OPERATION_PJ[dtype]) for dtype, count in macs.items() if count)
    operations_pj += sum(count * OPERATION_PJ[dtype][1] for dtype, count in others.items() if dtype in OPERATION_PJ)
    unpriced = {dtype: count for dtype, count in others.items() if count and dtype not in OPERATION_PJ}
    note = (
        "model, not measured: operations by Horowitz, ISSCC 2014 (45 nm; float32 add 0.9 pJ, multiply 3.7 pJ), "
        f"bytes {BYTE_PJ:g} pJ (four in five from cache, one from DRAM)"
    )
    if unpriced:
        note += f"; without {sum(unpriced.values())} operations in {', '.join(sorted(unpriced))}, which have no figure"
    if profile.totals.is_lower_bound:
        note += "; a lower bound, for some operators are unpriced"
    return Energy((operations_pj + moved_bytes * BYTE_PJ) * 1e-12, "model", note)


def meters(
    access: SensorAccess | None = None,
    gpu: int | str = 0,
    power_watts: float | None = None,
    profile: ModelProfile | None = None,
) -> tuple[EnergyMeter, ...]:
    """Return every meter, in the order in which they are tried.

    >>> [meter.name for meter in meters()]
    ['rapl', 'nvml', 'jetson', 'proxy', 'model']
    """
    machine = access or SensorAccess()
    return (
        RaplMeter(machine),
        NvmlMeter(machine, gpu),
        JetsonMeter(machine),
        ProxyMeter(power_watts),
        ModelMeter(profile),
    )


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
    target_precision: float = 0.02,
    access: SensorAccess | None = None,
) -> tuple[Energy | None, tuple[Refusal, ...]]:
    """Return joules per forward with their source, and each meter that could not be used with its reason.

    `run` does one forward and returns when it is done. "auto" takes the first meter that counts the device and works
    to the end, then the proxy if `power_watts` is given, then none; a meter that is asked for by name works or raises
    `MeterFailed`. "model" needs `profile` and is never taken unasked. `access` lets a recording replace the machine.
    """
    known = meters(access, gpu_of(device), power_watts, profile)
    _check(energy, [meter.name for meter in known], power_watts, min_time_s, target_precision)
    if energy is None:
        return None, ()
    work = MeteredWork(run, latency, min_time_s, target_precision, subtract_idle)
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


def _check(
    energy: str | None, names: list[EnergySource], power_watts: float | None, min_time_s: float, target_precision: float
) -> None:
    if energy not in (None, "auto", *names):
        raise InvalidInput(f"energy is {energy!r}; it must be 'auto', None or one of {', '.join(names)}")
    if power_watts is not None and not _is_above_zero(power_watts):
        raise InvalidInput(f"power_watts is {power_watts!r}; it must be a number above 0")
    if not _is_above_zero(min_time_s):
        raise InvalidInput(f"min_time_s is {min_time_s!r}; it must be a number above 0")
    if not _is_above_zero(target_precision) or target_precision >= 1:
        raise InvalidInput(f"target_precision is {target_precision!r}; it must lie between 0 and 1")


def _is_above_zero(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
