"""Energy of a prediction: a device's power times the time, and joules per operation and byte from a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from edge_opt.devices.passes import Pass, passes
from edge_opt.measure.energy.estimates import BYTE_PJ, OPERATION_PJ
from edge_opt.records import DeviceSpec, Energy, LayerPrediction, ModelProfile, Power, Precision, Prediction

# Under a model's load a device draws its power under load; a power mode and a TDP are ceilings, idle is no load at all.
_WORKING_STATES = ("load", "highest_mode", "tdp")
_TABLE_DTYPE: dict[Precision, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}


def with_energies(prediction: Prediction, profile: ModelProfile, spec: DeviceSpec | None) -> Prediction:
    """The prediction with what its energy is by every way there is; power times time comes first.

    Layers get their part of the first one, so that they add up to it. Where nothing is known a remark says so.
    """
    found = passes(profile, prediction.precision)
    power = None if spec is None else working_power(spec)
    proxy = None if power is None else _proxy(power, prediction.seconds)
    table = from_table(found, prediction.precision, is_lower_bound=bool(profile.unpriced))
    remarks: tuple[str, ...] = () if proxy or spec is None else (_missing(power),)
    if table is None:
        remarks += (f"the table of energies per operation has no figure for {prediction.precision}",)
    if proxy is not None and power is not None:
        watts = power.figure.value
        layers = tuple(
            replace(layer, energy_j=None if layer.seconds is None else watts * layer.seconds)
            for layer in prediction.layers
        )
    elif table is not None:
        layers = tuple(_with_table(prediction.layers, found, prediction.precision))
    else:
        layers = prediction.layers
    return replace(
        prediction,
        layers=layers,
        energies=tuple(energy for energy in (proxy, table) if energy is not None),
        remarks=prediction.remarks + remarks,
    )


def working_power(spec: DeviceSpec) -> Power | None:
    """Watts of the device at work: under load, else in its highest mode, else its TDP; None where nobody says.

    >>> from edge_opt.devices.catalog import device
    >>> [(power.state, power.figure.value) for power in (working_power(device("jetson-nano")),)]
    [('highest_mode', 10.0)]
    """
    by_state = {power.state: power for power in spec.powers}
    return next((by_state[state] for state in _WORKING_STATES if state in by_state), None)


def from_table(items: Iterable[Pass], precision: Precision, is_lower_bound: bool = False) -> Energy | None:
    """Energy of these passes by the table of `edge_opt.measure.energy`; None where it lacks the precision."""
    joules = table_joules(items, precision)
    if joules is None:
        return None
    add_pj, multiply_pj = OPERATION_PJ[_TABLE_DTYPE[precision]]
    note = (
        f"model, not measured: operations by Horowitz, ISSCC 2014 (45 nm; {_TABLE_DTYPE[precision]} add {add_pj:g} pJ, "
        f"multiply {multiply_pj:g} pJ), bytes {BYTE_PJ:g} pJ (four in five from cache, one from DRAM); "
        "for comparing variants, not for sizing a battery"
    )
    return Energy(joules, "model", note + ("; a lower bound, for some operators are unpriced" * is_lower_bound))


def table_joules(items: Iterable[Pass], precision: Precision) -> float | None:
    """A MAC is a multiplication and an addition, other arithmetic counts as multiplications, every byte the same.

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
        add_pj, multiply_pj = OPERATION_PJ[dtype]
        picojoules += item.macs * (add_pj + multiply_pj) + (item.flops - 2 * item.macs) * multiply_pj
    return picojoules * 1e-12


def _with_table(
    layers: Sequence[LayerPrediction], items: Sequence[Pass], precision: Precision
) -> list[LayerPrediction]:
    by_module: dict[int, list[Pass]] = {}
    for item in items:
        by_module.setdefault(item.module, []).append(item)
    return [replace(layer, energy_j=table_joules(by_module.get(layer.module, ()), precision)) for layer in layers]


def _proxy(power: Power, seconds: float | None) -> Energy | None:
    if seconds is None:
        return None
    watts = power.figure.value
    note = (
        f"proxy, not measured: {watts:g} W ({power.state}; {power.figure.kind}: {power.figure.source}) × "
        f"predicted {seconds:.4g} s"
    )
    return Energy(watts * seconds, "proxy", note)


def _missing(power: Power | None) -> str:
    if power is None:
        return "the power at work is unknown, so there is no energy from power and time"
    return "the time is unknown, so there is no energy from power and time"
