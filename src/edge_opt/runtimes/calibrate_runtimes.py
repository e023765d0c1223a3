"""Calibrate runtimes that fuse: small nets are converted, and the profile of the runtime tells what it fused."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from edge_opt._support.progress import report_progress
from edge_opt.calibration.fused_kernels import GroupTimes, OperatorGroup, groups_of, sample_of
from edge_opt.calibration.generated_networks import generated_networks
from edge_opt.calibration.predict import Scales
from edge_opt.calibration.quiet_clock import ReferenceKernel, SampleClock
from edge_opt.calibration.reference_networks import CHECKS, REFERENCES, Reference
from edge_opt.calibration.self_check import now, summary, with_cross_validation
from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.measuring.runtime_profile import ProfileEntry
from edge_opt.records.conversions import Exported
from edge_opt.records.devices import Precision
from edge_opt.records.predictions import CheckedNet, KernelGroupSample, RuntimeCalibration
from edge_opt.runtimes.export import export_quickly
from edge_opt.runtimes.kernels import FAMILY, Graph, read_graph
from edge_opt.runtimes.model_call import model_call
from edge_opt.runtimes.onnxruntime import chosen_scheme
from edge_opt.runtimes.protocol import ConversionRequest, Runner
from edge_opt.runtimes.registry import check_installed, find_runtime
from edge_opt.trace import trace

RUNTIMES = ("onnxruntime", "openvino")
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
_GENERATED = 40
# Runs in one profile: as many as take about this long. Short kernels need many to find one that was not interrupted.
_PROFILE_S, _LEAST_REPEATS, _MOST_REPEATS = 0.25, 8, 40
# Profiles of a net at most, until its kernels take at most this many times the whole; beyond the last it is left out.
_PROFILES, _PLAUSIBLE, _DISTURBED = 3, 1.08, 1.2
_COUNTING_S = 1e-6  # what a profile adds to each kernel: it counts whole microseconds
_LEAST_RUNS, _MOST_RUNS, _BLOCK_NS = 3, 12, 40_000_000
_TURNS = 2
_VISITS = 2
_FOLDS = 6
_ASSUMED = 0.15  # deviation of errors where nothing was held out
_CONVERTING = ("Quantize", "Dequantize", "Reorder", "Transpose", "Convert", "Cast", "FakeQuantize")
# Shares of the seconds after which no further net is sampled, and none is checked.
_SAMPLED_SHARE, _CHECKED_SHARE = 0.82, 0.97


class _Files:
    """Writes the files of nets when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, str], Path | None] = {}

    def of(self, net: Reference, precision: str) -> Path | None:
        """Return the file of a net in a precision, None where it cannot be made."""
        if (net.name, precision) not in self._known:
            self._known[net.name, precision] = None
            with suppress(EdgeOptError):
                self._known[net.name, precision] = self._write(net, precision)
        return self._known[net.name, precision]

    def _write(self, net: Reference, precision: str) -> Path:
        torch.manual_seed(0)
        model = net.build().eval()
        call = model_call(model, [net.inputs(1)])
        path = self._folder / f"{net.name}.fp32.onnx"
        if self._known.get((net.name, "fp32")) is None:
            if export_quickly(call, path).batch is not None:
                raise InvalidInput(f"{net.name} takes one batch only")
            self._known[net.name, "fp32"] = path
        if precision == "fp32":
            return path
        runtime = find_runtime("onnxruntime")
        exported = Exported(str(path), call.names, ("output",), None, path.stat().st_size, ())
        scheme = chosen_scheme(model, precision, runtime, "auto")
        calibration: list[tuple[torch.Tensor, ...]] = [(net.inputs(1),)]
        folder = self._folder / precision
        folder.mkdir(exist_ok=True)
        request = ConversionRequest(call, precision, folder, f"{net.name}.{precision}.onnx", calibration,
                                    exported=exported, scheme=scheme)  # fmt: skip
        return runtime.build(request).path


def calibrate_runtimes(
    scales: Scales,
    runtimes: Sequence[str],
    precisions: Sequence[Precision],
    threads: Sequence[int],
    seconds: float = 110.0,
) -> tuple[RuntimeCalibration, ...]:
    """Calibrate each runtime in each precision with each number of threads.

    Args:
        scales: The machine's figures, for first estimates.
        runtimes: Names of runtimes that have a profile of kernels.
        precisions: fp32 and int8.
        threads: Numbers of threads.
        seconds: CPU seconds of each platform at most.
    """
    check_platforms(runtimes, precisions)
    with TemporaryDirectory(prefix="edge-opt-") as name:
        files = _Files(Path(name))
        return tuple(
            _calibrated(_Platform(runtime, precision, count, scales, files, seconds))
            for count in threads
            for runtime in runtimes
            for precision in precisions
        )


