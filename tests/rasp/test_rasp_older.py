"""`rasp` as users of the published tool know it: names, settings, report types and what is returned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import rasp
from edge_opt.errors import InvalidInput
from edge_opt.model import SmallCNN

SHAPE = (1, 28, 28)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    before = {name: dict(getattr(rasp.CFG, name)) for name in ("frontend", "profile", "device", "analysis")}
    rasp.CFG.profile.num_batches, rasp.CFG.profile.warmup_batches = 4, 1
    yield
    rasp.set_config(before)


class Nested(nn.Module):
    """A block with two layers inside, and a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 64), nn.ReLU())
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.block(x))
        return y


def quiet(model: nn.Module, **options: Any) -> Any:
    options = {"returns": "data", **options}
    return rasp.stat(model, (8, 1, 1, 16), print_stat=False, **options)


def test_the_published_names_are_there() -> None:
    assert set(rasp.__all__) == {
        "stat", "CFG", "set_config", "get_config", "load_report", "save_report", "round_value",
    }  # fmt: skip


def test_settings_have_the_published_names_and_defaults() -> None:
    rasp.CFG.profile.num_batches, rasp.CFG.profile.warmup_batches = 100, 10
    assert dict(rasp.CFG.frontend) == {
        "type": "pytorch", "args": (), "stat_mem": False, "mark_updated": False, "reset_max_mem": False,
    }  # fmt: skip
    assert dict(rasp.CFG.profile) == {
        "batch_size": 1, "num_batches": 100, "warmup_batches": 10, "timing_max_depth": -1, "compute_max_depth": -1,
        "verbose": False,
    }  # fmt: skip
    assert dict(rasp.CFG.device) == {"type": "frontend", "args": ()}
    assert dict(rasp.CFG.analysis) == {"regress_model": "linear"}


def test_set_config_sets_what_it_names_and_nothing_where_one_is_wrong() -> None:
    rasp.set_config({"profile": {"batch_size": 3, "num_batches": 7}})
    assert rasp.get_config() is rasp.CFG
    assert (rasp.CFG.profile.batch_size, rasp.CFG.profile.num_batches, rasp.CFG.profile.warmup_batches) == (3, 7, 1)
    for wrong, message in (
        ({"profile": {"batch_size": 5, "num_batches": 0}}, "num_batches is 0"),
        ({"profile": {"batch_size": 5}, "profiles": {}}, "no section 'profiles'"),
        ({"frontend": {"type": "mxnet"}}, "type is 'mxnet'; it must be 'pytorch'"),
        ({"profile": 3}, "write sections"),
    ):
        with pytest.raises(InvalidInput, match=message):
            rasp.set_config(wrong)  # type: ignore[arg-type]
    assert rasp.CFG.profile.batch_size == 3
    with pytest.raises(AttributeError, match="'batches'"):
        _ = rasp.CFG.profile.batches


def test_stat_mem_turns_memory_on_and_verbose_says_what_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    rasp.CFG.frontend.stat_mem = rasp.CFG.profile.verbose = True
    assert "net_dev_mem" in quiet(Nested(), device="cuda").columns if not torch.cuda.is_available() else True
    quiet(Nested(), timing=True)
    assert "rasp: 1 + 4 batches on cpu" in capsys.readouterr().err


def test_compute_max_depth_folds_what_lies_deeper() -> None:
    whole = quiet(Nested())
    rasp.CFG.profile.compute_max_depth = 1
    folded = quiet(Nested())
    assert folded["name"].tolist() == [".block", ".head", "total"]
    for column in ("params", "flops", "mem_rw"):
        assert folded[column].iloc[-1] == whole[column].iloc[-1]
    rasp.CFG.profile.compute_max_depth = 0
    assert quiet(Nested())["name"].tolist() == [".", "total"]


def test_timing_max_depth_leaves_deeper_modules_untimed() -> None:
    rasp.CFG.profile.timing_max_depth = 1
    table = quiet(Nested(), timing=True, report_type="all").set_index("name")
    assert math.isnan(table.loc[".block.0", "net_lat"])
    assert table.loc[".block", "net_lat"] > 0
    assert table.loc[".head", "net_lat"] > 0


def test_net_lat_is_a_modules_own_time_without_its_children() -> None:
    table = quiet(Nested(), timing=True, report_type="all", include_root=True).set_index("name")
    inside = table.loc[[".block.0", ".block.1"], "net_lat"].sum()
    assert table.loc[".block", "lat"] == pytest.approx(table.loc[".block", "net_lat"] + inside)
    assert table.loc[".block.0", "lat"] == table.loc[".block.0", "net_lat"]
    rows = table.loc[[".", ".block", ".block.0", ".block.1", ".head"], "net_lat"]
    assert rows.sum() == pytest.approx(table.loc["total", "net_lat"])
    assert table.loc["total", "net_lat"] == pytest.approx(table.loc["total", "lat"], rel=0.2)
    shares = table.loc[rows.index, "lat[%]"]
    assert shares.sum() == pytest.approx(100)


