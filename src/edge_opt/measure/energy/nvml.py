"""NVML: the energy counter of an NVIDIA GPU, or its power where it has no counter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from edge_opt.errors import MeterFailed
from edge_opt.measure.energy.bench import Bench
from edge_opt.measure.energy.registry import Measure, meter
from edge_opt.measure.energy.sensing import Sensor, integrated, sensed

# Readings change every 20 to 100 ms, by GPU (Yang, Adamek, Armour, "Part-time power measurements", 2023).
UPDATE_S = 0.1
PERIOD_S = 0.02
STEP_J = 1e-3


@meter("nvml", sees=("cuda",))
def nvml(bench: Bench) -> Measure:
    """The whole board of one GPU. The counter came with Volta; GPUs before it tell their power at the moment."""
    library = _library() if bench.nvml is None else bench.nvml
    with _session(library):
        handle = _handle(library, bench.gpu)
        name = library.nvmlDeviceGetName(handle)
        name = name.decode() if isinstance(name, bytes) else name
        has_counter = _is_supported(library, library.nvmlDeviceGetTotalEnergyConsumption, handle)
        if not has_counter and not _is_supported(library, library.nvmlDeviceGetPowerUsage, handle):
            raise MeterFailed(f"{name} tells NVML neither its energy nor its power")
    counts = f"NVML energy counter of {name}" if has_counter else f"NVML power of {name}, sampled every {PERIOD_S} s"
    opened = partial(_counted if has_counter else _sampled, bench, library)
    return partial(sensed, Sensor("nvml", counts, UPDATE_S, STEP_J if has_counter else 0.0, opened), bench)


def gpu_of(device: str) -> int | str:
    """The GPU that torch calls `device`, by UUID: NVML knows nothing of CUDA_VISIBLE_DEVICES and of torch's order."""
    import torch

    kind, _, index = device.partition(":")
    if kind != "cuda" or not torch.cuda.is_available():
        return int(index or 0) if kind == "cuda" else 0
    return f"GPU-{torch.cuda.get_device_properties(int(index) if index else torch.cuda.current_device()).uuid}"


def _library() -> Any:
    try:
        return import_module("pynvml")
    except ImportError as error:
        raise MeterFailed("pynvml is not installed; `pip install nvidia-ml-py` brings it") from error


@contextmanager
def _session(library: Any) -> Iterator[None]:
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise MeterFailed(f"NVML does not start ({error}); is there an NVIDIA GPU with its driver loaded?") from error
    try:
        yield
    finally:
        library.nvmlShutdown()


def _handle(library: Any, gpu: int | str) -> Any:
    try:
        by = library.nvmlDeviceGetHandleByIndex if isinstance(gpu, int) else library.nvmlDeviceGetHandleByUUID
        return by(gpu)
    except library.NVMLError as error:
        raise MeterFailed(f"NVML has no GPU {gpu!r} ({error})") from error


def _is_supported(library: Any, query: Callable[[Any], int], handle: Any) -> bool:
    try:
        query(handle)
    except library.NVMLError:
        return False
    return True


def _reading(library: Any, query: Callable[[Any], int], handle: Any) -> float:
    """A reading in thousandths, as whole units: mJ as J, mW as W."""
    try:
        return query(handle) / 1000
    except library.NVMLError as error:
        raise MeterFailed(f"the GPU stopped answering NVML ({error})") from error


@contextmanager
def _counted(bench: Bench, library: Any) -> Iterator[Callable[[], float]]:
    with _session(library):
        yield partial(_reading, library, library.nvmlDeviceGetTotalEnergyConsumption, _handle(library, bench.gpu))


@contextmanager
def _sampled(bench: Bench, library: Any) -> Iterator[Callable[[], float]]:
    with _session(library):
        watts = partial(_reading, library, library.nvmlDeviceGetPowerUsage, _handle(library, bench.gpu))
        with integrated(watts, bench, PERIOD_S) as joules:
            yield joules