def check_platforms(runtimes: Sequence[str], precisions: Sequence[str]) -> None:
    """Refuse runtimes without a profile of kernels and precisions that they are not calibrated in."""
    for name in runtimes:
        if name not in RUNTIMES:
            raise InvalidInput(f"{name} cannot be calibrated; choose from {', '.join(('torch', *RUNTIMES))}")
    for precision in precisions:
        if precision not in PRECISIONS:
            raise InvalidInput(f"precision {precision!r} cannot be calibrated; choose from {', '.join(PRECISIONS)}")
    check_installed(runtimes)


@dataclass(frozen=True, slots=True)
class _Platform:
    runtime: str
    precision: Precision
    threads: int
    scales: Scales
    files: _Files
    seconds: float


def _nets() -> Iterator[tuple[Reference, int]]:
    """Yield nets with a batch: reference models and generated ones in turn, small batches first."""
    generated = list(generated_networks(_GENERATED))
    pairs = [*zip(REFERENCES, generated, strict=False)]
    order = [net for pair in pairs for net in pair] + [*REFERENCES[len(pairs) :], *generated[len(pairs) :]]
    for place in (0, 1):
        for net in order:
            yield net, min(net.batches[place], 4)


def _calibrated(platform: _Platform) -> RuntimeCalibration:
    start = time.process_time()

    def spent() -> float:
        return (time.process_time() - start) / platform.seconds

    clock = SampleClock(platform.threads)
    kernel = ReferenceKernel(clock)
    name = f"{platform.runtime} {platform.precision}, threads {platform.threads}"
    best: dict[tuple[str, int], _MeasuredNet] = {}
    lost: dict[tuple[str, int], None] = {}
    # The second visit of a net is minutes after the first: few disturbances last that long.
    for visit, (net, batch) in product(range(1, _VISITS + 1), _nets()):
        if best and spent() > _SAMPLED_SHARE:
            break
        key = net.name, batch
        if key in lost:
            continue
        report_progress(f"calibrating {name}, {spent():.0%}: {net.name}, batch {batch}, visit {visit}")
        measured = _measured(platform, net, batch, kernel, clock)
        if measured is not None and measured.samples:
            best[key] = min(best.get(key, measured), measured, key=lambda it: it.seconds)
        elif key not in best:
            lost[key] = None
    samples = [sample for measured in best.values() for sample in measured.samples]
    times = GroupTimes(samples)
    checks: list[CheckedNet] = []
    for place in (0, 1):
        for net in CHECKS:
            if len(checks) >= 2 and spent() > _CHECKED_SHARE:
                break
            batch = min(net.batches[place], 4)
            measured = _measured(platform, net, batch, kernel, clock, is_check=True)
            if measured is not None:
                checks.append(CheckedNet(f"{net.name}, batch {batch}", measured.seconds, _predicted_s(times, measured)))
    check = summary(tuple(checks), kernel.best_s, _ASSUMED)
    deviation = _held_out_deviation(best)
    package = find_runtime(platform.runtime).package
    remarks = (f"no profile could be read of {', '.join(dict.fromkeys(name for name, _ in lost))}",) if lost else ()
    return RuntimeCalibration(
        runtime=platform.runtime, precision=platform.precision, threads=platform.threads, version=version(package),
        created=now(), cpu_seconds=time.process_time() - start, samples=tuple(samples),
        check=with_cross_validation(check, deviation), remarks=remarks,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _MeasuredNet:
    seconds: float
    groups: list[OperatorGroup]
    samples: list[KernelGroupSample]


def _held_out_deviation(nets: Mapping[tuple[str, int], _MeasuredNet]) -> float:
    """Return the standard deviation of the logarithm of errors on nets that were left out, some at a time."""
    names = list(dict.fromkeys(name for name, _ in nets))
    logs = []
    for fold in range(min(_FOLDS, len(names))):
        left_out = set(names[fold::_FOLDS])
        times = GroupTimes([it for (name, _), net in nets.items() if name not in left_out for it in net.samples])
        own = [net for (name, _), net in nets.items() if name in left_out]
        logs += [math.log(net.seconds / _predicted_s(times, net)) for net in own]
    return math.sqrt(math.fsum(value**2 for value in logs) / len(logs)) if len(names) > 1 else _ASSUMED


def _predicted_s(times: GroupTimes, net: _MeasuredNet) -> float:
    return float(times.heads_s(net.groups).sum()) + sum(map(sum, times.tails_s(net.groups)))


def _measured(
    platform: _Platform, net: Reference, batch: int, kernel: ReferenceKernel, clock: SampleClock, is_check: bool = False
) -> _MeasuredNet | None:
    """Return the whole time of a net and, unless it is for the check, samples of its groups; None where it fails."""
    path, exported = platform.files.of(net, platform.precision), platform.files.of(net, "fp32")
    if path is None or exported is None:
        return None
    torch.manual_seed(0)
    model, x = net.build().eval(), net.inputs(batch)
    groups = groups_of(trace(model, x), platform.scales, platform.precision)
    runtime = find_runtime(platform.runtime)
    try:
        with runtime.open(path, platform.threads, platform.precision) as runner:
            seconds = whole_seconds(runner.bind(x), kernel, clock)
            samples = (
                [] if is_check else _samples(runner, path, exported, x, groups, seconds, f"{net.name}, batch {batch}")
            )
    except EdgeOptError:
        return None
    return _MeasuredNet(seconds, groups, samples)


def whole_seconds(call: Callable[[], object], kernel: ReferenceKernel, clock: SampleClock) -> float:
    """Return the least seconds of a call in a few quiet rounds, over the slowness of the machine beside them."""
    call()
    runs = max(_LEAST_RUNS, min(_MOST_RUNS, round(_BLOCK_NS / clock.nanoseconds(call))))
    return min(kernel.quiet_round(lambda: [clock.least_s(call, runs)], 1)[0][0] for _ in range(_TURNS))


def _samples(
    runner: Runner,
    path: Path,
    exported_path: Path,
    x: torch.Tensor,
    groups: Sequence[OperatorGroup],
    whole_s: float,
    origin: str,
) -> list[KernelGroupSample]:
    """Return the groups with the kernels that the runtime ran for each, scaled so that they add up to the whole."""
    graph, exported = read_graph(path), read_graph(exported_path)
    # Quantizing puts branches into another order; the exported file has them in the order of the trace.
    places = {node: place for place, node in enumerate(exported.nodes)}
    starts = _starts(exported, groups)
    if starts is None:
        return []
    least = _least_kernels(runner, x, whole_s)
    total_s = math.fsum(seconds for _, seconds in least)
    if not 0 < total_s <= _DISTURBED * (whole_s + _COUNTING_S * len(least)):
        return []
    # Each kernel takes some time to be counted, in whole microseconds: as much is taken off as makes up the whole.
    counted_s = min(_COUNTING_S, max(-_COUNTING_S, (total_s - whole_s) / len(least)))
    heads_s, tails_s = [0.0] * len(groups), [0.0] * len(groups)
    kernels: list[list[str]] = [[] for _ in groups]
    current, heads = 0, [0] * len(groups)
    for entry, seconds in least:
        known = (graph.find(name, entry.op) for name in (entry.name, *entry.aliases))
        # Dynamic quantization renames products.
        names = (node.name.removesuffix("_quant") for node in known if node is not None)
        place = next((places[name] for name in names if name in places), None)
        if place is not None:
            current = sum(start <= place for start in starts)
        kernels[current].append(entry.op)
        # A batch norm behind a concatenation runs as another convolution.
        head = groups[current].features
        is_head = entry.op in FAMILY and head is not None and heads[current] < _NODES.get(head.group, 1)
        heads[current] += is_head
        (heads_s if is_head else tails_s)[current] += max(seconds - counted_s, _COUNTING_S / 10)
    scale = whole_s / (math.fsum(heads_s) + math.fsum(tails_s))
    return [
        sample_of(group, head * scale, tail * scale, names, origin, sum(name.startswith(_CONVERTING) for name in names))
        for group, head, tail, names in zip(groups, heads_s, tails_s, kernels, strict=True)
    ]


def _least_kernels(runner: Runner, x: torch.Tensor, whole_s: float) -> list[tuple[ProfileEntry, float]]:
    """Return each kernel with its least seconds, in the order in which they run."""
    least: dict[str, tuple[ProfileEntry, float]] = {}
    # Kernels are timed by the wall: where one was interrupted each time, all together take longer than the whole does.
    repeats = max(_LEAST_REPEATS, min(_MOST_REPEATS, round(_PROFILE_S / whole_s)))
    for _ in range(_PROFILES):
        for entry in cast(Any, runner).kernel_times([x], repeats):
            before = least.get(entry.name, (entry, math.inf))[1]
            least[entry.name] = entry, min(before, *entry.samples_s)
        if sum(seconds for _, seconds in least.values()) <= _PLAUSIBLE * (whole_s + _COUNTING_S * len(least)):
            break
    return list(least.values())


_NODES = {"attention": 2}


def _starts(graph: Graph, groups: Sequence[OperatorGroup]) -> list[int] | None:
    """Return the place in the file at which each group after the first begins; None where file and trace differ."""
    wanted = [group.features for group in groups[1:]]
    places = [place for place, node in enumerate(graph.nodes.values()) if node.op_type in FAMILY]
    starts, next_head = [], 0
    for item in wanted:
        if item is None or next_head >= len(places):
            return None
        starts.append(places[next_head])
        next_head += _NODES.get(item.group, 1)
    return starts if next_head == len(places) else None