def test_a_container_has_the_rate_of_its_own_work() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)
            self.weight = nn.Parameter(torch.ones(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x) @ self.weight
            return y

    table = quiet(Scaled(), timing=True, report_type="all", include_root=True).set_index("name")
    own = table.loc[".", "flops"] - table.loc[".inner", "flops"]
    assert table.loc[".", "FLOPS"] == pytest.approx(own / table.loc[".", "net_lat"] * 1e3)


def test_sum_is_the_printed_text_and_totals_the_dict(capsys: pytest.CaptureFixture[str]) -> None:
    text = rasp.stat(SmallCNN(), SHAPE, returns="sum")
    assert capsys.readouterr().out == text + "\n"
    totals = rasp.stat(SmallCNN(), SHAPE, print_stat=False, returns="totals")
    # conv1 16 x (9 + 1), conv2 32 x (16 x 9 + 1), classifier 10 x (32 x 49 + 1)
    assert totals["params"] == 160 + 4640 + 15690
    assert "Total params: 20.49K" in text.splitlines()
    assert f"Total mem_rw: {rasp.round_value(totals['mem_rw'], True)} Byte" in text.splitlines()
    assert f"Total flops: {rasp.round_value(totals['flops'])}" in text.splitlines()


def test_several_results_come_as_a_list() -> None:
    found = quiet(Nested(), returns="data, tree")
    assert isinstance(found, list) and isinstance(found[0], pd.DataFrame) and found[1].name == "."
    assert isinstance(quiet(Nested(), returns="data"), pd.DataFrame)
    assert quiet(Nested(), returns=None) is None


def test_without_a_report_the_sum_has_the_totals_alone() -> None:
    text = rasp.stat(Nested(), (8, 1, 1, 16), report_type=None, returns="sum")
    assert text.startswith("Total params: 1.35K\n")


def test_timing_adds_its_total_lines() -> None:
    text = quiet(Nested(), timing=True, returns="sum")
    lines = [line.split(":")[0] for line in text.splitlines() if line.startswith("Total")]
    assert [f"Total {name}" for name in ("lat", "net_lat", "FLOPS")] == [
        line for line in lines if line.split()[1] in ("lat", "net_lat", "FLOPS")
    ]
    assert not any("lat[%]" in line for line in lines)


@pytest.mark.parametrize("report_type", ["node", "root"])
def test_node_and_root_are_one_line_for_the_whole(report_type: str) -> None:
    table = quiet(Nested(), report_type=report_type)
    assert table["name"].tolist() == [".", "total"]
    assert table["flops"].iloc[0] == table["flops"].iloc[1]


def test_macc_stands_where_the_published_table_has_it() -> None:
    columns = list(quiet(Nested(), includes=["macc"], memory=True))
    assert columns[-5:] == ["mem_rw", "macc", "net_dev_mem", "dev_mem_alloc", "dev_max_mem_alloc"]
    assert "flops" not in quiet(Nested(), includes=["macc"], excludes=["flops"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((999,), "999"), ((1000,), "1.0K"), ((327_140_000,), "327.14M"), ((4.19e9,), "4.19G"), ((2.5e12,), "2.5T"),
        ((1024, True), "1.0K"), ((1023, True), "1023"), ((3 * 2**20, True), "3.0M"), ((1234567, False, 0), "1.0M"),
    ],
)  # fmt: skip
def test_round_value(arguments: tuple[Any, ...], text: str) -> None:
    assert rasp.round_value(*arguments) == text


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_reports_are_saved_and_loaded(tmp_path: Path, suffix: str) -> None:
    table = quiet(Nested(), save_path=tmp_path / f"report{suffix}")
    read = rasp.load_report(tmp_path / f"report{suffix}")
    assert list(read.columns) == list(table.columns)
    assert read.index.tolist() == table.index.tolist()
    assert read["flops"].tolist() == table["flops"].tolist()
    assert read["name"].tolist() == table["name"].tolist()


def test_save_report_writes_a_table_that_was_returned(tmp_path: Path) -> None:
    table = quiet(Nested())
    assert rasp.save_report(table, tmp_path / "new" / "t.csv") == tmp_path / "new" / "t.csv"
    assert rasp.load_report(tmp_path / "new" / "t.csv")["params"].tolist() == table["params"].tolist()
    assert rasp.save_report(table, tmp_path / "folder") == tmp_path / "folder" / "report.csv"
    with pytest.raises(InvalidInput, match=r"\.csv"):
        rasp.save_report(table, tmp_path / "t.json")
    with pytest.raises(InvalidInput, match="is not a report of rasp"):
        rasp.load_report(tmp_path / "absent.csv")
