"""Files and values of unknown origin: an answer or one sentence, within limits, and nothing is executed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt._support.files import own_folder, staging, sync_folder, write_named, write_whole
from edge_opt._support.json import loads
from edge_opt.budgets import PROFILE_METRICS, parse_budget, parse_budgets
from edge_opt.cli import app
from edge_opt.errors import EdgeOptError, InvalidConfig, InvalidInput, UnreadableProfile
from edge_opt.loading import load_model
from edge_opt.run.config import read_config
from edge_opt.search.sweep import SweepOptions
from edge_opt.tasks.metrics import QualityMetric
from onnx_graphs import node, write

# A few of the files that `benchmarks/hostile_files.py` makes; that runs them all.
_SHORT = """
import sys, tempfile
from itertools import islice
from pathlib import Path
import hostile
hostile.preload()
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    for file in islice(hostile.files(folder, 7), 0, None, 97):
        for problem in hostile.run(file, folder, folder / "watched").problems:
            print(file.kind, file.name, problem)
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="the processes are forked")
def test_files_of_unknown_origin_end_in_an_answer_or_a_sentence() -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "support"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", _SHORT], env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout == "done\n", ended.stdout + ended.stderr


def refused(*words: str) -> str:
    """The sentence of a command that must not be accepted."""
    ended = CliRunner().invoke(app, list(words))
    assert (ended.exit_code, isinstance(ended.exception, SystemExit)) == (2, True), ended.output
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(
    "words",
    [
        "profile edge_opt.model:SmallCNN -i 9223372036854775808x1",
        "profile edge_opt.model:SmallCNN -i 1x1x28x28 -b 99999999999999999999",
        "llm CONFIG -t raspberry-pi-5 --engine npu",
        "llm CONFIG -t raspberry-pi-5 --ram 1e99",
        "llm CONFIG -t raspberry-pi-5 --ram nan",
        "llm LAYERS",
        "llm DEEP",
        "llm GGUF",
        "train-cost edge_opt.model:SmallCNN -i 1x1x28x28 --budget-mb nan",
        "check edge_opt.model:SmallCNN -i 1x1x28x28 --budget size_mb<=1 --budget size_kb>2000",
    ],
)
def test_invalid_values_are_one_sentence(words: str, tmp_path: Path) -> None:
    llama = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}
    contents = {
        "CONFIG": json.dumps(llama), "LAYERS": json.dumps(llama | {"num_hidden_layers": 10**9}),
        "DEEP": "[" * 100_000, "GGUF": "GGUF",
    }  # fmt: skip
    for name, content in contents.items():
        path = tmp_path / (f"{name}.gguf" if name == "GGUF" else f"{name}.json")
        path.write_text(content)
        words = words.replace(name, str(path))
    assert "no file" not in refused(*words.split())


OWN = """
import torch

class Ends(torch.nn.Module):
    def forward(self, x):
        raise SystemExit(0)

class Lost(Exception):
    pass

class Breaks:
    def __iter__(self):
        yield torch.zeros(2, 1, 28, 28), torch.zeros(2)
        raise Lost("batch 2")

breaks = Breaks()
inputs = lambda: exit(0)
"""
NET = "edge_opt.model:SmallCNN -i 1x1x28x28"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        # Taken as it is, the exit code of `check` would say that the budget is kept.
        ("check own.py:Ends -i 1x4 --budget macs<=0", "SystemExit(0)"),
        ("profile edge_opt.model:SmallCNN -i own.py:inputs", "SystemExit(0)"),
        (f"convert {NET} -o n.onnx --verify-on own.py:breaks", "Lost: batch 2; the model's or the data's own code"),
        (f"profile {NET} --measure --threads 99999999999", "at most 1024"),
        (f"profile {NET} --measure --min-time 1e300", "at most a day"),
        (f"profile {NET} -t nrf52840 --battery 1mAh@3V --every 0s", "--every is '0s'"),
        (f"profile {NET} --runtime-profile /dev/zero", "not a file"),
        (f"prune {NET} --ratio 0.5 --importance random --seed -1", "--seed is -1"),
        (f"prune {NET} --ratio conv1=0.5 --ratio conv1=0.6", "two ratios"),
        (f"prune {NET} --ratio =0.5", "cannot be read"),
        (f"targets {NET} --budget macs<=3", "unknown metric 'macs'"),
        (f"targets {NET} --top 0", "--top is 0"),
        ("board mine --like raspberry-pi-4 --time squeezenet1_1=1e300", "1e6 s"),
        ("convert own.onnx --precision int8 --scheme dynamic -o own.onnx", "is the model itself"),
        ("calibrate -o board.toml", ".json"),
        ("run --seeds 99999999999999999999", "2^63"),
        ("run --workers 99999999", "1024 workers"),
        ("doctor --seconds 1e300", "--seconds is"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    words: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    write(tmp_path / "own.onnx", [node("Relu", "x", "y")], {"x": (1,)}, ["y"])
    monkeypatch.chdir(tmp_path)
    assert reason in refused(*words.split())


def test_an_error_of_the_caller_is_not_one_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="^the camera is gone$"), staging(tmp_path):
        raise OSError("the camera is gone")


def test_an_error_of_edge_opt_itself_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_opt.boards.catalog.user_folder", None)
    assert isinstance(CliRunner().invoke(app, ["devices"]).exception, TypeError)


def test_escape_sequences_of_a_file_never_reach_the_terminal(tmp_path: Path) -> None:
    escape = "\x1b]0;owned\x07"
    nodes = [node("Relu", f"x{escape}", "y"), node("Nobody", "y", "z")]
    assert refused("profile", write(tmp_path / "m.onnx", nodes, {"x": (1,)}, ["z"])).isprintable()
    ended = CliRunner().invoke(app, ["profile", f"{escape}.onnx"])
    assert escape not in ended.output


