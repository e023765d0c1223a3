"""ONNX files timed with ONNX Runtime and numpy alone, as a board without torch can: `python -m … FOLDER`.

The folder holds `order.json`, the files and, if they are not to be drawn, the inputs as `inputs.npz`. What came of it
is written beside them, to `result.json`. Each order has a process of its own: what a runtime holds or breaks ends with
it.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt._support.checks import check_whole
from edge_opt._support.extras import import_optional
from edge_opt._support.files import write_whole
from edge_opt._support.json import from_plain, to_plain
from edge_opt.errors import ConversionFailed, EdgeOptError, InvalidInput, first_line
from edge_opt.measuring.allocator import ResidentGrowth
from edge_opt.measuring.latency import TimedCall, interleaved
from edge_opt.measuring.machine import cpu_name, read_environment, usable_cores
from edge_opt.records.measurements import Latency

Array = NDArray[Any]
ORDER, INPUTS, RESULT = "order.json", "inputs.npz", "result.json"
_TYPES = {"float": "float32", "double": "float64", "long": "int64", "int": "int32"}


@dataclass(frozen=True, slots=True)
class TimingOrder:
    """What is to be timed, and how.

    Attributes:
        files: Names of the files. They take the same inputs, and are timed a block of each in turn.
        sizes: Samples in one call; each of these is timed.
        shapes: Names and shapes of inputs that are drawn, where the file leaves a dimension open.
        threads: Of the runtime; 0 is all cores.
        min_time_s: Least seconds to measure each file at each size.
        max_time_s: Most seconds.
        rehearses: Whether each runs once, untimed, before its turn.
    """

    files: tuple[str, ...]
    sizes: tuple[int, ...] = (1,)
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    threads: int = 1
    min_time_s: float = 1.0
    max_time_s: float = 5.0
    rehearses: bool = False


@dataclass(frozen=True, slots=True)
class Timing:
    """One file at one size.

    Attributes:
        file: Name of the file.
        size: Samples in one call.
        latency: Seconds per call.
    """

    file: str
    size: int
    latency: Latency


@dataclass(frozen=True, slots=True)
class TimingResult:
    """What was timed, and on which machine.

    Attributes:
        machine: Name, processor, cores and runtime of the machine.
        timings: Every file at every size.
        memory_bytes: Growth of resident memory over the idle process while the first file runs its first size; None
            where the system does not say.
    """

    machine: str
    timings: tuple[Timing, ...]
    memory_bytes: int | None

    def latency(self, file: str, size: int) -> Latency:
        """The latency of one file at one size."""
        return next(item.latency for item in self.timings if (item.file, item.size) == (file, size))


def open_session(path: Path, threads: int, profile_prefix: str | None = None) -> Any:
    """A session of an ONNX file on the CPU; with a prefix it writes a profile."""
    runtime = onnxruntime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Fatal only: an error is raised as well, and warnings are about its own optimisations.
    options.log_severity_level = 4
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile_prefix
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own classes, one per status code, with no common base of theirs
        raise ConversionFailed(f"ONNX Runtime cannot load {path.name}: {reason(error)}") from error


def onnxruntime() -> Any:
    """ONNX Runtime, or how to get it."""
    return import_optional("onnxruntime", "ONNX files need", "onnx")


def reason(error: BaseException) -> str:
    """The last line of an error, without status codes and the folders that the file happens to lie in."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from \S+ failed:)?", "", lines[-1]) if lines else ""


def this_machine() -> str:
    """The machine that times, by name, processor, cores and runtime: times of two of these are not comparable.

    >>> this_machine().startswith(platform.node())
    True
    """
    cores, version = usable_cores(), onnxruntime().__version__
    return f"{platform.node()} ({cpu_name()}, {cores} core{'s' * (cores > 1)}, ONNX Runtime {version})"


def time_files(folder: Path, order: TimingOrder, given: Sequence[Array] = ()) -> TimingResult:
    """Time files in a folder, each at each size.

    Args:
        folder: Where the files are.
        order: What is to be timed.
        given: Inputs in the order of the files; drawn by the shapes in the file where there are none.
    """
    onnxruntime()
    growth = ResidentGrowth()
    sessions = {name: open_session(folder / name, order.threads) for name in order.files}
    first = next(iter(sessions.values()))
    held: int | None = None
    timings: list[Timing] = []
    for index, size in enumerate(order.sizes):
        batch = sized(given, size) if given else drawn(first, size, dict(order.shapes))
        runs = {name: _runner(name, session, batch, order.rehearses) for name, session in sessions.items()}
        if not index:
            held = growth.peak_while(runs[order.files[0]].once)
        found = interleaved(
            runs,
            batch_size=size,
            min_time_s=order.min_time_s,
            max_time_s=order.max_time_s,
            environment=read_environment(threads=order.threads or usable_cores()),
        )
        timings += (Timing(name, size, latency) for name, latency in found.items())
    return TimingResult(this_machine(), tuple(timings), held)


