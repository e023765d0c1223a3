"""Deployment: what measured latencies would mean for batches and for a stream, on a slower or faster clock."""

from __future__ import annotations

from dataclasses import dataclass

from edge_opt.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Deployment:
    """A simulation, not a measurement: measured time over the ratio of clocks, as if all of it were computing.

    Utilisation of the stream is the share of time that the device is busy, 1 at most; where it does not keep up,
    samples are lost or wait, and `stream_backlog_sps` says how many each second.
    """

    cpu_frequency_scale: float
    batch_size: int
    batch_latency_ms: float
    batch_throughput_sps: float
    stream_interval_ms: float
    stream_latency_ms: float
    stream_throughput_sps: float
    stream_utilization: float
    stream_keeps_up: bool
    stream_backlog_sps: float
    note: str = "simulated: measured latency here / cpu_frequency_scale"


def simulate_deployment(
    batch_latency_s: float,
    single_latency_s: float,
    *,
    batch_size: int,
    cpu_frequency_scale: float = 1.0,
    stream_interval_s: float = 0.01,
) -> Deployment:
    """Batches and a stream of single samples on a device whose clock is `cpu_frequency_scale` times the one here.

    >>> half = simulate_deployment(0.004, 0.001, batch_size=32, cpu_frequency_scale=0.5, stream_interval_s=0.01)
    >>> half.batch_latency_ms, half.batch_throughput_sps, half.stream_utilization
    (8.0, 4000.0, 0.2)
    """
    values = (batch_latency_s, single_latency_s, batch_size, cpu_frequency_scale, stream_interval_s)
    if not all(0 < value < float("inf") for value in values):
        raise InvalidInput(f"latencies, batch size, scale and interval must all be above 0, and are {values}")
    batch_s, single_s = batch_latency_s / cpu_frequency_scale, single_latency_s / cpu_frequency_scale
    offered, possible = 1 / stream_interval_s, 1 / single_s
    return Deployment(
        cpu_frequency_scale=cpu_frequency_scale,
        batch_size=batch_size,
        batch_latency_ms=batch_s * 1e3,
        batch_throughput_sps=batch_size / batch_s,
        stream_interval_ms=stream_interval_s * 1e3,
        stream_latency_ms=single_s * 1e3,
        stream_throughput_sps=min(offered, possible),
        stream_utilization=min(single_s / stream_interval_s, 1.0),
        stream_keeps_up=single_s <= stream_interval_s,
        stream_backlog_sps=max(offered - possible, 0.0),
    )
