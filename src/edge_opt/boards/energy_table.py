"""Energy of a prediction: power times time where the power is known, and a table of joules per operation and byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from edge_opt.boards.fused_layers import MemoryPass
from edge_opt.measuring.energy import BYTE_PJ, OPERATION_PJ
from edge_opt.records.devices import DeviceSpec, Power, Precision
from edge_opt.records.measurements import Energy
from edge_opt.records.predictions import Prediction

# Under a model's load a device draws its power under load; a power mode and a TDP are ceilings, idle is no load at all.
_WORKING_STATES = ("load", "highest_mode", "tdp")
_TABLE_DTYPE: dict[Precision, str] = {
    "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8", "int4": "float16",
}  # fmt: skip


def with_energies(
    prediction: Prediction, items: Sequence[MemoryPass], spec: DeviceSpec | None, is_lower_bound: bool
) -> Prediction:
    """Return the prediction with the device's RAM, and its energy by every way there is; power times time comes first.

    Layers get their part of the first one, so that they add up to it. Where nothing is known a remark says so.

    Args:
        prediction: Times of the model and its layers.
        items: Passes of the model at the prediction's precision.
        spec: The device; None for a calibrated machine, whose power nobody has said.
        is_lower_bound: Whether some operators have no price.
    """
    power = None if spec is None else working_power(spec)
    proxy = None if power is None or prediction.seconds is None else _proxy(power, prediction.seconds)
    table = from_table(items, prediction.precision, is_lower_bound)
    remarks: tuple[str, ...] = ()
    if spec is not None and proxy is None:
        missing = "the power at work" if power is None else "the time"
        remarks += (f"{missing} is unknown, so there is no energy from power and time",)
    if table is None:
        remarks += (f"the table of energies per operation has no figure for {prediction.precision}",)
    layers = prediction.layers
    if proxy is not None and power is not None:
        watts = power.figure.value
        layers = tuple(
            replace(layer, energy_j=None if layer.seconds is None else watts * layer.seconds) for layer in layers
        )
    elif table is not None:
        by_module: dict[int, list[MemoryPass]] = {}
        for item in items:
            by_module.setdefault(item.module, []).append(item)
        layers = tuple(
            replace(layer, energy_j=table_joules(by_module.get(layer.module, ()), prediction.precision))
            for layer in layers
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


def from_table(items: Iterable[MemoryPass], precision: Precision, is_lower_bound: bool = False) -> Energy | None:
    """Return the energy of these passes by the table of `measuring.energy`; None where it lacks the precision."""
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


def table_joules(items: Iterable[MemoryPass], precision: Precision) -> float | None:
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
        add_pj, multiply_pj = OPERATION_PJ[dtype]
        picojoules += item.macs * (add_pj + multiply_pj) + (item.flops - 2 * item.macs) * multiply_pj
    return picojoules * 1e-12


def _proxy(power: Power, seconds: float) -> Energy:
    watts = power.figure.value
    note = (
        f"proxy, not measured: {watts:g} W ({power.state}; {power.figure.kind}: {power.figure.source}) × "
        f"predicted {seconds:.4g} s"
    )
    return Energy(watts * seconds, "proxy", note)
