"""An ONNX file as a model: read, never run; ONNX Runtime runs it where it is measured."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from edge_opt.errors import UnreadableModel
from edge_opt.model_files.file_model import FileModel
from edge_opt.model_files.onnx_file import read_onnx


class OnnxModel(FileModel):
    """A model read from an `.onnx` file."""

    def session(self, threads: int | None = None) -> nn.Module:
        """The file as ONNX Runtime runs it, to be measured.

        Args:
            threads: Threads of the runtime; as many as torch uses unless given.
        """
        from edge_opt.model_files.onnx_session import Session

        return Session(self.file, self.plan.arguments, threads)


def load_onnx(path: str | Path) -> OnnxModel:
    """The model of an `.onnx` file, to be profiled, compared and checked like any other; nothing in it is run.

    Args:
        path: The file.
    """
    try:
        return OnnxModel(read_onnx(path))
    except RecursionError as error:
        raise UnreadableModel(f"{str(path)!r} cannot be read: its graphs are nested too deep") from error
