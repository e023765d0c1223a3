"""How the export of a model differs from the model, by cause."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from edge_opt.records.costs import Cause, OpCost, Reconciliation
from edge_opt.records.profiles import ModelProfile

_PRODUCTS = frozenset(("conv", "matmul", "recurrent", "attention", "linalg"))
NORM_FOLDED = "norm folded into the product before it"
BIAS_ADDED = "bias that a folded norm leaves"
BIAS_DROPPED = "bias added outside of the product, or left out"
WORKED_OUT = "worked out when exported, for no input reaches it"
QUANTIZED = "steps between floats and integers"
_MAX_KINDS = 4  # listed in one cause
_Work = dict[str, OpCost]  # cost by kind of operator


def export_difference(model: ModelProfile, file: ModelProfile) -> Reconciliation:
    """Compare both counts in FLOPs; the model's count and the causes add up to the file's.

    Args:
        model: The profile of the model.
        file: The profile of its export, on inputs of the same shape.
    """
    differences: dict[str, Counter[str]] = defaultdict(Counter)
    for path, ours, theirs in _work_by_path(_by_module(model), _by_module(file)):
        if _flops(ours) == _flops(theirs):
            continue
        if _is_rewritten(ours, theirs):
            differences[_rewritten_cause(ours, theirs)][path] += _flops(theirs) - _flops(ours)
            continue
        for kind in {*ours, *theirs}:
            mine, other = ours.get(kind, OpCost()), theirs.get(kind, OpCost())
            if mine.flops != other.flops:
                differences[_export_cause(kind, mine, other, ours, theirs)][path] += other.flops - mine.flops
    causes = [Cause(cause, parts.total(), tuple(parts)) for cause, parts in differences.items() if parts.total()]
    return Reconciliation(
        convention=file.name,
        unit="flops",
        ours=model.totals.flops,
        theirs=file.totals.flops,
        causes=tuple(sorted(causes, key=lambda cause: (-abs(cause.difference), cause.cause))),
    )


def _flops(work: _Work) -> int:
    return sum(cost.flops for cost in work.values())


def _by_module(profile: ModelProfile) -> dict[str, _Work]:
    """Return the cost of each module by kind of operator."""
    modules: dict[str, _Work] = defaultdict(dict)
    for operator in profile.operators:
        if operator.cost.flops:
            work = modules[operator.module]
            work[operator.kind] = work.get(operator.kind, OpCost()) + operator.cost
    return modules


def _work_by_path(before: Mapping[str, _Work], after: Mapping[str, _Work]) -> list[tuple[str, _Work, _Work]]:
    """Pair the work of each module. Work of a module that only the file has belongs to the module around it."""
    moved: dict[str, _Work] = defaultdict(dict)
    for path, work in after.items():
        known = path
        while known and known not in before:
            known = known.rpartition(".")[0]
        for kind, cost in work.items():
            moved[known][kind] = moved[known].get(kind, OpCost()) + cost
    return [(path, before.get(path, {}), moved.get(path, {})) for path in {**before, **moved}]


def _is_rewritten(ours: _Work, theirs: _Work) -> bool:
    """Whether the file uses other kinds of operators for the module, such as products for attention."""
    return bool(ours) and bool(set(theirs) - set(ours) - {"quantization"})


def _rewritten_cause(ours: _Work, theirs: _Work) -> str:
    lost = [kind for kind in ours if ours[kind] != theirs.get(kind)] or list(ours)
    new = [kind for kind in theirs if theirs[kind] != ours.get(kind)]
    return f"{_join_kinds(lost)} written as {_join_kinds(new)}"


def _join_kinds(kinds: list[str]) -> str:
    return ", ".join(sorted(kinds)[:_MAX_KINDS]) + (", ..." if len(kinds) > _MAX_KINDS else "")


def _export_cause(kind: str, mine: OpCost, other: OpCost, ours: _Work, theirs: _Work) -> str:
    if kind == "quantization":
        return QUANTIZED
    if not mine.flops:
        return f"{kind} added by the exporter"
    if other.flops:
        is_bias = kind in _PRODUCTS and mine.macs == other.macs
        return (BIAS_ADDED if other.flops > mine.flops else BIAS_DROPPED) if is_bias else f"{kind} counted differently"
    if kind == "norm":
        return NORM_FOLDED
    if not theirs and _PRODUCTS.intersection(ours):
        return WORKED_OUT
    return f"{kind} left out by the exporter"
