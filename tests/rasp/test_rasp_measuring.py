"""The measured half of `rasp.stat`: timing and memory, as published."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from torch import nn

import rasp
from zoo import torchvision_models

TIMING = ["lat", "net_lat", "lat[%]", "FLOPS"]
MEMORY = ["net_dev_mem", "dev_mem_alloc", "dev_max_mem_alloc"]


@pytest.fixture(autouse=True)
def few_repeats() -> Iterator[None]:
    before = rasp.CFG.profile.num_batches, rasp.CFG.profile.warmup_batches
    rasp.CFG.profile.num_batches, rasp.CFG.profile.warmup_batches = 4, 1
    yield
    rasp.CFG.profile.num_batches, rasp.CFG.profile.warmup_batches = before


class Counts(nn.Module):
    """Knows how often it was really run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)
        self.runs: SimpleQueue[int] = SimpleQueue()  # a list would be put back to what it was

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            self.runs.put(x.shape[0])
        return self.last(self.act(self.first(x)))


def test_timing_columns_come_only_with_timing() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    plain = rasp.stat(model, (2, 4, 4, 4), print_stat=False, returns="data")
    timed = rasp.stat(model, (2, 4, 4, 4), timing=True, print_stat=False, returns="data")
    assert not set(TIMING) & set(plain.columns)
    assert set(TIMING) <= set(timed.columns)


def test_net_latency_is_the_basis_of_shares_and_rates() -> None:
    table = rasp.stat(Counts(), (3, 4, 4, 4), timing=True, includes="end_lat", print_stat=False, returns="data")
    rows, total = table.iloc[:-1], table.loc["total"]
    assert rows["lat"].sum() <= total["lat"] * 1.0001
    assert (rows["lat"] > 0).all()
    # Leaves have no children, so their own time is all of it.
    assert rows["net_lat"].tolist() == rows["lat"].tolist()
    assert rows["net_lat"].sum() == pytest.approx(total["net_lat"])
    assert rows["lat[%]"].sum() == pytest.approx(100)
    assert total["lat[%]"] == 100
    assert (rows["lat[%]"] / 100 * total["net_lat"]).tolist() == pytest.approx(rows["net_lat"].tolist())
    assert (rows["flops"] / rows["net_lat"] * 1e3).tolist() == pytest.approx(rows["FLOPS"].tolist())
    assert total["flops"] / total["net_lat"] * 1e3 == pytest.approx(total["FLOPS"])
    assert rows["end_lat"].is_monotonic_increasing
    assert rows["end_lat"].iloc[-1] <= total["end_lat"] * 1.0001


def test_the_root_row_is_the_whole_forward() -> None:
    table = rasp.stat(Counts(), (3, 4, 4, 4), timing=True, report_type="root", print_stat=False, returns="data")
    assert table["lat"].iloc[0] == table["lat"].iloc[1]


def test_it_runs_as_often_as_configured() -> None:
    model = Counts()
    rasp.stat(model, (3, 4, 4, 4), timing=True, print_stat=False)
    few = model.runs.qsize()
    model.runs = SimpleQueue()
    rasp.CFG.profile.num_batches = 14
    rasp.stat(model, (3, 4, 4, 4), timing=True, print_stat=False)
    # ten more, each once without and once with the recorder
    assert model.runs.qsize() - few == 2 * 10


def test_memory_of_a_chain_follows_from_its_dimensions() -> None:
    table = rasp.stat(Counts(), (3, 4, 4, 4), memory=True, print_stat=False, returns="data")
    rows = 3 * 4 * 4
    hidden, out = 4 * rows * 8, 4 * rows * 2
    first, act, last = (table.iloc[index] for index in range(3))
    assert (first["net_dev_mem"], first["dev_mem_alloc"]) == (0, hidden)
    assert (act["net_dev_mem"], act["dev_mem_alloc"], act["dev_max_mem_alloc"]) == (hidden, hidden, 2 * hidden)
    assert (last["net_dev_mem"], last["dev_mem_alloc"], last["dev_max_mem_alloc"]) == (hidden, out, hidden + out)
    assert not set(TIMING) & set(table.columns)
    assert table.loc["total", "dev_max_mem_alloc"] == 2 * hidden


def test_cuda_that_is_not_there_warns_and_uses_the_cpu() -> None:
    if torch.cuda.is_available():
        pytest.fail("this test is about machines without CUDA; run it with CUDA_VISIBLE_DEVICES=''")
    with pytest.warns(UserWarning, match="'cuda'"):
        table = rasp.stat(nn.Linear(4, 4), (2, 4, 4, 4), device="cuda", timing=True, print_stat=False, returns="data")
    assert table["lat"].iloc[0] > 0


def test_the_published_snippets_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    AlexNet = torchvision_models().AlexNet
    monkeypatch.chdir(tmp_path)
    model = AlexNet()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rasp.stat(model, input_shape=(1, 3, 224, 224), timing=True)
        rasp.stat(model, input_shape=(1, 3, 224, 224), device="cuda", timing=True)
        rasp.stat(model, input_shape=(1, 3, 224, 224), device="cuda", memory=True)
        df = rasp.stat(
            model, input_shape=(1, 3, 224, 224), device="cuda", timing=True, print_stat=False, returns="data"
        )
        assert df["lat"].iloc[:-1].sum() <= df["lat"].iloc[-1] * 1.0001
    rasp.CFG.profile.num_batches = 2
    rasp.CFG.profile.warmup_batches = 1
    inputs = torch.randn(8, 3, 224, 224)
    rasp.stat(model, inputs=inputs, timing=True)
    for report_type in ["tape", "node", "leaves", "root", None]:
        rasp.stat(model, input_shape=(1, 3, 224, 224), report_type=report_type, timing=True)
    rasp.stat(model, input_shape=(1, 3, 224, 224), timing=True, save_path="./reports")
    assert list((tmp_path / "reports").iterdir())
