"""Utilisation in words: what a share of the bandwidth says, and what to do about it."""

from __future__ import annotations

from edge_opt.records import LayerLatencies, Roofline, RooflinePoint, Utilization

_READINGS = (
    (
        0.8,
        "memory-bound: most of the time goes into moving data",
        ("prune channels, which shrinks activations", "use fp16 or int8, which moves fewer bytes",
         "fuse or tile layers, so that data is used more often per transfer"),
    ),
    (
        0.2,
        "balanced: compute and memory both count",
        ("look at single layers for their own bottleneck", "try other batch sizes",
         "compare precisions for accuracy against speed"),
    ),
    (
        float("-inf"),
        "compute-bound, or memory is used inefficiently",
        ("a small model may be dominated by the framework's overhead", "few or slow cores limit compute",
         "check for cache misses", "consider quantisation or an accelerator"),
    ),
)  # fmt: skip
# A roofline's own time is a sum of the same quotients; their rounding is no cache.
_WHOLE = 1 + 1e-9
_CACHED = (
    "; more than memory delivers, so part of the data came from a cache, or the figure for the bandwidth is too low"
)


def read_utilization(bandwidth_utilization: float) -> tuple[str, tuple[str, ...]]:
    """What a share of the bandwidth says, and the advice that goes with it."""
    reading, advice = next(
        (text, hints) for least, text, hints in _READINGS if bandwidth_utilization > least or least == float("-inf")
    )
    return reading + (_CACHED if bandwidth_utilization > _WHOLE else ""), advice


def explain_utilization(bandwidth_utilization: float) -> str:
    """A bandwidth utilisation in words, with advice: above 80 % memory-bound, up to 20 % compute-bound, else balanced.

    >>> explain_utilization(0.423).partition(";")[0]
    '42.3 % of the bandwidth: balanced: compute and memory both count'
    """
    reading, advice = read_utilization(bandwidth_utilization)
    return f"{bandwidth_utilization * 100:.1f} % of the bandwidth: {reading}; {'; '.join(advice)}"


def utilization(roof: Roofline, seconds: float | None = None) -> Utilization | None:
    """What the whole model makes of the device: in measured `seconds`, else in the roofline's own time.

    None where the bandwidth or the time is unknown.
    """
    return _used(roof, roof.total, seconds)


def layer_utilizations(roof: Roofline, measured: LayerLatencies | None = None) -> tuple[Utilization, ...]:
    """The same layer by layer, for every layer whose time is known.

    A measured layer may use more than the whole bandwidth: what it reads was in a cache, and its reading says so.
    """
    times = {layer.module: layer.seconds for layer in measured.layers} if measured else {}
    points = [point for point in roof.layers if measured is None or point.module in times]
    used = (
        _used(roof, point, times[point.module] if measured and point.module is not None else None) for point in points
    )
    return tuple(item for item in used if item is not None)


def _used(roof: Roofline, point: RooflinePoint, measured_s: float | None) -> Utilization | None:
    seconds = point.seconds if measured_s is None else measured_s
    if not seconds or point.memory_s is None:
        return None
    share = point.memory_s / seconds
    reading, advice = read_utilization(share)
    return Utilization(
        module=point.module,
        path=point.path,
        seconds=seconds,
        is_measured=measured_s is not None,
        bandwidth=share,
        compute=None if point.compute_s is None else point.compute_s / seconds,
        reading=reading,
        advice=advice,
    )
