"""An ONNX file run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_opt._support.extras import optional
from edge_opt.errors import MeasurementFailed, first_line
from edge_opt.model_files.file_session import Arguments, FileSession, thread_count


class Session(FileSession):
    """A file that ONNX Runtime has loaded."""

    def __init__(self, path: Path, arguments: Arguments, threads: int | None = None) -> None:
        runtime = optional("onnxruntime", "running an ONNX file needs", "onnx")
        super().__init__(arguments, f"ONNX Runtime {runtime.__version__}")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = thread_count(threads)
        options.log_severity_level = 4
        try:
            self.runtime = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's own classes, which differ by version
            raise MeasurementFailed(f"ONNX Runtime cannot load {str(path)!r}: {first_line(error)}") from error

    def arrays(self, arrays: dict[str, Any]) -> list[Any]:
        return list(self.runtime.run(None, arrays))
