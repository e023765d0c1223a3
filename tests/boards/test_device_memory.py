"""Device memory without the device: the published table, the record, and the largest batch."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import nn

import edge_opt as eo
import rasp
from edge_opt.boards.device_memory import LARGE_SEGMENT, MIB, SMALL_SEGMENT
from edge_opt.errors import InvalidInput
from edge_opt.model import SmallCNN
from zoo import torchvision_models

PUBLISHED = Path(__file__).parent.parent / "reference" / "rasp_mobilenet_v2.csv"
MEMORY = ["net_dev_mem", "dev_mem_alloc", "dev_max_mem_alloc"]


def mobilenet() -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = torchvision_models().mobilenet_v2()
    return model


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def published() -> list[dict[str, str]]:
    with PUBLISHED.open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_published_rows_of_device_memory_are_equal(published: list[dict[str, str]]) -> None:
    data = rasp.stat(
        mobilenet(),
        input_shape=(1, 3, 224, 224),
        device="cuda",
        memory=True,
        includes=["macc"],
        print_stat=False,
        returns="data",
    )
    rows = data.reset_index().iloc[:-1]
    assert len(rows) == len(published) == 141
    for column in MEMORY:
        assert [str(value) for value in rows[column]] == [row[column] for row in published], column
    # With macc and memory the columns stand in the published order, too.
    assert list(data.reset_index().columns) == list(published[0])


def test_simulated_memory_says_so_wherever_it_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, tree, text = rasp.stat(
        SmallCNN(), (1, 28, 28), device="cuda", memory=True, returns="data,tree,sum", save_path=tmp_path / "t.json"
    )
    assert data.attrs["device_memory"].startswith("simulated: torch's CUDA caching allocator")
    assert tree.memory_source == data.attrs["device_memory"]
    assert all(node.memory_source == tree.memory_source for node in tree.walk())
    for shown in (text, capsys.readouterr().out, (tmp_path / "t.json").read_text(), " ".join(data.attrs["notes"])):
        assert "simulated" in shown
        assert "workspaces of cuDNN and cuBLAS" in shown


def test_memory_that_is_measured_says_that_instead() -> None:
    data = rasp.stat(SmallCNN(), (1, 28, 28), memory=True, print_stat=False, returns="data")
    assert data.attrs["device_memory"].startswith("measured")
    assert not any("simulated" in note for note in data.attrs["notes"])


def test_a_linear_layer_by_hand() -> None:
    # Weights 256 x 256 x 4 B and the input's 1 KiB are resident; the output is 1 KiB more. All in one small segment.
    found = eo.profile(nn.Linear(256, 256, bias=False), (1, 256)).device_memory("cuda")
    assert (found.resident_bytes, found.activation_bytes) == (256 * 256 * 4 + 1024, 1024)
    assert found.requested_bytes == found.allocated_bytes == 256 * 256 * 4 + 2048
    assert found.reserved_bytes == SMALL_SEGMENT
    assert found.fragmentation == 1 - found.requested_bytes / SMALL_SEGMENT
    assert (found.device, found.peak_op, found.peak_module) == ("cuda", 0, "")
    assert [point.allocated_bytes for point in found.tape] == [found.allocated_bytes]


def test_odd_sizes_cost_their_rounding() -> None:
    # Five 4-byte scalars: two weights, the input, two outputs, 512 B each.
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    found = eo.profile(model, (1, 1)).device_memory()
    assert (found.resident_bytes, found.allocated_bytes, found.requested_bytes) == (3 * 512, 5 * 512, 5 * 4)


def test_weights_that_the_run_does_not_read_are_held_too() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4, bias=False), nn.Linear(1024, 1024, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.used(x)
            return y

    profile = eo.profile(Idle(), (1, 4))
    assert profile.trace.moved_tensor_bytes == (4 * 4 * 4, 1024 * 1024 * 4)
    assert profile.device_memory().resident_bytes == 512 + 4 * MIB + 512
    assert profile.device_memory().reserved_bytes == SMALL_SEGMENT + LARGE_SEGMENT


def test_shared_weights_and_buffers_are_moved_once_in_the_order_of_to() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight = model[0].weight
    model.tied = model[0].weight
    # weight, bias; scale, shift, mean, variance, and the counter of batches: 8 bytes.
    assert eo.profile(model, (1, 2)).trace.moved_tensor_bytes == (16, 8, 8, 8, 8, 8, 8)


def test_a_modules_own_variables_are_gone_when_it_returns() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            return doubled + 1

    rows = eo.profile(nn.Sequential(Twice(), nn.ReLU()), (1, 128)).device_memory().modules
    twice = next(row for row in rows if row.path == "0")
    assert (twice.before_bytes, twice.allocated_bytes, twice.peak_bytes) == (0, 512, 1024)


def test_the_true_peak_is_reached_inside_modules_and_not_only_at_their_ends() -> None:
    found = eo.profile(mobilenet(), (1, 3, 224, 224)).device_memory()
    assert found.allocated_bytes == max(point.allocated_bytes for point in found.tape)
    assert found.activation_bytes == max(row.peak_bytes for row in found.modules)
    root = found.modules[0]
    # The whole model keeps 1000 scores at the end; its peak is another figure.
    assert root.allocated_bytes == 4096 < root.peak_bytes == found.activation_bytes
    assert found.requested_bytes <= found.allocated_bytes <= found.reserved_bytes


def test_settings_are_those_of_the_environment_variable() -> None:
    profile = eo.profile(mobilenet(), (32, 3, 224, 224))
    usual, unsplit = profile.device_memory(), profile.device_memory(settings="max_split_size_mb:21")
    assert unsplit.requested_bytes == usual.requested_bytes
    assert unsplit.reserved_bytes != usual.reserved_bytes
    with pytest.raises(InvalidInput, match="not simulated"):
        profile.device_memory(settings="backend:cudaMallocAsync")
    with pytest.raises(InvalidInput, match="no allocator is known for the device 'mps'"):
        profile.device_memory("mps")


def test_text_names_every_figure_and_what_is_not_in_it() -> None:
    text = str(eo.profile(SmallCNN(), (1, 1, 28, 28)).device_memory())
    for word in ("simulated", "Requested", "Allocated", "Reserved", "cuDNN and cuBLAS"):
        assert word in text


def test_a_saved_profile_gives_the_same_memory(tmp_path: Path) -> None:
    profile = eo.profile(SmallCNN(), (4, 1, 28, 28))
    assert eo.load(profile.save(tmp_path / "p.json")).device_memory() == profile.device_memory()


def test_the_page_draws_it_over_the_tape(tmp_path: Path) -> None:
    profile = eo.profile(SmallCNN(), (4, 1, 28, 28))
    page = profile.save(tmp_path / "p.html").read_text(encoding="utf-8")
    found = profile.device_memory()
    assert f'"cuda_reserved_bytes":[{found.tape[0].reserved_bytes}' in page.replace(" ", "")
    assert "workspaces of cuDNN and cuBLAS" in page


def test_fewer_samples_fit_a_gpus_allocator_than_the_bare_tensors() -> None:
    bare = eo.fit_batch(mobilenet(), (3, 224, 224), memory_limit_mb=256)
    real = eo.fit_batch(mobilenet(), (3, 224, 224), memory_limit_mb=256, allocator="cuda")
    assert 0 < real.batch <= bare.batch
    assert real.allocator == "cuda"
    assert real.reserved_bytes is not None and real.total_bytes <= real.reserved_bytes <= 256 * MIB
    assert real.shortfall_bytes is not None and real.shortfall_bytes > 0
    assert (bare.allocator, bare.reserved_bytes) == (None, None)


def test_a_limit_below_one_segment_fits_nothing() -> None:
    fit = eo.fit_batch(nn.Linear(4, 4), (4,), memory_limit_mb=1, allocator="cuda")
    assert (fit.batch, fit.shortfall_bytes) == (0, 1 * MIB)
    assert eo.fit_batch(nn.Linear(4, 4), (4,), memory_limit_mb=2, allocator="cuda", max_batch=8).batch == 8


def test_a_precision_is_for_the_model_and_not_for_the_allocator() -> None:
    with pytest.raises(InvalidInput, match=r"model\.half\(\)"):
        eo.fit_batch(nn.Linear(4, 4), (4,), memory_limit_mb=4, allocator="cuda", precision="fp16")
    with pytest.raises(InvalidInput, match="no allocator is known"):
        eo.fit_batch(nn.Linear(4, 4), (4,), memory_limit_mb=4, allocator="mps")  # type: ignore[arg-type]
