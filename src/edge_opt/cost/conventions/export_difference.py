"""A model against a file that was exported from it: the difference in FLOPs, by cause."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from edge_opt.records import Cause, ModelProfile, OpCost, Reconciliation

_PRODUCTS = frozenset(("conv", "matmul", "recurrent", "attention", "linalg"))
NORM_FOLDED = "norm folded into the product before it"
BIAS_ADDED = "bias that a folded norm leaves"
BIAS_DROPPED = "bias added outside of the product, or left out"
WORKED_OUT = "worked out when exported, for no input reaches it"
QUANTIZED = "steps between floats and integers"
_MOST_KINDS = 4


def export_difference(model: ModelProfile, file: ModelProfile) -> Reconciliation:
    """Both counts in FLOPs, and what makes the difference; the model's and the causes add up to the file's.

    Args:
        model: The profile of the model.
        file: The profile of its export, on inputs of the same shape.
    """
    differences: dict[str, Counter[str]] = defaultdict(Counter)
    for path, ours, theirs in _together(_by_module(model), _by_module(file)):
        if _flops(ours) == _flops(theirs):
            continue
        if _is_rewritten(ours, theirs):
            differences[_rewritten(ours, theirs)][path] += _flops(theirs) - _flops(ours)
            continue
        for kind in {*ours, *theirs}:
            mine, other = ours.get(kind, OpCost()), theirs.get(kind, OpCost())
            if mine.flops != other.flops:
                differences[_cause(kind, mine, other, ours, theirs)][path] += other.flops - mine.flops
    causes = [Cause(cause, parts.total(), tuple(parts)) for cause, parts in differences.items() if parts.total()]
    return Reconciliation(
        convention=file.name,
        unit="flops",
        ours=model.totals.flops,
        theirs=file.totals.flops,
        causes=tuple(sorted(causes, key=lambda cause: (-abs(cause.difference), cause.cause))),
    )


Work = dict[str, OpCost]


def _flops(work: Work) -> int:
    return sum(cost.flops for cost in work.values())


def _by_module(profile: ModelProfile) -> dict[str, Work]:
    """What each module costs, by kind of work."""
    found: dict[str, Work] = defaultdict(dict)
    for one in profile.operators:
        if one.cost.flops:
            found[one.module][one.kind] = found[one.module].get(one.kind, OpCost()) + one.cost
    return found


def _together(before: Mapping[str, Work], after: Mapping[str, Work]) -> list[tuple[str, Work, Work]]:
    """Work by module. What a file lays on a module that the model does not know goes to the one around it."""
    moved: dict[str, Work] = defaultdict(dict)
    for path, work in after.items():
        known = path
        while known and known not in before:
            known = known.rpartition(".")[0]
        for kind, cost in work.items():
            moved[known][kind] = moved[known].get(kind, OpCost()) + cost
    return [(path, before.get(path, {}), moved.get(path, {})) for path in {**before, **moved}]


def _is_rewritten(ours: Work, theirs: Work) -> bool:
    """Whether the same module is made of operators of other kinds: attention of products, an activation of parts."""
    return bool(ours) and bool(set(theirs) - set(ours) - {"quantization"})


def _rewritten(ours: Work, theirs: Work) -> str:
    lost = [kind for kind in ours if ours[kind] != theirs.get(kind)] or list(ours)
    new = [kind for kind in theirs if theirs[kind] != ours.get(kind)]
    return f"{_named(lost)} written as {_named(new)}"


def _named(kinds: list[str]) -> str:
    shown = sorted(kinds)
    return ", ".join(shown[:_MOST_KINDS]) + (", ..." if len(shown) > _MOST_KINDS else "")


def _cause(kind: str, mine: OpCost, other: OpCost, ours: Work, theirs: Work) -> str:
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
