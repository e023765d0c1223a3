"""The machine itself: bandwidth over working sets, peaks per class and precision, what fresh memory costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from edge_opt.devices.calibration.alone import best_seconds
from edge_opt.records import FreshOutput, MeasuredBandwidth, MeasuredPeak
from edge_opt.records.calibrations import PeakClass
from edge_opt.records.hardware import Precision

_WORKING_SETS = tuple(1 << power for power in range(15, 28))  # 32 KiB to 128 MiB
_FRESH = tuple(1 << power for power in range(18, 27, 2))  # 256 KiB to 64 MiB
_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIDE, _WIDTH = 28, 128


def bandwidths() -> tuple[MeasuredBandwidth, ...]:
    """What a copy reaches, from working sets that fit the smallest cache to those that fit none."""
    found = []
    for size in _WORKING_SETS:
        source, target = torch.ones(size // 8), torch.ones(size // 8)
        inner = max(1, (1 << 20) // size)

        def copy(source: torch.Tensor = source, target: torch.Tensor = target, inner: int = inner) -> None:
            for _ in range(inner):
                target.copy_(source)

        found.append(MeasuredBandwidth(size, size * inner / best_seconds(copy, 5)))
    return tuple(found)


def fresh_outputs() -> tuple[FreshOutput, ...]:
    """Writing memory that was just asked for, beside memory that was written before: new pages must be mapped first."""
    return tuple(_fresh(size) for size in _FRESH)


def _fresh(size: int) -> FreshOutput:
    kept = torch.empty(size // 4)
    return FreshOutput(
        size, best_seconds(lambda: torch.empty(size // 4).fill_(1.0), 4), best_seconds(lambda: kept.fill_(1.0), 4)
    )


def peaks() -> tuple[MeasuredPeak, ...]:
    """Operations per second of each class of work at each precision that torch has a kernel for, slow ones as found."""
    found = [
        MeasuredPeak(work, precision, 2 * macs / best_seconds(run, 3))
        for precision, dtype in _DTYPES.items()
        for work, macs, run in _work(dtype)
    ]
    return (*found, *_integer_peak())


def _work(dtype: torch.dtype) -> Iterator[tuple[PeakClass, int, Callable[[], object]]]:
    # Half the size at 16 bits: where only a reference kernel exists, it may be fifty times as slow.
    size = 512 if dtype is torch.float32 else 256
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    yield "gemm", size**3, lambda: torch.mm(a, b)
    image = torch.randn(1, _WIDTH, _SIDE, _SIDE).to(dtype)
    places = _SIDE * _SIDE
    three, one, deep = (
        torch.randn(shape).to(dtype) for shape in ((_WIDTH, _WIDTH, 3, 3), (_WIDTH, _WIDTH, 1, 1), (_WIDTH, 1, 3, 3))
    )
    yield "conv3x3", places * _WIDTH * _WIDTH * 9, lambda: F.conv2d(image, three, padding=1)
    yield "conv1x1", places * _WIDTH * _WIDTH, lambda: F.conv2d(image, one)
    yield "depthwise", places * _WIDTH * 9, lambda: F.conv2d(image, deep, padding=1, groups=_WIDTH)
    yield "strided", places // 4 * _WIDTH * _WIDTH * 9, lambda: F.conv2d(image, three, stride=2, padding=1)


def _integer_peak() -> Iterator[MeasuredPeak]:
    """Products of int8 matrices, the only class that torch has an integer kernel for without quantising."""
    a, b = (torch.randint(-8, 8, (256, 256), dtype=torch.int8) for _ in range(2))
    try:
        seconds = best_seconds(lambda: torch._int_mm(a, b), 3)
    except RuntimeError:  # not every build and processor has it
        return
    yield MeasuredPeak("gemm", "int8", 2 * 256**3 / seconds)