@pytest.mark.parametrize(
    "setting",
    ["learning_rate=1e300", "output_dir=''", 'output_dir="a\\0b"', "cpu_frequency_scale=1e300", "memory_limit_mb=1",
     "epochs=2001-99-99", "epochs=!!int x", "epochs=!!python/name:os.system", f"epochs={'9' * 5000}",
     f"epochs=0x{'f' * 5000}", f"seed={10**30}", "budgets=[size_mb <= 1, size_kb >= 2000]"],
)  # fmt: skip
def test_a_configuration_with_an_invalid_value_is_refused(setting: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_config(settings=[setting])
    assert len(str(caught.value)) < 500


def test_a_layer_to_prune_that_is_not_there_is_refused_before_training(tmp_path: Path) -> None:
    line = refused("run", "--set", "layer_pruning.nowhere=[0.5]", "--output", str(tmp_path / "out"))
    assert "nowhere" in line


def test_sizes_take_the_units_that_tables_print() -> None:
    assert parse_budget("size_mb <= 5 MiB").limit == parse_budget("size_mb <= 5").limit == 5
    assert parse_budget("size_mb <= 2 GiB").limit == 2 * 1024
    assert parse_budget("size_kb <= 3 MB").limit == 3 * 1024


def test_budgets_that_contradict_each_other_are_refused() -> None:
    parse_budgets(["size_mb <= 1", "size_kb >= 1024"], PROFILE_METRICS)
    for texts in (["size_mb < 1", "size_kb > 1024"], ["macs >= 2k", "macs <= 1k"]):
        with pytest.raises(InvalidInput, match="no figure can keep both"):
            parse_budgets(texts, PROFILE_METRICS)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:8786", "tcp://localhost:8786"])
def test_a_scheduler_without_encryption_is_refused_before_anything_runs(address: str) -> None:
    with pytest.raises(InvalidInput, match="--insecure"):
        SweepOptions(scheduler=address)
    assert SweepOptions(scheduler=address, insecure=True).scheduler == address


@pytest.mark.parametrize("result", ["0.5 or so", None, 1 + 2j])
def test_a_metric_that_returns_no_number_is_refused(result: Any) -> None:
    metric = QualityMetric("own", "higher", whole=lambda outputs, targets: result)
    with pytest.raises(InvalidInput, match="metric own returns"):
        metric.value(torch.zeros(3, 2), torch.zeros(3))


def test_a_loader_that_raises_an_error_of_the_system_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("def build():\n    raise OSError('the camera is gone')\nbatches = 3\n")
    line = refused("profile", f"{tmp_path / 'net.py'}:build", "-i", "1x3")
    assert "the camera is gone" in line


@pytest.mark.parametrize("text", ["[" * 100_000, '{"macs": ' + "9" * 5_000 + "}", '{"a": ' + "9" * 400 + "}"])
def test_json_that_no_program_of_ours_writes_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        loads(text)
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UnreadableProfile):
        eo.load(path)


def test_a_path_with_a_nul_is_one_sentence(tmp_path: Path) -> None:
    for call in (
        lambda path: eo.load(path),
        lambda path: write_named(path, ""),
        lambda path: load_model(f"{path}.onnx"),
    ):
        with pytest.raises(EdgeOptError):
            call(f"{tmp_path}/a\0b")


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    link = tmp_path / "full.json"
    link.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_whole(link, "content")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode) and link.is_symlink()


def test_a_recorded_candidate_is_forced_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").readlink()))
    folder = tmp_path / "candidate"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "model.onnx").write_bytes(b"weights")
    sync_folder(folder)
    assert {folder / "inner" / "model.onnx", folder / "inner", folder, tmp_path} == set(synced)


def test_one_output_beyond_all_memory_is_refused(tmp_path: Path) -> None:
    nodes = [
        node("Concat", f"{'x' if not i else f'v{i}'} {'x' if not i else f'v{i}'}", f"v{i + 1}", axis=0)
        for i in range(80)
    ]
    model = load_model(write(tmp_path / "m.onnx", nodes, {"x": (1, 4)}, ["v80"])).model
    # 4 elements doubled 48 times are 2^50; the next node is refused.
    with pytest.raises(EdgeOptError, match=f"'v49': its result would have {2**51:,} elements"):
        eo.profile(model, (1, 4))


@pytest.mark.parametrize("opset", [0, 6, 1000, 2**31])
def test_an_opset_that_does_not_exist_is_refused(opset: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("Relu", "x", "y")], {"x": (1,)}, ["y"], opset=opset)
    with pytest.raises(EdgeOptError, match=f"opset {opset}"):
        load_model(path)


def test_a_control_node_with_wrong_settings_is_one_sentence(tmp_path: Path) -> None:
    for broken in (node("Loop", "n -", "y"), node("If", "b", "y")):
        path = write(tmp_path / "m.onnx", [broken], {"x": (1,)}, ["y"], {"n": np.array(3), "b": np.array(True)})
        with pytest.raises(EdgeOptError, match="its inputs do not fit"):
            eo.profile(load_model(path).model, (1,))


def test_a_folder_for_temporary_files_is_of_its_owner_alone() -> None:
    assert stat.S_IMODE(own_folder().stat().st_mode) == 0o700


def test_a_link_that_another_user_made_for_onnx_runtime_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".ses").symlink_to(tmp_path / "precious")
    names = ("CI", "ORT_DISABLE_TELEMETRY", "ORT_TELEMETRY_DISABLED", "ORT_RUNNING_UNIT_TESTS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"TMPDIR": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", "import edge_opt, onnxruntime"], check=True, env=environment)
    assert (tmp_path / "precious").read_text() == "mine"
