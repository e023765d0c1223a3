"""A board that times: a process without torch that has joined a scheduler by TLS."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import edge_opt as eo
from edge_opt.compress import convert
from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.measuring.onnx_timing import TimingOrder, this_machine
from edge_opt.model import SmallCNN
from edge_opt.search import board_worker
from edge_opt.search.board_worker import GONE, Board, find_board
from edge_opt.search.build import Notice
from edge_opt.search.certificates import make_certificates, security_from
from edge_opt.search.store import Store
from needed import needed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_machine")]
distributed = needed("distributed")


class Bench:
    """A scheduler here, its certificates, a model as a file, and boards that can be started."""

    def __init__(self, folder: Path, address: str, file: Path) -> None:
        self.folder, self.address, self.file = folder, address, file
        self.tls = folder / "tls"

    def start(self) -> subprocess.Popen[bytes]:
        """A board in a process that cannot import torch."""
        blocked = self.folder / "no_torch"
        blocked.mkdir(exist_ok=True)
        (blocked / "torch.py").write_text("raise ImportError('there is no torch on this board')")
        path = os.pathsep.join([str(blocked), str(Path(eo.__file__).parents[1])])
        command = [sys.executable, "-m", "edge_opt.search.board_worker", self.address, "--tls-dir", str(self.tls)]
        return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("board")
    security = security_from(make_certificates(folder / "tls"))
    made = convert(SmallCNN(), (1, 1, 28, 28), "fp32", "onnxruntime", folder=folder)
    with distributed.LocalCluster(
        n_workers=0, processes=False, protocol="tls://", host="127.0.0.1", security=security, dashboard_address=None
    ) as cluster:
        yield Bench(folder, cluster.scheduler_address, Path(made.path))


@pytest.fixture
def start(bench: Bench) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def one() -> subprocess.Popen[bytes]:
        started.append(bench.start())
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()


def order_for(bench: Bench, **options: Any) -> tuple[TimingOrder, dict[str, bytes]]:
    chosen = {"min_time_s": 0.02, "max_time_s": 0.05, **options}
    return TimingOrder((bench.file.name,), **chosen), {bench.file.name: bench.file.read_bytes()}


def test_a_board_without_torch_times_a_file_and_refuses_a_broken_one(bench: Bench, start: Any) -> None:
    start()
    board = find_board(bench.address, bench.tls)
    assert board.machine == this_machine()  # the same machine here
    order, files = order_for(bench, sizes=(2, 1))
    found = board.time(order, files)
    assert found.machine == board.machine
    assert {(item.size, item.latency.batch_size) for item in found.timings} == {(1, 1), (2, 2)}
    assert all(item.latency.median_s > 0 for item in found.timings)
    with pytest.raises(InvalidInput, match="cannot load"):
        board.time(order, {bench.file.name: b"no model"})
    with pytest.raises(EdgeOptError, match="the times are of another board, and now"):
        Board(board.cluster, "another board").time(order, files)


def test_a_board_without_torch_says_that_it_cannot_be_calibrated(bench: Bench, start: Any) -> None:
    start()
    with pytest.raises(InvalidInput, match="the board cannot be calibrated: .*torch"):
        find_board(bench.address, bench.tls).calibrate(threads=1, seconds=1.0)


def test_a_board_that_goes_away_costs_that_attempt_and_is_waited_for(
    bench: Bench, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_worker, "LOOK_S", 0.2)
    first = start()
    board = find_board(bench.address, bench.tls)
    told: list[str] = []
    lost: list[None] = []

    def tell(event: Any) -> None:
        if isinstance(event, Notice):
            told.append(event.text)
            start()  # somebody switches it on again

    def end_it() -> None:
        time.sleep(1.0)
        first.kill()

    order, files = order_for(bench, min_time_s=2.0, max_time_s=2.0)
    killer = threading.Thread(target=end_it)
    killer.start()
    found = board.time(order, files, tell=tell, on_loss=lambda: lost.append(None))
    killer.join()
    assert told == [GONE]
    assert len(lost) == 1
    assert found.timings[0].latency.median_s > 0


@pytest.mark.usefixtures("one_nursery")
def test_variants_are_built_here_and_timed_on_the_board(bench: Bench, start: Any, tmp_path: Path) -> None:
    start()
    torch.manual_seed(0)
    batches = [(torch.randn(8, 1, 28, 28), torch.randint(0, 10, (8,))) for _ in range(2)]
    loaders = {"train": batches, "validation": batches}
    options = {"pruning_levels": [0.5], "constraints": [], "min_time_s": 0.02, "calibration_batches": 1}
    where = {"measure_on": bench.address, "tls_dir": bench.tls}
    with pytest.raises(InvalidInput, match="a board has onnxruntime alone"):
        eo.sweep(SmallCNN(), loaders, folder=tmp_path, runtimes=["torch", "onnxruntime"], **options, **where)
    result = eo.sweep(SmallCNN(), loaders, folder=tmp_path, **options, **where)
    # fp32 and int8, the default; nothing of this machine among their times.
    assert {trial.candidate.runtime for trial in result.trials} == {"onnxruntime"}
    assert [trial.metrics.machine for trial in result.trials if trial.metrics] == [this_machine()] * 2
    assert result.baseline.candidate.pruning == 0 and result.baseline.metrics.machine == this_machine()
    assert result.finals is not None
    card = (tmp_path / "best" / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert f"measured on {this_machine()}" in card
    Store.look(tmp_path).close()
    with pytest.raises(EdgeOptError, match="measured_on"):
        eo.sweep(SmallCNN(), loaders, folder=tmp_path, runtimes=["onnxruntime"], **options)


def test_another_machine_is_not_spoken_to_without_tls() -> None:
    with pytest.raises(InvalidInput, match="without TLS"):
        find_board("tcp://192.0.2.1:8786")
    with pytest.raises(InvalidInput, match="without TLS"):
        board_worker.serve("tcp://192.0.2.1:8786")
