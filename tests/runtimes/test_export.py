"""Exports leave the caller's model alone, fuse what is meant to be fused, and have a second way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from edge_opt import compress
from edge_opt.errors import ExportFailed


class Caching(nn.Module):
    """Keeps a table that its first forward computes, as LeViT keeps its attention biases."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 4))
        self.cache: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "table" not in self.cache:
            self.cache["table"] = self.table[:, [0, 2, 1, 3]]
        return x @ self.cache["table"]


def test_a_cache_of_the_forward_holds_nothing_of_the_export(tmp_path: Path) -> None:
    model = Caching().eval()
    compress.export_onnx(model, (1, 3), tmp_path / "net.onnx")
    assert model.cache == {}
    assert type(model(torch.randn(2, 3))) is torch.Tensor


def test_what_torch_export_refuses_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_exporting():
                raise RuntimeError("not for export")
            return self.linear(x).relu()

    done = compress.convert(Refused(), (1, 4), "fp32")
    assert "exported by tracing, for torch.export refused it" in done.remarks
    assert [(layer.path, layer.precision) for layer in done.layers] == [("linear", "fp32")]
    assert [entry.samples for entry in done.agreement.by_batch if entry.difference is not None] == [1, 512]


def test_one_sentence_where_both_ways_fail() -> None:
    class Breaking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no way\nand more")

    with pytest.raises(ExportFailed, match="cannot be exported: ValueError: no way .*Breaking") as raised:
        compress.convert(Breaking(), (1, 4), "fp32")
    assert "\n" not in str(raised.value)


class Joined(nn.Module):
    """Calls its input as torch calls what it makes of it."""

    def forward(self, x: torch.Tensor, cat: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, cat], 1).relu()


def test_an_input_may_have_the_name_of_an_operator(tmp_path: Path) -> None:
    file = compress.export_onnx(Joined(), [torch.ones(2, 3), torch.ones(2, 1)], tmp_path / "joined.onnx").path
    with compress.open_runner(file, "onnxruntime") as runner:
        assert runner(torch.ones(2, 3), torch.ones(2, 1))[0].shape == (2, 4)


def test_a_started_exporter_says_nothing_about_packages_that_it_does_not_need() -> None:
    # None in the table of modules is how Python says that there is none; torch's exporter warns of it four times.
    code = (
        "import sys; sys.modules['torchvision'] = None; import edge_opt.runtimes.export as exporter; "
        "exporter.start_exporter(); print('torch.onnx._internal.exporter._core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
