"""Estimates of energy where nothing measures it: power times latency, and joules per operation and byte."""

from __future__ import annotations

from collections import Counter
from functools import partial

from edge_opt.errors import MeterFailed
from edge_opt.measure.energy.bench import Bench
from edge_opt.measure.energy.registry import Measure, Workload, meter
from edge_opt.records import Energy, ModelProfile

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


@meter("proxy")
def proxy(bench: Bench) -> Measure:
    """The caller's watts times the median latency."""
    if bench.power_watts is None:
        raise MeterFailed("no power is given; pass power_watts=, the draw of the device under load")
    return partial(_proxy, bench.power_watts)


def _proxy(power_watts: float, work: Workload) -> Energy:
    idle = "; idle power is not known and not subtracted" if work.subtract_idle else ""
    note = f"proxy, not measured: {power_watts:g} W given × median latency of {work.latency.median_s:.4g} s{idle}"
    return Energy(power_watts * work.latency.median_s, "proxy", note)


@meter("model", is_automatic=False)
def model(bench: Bench) -> Measure:
    """Joules per operation and byte, from a profile: for comparing variants of a model, not for sizing a battery."""
    if bench.profile is None:
        raise MeterFailed("no profile is given; pass profile=, the result of edge_opt.profile")
    energy = modeled(bench.profile)
    return lambda _: energy


def modeled(profile: ModelProfile) -> Energy:
    """Energy of one forward by the table of this module.

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
    left_out = {dtype: count for dtype, count in others.items() if count and dtype not in OPERATION_PJ}
    note = (
        "model, not measured: operations by Horowitz, ISSCC 2014 (45 nm; float32 add 0.9 pJ, multiply 3.7 pJ), "
        f"bytes {BYTE_PJ:g} pJ (four in five from cache, one from DRAM)"
    )
    if left_out:
        note += f"; without {sum(left_out.values())} operations in {', '.join(sorted(left_out))}, which have no figure"
    if profile.totals.is_lower_bound:
        note += "; a lower bound, for some operators are unpriced"
    return Energy((operations_pj + moved_bytes * BYTE_PJ) * 1e-12, "model", note)
