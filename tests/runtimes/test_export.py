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


class Branches(nn.Module):
    """Two linear layers side by side that become one, as in RepVGG."""

    def __init__(self) -> None:
        super().__init__()
        self.left: nn.Linear | None = nn.Linear(4, 5)
        self.right: nn.Linear | None = nn.Linear(4, 5)
        self.both: nn.Linear | None = None

    def reparameterize(self) -> None:
        assert self.left is not None and self.right is not None
        self.both = nn.Linear(4, 5)
        self.both.weight.data = self.left.weight.data + self.right.weight.data
        self.both.bias.data = self.left.bias.data + self.right.bias.data
        self.left = self.right = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.both is not None:
            return self.both(x)
        assert self.left is not None and self.right is not None
        return self.left(x) + self.right(x)


class WrongBranches(Branches):
    def reparameterize(self) -> None:
        super().reparameterize()
        assert self.both is not None
        self.both.bias.data += 1


@pytest.mark.parametrize(("block", "products"), [(Branches, 1), (WrongBranches, 2)])
def test_branches_are_fused_where_that_changes_nothing(block: type[Branches], products: int) -> None:
    model = nn.Sequential(block(), nn.ReLU())
    done = compress.convert(model, (1, 4), "fp32")
    assert sum(layer.op in ("Gemm", "MatMul") for layer in done.layers) == products
    assert model[0].left is not None


class Counted(nn.Module):
    """Two branches that are fused by a number of channels which the block keeps for itself, as MobileOne does."""

    def __init__(self) -> None:
        super().__init__()
        self.out_chs = 8
        self.left, self.right = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
        self.both: nn.Conv2d | None = None

    def reparameterize(self) -> None:
        self.both = nn.Conv2d(3, self.out_chs, 1)
        self.both.weight.data.copy_(self.left.weight.data + self.right.weight.data)
        self.both.bias.data.copy_(self.left.bias.data + self.right.bias.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x) if self.both is None else self.both(x)


def test_branches_are_fused_after_pruning_too() -> None:
    model = nn.Sequential(Counted(), nn.ReLU(), nn.Conv2d(8, 2, 1))
    pruned = compress.prune(model, (1, 3, 4, 4), 0.5, round_to=1).model
    assert (pruned[0].left.out_channels, pruned[0].out_chs) == (4, 8)
    done = compress.convert(pruned, (1, 3, 4, 4), "fp32")
    # one convolution instead of two branches, and the last one; the model itself keeps its branches
    assert sum(layer.op == "Conv" for layer in done.layers) == 2 and pruned[0].both is None


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
        "import sys; sys.modules['torchvision'] = None; import edge_opt.runtimes.exporter_start as exporter; "
        "exporter.start_exporter(); print('torch.onnx._internal.exporter._core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
