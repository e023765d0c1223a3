"""A `.tflite` file run by LiteRT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_opt._support.extras import optional
from edge_opt.errors import MeasurementFailed, first_line
from edge_opt.model_files.file_session import Arguments, FileSession, thread_count


class _Interpreter:
    """Holds the interpreter: it runs only while nobody else holds its parts, so a copy of the session must not."""

    __slots__ = ("loaded",)

    def __init__(self, path: Path, threads: int) -> None:
        package = optional("ai_edge_litert.interpreter", "running a .tflite file needs", "litert", "ai-edge-litert")
        try:
            self.loaded = package.Interpreter(model_path=str(path), num_threads=threads)
            self.loaded.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise MeasurementFailed(f"LiteRT cannot load {str(path)!r}: {first_line(error)}") from error


class TfliteSession(FileSession):
    """A file that LiteRT's interpreter has loaded."""

    def __init__(self, path: Path, arguments: Arguments, threads: int | None = None) -> None:
        super().__init__(arguments, "LiteRT")
        self._holder = _Interpreter(path, thread_count(threads))
        self._inputs = self._holder.loaded.get_input_details()
        self._shapes = [tuple(one["shape"]) for one in self._inputs]

    def arrays(self, arrays: dict[str, Any]) -> list[Any]:
        runtime = self._holder.loaded
        # The interpreter and the file list the inputs in one order.
        given = list(arrays.values())
        if [array.shape for array in given] != self._shapes:
            for port, array in zip(self._inputs, given, strict=True):
                runtime.resize_tensor_input(port["index"], array.shape)
            runtime.allocate_tensors()
            self._shapes = [array.shape for array in given]
        for port, array in zip(self._inputs, given, strict=True):
            runtime.set_tensor(port["index"], array)
        runtime.invoke()
        return [runtime.get_tensor(port["index"]) for port in runtime.get_output_details()]
