"""rasp.stat: its arguments, what it returns, prints, writes and refuses."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import rasp
from edge_opt.errors import InvalidInput
from zoo import torchvision_models

DEFAULTS = ["name", "type", "in_shape", "out_shape", "params", "flops", "mem_r", "mem_w", "mem_rw"]
SHAPE = (1, 3, 8, 8)

# The published snippets, without the calls that measure.
SNIPPETS = {
    "basic": "rasp.stat(model, input_shape=(1, 3, 224, 224))",
    "macc": "rasp.stat(model, input_shape=(1, 3, 224, 224), includes=['macc'], excludes=['flops'])",
    "data": "df = rasp.stat(model, input_shape=(1, 3, 224, 224), device='cuda', print_stat=False, returns='data')",
    "settings": "rasp.CFG.profile.num_batches=200\n"
    "rasp.CFG.profile.warmup_batches=20\n"
    "rasp.stat(model, input_shape=(1, 3, 224, 224))",
    "inputs": "inputs = torch.randn(8, 3, 224, 224)\nrasp.stat(model, inputs=inputs)",
    "report types": "for report_type in ['tape', 'node', 'leaves', 'root', None]:\n"
    "    rasp.stat(model, input_shape=(1, 3, 224, 224), report_type=report_type)",
    "save": "rasp.stat(model, input_shape=(1, 3, 224, 224), save_path='./reports')",
    "energy": "import rasp\nimport rasp.addons.energy\n"
    "rasp.stat(model, input_shape=(1, 3, 224, 224), includes=['energy'])",
}


@pytest.fixture(autouse=True)
def settings_as_found() -> Iterator[None]:
    before = {key: getattr(rasp.CFG.profile, key) for key in ("batch_size", "num_batches", "warmup_batches")}
    yield
    for key, value in before.items():
        setattr(rasp.CFG.profile, key, value)


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 2))


def quiet(model: nn.Module, input_shape: Any = SHAPE, returns: str = "data", **options: Any) -> Any:
    return rasp.stat(model, input_shape, print_stat=False, returns=returns, **options)


@pytest.mark.parametrize("name", SNIPPETS)
@pytest.mark.filterwarnings("ignore:device 'cuda' is not available")
def test_published_snippet_runs_as_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchvision_models()
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"torch": torch}
    with torch.device("meta"):
        exec("import rasp\nfrom torchvision.models import AlexNet\nmodel = AlexNet()", scope)
    exec(SNIPPETS[name], scope)
    printed = capsys.readouterr().out
    assert (name == "data") == (printed == "")
    assert ("macc" in printed) == (name == "macc")
    assert ("energy" in printed) == (name == "energy")
    assert [path.name for path in tmp_path.glob("reports/*")] == (["AlexNet_tape.csv"] if name == "save" else [])
    if name == "data":
        assert scope["df"].loc["total", "params"] == 61100840  # the published 61.1M
    if name == "inputs":
        assert "(8, 3, 224, 224)" in printed


def test_short_shape_gets_the_batch_size_in_front(net: nn.Module) -> None:
    assert quiet(net, SHAPE[1:])["in_shape"].iloc[0] == (1, 3, 8, 8)
    rasp.CFG.profile.batch_size = 5
    assert quiet(net, list(SHAPE[1:]))["in_shape"].iloc[0] == (5, 3, 8, 8)
    assert quiet(net, (2, 3, 8, 8))["in_shape"].iloc[0] == (2, 3, 8, 8)


def test_own_inputs_by_name() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.linear(left + right)

    inputs = {"right": torch.ones(3, 4), "left": torch.ones(3, 4)}
    assert quiet(Pair(), None, inputs=inputs)["in_shape"].iloc[0] == (3, 4)


def test_settings_refuse_wrong_names_and_values() -> None:
    for key, value in (("batch_size", 0), ("batch_size", 1.5), ("num_batches", True), ("warmup_batches", -1)):
        with pytest.raises(InvalidInput, match=f"{key} is {value}"):
            setattr(rasp.CFG.profile, key, value)
    with pytest.raises(InvalidInput, match=r"'batchsize'.*batch_size, num_batches, warmup_batches"):
        rasp.CFG.profile.batchsize = 3  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match=r"rasp\.CFG\.batch_size"):
        rasp.CFG.batch_size = 3  # type: ignore[attr-defined]
    assert "profile(batch_size=1, num_batches=100, warmup_batches=10" in repr(rasp.CFG)


def test_columns_are_chosen(net: nn.Module) -> None:
    assert list(quiet(net)) == DEFAULTS
    assert list(quiet(net, includes=["macc"], excludes=["flops"])) == [*DEFAULTS[:5], *DEFAULTS[6:], "macc"]
    assert list(quiet(net, report_fields=["macc", "name"])) == ["macc", "name"]
    assert list(quiet(net, report_fields="name,flops", includes="flops, params", excludes=("name",))) == [
        "flops",
        "params",
    ]
    assert list(quiet(net, compute=False)) == DEFAULTS[:5]


def test_callers_lists_are_left_alone(net: nn.Module) -> None:
    fields, includes, excludes = ["name", "flops"], ["macc"], ["flops"]
    for _ in range(2):
        assert list(quiet(net, report_fields=fields, includes=includes, excludes=excludes)) == ["name", "macc"]
    assert (fields, includes, excludes) == (["name", "flops"], ["macc"], ["flops"])


def test_returns_come_in_the_order_asked(net: nn.Module) -> None:
    totals, tree, data = quiet(net, returns="totals, tree,data")
    assert isinstance(data, pd.DataFrame)
    assert totals == {name: data.loc["total", name] for name in DEFAULTS[4:]}
    assert [node.name for node in tree.walk()] == [".", ".0", ".1", ".2", ".3", ".4"]
    assert tree.total.flops == totals["flops"]
    assert quiet(net, returns=["totals"]) == totals  # type: ignore[arg-type]
    assert rasp.stat(net, SHAPE, print_stat=False) is None


def test_tree_stays_with_the_data_only_when_asked(net: nn.Module) -> None:
    assert "tree" not in quiet(net).attrs
    assert quiet(net, keep_tree=True).attrs["tree"].type == "Sequential"


def test_no_report_prints_nothing_and_still_sums_up(net: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    totals = rasp.stat(net, SHAPE, report_type=None, returns="totals")
    assert capsys.readouterr().out == ""
    assert totals == quiet(net, returns="totals", report_type="root")


def test_table_is_printed_in_full(net: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    rasp.stat(net, SHAPE)
    header, first, *lines = capsys.readouterr().out.splitlines()
    last = next(line for line in lines if line.startswith("total"))
    assert header.split() == ["index", *DEFAULTS]
    # 4x6x6 outputs, 2 x 27 operations with the bias; 192 inputs and 112 weights of 4 bytes in, 144 outputs out.
    assert " ".join(first.split()) == "0 .0 Conv2d (1, 3, 8, 8) (1, 4, 6, 6) 112 7776 1216 576 1792"
    assert last.split()[:3] == ["total", "total", str(112 + 8 + 290)]


@pytest.mark.parametrize("suffix", [".csv", ".json", ".md", ".txt"])
def test_file_holds_the_table(net: nn.Module, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "new" / f"table{suffix}"
    data = quiet(net, save_path=path)
    text = path.read_text(encoding="utf-8")
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    if suffix == ".json":
        content = json.loads(text)
        assert [row["flops"] for row in content["rows"]] == list(data["flops"].iloc[:-1])
        assert content["total"]["flops"] == data["flops"].iloc[-1]
        assert (content["model"], content["report_type"]) == ("Sequential", "tape")
    elif suffix == ".csv":
        read = pd.read_csv(path)
        assert list(read.columns) == ["index", *DEFAULTS]
        assert list(read["flops"]) == list(data["flops"])
        assert read["in_shape"].iloc[0] == "(1, 3, 8, 8)"
    else:
        lines = [line for line in text.splitlines() if not line.startswith(("Total", "="))]
        assert all(str(flops) in line for flops, line in zip(data["flops"], lines[-len(data) :], strict=True))


def test_path_without_suffix_is_a_folder(net: nn.Module, tmp_path: Path) -> None:
    dotted = tmp_path / "reports.v1"
    dotted.mkdir()
    for folder in (tmp_path / "a" / "b", dotted):
        quiet(net, report_type="leaves", save_path=str(folder))
        assert [item.name for item in folder.iterdir()] == ["Sequential_leaves.csv"]


def test_absent_cuda_is_a_warning_and_changes_no_figure(net: nn.Module) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asked = quiet(net, returns="totals", device="cuda")
    about_device = [str(warning.message) for warning in caught if "the CPU is used" in str(warning.message)]
    assert len(about_device) == (0 if torch.cuda.is_available() else 1)
    assert asked == quiet(net, returns="totals", device=torch.device("cpu")) == quiet(net, returns="totals")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"report_type": "tapes"}, "'tapes'.*tape, leaves, all, nodes, node, root"),
        ({"returns": "data,dict"}, "'dict'.*data, tree, sum, totals"),
        ({"report_type": None, "returns": "data"}, "choose a report_type"),
        ({"report_type": None, "save_path": "x.csv"}, "choose a report_type"),
        ({"includes": ["mac"]}, "'mac'.*name, type"),
        ({"excludes": ["flop"]}, "'flop'"),
        ({"report_fields": [3]}, "names must be strings"),
        ({"includes": ["macc"], "compute": False}, "'macc'.*compute=True"),
        ({"includes": ["lat"]}, "'lat'.*timing=True"),
        ({"report_fields": ["name"], "excludes": ["name"]}, "no column is left"),
        ({"save_path": "table.xlsx"}, r"'\.xlsx'.*\.csv, \.json, \.md, \.txt"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"device": "meta"}, "must be 'cpu' or 'cuda'"),
        ({"inputs": torch.ones(1, 3, 8, 8)}, "both of input_shape and inputs"),
        ({"input_shape": None}, "neither of input_shape and inputs"),
        ({"input_shape": (3, -1, 8)}, "must be positive integers"),
        ({"input_shape": 8}, "must be positive integers"),
        ({"input_shape": ()}, "must be positive integers"),
        ({"input_shape": (1, 3.0, 8, 8)}, "must be positive integers"),
    ],
)
def test_wrong_argument_is_one_clear_error(
    net: nn.Module, options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidInput, match=message):
        rasp.stat(net, **{"input_shape": SHAPE, **options})
    assert capsys.readouterr().out == ""


def test_model_is_left_as_found(net: nn.Module) -> None:
    net.train()
    net[1].eval()
    inputs = torch.randn(SHAPE)
    values = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    kept_inputs, modes = inputs.clone(), [module.training for module in net.modules()]
    attributes = [sorted(module.__dict__) for module in net.modules()]
    rasp.stat(net, inputs=inputs, print_stat=False, returns="data", keep_tree=True)
    assert all(torch.equal(tensor, values[name]) for name, tensor in net.state_dict().items())
    assert torch.equal(inputs, kept_inputs)
    assert [module.training for module in net.modules()] == modes
    assert [sorted(module.__dict__) for module in net.modules()] == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