def sized(values: Sequence[Array], size: int) -> list[Array]:
    """A call with so many samples: the first ones, or all of them again and again. What has no samples stays as it is.

    >>> [value.tolist() for value in sized([np.array([1, 2, 3]), np.array([7, 8])], 5)]
    [[1, 2, 3, 1, 2], [7, 8]]
    """
    count = len(values[0])
    repeats = -(-size // count)
    return [
        np.ascontiguousarray(np.concatenate([value] * repeats)[:size]) if value.ndim and len(value) == count else value
        for value in values
    ]


def drawn(session: Any, size: int, shapes: Mapping[str, tuple[int, ...]]) -> list[Array]:
    """Inputs as a file declares them: normal numbers, and zeros where it takes whole ones."""
    entries = session.get_inputs()
    unknown = sorted(set(shapes) - {entry.name for entry in entries})
    if unknown:
        names = ", ".join(entry.name for entry in entries)
        raise InvalidInput(f"the file has no input {unknown[0]!r}; it has {names}")
    generator = np.random.default_rng(0)
    found: list[Array] = []
    for entry in entries:
        kind = re.sub(r"^tensor\((.*)\)$", r"\1", entry.type)
        dtype = np.dtype(_TYPES.get(kind, kind))
        shape = shapes.get(entry.name) or _shape(entry, size)
        is_float = dtype.kind == "f"
        found.append(generator.standard_normal(shape).astype(dtype) if is_float else np.zeros(shape, dtype))
    return found


def _shape(entry: Any, size: int) -> tuple[int, ...]:
    """The declared shape with the batch in front; another dimension that is left open cannot be guessed."""
    declared = list(entry.shape)
    if declared and not isinstance(declared[0], int):
        declared[0] = size
    open_ones = [str(item) for item in declared if not isinstance(item, int)]
    if open_ones:
        raise InvalidInput(
            f"the file leaves {', '.join(open_ones)} of its input {entry.name} open; say its shape, such as "
            f"--input {entry.name}:{'x'.join('1' if isinstance(item, str) else str(item) for item in entry.shape)}"
        )
    if declared and declared[0] != size:
        raise InvalidInput(f"the file takes {declared[0]} samples in one call, and {size} are asked for")
    return tuple(declared)


def _runner(name: str, session: Any, batch: Sequence[Array], rehearses: bool) -> TimedCall:
    entries = session.get_inputs()
    if len(entries) != len(batch):
        raise InvalidInput(f"{len(batch)} inputs given; {name} takes {len(entries)}")
    feeds = {entry.name: value for entry, value in zip(entries, batch, strict=True)}

    def run() -> object:
        return session.run(None, feeds)

    def rehearse(_: int) -> None:
        run()

    return TimedCall(run, rehearse if rehearses else None)


def write_order(folder: Path, order: TimingOrder, files: Mapping[str, bytes], inputs: bytes = b"") -> None:
    """Lay everything into a folder that a process of its own reads."""
    check_whole("threads", order.threads, 0)
    for name, content in files.items():
        if Path(name).name != name:
            raise InvalidInput(f"{name!r} is no plain name of a file")
        write_whole(folder / name, content)
    if inputs:
        write_whole(folder / INPUTS, inputs)
    write_whole(folder / ORDER, json.dumps(to_plain(order)))


def read_result(folder: Path) -> TimingResult:
    """What the process left; what it refused is raised here."""
    told = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    if "error" in told:
        raise InvalidInput(told["error"])
    return from_plain(TimingResult, told)


def main(arguments: Sequence[str]) -> int:
    """Carry out the order in a folder."""
    folder = Path(arguments[0])
    try:
        order = from_plain(TimingOrder, json.loads((folder / ORDER).read_text(encoding="utf-8")))
        given: list[Array] = []
        if (folder / INPUTS).is_file():
            with np.load(folder / INPUTS, allow_pickle=False) as archive:
                given = [archive[name] for name in archive.files]
        told = to_plain(time_files(folder, order, given))
    except EdgeOptError as error:
        told = {"error": str(error)}
    except Exception as error:  # whatever a runtime raises becomes a sentence on the other side
        told = {"error": f"{type(error).__name__}: {first_line(error)}"}
    write_whole(folder / RESULT, json.dumps(told, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
