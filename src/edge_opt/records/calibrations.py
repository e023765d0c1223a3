"""Records of a calibration: how fast a machine is, as measured there, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge_opt.records.hardware import Precision
from edge_opt.records.measurements import Environment
from edge_opt.records.tracing import OpSignature

# Of a convolution by its kernel, or a plain matrix product.
PeakClass = Literal["gemm", "conv3x3", "conv1x1", "depthwise", "strided"]


@dataclass(frozen=True, slots=True)
class OperatorSample:
    """One operator as it was timed: alone, or in place inside the reference model named by `origin`.

    `distances` has one entry per tensor in `signature.inputs`: bytes that were touched since it was last, which tells
    whether it may still have been in a cache.
    """

    signature: OpSignature
    distances: tuple[int, ...]
    seconds: float
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """A whole forward of a reference model beside the sum of its operators: what lies between operators."""

    name: str
    family: str
    batch: int
    operators: int
    modules: int
    operators_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """Operations per second, two per MAC, of one class of work at one precision, as its best kernel here reaches."""

    work: PeakClass
    precision: Precision
    ops_per_s: float


@dataclass(frozen=True, slots=True)
class MeasuredBandwidth:
    """Bytes read plus bytes written per second by a copy whose source and target together have `working_set_bytes`."""

    working_set_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class FreshOutput:
    """Seconds per byte of writing a new tensor of this size, beside writing one that was written before."""

    nbytes: int
    fresh_s: float
    reused_s: float


@dataclass(frozen=True, slots=True)
class GroupDeviation:
    """Standard deviation of the logarithm of predicted over measured time, of operators of one group."""

    group: str
    deviation: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine as measured on `created`, with `machine.threads` threads; everything a prediction there rests on.

    `whole_deviation` and `deviations` are the errors of predictions of reference models that were held out.
    """

    name: str
    created: str
    machine: Environment
    versions: tuple[tuple[str, str], ...]
    cpu_seconds: float
    bandwidths: tuple[MeasuredBandwidth, ...]
    peaks: tuple[MeasuredPeak, ...]
    overhead_per_operator_s: float
    overhead_per_module_s: float
    fresh_outputs: tuple[FreshOutput, ...]
    references: tuple[ReferenceRun, ...]
    samples: tuple[OperatorSample, ...]
    whole_deviation: float
    deviations: tuple[GroupDeviation, ...]

    def peak(self, work: str, precision: str) -> float | None:
        """Operations per second of one class of work; None where torch has no kernel for it."""
        found = (item.ops_per_s for item in self.peaks if (item.work, item.precision) == (work, precision))
        return next(found, None)

    @property
    def memory_bytes_per_s(self) -> float:
        """Bandwidth of the largest working set: that of memory itself."""
        return max(self.bandwidths, key=lambda item: item.working_set_bytes).bytes_per_s
