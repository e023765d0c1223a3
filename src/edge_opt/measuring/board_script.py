"""Time model files on this machine: the script that `edge-opt measure-on` copies to a board and runs there.

    python3 board_script.py ORDER.json RESULT.json

It runs as a plain file on a machine without edge_opt. So it imports nothing of edge_opt: only the standard library,
numpy, and the runtime of the files (ONNX Runtime for .onnx, LiteRT or TensorFlow Lite for .tflite). It must run on
Python 3.8. It returns samples; statistics are computed on the machine that asked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

# Shorter runs are timed in blocks, so that reading the clock costs less than 0.1 %.
_BLOCK_S = 2e-3
_BLOCKS_AT_LEAST = 5
# Stop before max_time_s when the notch of a box plot, the 95 % interval of the median, is this narrow.
_PRECISION = 0.02
_TFLITE_MODULES = ("ai_edge_litert.interpreter", "tflite_runtime.interpreter", "tensorflow.lite")


class Refused(Exception):
    """The order cannot be carried out; `install` names packages that would help."""

    def __init__(self, message: str, install: str = "") -> None:
        super().__init__(message)
        self.install = install


def import_package(name: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Refused(f"{name} cannot be imported there ({error})", install) from error


class OnnxFile:
    """An .onnx file in ONNX Runtime."""

    runtime = "ONNX Runtime"

    def __init__(self, path: str, threads: int) -> None:
        package = import_package("onnxruntime", "onnxruntime numpy")
        self.version = package.__version__
        options = package.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        try:
            self._session = package.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # one class per status code, without a common base
            raise Refused(f"ONNX Runtime cannot load {Path(path).name}: {last_line(error)}") from error

    def inputs(self) -> list[tuple[str, list[Any], str]]:
        """Return name, declared shape and numpy type of each input; an open dimension is not a number."""
        names = {"float": "float32", "double": "float64", "long": "int64", "int": "int32"}
        entries = []
        for entry in self._session.get_inputs():
            kind = entry.type.replace("tensor(", "").rstrip(")")
            entries.append((entry.name, list(entry.shape), names.get(kind, kind)))
        return entries

    def bind(self, arrays: list[Any]) -> Any:
        feeds = {name: array for (name, _, _), array in zip(self.inputs(), arrays)}  # noqa: B905 (strict is new in 3.10)
        return lambda: self._session.run(None, feeds)


class TfliteFile:
    """A .tflite file in LiteRT, or in an older package with the same interpreter."""

    runtime = "LiteRT"

    def __init__(self, path: str, threads: int) -> None:
        for name in _TFLITE_MODULES:
            try:
                module = importlib.import_module(name)
                break
            except ImportError:
                continue
        else:
            raise Refused("no interpreter of .tflite files is installed there", "ai-edge-litert numpy")
        package = sys.modules.get(module.__name__.partition(".")[0])
        self.version = getattr(package, "__version__", "") or ""
        try:
            self._interpreter = module.Interpreter(model_path=path, num_threads=threads or os.cpu_count())
            self._interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise Refused(f"LiteRT cannot load {Path(path).name}: {last_line(error)}") from error
        details = self._interpreter.get_input_details()
        # The interpreter has its own order of inputs. Exported files number them in the order of the model.
        self._ports = sorted(details, key=lambda port: (len(port["name"]), port["name"]))

    def inputs(self) -> list[tuple[str, list[Any], str]]:
        """Return name, declared shape and numpy type of each input; an open dimension is not a number."""
        import numpy as np

        return [
            (
                port["name"],
                [int(size) if size > 0 else "batch" for size in port.get("shape_signature", port["shape"])],
                np.dtype(port["dtype"]).name,
            )
            for port in self._ports
        ]

    def bind(self, arrays: list[Any]) -> Any:
        interpreter = self._interpreter
        for port, array in zip(self._ports, arrays):  # noqa: B905
            if tuple(port["shape"]) != array.shape:
                interpreter.resize_tensor_input(port["index"], array.shape, strict=True)
        interpreter.allocate_tensors()
        fed = [(port["index"], _quantized(array, port)) for port, array in zip(self._ports, arrays)]  # noqa: B905

        def call() -> None:
            for index, array in fed:
                interpreter.set_tensor(index, array)
            interpreter.invoke()

        return call


def _quantized(array: Any, port: dict[str, Any]) -> Any:
    """Return an input in the type of the file; float values are scaled as the file says."""
    import numpy as np

    scale, zero = port["quantization"]
    if not scale or array.dtype == port["dtype"]:
        return array.astype(port["dtype"])
    limits = np.iinfo(port["dtype"])
    return np.clip(np.round(array / scale) + zero, limits.min, limits.max).astype(port["dtype"])


def open_file(path: str, threads: int) -> Any:
    return TfliteFile(path, threads) if path.endswith(".tflite") else OnnxFile(path, threads)


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def make_inputs(file: Any, size: int, shapes: dict[str, list[int]]) -> list[Any]:
    """Return random inputs as a file declares them: normal numbers, and zeros for integers."""
    import numpy as np

    generator = np.random.default_rng(0)
    arrays = []
    declared = file.inputs()
    unknown = sorted(set(shapes) - {name for name, _, _ in declared})
    if unknown:
        raise Refused(f"the file has no input {unknown[0]!r}; it has {', '.join(name for name, _, _ in declared)}")
    for name, shape, kind in declared:
        wanted = list(shapes.get(name) or shape)
        if name not in shapes and wanted and not isinstance(wanted[0], int):
            wanted[0] = size
        if not all(isinstance(dimension, int) for dimension in wanted):
            example = "x".join(str(dimension) if isinstance(dimension, int) else "1" for dimension in wanted)
            raise Refused(f"the file leaves the shape of its input {name} open; give it with --inputs {name}:{example}")
        if name not in shapes and wanted and wanted[0] != size:
            raise Refused(f"the file takes {wanted[0]} samples per call, and {size} are requested")
        is_float = np.dtype(kind).kind == "f"
        arrays.append(generator.standard_normal(wanted).astype(kind) if is_float else np.zeros(wanted, kind))
    return arrays


def resized(arrays: list[Any], size: int) -> list[Any]:
    """Return a batch of `size` samples: the first ones, repeated if there are too few."""
    import numpy as np

    count = len(arrays[0])
    repeats = -(-size // count)
    return [
        np.ascontiguousarray(np.concatenate([array] * repeats)[:size]) if array.ndim and len(array) == count else array
        for array in arrays
    ]


class Timed:
    """A bound call with its block length and the blocks timed so far, in seconds per call."""

    def __init__(self, name: str, call: Any) -> None:
        self.name, self.call, self.length = name, call, 1
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def block(self) -> tuple[float, float]:
        cpu, start = time.process_time(), time.perf_counter()
        for _ in range(self.length):
            self.call()
        end, cpu_end = time.perf_counter(), time.process_time()
        return (end - start) / self.length, (cpu_end - cpu) / self.length

    def warm_up(self, seconds: float) -> None:
        """Run for a while, and find how many calls fill a block."""
        begun = time.perf_counter()
        while True:
            wall, _ = self.block()
            if wall * self.length < _BLOCK_S:
                self.length = min(10 * self.length, max(self.length + 1, int(_BLOCK_S / max(wall, 1e-9)) + 1))
            elif time.perf_counter() - begun >= seconds:
                return


def is_precise(samples: list[float]) -> bool:
    import numpy as np

    low, middle, high = np.percentile(samples, (25, 50, 75))
    return bool(1.57 * (high - low) / len(samples) ** 0.5 <= _PRECISION * middle)


def take_turns(runs: list[Timed], min_time_s: float, max_time_s: float) -> None:
    """Time one block of each in random order, round after round: all of them see the same state of the machine."""
    order = random.Random(0)
    while True:
        for run in runs:
            wall, cpu = run.block()
            run.wall_s.append(wall)
            run.cpu_s.append(cpu)
        order.shuffle(runs)
        spent = min(sum(run.wall_s) * run.length for run in runs)
        if len(runs[0].wall_s) < _BLOCKS_AT_LEAST or spent < min_time_s:
            continue
        if spent >= max_time_s or all(is_precise(run.wall_s) for run in runs):
            return


def machine_cpu_s() -> float | None:
    """Return the CPU seconds of the whole machine so far, without idle time; None where the system does not say."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        fields = [int(value) for value in first.split()[1:9]]
        return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def resident_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def cpu_name() -> str:
    """Return the model of the board, else of its processor."""
    for path, key in (("/proc/device-tree/model", ""), ("/proc/cpuinfo", "model name")):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for line in text.replace("\0", "").splitlines():
            if line.startswith(key) and line.strip():
                return line.partition(":")[2].strip() if key else line.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def run_order(order: dict[str, Any]) -> dict[str, Any]:
    """Time every file of an order at every batch size, and describe the machine."""
    np = import_package("numpy", "numpy")
    machine = {"name": platform.node(), "cpu": cpu_name(), "cores": usable_cores()}
    if not order["files"]:
        return {"machine": machine, "timings": [], "memory_bytes": None, "runtime": ""}
    given: list[Any] = []
    if order["inputs"]:
        with np.load(order["inputs"], allow_pickle=False) as archive:
            given = [archive[name] for name in archive.files]
    # Import the runtime before the memory baseline: the model's memory is what counts.
    open_file(order["files"][0], order["threads"])
    gc.collect()
    before = resident_bytes()
    files = {name: open_file(name, order["threads"]) for name in order["files"]}
    first = files[order["files"][0]]
    timings, memory = [], None
    for index, size in enumerate(order["sizes"]):
        batch = resized(given, size) if given else make_inputs(first, size, order["shapes"])
        runs = [Timed(name, bind_checked(name, file, batch)) for name, file in files.items()]
        if not index:
            runs[0].call()
            after = resident_bytes()
            memory = None if before is None or after is None else max(0, after - before)
        for run in runs:
            run.warm_up(order["min_time_s"] / 4)
        wall, own, used = time.perf_counter(), time.process_time(), machine_cpu_s()
        take_turns(runs, order["min_time_s"], order["max_time_s"])
        wall, own = time.perf_counter() - wall, time.process_time() - own
        now = machine_cpu_s()
        others = None if used is None or now is None else max(0.0, (now - used - own) / wall)
        timings += [
            {"file": run.name, "size": size, "wall_s": run.wall_s, "cpu_s": run.cpu_s, "busy_cores": others}
            for run in runs
        ]
    runtime = f"{first.runtime} {first.version}".strip()
    return {"machine": machine, "timings": timings, "memory_bytes": memory, "runtime": runtime}


def bind_checked(name: str, file: Any, batch: list[Any]) -> Any:
    count = len(file.inputs())
    if count != len(batch):
        raise Refused(f"{len(batch)} inputs are given, and {name} takes {count}")
    try:
        call = file.bind(batch)
        call()
    except Exception as error:  # whatever a runtime raises for inputs that do not fit
        raise Refused(f"{name} refuses the inputs: {last_line(error)}") from error
    return call


def main(order_path: str, result_path: str) -> None:
    """Carry out an order, and write the result or the error."""
    try:
        result = run_order(json.loads(Path(order_path).read_text(encoding="utf-8")))
    except Refused as error:
        result = {"error": str(error), "install": error.install}
    except MemoryError:
        result = {"error": "the model needs more memory than the board has", "install": ""}
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
