"""What a measurement on this machine would rest on."""

from __future__ import annotations

import torch

from edge_opt import __version__
from edge_opt._support.extras import installed
from edge_opt.errors import InvalidInput
from edge_opt.measuring.latency import Clock, Progress, interleaved
from edge_opt.measuring.machine import BACKENDS, read_environment
from edge_opt.measuring.statistics import compare_latencies
from edge_opt.records.measurements import Comparison, Diagnosis, Environment, Facility, Latency

_PACKAGES = ("torch", "numpy", "pandas", "torchvision", "timm", "onnxruntime", "openvino")
# A product of this size takes about a millisecond on a small core and fits into its cache.
_SIDE = 256


def diagnose(max_time_s: float = 5.0, clock: Clock | None = None, progress: Progress | None = None) -> Diagnosis:
    """Return the machine, packages, devices and meters with why each is or is not usable, and the noise."""
    from edge_opt.measuring.energy import meters

    environment = read_environment()
    noise, repetition = machine_noise(max_time_s, environment, clock, progress)
    return Diagnosis(
        environment=environment,
        interop_threads=torch.get_num_interop_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        versions=(("edge-opt", __version__), *((package, installed(package)) for package in _PACKAGES)),
        devices=tuple(
            Facility(kind, None if backend.count() else f"torch {torch.__version__} finds none here")
            for kind, backend in BACKENDS.items()
        ),
        meters=tuple(Facility(meter.name, meter.refusal) for meter in meters()),
        noise=noise,
        repetition=repetition,
    )


def machine_noise(
    max_time_s: float, environment: Environment, clock: Clock | None = None, progress: Progress | None = None
) -> tuple[Latency, Comparison]:
    """Measure a fixed matrix product against itself, in `max_time_s` at most: its latency, and how well it repeats."""
    if not max_time_s > 0:
        raise InvalidInput(f"the time to measure the noise is {max_time_s} s; it must be above 0, such as 5")
    matrix = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0))

    def product() -> object:
        return torch.mm(matrix, matrix)

    # Both sides warm up for a twentieth at most and are measured for two fifths at most.
    with torch.inference_mode():
        sides = interleaved(
            {"once": product, "again": product},
            min_time_s=max_time_s / 20,
            max_time_s=max_time_s * 0.4,
            target_precision=0.005,
            clock=clock,
            environment=environment,
            progress=progress,
        )
    return sides["once"], compare_latencies(sides["once"], sides["again"], paired=True)
