"""Calibrations for the tests: made of samples whose times follow from a formula, so that answers are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from edge_opt.calibration.operator_bench import Overheads
from edge_opt.calibration.operator_draws import is_warm, plan
from edge_opt.cost.rules import price
from edge_opt.measuring.machine import read_environment
from edge_opt.records.costs import OpSignature
from edge_opt.records.predictions import (
    Calibration,
    FreshOutput,
    GroupDeviation,
    MeasuredBandwidth,
    MeasuredPeak,
    OperatorSample,
)

FLOPS_PER_S, BYTES_PER_S, CALL_S = 50e9, 20e9, 3e-6
OVERHEADS = Overheads(operator_s=2e-6, module_s=1e-6)


def formula(signature: OpSignature) -> float:
    """Seconds on an imaginary machine: work and traffic one after the other, and a fixed price per call."""
    if price(signature).status == "free":
        return CALL_S
    cost = price(signature).cost
    return CALL_S + cost.flops / FLOPS_PER_S + cost.bytes_moved / BYTES_PER_S


@cache
def planned() -> tuple[OpSignature, ...]:
    return tuple(operator.signature for operator in plan(seed=1, count=700))


def imaginary(seconds: Callable[[OpSignature], float] = formula, count: int = 700) -> Calibration:
    """A calibration of the imaginary machine; it names this one, so that nothing is remarked upon."""
    return Calibration(
        name="imaginary",
        created="2026-01-01T00:00:00+00:00",
        machine=read_environment(),
        versions=(("torch", read_environment().torch),),
        cpu_seconds=1.0,
        bandwidths=tuple(MeasuredBandwidth(1 << power, BYTES_PER_S) for power in (16, 20, 23, 27)),
        peaks=(MeasuredPeak("gemm", "fp32", FLOPS_PER_S), MeasuredPeak("depthwise", "fp32", FLOPS_PER_S)),
        overhead_per_operator_s=OVERHEADS.operator_s,
        overhead_per_module_s=OVERHEADS.module_s,
        fresh_outputs=(FreshOutput(1 << 26, 30e-3, 4e-3),),
        references=(),
        samples=tuple(
            OperatorSample(item, tuple(0 if warm else 1 << 26 for warm in is_warm(item)), seconds(item), "imagined")
            for item in planned()[:count]
        ),
        whole_deviation=0.05,
        deviations=(GroupDeviation("conv", 0.1), GroupDeviation("matmul", 0.1), GroupDeviation("pass", 0.2)),
    )


def changed(calibration: Calibration, **machine: object) -> Calibration:
    """The same, made on a machine that differs."""
    return replace(calibration, machine=replace(calibration.machine, **machine))  # type: ignore[arg-type]
