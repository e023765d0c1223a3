"""Two profiles laid over each other by module path: what each layer cost before and after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from edge_opt.records import Converted, LayerChange, ModelProfile, RunnerProfile
from edge_opt.records.explanations import Bottleneck

# Bytes per element of a layer that runs in it, over the four of the profile's float32.
_SHRUNK = {"int8": 0.25, "fp16": 0.5, "bf16": 0.5, "fp32": 1.0}
# A layer this close to the cheapest one per operator is made of overhead.
_NEAR_FLOOR = 3.0


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two models: its profile, and what else is known about it."""

    profile: ModelProfile
    converted: Converted | None = None
    kernels: RunnerProfile | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Time of each module path: of the runtime's kernels, else of the measured layers; empty without either."""
        found: dict[str, float] = defaultdict(float)
        if self.kernels is not None:
            for kernel in self.kernels.kernels:
                if kernel.nodes:
                    found[kernel.path] += kernel.seconds or 0.0
        elif self.profile.measurement is not None and self.profile.measurement.layers is not None:
            for layer in self.profile.measurement.layers.layers:
                found[layer.path] += layer.seconds
        return dict(found)

    @property
    def precisions(self) -> dict[str, str]:
        """What each module path runs in, where a conversion says; mixed ones are joined."""
        found: dict[str, set[str]] = defaultdict(set)
        if self.converted is None:
            return {}
        for layer in self.converted.layers:
            found[layer.path].add(layer.precision)
        for kernel in self.converted.kernels:
            if kernel.nodes and kernel.path not in {layer.path for layer in self.converted.layers}:
                found[kernel.path].add(kernel.precision)
        return {path: "+".join(sorted(kinds)) for path, kinds in found.items()}

    def is_fused(self, path: str) -> bool:
        """Whether the runtime has no kernel for this module: its work happens inside another's, in the same pass."""
        kernels = self.converted.kernels if self.converted else ()
        return bool(kernels) and all(kernel.path != path for kernel in kernels if kernel.nodes)


@dataclass(frozen=True, slots=True)
class _Row:
    kind: str
    macs: int
    flops: int
    moved: int
    operators: int
    channels: int | None


def _rows(side: Side) -> dict[str, _Row]:
    """Costs by path, calls of the same module together."""
    rows: dict[str, _Row] = {}
    precisions = side.precisions
    for layer in side.profile.layers:
        call, known = layer.call, rows.get(layer.call.path)
        shrunk = 0.0 if side.is_fused(call.path) else _SHRUNK.get(precisions.get(call.path, "fp32"), 1.0)
        moved = round(layer.cost.bytes_moved * shrunk)
        rows[call.path] = _Row(
            call.kind,
            layer.cost.macs + (known.macs if known else 0),
            layer.cost.flops + (known.flops if known else 0),
            moved + (known.moved if known else 0),
            layer.operators + (known.operators if known else 0),
            _channels(call.kind, call.output_shapes[0] if call.output_shapes else ()),
        )
    return {path: row for path, row in rows.items() if row.operators}


def _channels(kind: str, shape: tuple[int, ...]) -> int | None:
    if kind.startswith("Conv") and len(shape) > 2:
        return shape[1]
    return shape[-1] if kind == "Linear" and shape else None


def layer_changes(before: Side, after: Side) -> tuple[LayerChange, ...]:
    """Every layer of either model, in the order of the first; paths are stable under pruning and conversion."""
    old, new = _rows(before), _rows(after)
    old_s, new_s = before.seconds, after.seconds
    precisions = after.precisions
    bottlenecks = _bottlenecks(new, new_s, _best_rates((old, old_s), (new, new_s)))
    return tuple(
        LayerChange(
            path=path,
            kind=(new.get(path) or old[path]).kind,
            macs_before=old[path].macs if path in old else None,
            macs_after=new[path].macs if path in new else None,
            bytes_before=old[path].moved if path in old else None,
            bytes_after=new[path].moved if path in new else None,
            seconds_before=old_s.get(path),
            seconds_after=new_s.get(path),
            channels_before=old[path].channels if path in old else None,
            channels_after=new[path].channels if path in new else None,
            precision=precisions.get(path),
            bottleneck=bottlenecks.get(path, "unknown"),
        )
        for path in dict.fromkeys([*old, *new])
    )


def _best_rates(*sides: tuple[Mapping[str, _Row], Mapping[str, float]]) -> tuple[float, float]:
    """FLOPs and bytes per second of the layers that did best at each."""
    timed = [(row, seconds[path]) for rows, seconds in sides for path, row in rows.items() if seconds.get(path)]
    return (
        max((row.flops / spent for row, spent in timed), default=0.0),
        max((row.moved / spent for row, spent in timed), default=0.0),
    )


def _bottlenecks(
    rows: Mapping[str, _Row], seconds: Mapping[str, float], best: tuple[float, float]
) -> dict[str, Bottleneck]:
    """What holds each timed layer: the cost of calling it, memory, or arithmetic."""
    timed = {path: spent for path, spent in seconds.items() if spent and path in rows}
    floor = min((spent / rows[path].operators for path, spent in timed.items()), default=0.0)
    found: dict[str, Bottleneck] = {}
    for path, spent in timed.items():
        row = rows[path]
        attainable = max(row.flops / best[0] if best[0] else 0.0, row.moved / best[1] if best[1] else 0.0)
        if not attainable or (spent < _NEAR_FLOOR * floor * row.operators and attainable < spent / 2):
            found[path] = "overhead"
        else:
            found[path] = "memory" if row.moved * best[0] > row.flops * best[1] else "compute"
    return found
