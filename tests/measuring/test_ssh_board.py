"""Boards over ssh, against a real sshd on the loopback address."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt.cli import app
from edge_opt.compress import convert
from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.measuring import ssh_board
from edge_opt.measuring.ssh_board import Board, BoardUnavailable, TimingOrder, pack_inputs, parse_board
from edge_opt.model import SmallCNN
from ssh_server import HOST, SshServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    started = SshServer(tmp_path_factory.mktemp("ssh"))
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{started.bin}{os.pathsep}{before}"
    yield started
    os.environ["PATH"] = before
    started.close()


@pytest.fixture
def board(server: SshServer) -> Iterator[Board]:
    """The board with the Python of the tests, which has the runtimes; nothing may be left in its temporary folder."""
    folder = server.folder / "tmp"
    folder.mkdir(exist_ok=True)
    yield Board(HOST, sys.executable, 60.0)
    assert not list(Path("/tmp").glob("edge-opt-*/board_script.py"))


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return Path(convert(SmallCNN(), (1, 1, 28, 28), "fp32", "onnxruntime", output=folder).path)


def short(file: Path, **options: object) -> TimingOrder:
    return TimingOrder((file.name,), **{"min_time_s": 0.02, "max_time_s": 0.05, **options})  # type: ignore[arg-type]


def test_a_file_is_timed_at_each_size(board: Board, onnx_file: Path) -> None:
    files = {onnx_file.name: onnx_file.read_bytes()}
    result = board.time(short(onnx_file, sizes=(2, 1)), files, pack_inputs([np.zeros((3, 1, 28, 28), np.float32)]))
    assert [(item.size, item.latency.batch_size) for item in result.timings] == [(2, 2), (1, 1)]
    assert all(item.latency.median_s > 0 for item in result.timings)
    assert result.machine.startswith(board.check().partition(" (")[0]) and "ONNX Runtime" in result.machine
    assert result.memory_bytes is not None and result.memory_bytes >= 0


def test_the_command_prints_the_latency_and_json(server: SshServer, onnx_file: Path) -> None:
    words = ["measure-on", f"{HOST}:{sys.executable}", str(onnx_file), "--min-time", "0.02"]
    printed = CliRunner().invoke(app, words)
    assert printed.exit_code == 0 and printed.stdout.startswith(f"{onnx_file.name}: "), printed.output
    plain = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert plain["timings"][0]["latency"]["median_s"] > 0


def test_a_broken_file_and_wrong_inputs_are_refused_by_the_board(board: Board, onnx_file: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot load"):
        board.time(short(onnx_file), {onnx_file.name: b"no model"})
    with pytest.raises(InvalidInput, match="2 inputs are given"):
        zeros = np.zeros((1, 1, 28, 28), np.float32)
        board.time(short(onnx_file), {onnx_file.name: onnx_file.read_bytes()}, pack_inputs([zeros, zeros]))


def test_a_host_that_does_not_answer_is_one_sentence_with_exit_code_2(onnx_file: Path) -> None:
    done = CliRunner().invoke(app, ["measure-on", "nobody@127.0.0.1.invalid", str(onnx_file)])
    assert done.exit_code == 2 and "ssh -o BatchMode=yes nobody@127.0.0.1.invalid true" in done.stderr


def test_a_key_that_the_board_does_not_know_is_refused_without_a_prompt(server: SshServer, board: Board) -> None:
    server.use_key("other_key")
    try:
        with pytest.raises(BoardUnavailable, match="Permission denied"):
            board.check()
    finally:
        server.use_key("user_key")


def test_a_missing_python_and_a_missing_runtime_name_what_to_install(
    server: SshServer, onnx_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(BoardUnavailable, match="no-such-python"):
        Board(HOST, "no-such-python").check()
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('not here')", encoding="ascii")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n', encoding="ascii")
    python.chmod(0o755)
    with pytest.raises(BoardUnavailable, match="-m pip install onnxruntime"):
        Board(HOST, str(python)).time(short(onnx_file), {onnx_file.name: onnx_file.read_bytes()})


def test_a_time_limit_and_a_crash_are_reported(board: Board, onnx_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {onnx_file.name: onnx_file.read_bytes()}
    with pytest.raises(TimeoutError, match="longer than 1 s"):
        Board(HOST, sys.executable, 1.0).time(short(onnx_file, min_time_s=30.0, max_time_s=30.0), files)
    monkeypatch.setattr(
        ssh_board, "_archive", _archive_with(b"import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    )
    with pytest.raises(ChildProcessError, match="signal 11"):
        board.time(short(onnx_file), files)


def _archive_with(script: bytes):  # type: ignore[no-untyped-def]
    real = ssh_board._archive
    return lambda content: real({**content, ssh_board.SCRIPT: script})


def test_a_full_disk_on_the_board_is_said(server: SshServer, onnx_file: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    # The shell's limit on the size of files stands in for a full disk: writing fails in the same place.
    python.write_text(f'#!/bin/sh\nulimit -f 1\nexec {sys.executable} "$@"\n', encoding="ascii")
    python.chmod(0o755)
    big = {onnx_file.name: onnx_file.read_bytes() + bytes(2**20)}
    with pytest.raises(EdgeOptError, match="free some space there|nothing came back"):
        Board(HOST, str(python)).time(short(onnx_file), big)


@pytest.mark.parametrize("address", ["tls://host:8786", "", "-oProxyCommand=touch /tmp/x", "user@"])
def test_what_is_not_a_host_is_refused(address: str) -> None:
    if address == "user@":
        assert parse_board(address).host == "user@"  # ssh itself refuses it
        return
    with pytest.raises(InvalidInput, match="USER@HOST"):
        parse_board(address)


@pytest.mark.usefixtures("one_fork_server", "own_machine")
def test_variants_are_built_here_and_measured_on_the_board(board: Board, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(8, 1, 28, 28), torch.randint(0, 10, (8,))) for _ in range(2)]
    loaders = {"train": batches, "validation": batches}
    options = {"pruning_levels": [0.5], "constraints": [], "min_time_s": 0.02, "calibration_batches": 1}
    where = {"measure_on": f"{HOST}:{sys.executable}"}
    with pytest.raises(InvalidInput, match="torch cannot be measured on a board"):
        eo.sweep(SmallCNN(), loaders, output=tmp_path, runtimes=["torch", "onnxruntime"], **options, **where)
    result = eo.sweep(SmallCNN(), loaders, output=tmp_path, **options, **where)
    machine = board.check()
    # fp32 and int8, the default; nothing of this machine among their times.
    assert {trial.candidate.runtime for trial in result.trials} == {"onnxruntime"}
    named = [trial.metrics.machine for trial in (result.baseline, *result.trials) if trial.metrics]
    assert len(named) == 3 and all(name.startswith(machine.partition(" (")[0]) for name in named)
    assert result.finals is not None
    assert named[0] in (tmp_path / "best" / "MODEL_CARD.md").read_text(encoding="utf-8")
    with pytest.raises(EdgeOptError, match="measured_on"):
        eo.sweep(SmallCNN(), loaders, output=tmp_path, runtimes=["onnxruntime"], **options)


@pytest.mark.usefixtures("one_fork_server", "own_machine")
def test_a_board_that_fails_costs_rows_and_the_sweep_goes_on(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [(torch.randn(8, 1, 28, 28), torch.randint(0, 10, (8,))) for _ in range(2)]
    order_count = iter(range(100))
    real = Board._run

    def unreliable(self: Board, *arguments: object) -> object:
        # The probe and the baseline succeed; then the connection breaks once.
        if next(order_count) == 2:
            raise BoardUnavailable(f"cannot connect to {self.host}: Connection reset by peer")
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Board, "_run", unreliable)
    result = eo.sweep(
        SmallCNN(), {"train": batches, "validation": batches}, output=tmp_path, pruning_levels=[0.0, 0.5],
        precisions=["fp32"], budgets=[], min_time_s=0.02, measure_on=f"{HOST}:{sys.executable}",
    )  # fmt: skip
    assert [trial.status for trial in result.trials] == ["done", "failed"]
    assert "Connection reset" in result.failed[0].reason
